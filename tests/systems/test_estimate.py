"""The estimate from humans and a judge: recomputed with SciPy and a formula written by hand; that its intervals cover;
and that more queries are asked for where the interval is wide.
"""

import numpy as np
import pytest
from scipy import stats

from relabel.manifests.metrics.prediction_powered import (
    FEWEST_TO_FIT,
    gold_needed,
    plain_mean,
    powered_mean,
)


def drawn(queries: int, *, seed: int = 0, error: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Figures of queries by humans and by a judge that is kinder and errs."""
    random = np.random.default_rng(seed)
    human_G = random.beta(2, 3, queries)
    return human_G, human_G + 0.2 + error * random.normal(size=queries)


def by_hand(human_G: np.ndarray, judge_G: np.ndarray, judge_U: np.ndarray, *, is_fitted: bool) -> tuple[float, ...]:
    """D and its interval, as docs/which-search-is-better.md writes them."""
    n, m = len(human_G), len(judge_U)
    everything = [*judge_G, *judge_U]
    weight = 1.0
    if is_fitted:
        weight = float(np.clip(np.cov(human_G, judge_G)[0, 1] / np.var(everything, ddof=1), 0, 1))
    value = weight * np.mean(everything) + np.mean(human_G - weight * judge_G)
    share = weight * m / (n + m)
    residual = human_G - share * judge_G
    freedom = n - 2 if is_fitted else n - 1
    first = sum((residual - residual.mean()) ** 2) / freedom / n
    second = share**2 * stats.sem(judge_U) ** 2
    if not is_fitted:
        freedom = max(freedom, np.floor((first + second) ** 2 / (first**2 / (n - 1) + second**2 / (m - 1))))
    half = stats.t.ppf(0.975, freedom) * np.sqrt(first + second)
    return value, value - half, value + half, weight


@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize(("gold", "error"), [(5, 0.1), (10, 0.01), (20, 0.6), (60, 0.1)])
def test_estimate_is_the_formula(gold: int, error: float, is_fitted: bool) -> None:
    human, judge = drawn(80, error=error)
    found = powered_mean(human[:gold], judge[:gold], judge[gold:], is_fitted=is_fitted)
    wanted = by_hand(human[:gold], judge[:gold], judge[gold:], is_fitted=is_fitted)
    assert [found.value, found.low, found.high, found.weight] == pytest.approx(wanted, abs=1e-9)


def test_humans_alone_are_students_t() -> None:
    human, judge = drawn(12)
    wanted = stats.ttest_1samp(human, 0).confidence_interval(0.95)
    for found in (plain_mean(human), powered_mean(human, judge, np.array([]))):
        assert [found.low, found.high] == pytest.approx(wanted, abs=1e-9)
        assert found.value == pytest.approx(human.mean())
        assert found.weight == 0


def test_many_draws_at_once_are_each_of_them() -> None:
    human, judge = drawn(50)
    draws = np.random.default_rng(1).integers(0, 50, (7, 50))
    for is_fitted in (False, True):
        together = powered_mean(human[draws[:, :8]], judge[draws[:, :8]], judge[draws[:, 8:]], is_fitted=is_fitted)
        for number, draw in enumerate(draws):
            alone = powered_mean(human[draw[:8]], judge[draw[:8]], judge[draw[8:]], is_fitted=is_fitted)
            assert together.low[number] == pytest.approx(alone.low)
            assert together.high[number] == pytest.approx(alone.high)


def test_a_fitted_weight_drops_a_judge_that_knows_nothing() -> None:
    human, _ = drawn(30)
    constant = np.full(100, 0.7)
    found = powered_mean(human, constant[:30], constant[30:], is_fitted=True)
    assert found.weight == 0
    assert found.value == pytest.approx(human.mean())


@pytest.mark.parametrize(("gold", "is_fitted"), [(5, False), (10, False), (20, True)])
def test_intervals_cover_what_they_say(gold: int, is_fitted: bool) -> None:
    """Means of 4,000 samples of 60 queries each: 95 % of the intervals hold the mean of all."""
    random = np.random.default_rng(5)
    human_N = random.beta(0.7, 1.2, 20_000)
    judge_N = np.clip(human_N + random.normal(0.15, 0.2, 20_000), 0, 1)
    draws = random.integers(0, 20_000, (4_000, 60))
    found = powered_mean(
        human_N[draws[:, :gold]], judge_N[draws[:, :gold]], judge_N[draws[:, gold:]], is_fitted=is_fitted
    )
    covered = ((found.low <= human_N.mean()) & (human_N.mean() <= found.high)).mean()
    assert 0.935 < covered < 0.965
    alone = plain_mean(human_N[draws[:, :gold]])
    assert (found.high - found.low).mean() < 0.9 * (alone.high - alone.low).mean()


@pytest.mark.parametrize("width", [0.02, 0.012])
def test_so_many_more_queries_give_the_wanted_width(width: float) -> None:
    """With the number that is asked for, half the interval is about the width, on average over samples."""
    random = np.random.default_rng(2)
    human_N = random.normal(0.0, 0.2, 50_000)
    judge_N = human_N + random.normal(0.05, 0.1, 50_000)
    needed = gold_needed(human_N[:60], judge_N[:60], judge_N[60:2000], width=width, fits=False)
    assert needed is not None
    assert needed > 60
    halves = []
    for start in range(0, 40_000, 2000):
        human, judge = human_N[start : start + 2000], judge_N[start : start + 2000]
        found = powered_mean(human[:needed], judge[:needed], judge[needed:], is_fitted=needed >= FEWEST_TO_FIT)
        halves.append((found.high - found.low) / 2)
    assert np.mean(halves) == pytest.approx(width, rel=0.2)


def test_no_more_queries_are_asked_for_than_are_there_already() -> None:
    human, judge = drawn(40, error=0.001)
    assert gold_needed(human[:10], judge[:10], judge[10:], width=0.9, fits=False) == 10


def test_queries_beyond_those_labelled_are_asked_for_by_humans_alone() -> None:
    """20 labelled queries can't show .01; the answer is Student's t of the humans' figures."""
    human, judge = drawn(20)
    needed = gold_needed(human[:10], judge[:10], judge[10:], width=0.01, fits=False)
    assert needed is not None
    assert needed > 20
    spread = human[:10].std(ddof=1)
    assert stats.t.ppf(0.975, needed - 1) * spread / np.sqrt(needed) <= 0.01
    assert stats.t.ppf(0.975, needed - 2) * spread / np.sqrt(needed - 1) > 0.01
