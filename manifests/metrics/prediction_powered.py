"""Means over queries that few humans and a judge of all queries give together, with 95 % intervals.

A judge's figure of a query may be wrong in one direction for all queries. So the mean of the judge's figures over many
queries is corrected by the mean of (human figure - judge's figure) over the few queries that humans judged too. Where
the judge is good, the corrected mean varies less than the humans' alone.

Letters: G queries that humans judged, U queries that the judge alone did; leading axes are the caller's.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from relabel.manifests.metrics.metric import LEVEL, t_quantile

FEWEST_FOR_DIFFERENCES = 5
"""Gold queries below which no interval of a difference is given."""
FEWEST_FOR_LEVELS = 10
"""Gold queries below which no interval of a system's own figure is given."""
FEWEST_TO_FIT = 20
"""Gold queries from which on the judge's weight is fitted for any figure."""

_UPPER = (1 + LEVEL) / 2


@dataclass(frozen=True)
class PoweredMean:
    """A mean over queries.

    Args:
        value, low, high: the mean and its 95 % interval, [...].
        weight: of the judge's figures, 0 to 1, [...]; 0 leaves the humans alone.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray


def powered_mean(
    human_G: np.ndarray, judge_G: np.ndarray, judge_U: np.ndarray, *, is_fitted: bool = False
) -> PoweredMean:
    """λ · mean of the judge over all queries + mean over gold queries of (human - λ · judge), with Student's t.

    The gold queries are among those that the judge labelled. The estimate is therefore written with the judge's other
    queries alone, so that its two terms are independent and their variances add up.

    Args:
        human_G: humans' figure of each gold query, float64 [..., G], three queries or more.
        judge_G: the judge's figure of the same queries.
        judge_U: the judge's figure of all other queries, [..., U]; with fewer than two, humans alone count.
        is_fitted: λ is chosen so that the variance is least, within 0 and 1; else it is 1.
    Source:
        Angelopoulos et al. 2023, prediction-powered inference (arXiv:2301.09633); λ as in PPI++ (arXiv:2311.01453),
        section 6. Both take a normal quantile, which covers too rarely with few queries. Here degrees of freedom are
        Welch's; of a fitted λ, G - 2, and the variance is divided by as many. Coverage:
        `benchmarks/systems_coverage.py`.
    """
    num_gold = human_G.shape[-1]
    num_other = judge_U.shape[-1]
    if num_other < 2:
        return plain_mean(human_G)
    most = num_other / (num_gold + num_other)
    if is_fitted:
        share = np.clip(_fitted_share(human_G, judge_G, judge_U), 0.0, most)
    else:
        share = np.full(human_G.shape[:-1], most)
    rest_G = human_G - share[..., None] * judge_G
    value = rest_G.mean(-1) + share * judge_U.mean(-1)
    freedom = num_gold - 1 - is_fitted
    of_gold = rest_G.var(-1) / freedom
    of_judge = share**2 * judge_U.var(-1, ddof=1) / num_other
    if is_fitted:
        quantile = np.full(value.shape, t_quantile(_UPPER, freedom))
    else:
        quantile = _quantiles(_welch(of_gold, of_judge, freedom, num_other - 1))
    half = quantile * np.sqrt(of_gold + of_judge)
    return PoweredMean(value, value - half, value + half, share / most)


def plain_mean(value_G: np.ndarray) -> PoweredMean:
    """The mean of one source's figures of queries, [..., G] with two queries or more, with Student's t; the judge's
    weight is 0.
    """
    num_queries = value_G.shape[-1]
    value = value_G.mean(-1)
    half = t_quantile(_UPPER, num_queries - 1) * value_G.std(-1, ddof=1) / np.sqrt(num_queries)
    return PoweredMean(value, value - half, value + half, np.zeros(value.shape))


def _fitted_share(human_G: np.ndarray, judge_G: np.ndarray, judge_U: np.ndarray) -> np.ndarray:
    """The weight of the judge's other queries with which the estimate's variance is least; 0 for a constant judge."""
    num_gold = human_G.shape[-1]
    num_other = judge_U.shape[-1]
    shared = _covariance(human_G, judge_G)
    spread = np.concatenate([judge_G, judge_U], axis=-1).var(-1, ddof=1) * (1 + num_gold / num_other)
    return np.where(spread > 0, shared / np.where(spread > 0, spread, 1.0), 0.0)


def _covariance(first_G: np.ndarray, second_G: np.ndarray) -> np.ndarray:
    first_step_G = first_G - first_G.mean(-1, keepdims=True)
    second_step_G = second_G - second_G.mean(-1, keepdims=True)
    return np.asarray((first_step_G * second_step_G).sum(-1) / (first_G.shape[-1] - 1))


def _welch(first: np.ndarray, second: np.ndarray, first_freedom: int, second_freedom: int) -> np.ndarray:
    """Degrees of freedom of the sum of two variances of means, rounded down; those of the first where both are 0."""
    total = (first + second) ** 2
    parts = first**2 / first_freedom + second**2 / second_freedom
    freedom = np.divide(total, parts, out=np.full(total.shape, float(first_freedom)), where=parts > 0)
    return np.asarray(np.maximum(np.floor(freedom), first_freedom))


def _quantiles(freedom: np.ndarray) -> np.ndarray:
    different, place = np.unique(freedom, return_inverse=True)
    return np.array([t_quantile(_UPPER, float(one)) for one in different])[place].reshape(freedom.shape)


# ------------------------------------------------------------------------------
# How many queries humans would have to judge, by what the ones that they judged show.


MOST_QUERIES = 1_000_000
"""More than anybody judges."""


def gold_needed(
    human_G: np.ndarray, judge_G: np.ndarray, judge_U: np.ndarray, *, width: float, fits: bool
) -> int | None:
    """The number of gold queries with which half of the interval would be `width` or less: at least so many as there
    are. None: more than a million.

    Up to all queries that the judge labelled, gold queries are taken from these; beyond, humans alone count.

    Args:
        human_G, judge_G, judge_U: as in `powered_mean`, without leading axes.
        fits: λ is fitted at any number of gold queries; else from `FEWEST_TO_FIT` on.
    """
    num_gold = len(human_G)
    num_all = num_gold + len(judge_U)
    human = float(human_G.var(ddof=1))
    judge = float(np.concatenate([judge_G, judge_U]).var(ddof=1))
    shared = float(_covariance(human_G, judge_G))

    def half(count: int) -> float:
        is_fitted = fits or count >= FEWEST_TO_FIT
        num_other = num_all - count
        if num_other < 2:
            return t_quantile(_UPPER, count - 1) * float(np.sqrt(human / count))
        most = num_other / num_all
        share = most
        if is_fitted:
            share = min(max(most * shared / judge, 0.0), most) if judge > 0 else 0.0
        rest = human - 2 * share * shared + share**2 * judge
        variance = max(rest, 0.0) / count + share**2 * judge / num_other
        return t_quantile(_UPPER, count - 1 - is_fitted) * float(np.sqrt(variance))

    counts = range(num_gold, MOST_QUERIES + 1)
    index = bisect.bisect_left(counts, True, key=lambda count: half(count) <= width)
    return counts[index] if index < len(counts) else None
