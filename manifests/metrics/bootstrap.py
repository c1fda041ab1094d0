"""95 % bootstrap intervals: groups (queries, or rows where there is none) are drawn with replacement, figures
recomputed, percentiles kept.

Rows of one query share its wording, its intent and often its assessor; drawing rows would take them for independent and
give intervals that are too narrow. A resample is a vector of weights, how often each group was drawn; a statistic turns
many such vectors into many values at once.

Letters: G groups, R resamples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
CHUNK_VALUES = 3_200_000
"""Weights held at a time: 26 MB."""
MOST_AT_A_TIME = 128
"""Resamples at a time: enough for a matrix product, few enough for a processor's cache."""

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Weights [R, G] to values by name, [R] each, NaN where one is not defined for that resample."""


class Interval(NamedTuple):
    """Bounds of a figure; `num_undefined` resamples gave it no value (a grade that was not drawn) and are left out."""

    low: float
    high: float
    num_undefined: int


def draw_weights(num_groups: int, resamples: int, seed: int, *, width: int = 0) -> Iterator[np.ndarray]:
    """Weights of `resamples` resamples, some at a time: float64 [r, G], each row sums to G. The same arguments give the
    same weights.

    Args:
        width: the widest row that a statistic will make of a resample, where that is more than G; keeps memory flat.
    """
    random = np.random.default_rng(seed)
    step = max(1, min(MOST_AT_A_TIME, CHUNK_VALUES // max(num_groups, width, 1)))
    for start in range(0, resamples, step):
        weight_RG = np.empty((min(step, resamples - start), num_groups))
        for weight_G in weight_RG:
            weight_G[:] = np.bincount(random.integers(0, num_groups, size=num_groups), minlength=num_groups)
        yield weight_RG


def resampled(
    statistics: Sequence[Statistic], *, num_groups: int, resamples: int, seed: int, width: int = 0
) -> list[dict[str, np.ndarray]]:
    """For each statistic its values by name, [R] each, over the same resamples; empty where there is nothing to draw
    (fewer than two groups, or no resamples).
    """
    found: list[dict[str, list[np.ndarray]]] = [{} for _ in statistics]
    if num_groups > 1:
        for weight_RG in draw_weights(num_groups, resamples, seed, width=width):
            for statistic, values in zip(statistics, found, strict=True):
                for name, value_R in statistic(weight_RG).items():
                    values.setdefault(name, []).append(value_R)
    return [{name: np.concatenate(parts) for name, parts in values.items()} for values in found]


def bootstrap(
    statistic: Statistic, *, num_groups: int, resamples: int, seed: int, width: int = 0
) -> dict[str, Interval]:
    """Percentile intervals of all values, each resample shared by all of them; empty where there is nothing to draw."""
    (found,) = resampled([statistic], num_groups=num_groups, resamples=resamples, seed=seed, width=width)
    return {name: interval_of(value_R) for name, value_R in found.items()}


class Paired(NamedTuple):
    """Intervals of two label sets' figures and of their differences, second minus first."""

    first: dict[str, Interval]
    second: dict[str, Interval]
    difference: dict[str, Interval]


def paired_bootstrap(first: Statistic, second: Statistic, *, num_groups: int, resamples: int, seed: int) -> Paired:
    """Intervals over resamples that both sets share: what a query's difficulty does to both cancels in their
    difference.

    Args:
        first, second: statistics of the same groups, in the same order.
    """
    ours, theirs = resampled([first, second], num_groups=num_groups, resamples=resamples, seed=seed)
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
