"""Intervals: reproducible, wide enough, and the same whether counts or rows are resampled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relabel.manifests.metrics import metric as module
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


def test_an_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    """300 tiny worlds of 40 queries with 5 rows that lean the same way: 95 % intervals over queries."""
    random = np.random.default_rng(11)
    worlds, queries, rows = 300, 40, 5
    covered = 0
    for world in range(worlds):
        hit = random.random((queries, rows)) < random.beta(0.6, 0.4, (queries, 1))  # the mean of that beta is 0.6
        by_query = of_ratio("mean", hit.sum(1), np.full(queries, rows))
        low, high, _ = bootstrap(by_query, num_groups=queries, resamples=200, seed=world)["mean"]
        covered += low <= 0.6 <= high
    assert 0.90 <= covered / worlds <= 0.98


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
