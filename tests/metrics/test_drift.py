"""A fall of agreement beyond chance: rarely found where there is none, however often one looks; found where it is."""

from statistics import NormalDist

import numpy as np
import pytest

from relabel.manifests.metrics.drift import ALPHA, latest_fall
from relabel.manifests.metrics.metric import share_bounds

LOOKS = 120
PAIRS = 200


def looks(random: np.random.Generator, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Agreement and its standard error at each look, of pairs that agree with these chances."""
    agreement = random.binomial(PAIRS, shares) / PAIRS
    kept = np.clip(agreement, 1 / PAIRS, 1 - 1 / PAIRS)
    return agreement, np.sqrt(kept * (1 - kept) / PAIRS)


def alarm(agreement: np.ndarray, error: np.ndarray) -> int | None:
    """The first look that raises an alarm."""
    for last in range(1, len(agreement)):
        if latest_fall(agreement[: last + 1], error[: last + 1]).is_beyond_chance:
            return last
    return None


def test_all_looks_together_raise_a_false_alarm_with_a_chance_of_alpha_at_most() -> None:
    """The same looks by 95 % intervals of the difference raise one in most of the simulations."""
    random = np.random.default_rng(11)
    num_alarms = 0
    num_naive = 0
    for _ in range(100):
        agreement, error = looks(random, np.full(LOOKS, 0.8))
        num_alarms += alarm(agreement, error) is not None
        fall = agreement[0] - agreement[1:]
        num_naive += bool((fall > 1.96 * np.hypot(error[0], error[1:])).any())
    assert num_alarms <= 100 * ALPHA
    assert num_naive > 40


@pytest.mark.parametrize(("before", "after"), [(10, 0.55), (60, 0.55), (1, 0.62)])
def test_a_fall_is_found_soon_whenever_it_comes(before: int, after: float) -> None:
    random = np.random.default_rng(3)
    for _ in range(10):
        shares = np.concatenate([np.full(before, 0.8), np.full(40, after)])
        agreement, error = looks(random, shares)
        found = alarm(agreement, error)
        assert found is not None
        assert before <= found <= before + (3 if after < 0.6 else 30)


def test_a_rise_is_none_and_one_look_says_nothing() -> None:
    error = np.full(30, 0.02)
    assert latest_fall(np.linspace(0.5, 0.9, 30), error).is_beyond_chance is False
    assert latest_fall(np.array([0.8]), error[:1]).bound is None


@pytest.mark.parametrize(
    ("queries", "at_second", "in_one_day", "since_first"),
    [(30, 0.257, 0.376, 0.095), (100, 0.132, 0.194, 0.049), (300, 0.075, 0.109, 0.028)],
)
def test_least_fall_that_is_seen_is_that_of_the_docs(
    queries: int, at_second: float, in_one_day: float, since_first: float
) -> None:
    """Ten pairs a query, 0.8 of which agree, with a standard deviation of 0.2 between queries."""
    low, high = share_bounds(np.tile([6.0, 10.0], queries // 2), np.full(queries, 10.0))
    error = float(high - low) / (2 * NormalDist().inv_cdf(0.975))

    def is_seen(fall: float, looks: int, since: int) -> bool:
        agreement = np.full(looks, 0.8)
        agreement[since:] -= fall
        return latest_fall(agreement, np.full(looks, error)).is_beyond_chance

    for least, looks, since in ((at_second, 2, 1), (in_one_day, 100, 99), (since_first, 100, 1)):
        assert is_seen(least + 0.0005, looks, since)
        assert not is_seen(least - 0.0005, looks, since)
