"""Intervals: reproducible, wide enough, and the same whether counts or rows are resampled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relabel.manifests.metrics import metric as module
from relabel.manifests.metrics.measures import confusion_by_group
from relabel.manifests.metrics.metric import WeightedStatistic as Statistic
from relabel.manifests.metrics.metric import bootstrap, draw_weights
from relabel.manifests.metrics.registry import count_metrics


def of_ratio(name: str, total_G: np.ndarray, count_G: np.ndarray) -> Statistic:
    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            return {name: weight_RG @ total_G / (weight_RG @ count_G)}

    return statistic


def of_counts(counts_GKK: np.ndarray) -> Statistic:
    return lambda weight_RG: count_metrics(np.tensordot(weight_RG, counts_GKK, axes=1))


def test_weights_draw_as_many_groups_as_there_are() -> None:
    weights = np.concatenate(list(draw_weights(13, 50, seed=2)))
    assert weights.shape == (50, 13)
    assert (weights.sum(1) == 13).all()
    assert (np.concatenate(list(draw_weights(13, 50, seed=2))) == weights).all()
    assert (np.concatenate(list(draw_weights(13, 50, seed=3))) != weights).any()


def test_many_groups_are_drawn_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", 40)
    parts = list(draw_weights(13, 10, seed=2, width=20))
    assert [len(part) for part in parts] == [2] * 5
    assert (np.concatenate(parts) == np.concatenate(list(draw_weights(13, 10, seed=2, width=40)))).all()
    assert all((part.sum(1) == 13).all() for part in parts)


def test_resampled_counts_are_resampled_rows() -> None:
    """The weighted sum of per-query matrices is the matrix of the rows of the queries drawn, each as often as drawn."""
    random = np.random.default_rng(4)
    gold, label, query = random.integers(0, 3, 80), random.integers(0, 3, 80), random.integers(0, 9, 80)
    weight = next(draw_weights(9, 1, seed=5))[0]
    rows = np.concatenate([np.flatnonzero(query == group) for group in range(9) for _ in range(int(weight[group]))])
    slow = count_metrics(
        confusion_by_group(gold[rows], label[rows], np.zeros(len(rows), dtype=int), num_groups=1, grades=3)[0]
    )
    counts = confusion_by_group(gold, label, query, num_groups=9, grades=3)
    fast = of_counts(counts)(weight[None])
    for name, value in slow.items():
        assert fast[name][0] == pytest.approx(float(value)), name


def test_an_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    """300 tiny worlds of 40 queries with 5 rows that lean the same way: 95 % intervals over queries, and too narrow
    ones over rows.
    """
    random = np.random.default_rng(11)
    worlds, queries, rows = 300, 40, 5
    covered = covered_by_rows = 0
    for world in range(worlds):
        hit = random.random((queries, rows)) < random.beta(0.6, 0.4, (queries, 1))  # the mean of that beta is 0.6
        by_query = of_ratio("mean", hit.sum(1), np.full(queries, rows))
        low, high, _ = bootstrap(by_query, num_groups=queries, resamples=200, seed=world)["mean"]
        covered += low <= 0.6 <= high
        by_row = of_ratio("mean", hit.ravel(), np.ones(queries * rows))
        low, high, _ = bootstrap(by_row, num_groups=queries * rows, resamples=200, seed=world)["mean"]
        covered_by_rows += low <= 0.6 <= high
    assert 0.90 <= covered / worlds <= 0.98
    assert covered_by_rows / worlds < 0.8


def test_resamples_without_a_value_are_left_out_and_counted() -> None:
    counts = np.zeros((2, 2, 2))
    counts[0, 0, 0] = counts[1, 1, 1] = 3  # the figures of grade 1 are undefined where only the first query is drawn
    found = bootstrap(of_counts(counts), num_groups=2, resamples=400, seed=1)
    low, high, undefined = found["f1_1"]
    assert (low, high) == (1.0, 1.0)
    assert 60 < undefined < 140  # one in four
    assert found["accuracy"].num_undefined == 0


def test_one_group_has_no_interval() -> None:
    assert bootstrap(of_ratio("mean", np.ones(1), np.ones(1)), num_groups=1, resamples=10, seed=1) == {}
    nothing = bootstrap(of_ratio("mean", np.zeros(2), np.zeros(2)), num_groups=2, resamples=10, seed=1)["mean"]
    assert math.isnan(nothing.low)
    assert nothing.num_undefined == 10
