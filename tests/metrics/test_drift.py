"""A fall of agreement beyond chance: rarely found where there is none, however often one looks; found where it is."""

import numpy as np
import pytest

from relabel.manifests.metrics.drift import ALPHA, latest_fall

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
