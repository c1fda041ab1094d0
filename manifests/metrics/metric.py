"""A metric: what it is called, which way is better, and how its value follows from sufficient statistics. A set of
them, measured.

Letters: G groups (queries, or rows where there is no query), R resamples, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from relabel.manifests.metrics.bootstrap import Interval
from relabel.manifests.metrics.shares import share_bounds
from relabel.manifests.metrics.statistics import Statistic, Sums, places_of

Formula = Callable[[np.ndarray], np.ndarray]
"""Weighted sums [..., F] to values [...], NaN where one is not defined (0/0)."""


@dataclass(frozen=True)
class Share:
    """A formula that is one sum over another, each group adding between 0 and what it adds to the other.

    Args:
        part, whole: the two, of sums [..., F], or of what one group adds.
    """

    part: Formula
    whole: Formula

    def __call__(self, sums: np.ndarray) -> np.ndarray:
        return np.asarray(self.part(sums) / self.whole(sums))


NOTHING_DRAWN = Interval(math.nan, math.nan, 0)


class Measured(NamedTuple):
    """What a metric of some rows is computed from, and how.

    `is_by_grade`: it ranks rows by the grade that was written, for want of a distribution. Such an AUC is lower than
    the same labeler's by distributions: grades tie what probabilities tell apart.
    `num_rows`: rows that it rests on, where these are neither all of the statistic's nor the whole of a `Share`.
    """

    statistic: Statistic
    formula: Formula
    is_by_grade: bool = False
    num_rows: int | None = None


@dataclass(frozen=True)
class Metric:
    """All that is to be known of one metric; whatever shows, draws, gates or documents metrics reads it here.

    Args:
        name: in JSON and gates: `f1_macro`. `f1_{}` is one metric for each grade (cut, k).
        title: in text and pages, with the same `{}`.
        direction: which values are better.
        unit: what it is a mean or a count over.
        measure: of statistics, by what stands for `{}` (`""` for a metric without); empty where they hold nothing of
            it.
        what: the definition, in Markdown.
        aliases: other names that people use in gates.
        is_drawn: the report's drawing shows it; between 0 and 1.
    """

    name: str
    title: str
    direction: Literal["higher", "lower", "neither"]
    unit: Literal["rows", "queries"]
    measure: Callable[[Any], Mapping[str, Measured]]
    what: str
    aliases: tuple[str, ...] = ()
    is_drawn: bool = False


@dataclass(frozen=True)
class MetricValue:
    """One value and its interval.

    Args:
        value: None where the metric is not defined (0/0).
        low, high: 95 % bounds: of a `Share` those of `share_bounds`, else percentiles of the bootstrap; None without
            resamples or with fewer than two groups.
        over: how many rows or queries it is the metric of.
        unit: `rows` or `queries`.
        undefined_resamples: resamples without a value, left out of the interval.
        is_by_grade: see `Measured`.
    """

    value: float | None
    low: float | None
    high: float | None
    over: int
    unit: str
    undefined_resamples: int
    is_by_grade: bool = False


class MetricSet:
    """Metrics of the same rows. One matrix product gives all of them for many resamples of the groups.

    Args:
        metrics: those to measure.
        statistics: what their `measure` takes.
        num_groups: G.
    """

    def __init__(self, metrics: Iterable[Metric], statistics: Any, *, num_groups: int) -> None:
        self.num_groups = num_groups
        self._measured: dict[str, Measured] = {}
        self._units: dict[str, str] = {}
        for metric in metrics:
            for member, measured in metric.measure(statistics).items():
                name = metric.name.format(member)
                self._measured[name], self._units[name] = measured, metric.unit
        linear = {
            id(one.statistic): one.statistic for one in self._measured.values() if isinstance(one.statistic, Sums)
        }
        self._linear = list(linear.values())
        parts = [one.by_group.reshape(num_groups, -1) for one in self._linear]
        self._feature_GF = np.concatenate(parts, axis=1, dtype=np.float64) if parts else np.zeros((num_groups, 0))
        self.values = {name: float(value_R[0]) for name, value_R in self.resampled(np.ones((1, num_groups))).items()}
        """By name; NaN where a metric is not defined."""

    def over(self, name: str) -> int:
        """How many rows or queries a metric is of; 0 where it was not measured."""
        if name not in self._measured:
            return 0
        statistic, formula, _, num_rows = self._measured[name]
        if num_rows is None and isinstance(formula, Share) and isinstance(statistic, Sums):
            return int(formula.whole(statistic.by_group.sum(0)))
        return statistic.over if num_rows is None else num_rows

    def of(self, metrics: Iterable[Metric]) -> list[Metric]:
        """Those of some metrics that were measured."""
        return [metric for metric in metrics if metric.name in self._measured]

    def is_by_grade(self, name: str) -> bool:
        """Whether a metric ranks by the written grade."""
        return self._measured[name].is_by_grade

    def resampled(self, weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        """Every metric of every weighting of the groups, [R] each; NaN where it is not defined.

        Args:
            weight_RG: float64, how often each group counts.
        """
        sums_RF = weight_RG @ self._feature_GF
        sums: dict[int, np.ndarray] = {}
        start = 0
        for one in self._linear:
            shape = one.by_group.shape[1:]
            size = math.prod(shape)
            sums[id(one)] = sums_RF[:, start : start + size].reshape(len(weight_RG), *shape)
            start += size
        others = [one.statistic for one in self._measured.values() if not isinstance(one.statistic, Sums)]
        if others:
            weight_GR = places_of(weight_RG)
            sums |= {id(one): one.weighted(weight_RG, weight_GR) for one in others}
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: formula(sums[id(statistic)]) for name, (statistic, formula, *_) in self._measured.items()}

    def with_intervals(self, intervals: Mapping[str, Interval]) -> dict[str, MetricValue]:
        """Every metric's value with its interval.

        Args:
            intervals: of the bootstrap; those of shares are taken from the groups' own sums instead.
        """
        found = {}
        for name, value in self.values.items():
            low, high, num_undefined = intervals.get(name, NOTHING_DRAWN)
            statistic, formula, *_ = self._measured[name]
            if name in intervals and isinstance(formula, Share) and isinstance(statistic, Sums):
                sums = statistic.by_group
                low, high = map(float, share_bounds(formula.part(sums), formula.whole(sums)))
                num_undefined = 0
            over, is_by_grade = self.over(name), self.is_by_grade(name)
            found[name] = MetricValue(
                finite(value), finite(low), finite(high), over, self._units[name], num_undefined, is_by_grade
            )
        return found


def mean(sums_2: np.ndarray) -> np.ndarray:
    """Formula of `mean_of_rows` and `mean_of_queries`: the total over the count."""
    return np.asarray(sums_2[..., 0] / sums_2[..., 1])


share = Share(lambda sums_2: sums_2[..., 0], lambda sums_2: sums_2[..., 1])
"""`mean`, where the values that are added up lie between 0 and 1."""


def finite(value: float) -> float | None:
    """A number, or None for what JSON can't say."""
    return float(value) if math.isfinite(value) else None
