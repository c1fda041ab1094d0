"""Intervals of shares: they never collapse, they cover what they say, and every share of every registry has one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

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


@pytest.mark.parametrize("share", [0.005, 0.5])
@pytest.mark.parametrize("alike", [0.0, 0.9])
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


@pytest.mark.parametrize("whole", [[], [3.0], [0.0, 2.0, 0.0], [0.0, 0.0]])
def test_fewer_than_two_groups_say_nothing(whole: list[float]) -> None:
    assert np.isnan(share_bounds(np.array(whole), np.array(whole))).all()
