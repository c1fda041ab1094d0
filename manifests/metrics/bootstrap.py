"""95 % bootstrap intervals: groups (queries, or rows where there is none) are drawn with replacement, figures recomputed, percentiles kept.

Rows of one query share its wording, its intent and often its assessor; drawing rows would take them for independent and give intervals
that are too narrow. A resample is a vector of weights, how often each group was drawn; a statistic turns many such vectors into many
values at once.

Letters: G groups, R resamples, F features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
CHUNK_VALUES = 2_000_000
"""Weights held at a time: 16 MB. What a statistic makes of them is a few times that."""

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Weights [R, G] to figures by name, [R] each, NaN where a figure is not defined for that resample."""


class Interval(NamedTuple):
    """Bounds of a figure; `num_undefined` resamples gave it no value (a grade that was not drawn) and are left out."""

    low: float
    high: float
    num_undefined: int


def of_sums(feature_GF: np.ndarray, figures: Callable[[np.ndarray], dict[str, np.ndarray]]) -> Statistic:
    """A statistic that looks at sums over groups only.

    Args:
        feature_GF: [G, ...] what each group adds.
        figures: of sums [R, ...].
    """
    flat_GF = np.asarray(feature_GF, dtype=np.float64).reshape(len(feature_GF), -1)

    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        return figures((weight_RG @ flat_GF).reshape(len(weight_RG), *feature_GF.shape[1:]))

    return statistic


def of_ratio(name: str, total_G: np.ndarray, count_G: np.ndarray) -> Statistic:
    """A statistic that is a mean: what the groups add up to, over how many things they hold (0 where a group has none)."""

    def figures(sum_R2: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: sum_R2[:, 0] / sum_R2[:, 1]}

    return of_sums(np.stack([total_G, count_G], axis=1), figures)


def draw_weights(num_groups: int, resamples: int, seed: int, *, width: int = 0) -> Iterator[np.ndarray]:
    """Weights of `resamples` resamples, some at a time: float64 [r, G], each row sums to G. The same arguments give the same weights.

    Args:
        width: the widest row that a statistic will make of a resample (the number of rows, say); keeps memory flat.
    """
    random = np.random.default_rng(seed)
    step = max(1, CHUNK_VALUES // max(num_groups, width, 1))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = random.integers(0, num_groups, size=(rows, num_groups)) + np.arange(rows)[:, None] * num_groups
        yield np.bincount(drawn.ravel(), minlength=rows * num_groups).reshape(rows, num_groups).astype(np.float64)


def resampled(statistics: Sequence[Statistic], *, num_groups: int, resamples: int, seed: int, width: int = 0) -> dict[str, np.ndarray]:
    """Every figure of every resample, [R] each; the same arguments besides `statistics` give the same resamples.

    Returns:
        By name; empty where there is nothing to draw (fewer than two groups, or no resamples).
    """
    if num_groups < 2 or resamples < 1:
        return {}
    found: dict[str, list[np.ndarray]] = {}
    for weight_RG in draw_weights(num_groups, resamples, seed, width=width):
        for statistic in statistics:
            for name, value_R in statistic(weight_RG).items():
                found.setdefault(name, []).append(value_R)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def bootstrap(statistics: Sequence[Statistic], *, num_groups: int, resamples: int, seed: int, width: int = 0) -> dict[str, Interval]:
    """Percentile intervals of all figures, each resample shared by all of them; empty where there is nothing to draw."""
    found = resampled(statistics, num_groups=num_groups, resamples=resamples, seed=seed, width=width)
    return {name: interval_of(value_R) for name, value_R in found.items()}


class Paired(NamedTuple):
    """Intervals of two label sets' figures and of their differences, second minus first."""

    first: dict[str, Interval]
    second: dict[str, Interval]
    difference: dict[str, Interval]


def paired_bootstrap(
    first: Sequence[Statistic], second: Sequence[Statistic], *, num_groups: int, resamples: int, seed: int, width: int = 0
) -> Paired:
    """Intervals over resamples that both sets share: what a query's difficulty does to both cancels in their difference.

    Args:
        first, second: statistics of the same groups, in the same order.
    """
    ours, theirs = (
        resampled(statistics, num_groups=num_groups, resamples=resamples, seed=seed, width=width) for statistics in (first, second)
    )
    both = [name for name in ours if name in theirs]
    return Paired(
        {name: interval_of(value_R) for name, value_R in ours.items()},
        {name: interval_of(value_R) for name, value_R in theirs.items()},
        {name: interval_of(theirs[name] - ours[name]) for name in both},
    )


def interval_of(value_R: np.ndarray) -> Interval:
    """The middle 95 % of a figure's resamples; those without a value are left out and counted."""
    tail = (1 - LEVEL) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # every value undefined: NaN is the answer
        low, high = np.nanquantile(value_R, [tail, 1 - tail])
    return Interval(float(low), float(high), int(np.isnan(value_R).sum()))
