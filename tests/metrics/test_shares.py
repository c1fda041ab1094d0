"""Intervals of shares: they never collapse, they cover what they say, and every share of every registry has one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from relabel.manifests.metrics.comparison import PairedRows, PairedSums
from relabel.manifests.metrics.judged import JudgedStatistics
from relabel.manifests.metrics.metric import MetricSet, Share, bootstrap, share_bounds
from relabel.manifests.metrics.registry import METRICS
from tests.metrics.test_registry import world

SHARES = {
    "accuracy", "bad_case_rate", "collapse_rate", "exact_match", "expand_precision", "hit@1", "irrelevant_precision",
    "irrelevant_recall", "pass@1", "pass@2", "pass@3", "refusal_accuracy", "useful_precision", "useful_recall",
}  # fmt: skip


def test_every_share_of_the_registry_has_an_interval_that_is_not_a_point() -> None:
    """Labels that are gold throughout, and labels that never are: accuracy 1 and 0, and others near them."""
    right = world(3, queries=9)
    wrong = dataclasses.replace(right, labels=(right.gold + 1) % 3, num_correct=np.zeros_like(right.gold))
    ends = set()
    for judged in (dataclasses.replace(right, labels=right.gold, num_correct=np.full_like(right.gold, 3)), wrong):
        metrics = MetricSet(METRICS, JudgedStatistics(judged), num_groups=9)
        intervals = bootstrap(metrics.resampled, num_groups=9, resamples=50, seed=1)
        assert {name for name, one in metrics._measured.items() if isinstance(one.formula, Share)} == SHARES
        figures = metrics.with_intervals(intervals)
        for name in SHARES:
            one = figures[name]
            if one.value is None:
                continue
            assert one.low is not None
            assert one.high is not None
            assert 0 <= one.low <= one.value <= one.high <= 1, name
            assert one.high - one.low > 0.05, name
            assert one.undefined_resamples == 0
            ends |= {(name, one.value)} if one.value in (0, 1) else set()
        assert (figures["kappa"].low, figures["kappa"].high) == pytest.approx(intervals["kappa"][:2])
        assert metrics.with_intervals({})["accuracy"].low is None
    assert {("accuracy", 0.0), ("accuracy", 1.0), ("pass@1", 0.0), ("pass@1", 1.0)} <= ends


def test_shares_of_two_label_sets_are_shares_too() -> None:
    """They are printed next to metrics of the registry that have the same names."""
    sums = PairedSums(3, depth=2)
    grades = np.array([0, 1, 2, 2])
    sums.add(
        PairedRows(
            np.array([0, 0, 1, 1]),
            list("abcd"),
            (grades, grades),
            (grades * 1.0, grades * 1.0),
            (np.eye(3)[grades],) * 2,
        )
    )
    figures = sums.figures(resamples=20, seed=1)
    found = {name: one.value for name, one in figures.items() if name in ("agreement", "overlap@2", "first_changed")}
    assert found == {"agreement": 1, "overlap@2": 1, "first_changed": 0}
    for name in found:
        assert figures[name].low != figures[name].high, name


@pytest.mark.parametrize("share", [0.005, 0.05, 0.5, 0.995])
@pytest.mark.parametrize("alike", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("queries", [20, 200])
def test_the_interval_holds_the_share_in_93_of_100_draws_of_queries(share: float, alike: float, queries: int) -> None:
    """Rows of a query are alike by an intra-query correlation; queries have 1 to many rows."""
    random = np.random.default_rng([queries, int(alike * 10), int(share * 1000)])
    shape = (1500, queries)
    rows = random.geometric(0.1, shape)
    chance = random.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), shape) if alike else share
    low, high = share_bounds(random.binomial(rows, chance), rows)
    assert (high > low).all()
    assert ((low <= share) & (share <= high)).mean() >= 0.93


def test_bounds_mirror_and_rows_that_are_alike_weigh_as_one() -> None:
    random = np.random.default_rng(1)
    whole = random.integers(0, 6, 40)
    part = random.binomial(whole, 0.9)
    low, high = share_bounds(part, whole)
    np.testing.assert_allclose(share_bounds(whole - part, whole), (1 - high, 1 - low))
    ones = random.binomial(1, 0.3, 100)
    np.testing.assert_allclose(share_bounds(7 * ones, np.full(100, 7)), share_bounds(ones, np.ones(100)))
    halves = share_bounds(np.full(20, 0.5), np.ones(20))
    assert halves[0] < 0.3 < 0.7 < halves[1], "no variance is seen, and that is not known to be none"


@pytest.mark.parametrize("whole", [[], [3.0], [0.0, 2.0, 0.0], [0.0, 0.0]])
def test_fewer_than_two_groups_say_nothing(whole: list[float]) -> None:
    assert np.isnan(share_bounds(np.array(whole), np.array(whole))).all()
