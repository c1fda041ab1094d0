"""A metric and its 95 % interval: sufficient statistics by query, resampled by the bootstrap; and the measures over
arrays of labels and grades: agreement, calibration and ranking.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np

from relabel.manifests.process import require
from relabel.manifests.specs import nearest

# ------------------------------------------------------------------------------
# 95 % bootstrap intervals: groups (queries, or rows where there is none) are drawn with replacement, figures
# recomputed, percentiles kept.
#
# Rows of one query share its wording, its intent and often its assessor; drawing rows would take them for independent
# and give intervals that are too narrow. A resample is a vector of weights, how often each group was drawn; a statistic
# turns many such vectors into many values at once.
#
# Letters: G groups, R resamples.


LEVEL = 0.95
CHUNK_VALUES = 3_200_000
"""Weights held at a time: 26 MB."""
MOST_AT_A_TIME = 128
"""Resamples at a time: enough for a matrix product, few enough for a processor's cache."""

WeightedStatistic = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Weights [R, G] to values by name, [R] each, NaN where one is not defined for that resample."""
Name = TypeVar("Name")
Named = TypeVar("Named")


class Interval(NamedTuple):
    """Bounds of a figure."""

    low: float
    high: float


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
    statistic: Callable[[np.ndarray], dict[Name, np.ndarray]],
    *,
    num_groups: int,
    resamples: int,
    seed: int,
    width: int = 0,
) -> dict[Name, np.ndarray]:
    """A statistic's values by name, [R] each; empty where there is nothing to draw (fewer than two groups, or no
    resamples).
    """
    weights = draw_weights(num_groups, resamples, seed, width=width) if num_groups > 1 else ()
    parts = [statistic(weight_RG) for weight_RG in weights]
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]} if parts else {}


def bootstrap(
    statistic: WeightedStatistic, *, num_groups: int, resamples: int, seed: int, width: int = 0
) -> dict[str, Interval]:
    """Percentile intervals of all values, each resample shared by all of them; empty where there is nothing to draw.
    Of a difference, what a query's difficulty does to both of its terms cancels.
    """
    found = resampled(
        statistic,
        num_groups=num_groups,
        resamples=resamples,
        seed=seed,
        width=width,
    )
    return {name: interval_of(value_R) for name, value_R in found.items()}


def interval_of(value_R: np.ndarray) -> Interval:
    """The middle 95 % of a figure's resamples; those without a value (a grade that was not drawn) are left out."""
    tail = (1 - LEVEL) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # every value undefined: NaN is the answer
        low, high = np.nanquantile(value_R, [tail, 1 - tail])
    return Interval(float(low), float(high))


# ------------------------------------------------------------------------------
# Shares and their 95 % intervals over queries. A bootstrap has nothing to draw from where a share is near 0 or 1: of
# 200 queries without a bad case every resample has none, and the interval would be a point.
#
# Letters: G groups (queries, or rows where there is no query).


_Z = 1.959963984540054
"""Quantile 0.975 of a normal distribution."""
_ROUNDING = 1e-12
"""Variance within it is none."""


def share_bounds(part_G: np.ndarray, whole_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % bounds of Σ part / Σ whole, groups drawn independently: [...] from [..., G]; NaN with fewer than two groups
    whose whole is above 0.

    Wilson's interval with a correction for continuity, of as many independent draws as have the variance that is seen
    between groups, and no fewer than if the rows of a group were all alike, which is also what is taken where no
    variance is seen. Degrees of freedom count the groups that the variance comes from: few, near 0 and 1.

    Source:
        Newcombe 1998, method 4; the effective size and t for its degrees of freedom: Korn and Graubard 1998. Coverage:
        `benchmarks/share_intervals.py`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        num_groups = np.asarray((whole_G > 0).sum(-1), dtype=np.float64)
        total = np.where(num_groups > 1, whole_G.sum(-1, dtype=np.float64), np.nan)
        share = part_G.sum(-1, dtype=np.float64) / total
        square_G = (part_G - share[..., None] * whole_G) ** 2
        square = square_G.sum(-1)
        unit = share * (1 - share)
        alike = total**2 / (whole_G**2).sum(-1)
        freedom = square**2 / (square_G**2).sum(-1)
        t = np.vectorize(t_quantile, otypes=[np.float64])((1 + LEVEL) / 2, freedom)
        size = unit * total**2 / square * (num_groups - 1) / num_groups * (_Z / t) ** 2
        size = np.where(square > _ROUNDING * unit * total, np.maximum(size, alike), alike)
    step = 0.5 / size
    low = wilson(np.maximum(share - step, 0.0), size, -1)
    high = wilson(np.minimum(share + step, 1.0), size, 1)
    return np.minimum(low, share), np.maximum(high, share)  # rounding may put a bound of 0 or 1 on the other side


@functools.lru_cache(maxsize=1 << 12)
def t_quantile(share: float, freedom: float) -> float:
    """The quantile of Student's t above its median: SciPy's to 1e-9, which need not be here. NaN where the degrees of
    freedom are NaN.

    By Newton's method from the normal quantile, which is lower: the tail is convex, so no step leads too far.

    Args:
        share: of the distribution that lies below it, from 0.5 up to less than 1.
        freedom: degrees of freedom, above 0, not necessarily whole.
    """
    if not math.isfinite(freedom):
        return math.nan
    log_height = _log_gamma_step(freedom / 2) - math.log(freedom * math.pi) / 2
    t = NormalDist().inv_cdf(share)
    for _ in range(100):
        density = math.exp(log_height - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (_t_tail(t, freedom) - (1 - share)) / density
        t += step
        if step <= 1e-13 * t:
            break
    return t


def _t_tail(t: float, freedom: float) -> float:
    """The share of Student's t above t, 0 or more: half of the regularized incomplete beta function I_x(ν/2, 1/2) at
    x = ν / (ν + t²).

    Source:
        Numerical Recipes, 6.4: the continued fraction where it converges fast, else that of 1 - I_(1-x)(1/2, ν/2).
    """
    a = freedom / 2
    b = 0.5
    x = freedom / (freedom + t * t)
    rest = t * t / (freedom + t * t)
    if rest == 0:
        return 0.5
    log_front = _log_gamma_step(a) - math.log(math.pi) / 2 + a * math.log1p(-rest) + math.log(rest) / 2
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(a, b, x) / a / 2
    return (1 - math.exp(log_front) * _beta_fraction(b, a, rest) / b) / 2


def _log_gamma_step(a: float) -> float:
    """log Γ(a + 1/2) - log Γ(a); the difference of two big numbers would lose digits."""
    if a > 1e4:
        return math.log(a) / 2 - 1 / (8 * a)
    return math.lgamma(a + 0.5) - math.lgamma(a)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for step in range(1, 1000):
        for numerator in (
            step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step)),
            -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1)),
        ):
            d = 1 / (1 + numerator * d)
            c = 1 + numerator / c
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def wilson(share: np.ndarray, size: np.ndarray, side: int) -> np.ndarray:
    """One bound (Wilson 1927)."""
    spread = _Z * np.sqrt(share * (1 - share) / size + _Z**2 / (4 * size**2))
    return np.asarray(np.clip((share + _Z**2 / (2 * size) + side * spread) / (1 + _Z**2 / size), 0.0, 1.0))


# ------------------------------------------------------------------------------
# Sufficient statistics: what each query adds, so that a metric of resampled queries needs no row again.
#
# A resample is a vector of weights, how often each query was drawn. A metric is a function of weighted sums over
# queries (`Sums`), and these are one matrix product for all resamples. AUC alone compares rows of different queries,
# and keeps them in order (`Order`); a maximum looks at which queries were drawn (`Largest`).
#
# Letters: N rows, G groups (queries, or rows where there is no query), K grades, R resamples.


@dataclass(frozen=True, eq=False)
class Sums:
    """What each group adds.

    Args:
        by_group: [G, ...].
        over: how many rows or queries they are sums of.
    """

    by_group: np.ndarray
    over: int


BLOCK = 32
"""Rows of a block of `Order`, which are added up one after the other."""
SLAB = 128
"""Blocks of `Order` that are added up side by side: about what a processor's cache holds."""


class Order:
    """Rows in the order of a score, each relevant or not: what AUC of weighted groups is computed from. The order never
    changes, so it is found once.

    Others below every relevant row, and relevant rows above every other, count by their group alone. Rows between are
    laid out in blocks of BLOCK: all blocks of a slab and all resamples are added up together, row by row of a block, in
    16 bits where that is enough. A running sum a resample takes five times as long.

    Letters: P rows of a block, B blocks, T rows in ties.

    Args:
        score_N: higher is more relevant.
        is_relevant_N: bool.
        group_N: 0..G-1.
    """

    def __init__(self, score_N: np.ndarray, is_relevant_N: np.ndarray, group_N: np.ndarray) -> None:
        self.over = len(score_N)
        order_N, tie_N = _in_order(score_N, is_relevant_N)
        is_relevant_N = is_relevant_N[order_N]
        group_N = group_N[order_N]
        num_low = int(np.argmax(np.append(is_relevant_N, True)))
        num_top = int(np.argmax(np.append(~is_relevant_N[num_low:][::-1], True)))
        between = slice(num_low, self.over - num_top)
        num_groups = int(group_N.max(initial=-1)) + 1
        low_G = np.bincount(group_N[: between.start], minlength=num_groups)
        top_G = np.bincount(group_N[between.stop :], minlength=num_groups)
        self._ends_G2 = np.stack([low_G, top_G], axis=1, dtype=np.float64)
        """Others below, and relevant rows above all rows between."""
        self._relevant_PB = _blocks(np.where(is_relevant_N, group_N, -1)[between])
        self._others_PB = _blocks(np.where(is_relevant_N, -1, group_N)[between])
        is_tied_N = _is_in_tie(tie_N, is_relevant_N)
        self._group_T = group_N[is_tied_N]
        self._starts = np.flatnonzero(np.diff(is_relevant_N[is_tied_N], prepend=True))
        """Of the others of a tie and of its relevant rows, which take turns among the rows in ties."""

    @staticmethod
    def small_weights(weight_RG: np.ndarray) -> np.ndarray:
        """Weights as `weighted` takes them: [G + 1, R], of a type that holds what a block adds up to; the last group,
        which is -1, weighs nothing.
        """
        num_resamples, num_groups = weight_RG.shape
        most_pairs = (BLOCK * int(weight_RG.max(initial=0)) // 2) ** 2
        weight_GR = np.zeros((num_groups + 1, num_resamples), dtype=np.min_scalar_type(most_pairs))
        weight_GR[:num_groups] = weight_RG.T
        return weight_GR

    def weighted(self, weight_RG: np.ndarray, weight_GR: np.ndarray | None = None) -> np.ndarray:
        """Pairs of a relevant row and another in the right order (ties a half), relevant rows, other rows: float64 [R,
        3].

        Args:
            weight_RG: whole numbers.
            weight_GR: their `small_weights`, where several orders share them.
        """
        if weight_GR is None:
            weight_GR = self.small_weights(weight_RG)
        num_resamples = len(weight_RG)
        won_R = np.zeros(num_resamples)
        relevant_R = np.zeros(num_resamples)
        others_R, top_R = (weight_RG[:, : len(self._ends_G2)] @ self._ends_G2).T
        for start in range(0, self._others_PB.shape[1], SLAB):
            relevant_PBR = weight_GR.take(self._relevant_PB[:, start : start + SLAB], axis=0, mode="wrap")
            others_PBR = weight_GR.take(self._others_PB[:, start : start + SLAB], axis=0, mode="wrap")
            for row in range(1, BLOCK):
                others_PBR[row] += others_PBR[row - 1]
            relevant_BR = relevant_PBR.sum(axis=0, dtype=weight_GR.dtype)
            within_BR = np.einsum("pbr,pbr->br", others_PBR, relevant_PBR)
            ends_BR = np.cumsum(others_PBR[-1], axis=0, dtype=np.float64) + others_R
            before_BR = ends_BR - others_PBR[-1]
            won_R += within_BR.sum(axis=0, dtype=np.float64) + np.einsum("br,br->r", before_BR, relevant_BR)
            relevant_R += relevant_BR.sum(axis=0, dtype=np.float64)
            others_R = ends_BR[-1]
        won_R += top_R * others_R - self._tied_pairs(weight_RG) / 2
        return np.stack([won_R, relevant_R + top_R, others_R], axis=1)

    def _tied_pairs(self, weight_RG: np.ndarray) -> np.ndarray:
        """Pairs of a relevant row and another of the same score: float64 [R]."""
        pairs_R = np.zeros(len(weight_RG))
        if len(self._group_T):
            for resample, weight_G in enumerate(weight_RG):
                sums = np.add.reduceat(weight_G.take(self._group_T), self._starts)
                pairs_R[resample] = sums[0::2] @ sums[1::2]
        return pairs_R

    @staticmethod
    def area(won_3: np.ndarray) -> np.ndarray:
        """AUC of what `weighted` gives; NaN where only one kind is there."""
        return np.asarray(won_3[..., 0] / (won_3[..., 1] * won_3[..., 2]))


def _in_order(score_N: np.ndarray, is_relevant_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows by score, a relevant one after the others of its score: int64 [N]; and the number of each one's score in
    that order. Rows of one kind and score may come in any order. numpy sorts one number a row in a fraction of the time
    that `lexsort` takes.
    """
    order_N = np.argsort(score_N)
    tie_N = _numbers(score_N[order_N])
    return order_N[np.argsort(2 * tie_N + is_relevant_N[order_N])], tie_N


def _numbers(sorted_N: np.ndarray) -> np.ndarray:
    """Sorted values numbered from 0, equal ones alike: int64 [N]."""
    is_new_N = np.append(False, sorted_N[1:] != sorted_N[:-1])[: len(sorted_N)]
    return np.cumsum(is_new_N)


def ranks(value_N: np.ndarray) -> np.ndarray:
    """Values numbered from 0 in their order, equal ones alike: int64 [N]."""
    order_N = np.argsort(value_N)
    rank_N = np.empty(len(order_N), dtype=np.int64)
    rank_N[order_N] = _numbers(value_N[order_N])
    return rank_N


def _is_in_tie(tie_N: np.ndarray, is_relevant_N: np.ndarray) -> np.ndarray:
    """Whether a relevant row and another have this score, bool [N], by the numbers of scores."""
    relevant = np.bincount(tie_N, is_relevant_N)
    others = np.bincount(tie_N, ~is_relevant_N)
    return np.asarray(((relevant > 0) & (others > 0))[tie_N])


def _blocks(group_N: np.ndarray) -> np.ndarray:
    """Rows laid out so that a column is a block: [P, B], int32, filled up with -1."""
    num_blocks = -(-len(group_N) // BLOCK)
    filled = np.full(num_blocks * BLOCK, -1, dtype=np.int32)
    filled[: len(group_N)] = group_N
    return np.ascontiguousarray(filled.reshape(num_blocks, BLOCK).T)


class Largest:
    """The largest value of the groups that are drawn.

    Args:
        value_G: NaN where a group has none.
    """

    def __init__(self, value_G: np.ndarray) -> None:
        self.over = int((~np.isnan(value_G)).sum())
        self._value_G = np.where(np.isnan(value_G), -np.inf, value_G)

    def weighted(self, weight_RG: np.ndarray) -> np.ndarray:
        """Float64 [R], NaN where no group with a value is drawn."""
        largest_R = np.where(weight_RG > 0, self._value_G, -np.inf).max(axis=1, initial=-np.inf)
        return np.where(np.isneginf(largest_R), np.nan, largest_R)


Statistic = Sums | Order | Largest


def mean_of_queries(value_G: np.ndarray) -> Sums:
    """The mean of a value that each query has, or has not (NaN)."""
    is_defined_G = ~np.isnan(value_G)
    return Sums(np.stack([np.where(is_defined_G, value_G, 0.0), is_defined_G], axis=1), int(is_defined_G.sum()))


def mean_of_rows(value_N: np.ndarray, group_N: np.ndarray, num_groups: int) -> Sums:
    """The mean of a value that each row has, or has not (NaN)."""
    has_N = ~np.isnan(value_N)
    group_N = group_N[has_N]
    total_G = np.bincount(group_N, value_N[has_N], minlength=num_groups)
    return Sums(np.stack([total_G, np.bincount(group_N, minlength=num_groups)], axis=1), len(group_N))


# ------------------------------------------------------------------------------
# A metric: what it is called, which way is better, and how its value follows from sufficient statistics. A set of
# them, measured.
#
# Letters: G groups (queries, or rows where there is no query), R resamples, F features.


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


NOTHING_DRAWN = Interval(math.nan, math.nan)


class Measured(NamedTuple):
    """What a metric of some rows is computed from, and how.

    `is_by_grade`: it ranks rows by the grade that was written, for want of a distribution. Such an AUC is lower than
    the same labeler's by distributions: grades tie what probabilities distinguish.
    """

    statistic: Statistic
    formula: Formula
    is_by_grade: bool = False


@dataclass(frozen=True)
class OfCounts:
    """Measures a function of `counts`, the confusion matrix [..., K, K] of two sets of labels; nothing without one.

    Args:
        formula: to values [...], or [..., K] if `is_each_grade`.
    """

    formula: Formula
    is_each_grade: bool = False

    def by_member(self, grades: int) -> dict[str, Formula]:
        """The formula, or that of each grade."""
        each = {str(grade): functools.partial(self._of_grade, grade) for grade in range(grades)}
        return {**each} if self.is_each_grade else {"": self.formula}

    def _of_grade(self, grade: int, counts_KK: np.ndarray) -> np.ndarray:
        return self.formula(counts_KK)[..., grade]

    def __call__(self, rows: Any) -> Mapping[str, Measured]:
        if rows.counts is None:
            return {}
        members = self.by_member(rows.counts.by_group.shape[-1])
        return {member: Measured(rows.counts, formula) for member, formula in members.items()}


@dataclass(frozen=True)
class Metric:
    """All that is to be known of one metric; whatever shows, draws, gates or documents metrics reads it here.

    Args:
        name: in JSON and gates: `f1_macro`. `f1_{}` is one metric for each grade (cut, k).
        title: in text and pages, with the same `{}`.
        direction: which values are better.
        unit: what it is a mean or a count over.
        measure: of statistics, by what replaces `{}` (`""` for a metric without); empty where they hold nothing of
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
class Difference:
    """A figure of one label set minus the same figure of another, judged on the same rows and resampled together.

    Args:
        value: None where either figure is not defined.
        low, high: 95 % percentile bootstrap bounds of the difference.
    """

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MetricValue(Difference):
    """One value and its interval.

    Args:
        value: None where the metric is not defined (0/0).
        low, high: 95 % bounds: of a `Share` those of `share_bounds`, else percentiles of the bootstrap; None without
            resamples or with fewer than two groups.
        over: how many rows or queries it is the metric of.
        unit: `rows` or `queries`.
        is_by_grade: see `Measured`.
    """

    over: int
    unit: str
    is_by_grade: bool = False


class Figures(dict[str, Named]):
    """What is known of figures, by their names; one that is not there names those that are."""

    def __missing__(self, name: str) -> NoReturn:
        hint = nearest(name, list(self))
        raise KeyError(
            f"no figure `{name}`; known are {', '.join(self)}." + (f" Did you mean `{hint}`?" if hint else "")
        )


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
            values = {metric.name.format(member): one for member, one in metric.measure(statistics).items()}
            self._measured |= values
            self._units |= dict.fromkeys(values, metric.unit)
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
        statistic, formula, _ = self._measured[name]
        if isinstance(formula, Share) and isinstance(statistic, Sums):
            return int(formula.whole(statistic.by_group.sum(0)))
        return statistic.over

    def resampled(self, weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        """Every metric of every weighting of the groups, [R] each; NaN where it is not defined.

        Args:
            weight_RG: float64, how often each group counts.
        """
        sums_RF = weight_RG @ self._feature_GF
        ends = np.cumsum([one.by_group[0].size for one in self._linear])
        parts = zip(self._linear, np.split(sums_RF, ends[:-1], axis=1), strict=bool(self._linear))
        sums = {id(one): part.reshape(len(weight_RG), *one.by_group.shape[1:]) for one, part in parts}
        weight_GR = None
        for statistic, *_ in self._measured.values():
            if isinstance(statistic, Order):
                if weight_GR is None:
                    weight_GR = statistic.small_weights(weight_RG)
                sums[id(statistic)] = statistic.weighted(weight_RG, weight_GR)
            elif isinstance(statistic, Largest):
                sums[id(statistic)] = statistic.weighted(weight_RG)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: formula(sums[id(statistic)]) for name, (statistic, formula, *_) in self._measured.items()}

    def with_intervals(self, intervals: Mapping[str, Interval]) -> dict[str, MetricValue]:
        """Every metric's value with its interval.

        Args:
            intervals: of the bootstrap; those of shares are taken from the groups' own sums instead.
        """
        figures = Figures[MetricValue]()
        for name, value in self.values.items():
            low, high = intervals.get(name, NOTHING_DRAWN)
            statistic, formula, is_by_grade = self._measured[name]
            if name in intervals and isinstance(formula, Share) and isinstance(statistic, Sums):
                sums = statistic.by_group
                low, high = map(float, share_bounds(formula.part(sums), formula.whole(sums)))
            over = self.over(name)
            unit = self._units[name]
            figures[name] = MetricValue(
                finite(value),
                finite(low),
                finite(high),
                over,
                unit,
                is_by_grade,
            )
        return figures


def measured(statistic: Callable[[Any], Statistic | None], formula: Formula) -> Callable[[Any], Mapping[str, Measured]]:
    """Measures a function of one statistic, where there is any."""
    return lambda rows: {} if (found := statistic(rows)) is None else {"": Measured(found, formula)}


def mean(sums_2: np.ndarray) -> np.ndarray:
    """Formula of `mean_of_rows` and `mean_of_queries`: the total over the count."""
    return np.asarray(sums_2[..., 0] / sums_2[..., 1])


share = Share(lambda sums_2: sums_2[..., 0], lambda sums_2: sums_2[..., 1])
"""`mean`, where the values that are added up lie between 0 and 1."""


def finite(value: float) -> float | None:
    """A number, or None for what JSON can't say."""
    return float(value) if math.isfinite(value) else None


# ------------------------------------------------------------------------------
# Agreement of labels with gold grades, from counts alone: accuracy, F1, kappa and alpha are functions of a confusion
# matrix.
#
# Each takes any number of matrices at once, [..., K, K], of counts or sums of weights, and gives [...]; NaN where it is
# not defined (0/0), of which callers silence numpy's warning. That makes a bootstrap cheap: a resample of queries is a
# weighted sum of their matrices.
#
# Letters: N rows, K grades, G groups (queries, or rows where there is no query); a confusion matrix has a row a gold
# grade, a column a label.


def confusion_by_group(
    gold_N: np.ndarray, label_N: np.ndarray, group_N: np.ndarray, *, num_groups: int, grades: int
) -> np.ndarray:
    """One confusion matrix a group: int64 [G, K, K].

    Args:
        gold_N, label_N: grades 0..K-1.
        group_N: 0..G-1.
    """
    cell_N = (group_N * grades + gold_N) * grades + label_N
    return np.bincount(cell_N, minlength=num_groups * grades * grades).reshape(num_groups, grades, grades)


accuracy = Share(lambda counts_KK: _hits(counts_KK).sum(-1), lambda counts_KK: counts_KK.sum((-2, -1)))
"""Share of rows whose label is gold."""


def f1_by_grade(counts_KK: np.ndarray) -> np.ndarray:
    """2·both / (gold k + labels k): [..., K]."""
    return np.asarray(2 * _hits(counts_KK) / (counts_KK.sum(-1) + counts_KK.sum(-2)))


def f1_macro(counts_KK: np.ndarray) -> np.ndarray:
    """Mean of F1 over grades that occur in gold or labels."""
    occurs_K = counts_KK.sum(-1) + counts_KK.sum(-2) > 0
    return np.asarray(np.where(occurs_K, f1_by_grade(counts_KK), 0).sum(-1) / occurs_K.sum(-1))


def f1_weighted(counts_KK: np.ndarray) -> np.ndarray:
    """Mean of F1 by the number of gold rows."""
    gold_K = counts_KK.sum(-1)
    return np.asarray((np.where(gold_K > 0, f1_by_grade(counts_KK), 0) * gold_K).sum(-1) / gold_K.sum(-1))


def kappa(counts_KK: np.ndarray, *, power: int) -> np.ndarray:
    """Cohen 1960 and 1968: 1 - observed cost / cost expected from the two margins.

    Args:
        power: of the distance of two grades, which is their cost: 2, or 0 for a cost of 1 whatever the distance.
    """
    gold_K = counts_KK.sum(-1)
    label_K = counts_KK.sum(-2)
    step_KK = np.abs(np.subtract.outer(np.arange(counts_KK.shape[-1]), np.arange(counts_KK.shape[-1])))
    cost_KK = np.where(step_KK > 0, step_KK.astype(float) ** power, 0.0)
    expected = (gold_K[..., :, None] * label_K[..., None, :] * cost_KK).sum((-2, -1))
    return np.asarray(
        1 - (counts_KK * cost_KK).sum((-2, -1)) * gold_K.sum(-1) / np.where(expected > 0, expected, np.nan)
    )


def alpha(counts_KK: np.ndarray, *, is_ordinal: bool) -> np.ndarray:
    """Krippendorff 2011, two raters and no missing value: 1 - (n-1) Σ o δ² / Σ n_c n_k δ², o = counts + countsᵀ, n = 2N
    values.

    Nominal δ is 1 for any two grades; ordinal δ_ck = Σ_{g=c..k} n_g - (n_c + n_k)/2, which is the distance between
    their mid-ranks.
    """
    margin_K = counts_KK.sum(-1) + counts_KK.sum(-2)
    midrank_K = np.cumsum(margin_K, -1) - margin_K / 2
    distance_KK = (
        (midrank_K[..., :, None] - midrank_K[..., None, :]) ** 2 if is_ordinal else 1.0 - np.eye(margin_K.shape[-1])
    )
    expected = (margin_K[..., :, None] * margin_K[..., None, :] * distance_KK).sum((-2, -1))
    # δ is symmetric, so counts and their transpose cost the same
    observed = 2 * (counts_KK * distance_KK).sum((-2, -1))
    return np.asarray(1 - (margin_K.sum(-1) - 1) * observed / np.where(expected > 0, expected, np.nan))


def auc_of_counts(counts_KK: np.ndarray, cut: int) -> np.ndarray:
    """Area under the ROC curve of the label itself against gold ≥ cut."""
    relevant_K = counts_KK[..., cut:, :].sum(-2)
    other_K = counts_KK[..., :cut, :].sum(-2)
    below_K = np.cumsum(other_K, -1) - other_K / 2
    return np.asarray((relevant_K * below_K).sum(-1) / (relevant_K.sum(-1) * other_K.sum(-1)))


def _hits(counts_KK: np.ndarray) -> np.ndarray:
    return np.diagonal(counts_KK, axis1=-2, axis2=-1)


def pass_at_k(num_correct_N: np.ndarray, num_samples_N: np.ndarray, k: int) -> np.ndarray:
    """For each row the chance that k of its samples, drawn without replacement, hold one that equals gold: float64 [N].

    Args:
        num_correct_N, num_samples_N: samples equal to gold, and all samples (a failed one is never correct), at least k
            each.
    Source:
        Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(S-c, k) / C(S, k).
    """
    missed_N = np.ones(len(num_correct_N))
    for drawn in range(k):
        missed_N *= np.clip(num_samples_N - num_correct_N - drawn, 0, None) / (num_samples_N - drawn)
    return 1 - missed_N


# ------------------------------------------------------------------------------
# Whether probabilities mean what they say: expected calibration error, Brier score; and the temperature that corrects
# them.
#
# Letters: N rows, K grades, G groups, B bins, R resamples.


BINS = 15
"""Equal-width bins of confidence, the number of Guo et al. 2017."""

TINY = 1e-12
"""Least probability that a logarithm is taken of."""


def brier_rows(probs_NK: np.ndarray, gold_N: np.ndarray) -> np.ndarray:
    """Brier's own multi-class score of each row, Σ_k (p_k - [gold = k])²: 0 to 2, float64 [N]."""
    hit_NK = np.arange(probs_NK.shape[1]) == gold_N[:, None]
    return np.asarray(((probs_NK - hit_NK) ** 2).sum(1))


def reliability_by_group(
    probs_NK: np.ndarray, gold_N: np.ndarray, group_N: np.ndarray, *, num_groups: int
) -> np.ndarray:
    """What each group adds to each bin of confidence: rows, sum of confidence, number correct; float64 [G, B, 3].

    Confidence is the largest probability, correct means that its grade is gold (the lower grade where two are equally
    probable).
    """
    confidence_N = probs_NK.max(1)
    correct_N = probs_NK.argmax(1) == gold_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    cell_N = group_N * BINS + bin_N
    size = num_groups * BINS
    parts = [
        np.bincount(cell_N, weights, minlength=size)
        for weights in (np.ones(len(gold_N)), confidence_N, correct_N.astype(float))
    ]
    return np.stack(parts, axis=-1).reshape(num_groups, BINS, 3)


def ece_of_bins(bins_B3: np.ndarray) -> np.ndarray:
    """Expected calibration error of sums [..., B, 3] over rows: Σ_bins (share of rows) · |mean confidence - accuracy|;
    NaN without rows.

    Source:
        Guo et al. 2017 (arXiv:1706.04599), equation 3.
    """
    rows = bins_B3[..., 0].sum(-1)
    gap = np.abs(bins_B3[..., 1] - bins_B3[..., 2]).sum(-1)
    return np.asarray(gap / np.where(rows > 0, rows, np.nan))


def tempered(probs_NK: np.ndarray, temperature: float) -> np.ndarray:
    """p^(1/T), renormalised."""
    scaled_NK = np.log(np.maximum(probs_NK, TINY)) / temperature
    raised_NK = np.exp(scaled_NK - scaled_NK.max(1, keepdims=True))
    return np.asarray(raised_NK / raised_NK.sum(1, keepdims=True))


def fit_temperature(probs_NK: np.ndarray, target_NK: np.ndarray) -> float:
    """One temperature, least cross-entropy (Guo et al. 2017, section 4.2), sought between 1/100 and 100.

    Args:
        target_NK: what the distributions should be; 1 at the grade where a row has one.
    Raises:
        MissingExtraError: scipy is absent.
    """
    optimize = require("scipy.optimize", extra="cpu", purpose="A temperature fitted on dev")

    def loss(log_temperature: float) -> float:
        logs_NK = np.log(np.maximum(tempered(probs_NK, np.exp(log_temperature)), TINY))
        return float(-(target_NK * logs_NK).sum(1).mean())

    found = optimize.minimize_scalar(
        loss, bounds=(np.log(0.01), np.log(100.0)), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(found.x))


def at_least(probs_NK: np.ndarray) -> np.ndarray:
    """P(k ≥ j) for j = 1..K-1: float64 [N, K-1]."""
    return np.asarray(np.cumsum(probs_NK[:, ::-1], axis=1)[:, ::-1][:, 1:])


# ------------------------------------------------------------------------------
# How labels order the documents of a query, for all queries at once: nDCG@10, Kendall tau, bad cases; and the area
# under the ROC curve.
#
# An item is one document of a query. Equal scores are ordered by document id, descending, as trec_eval does, so that
# figures do not depend on the order of rows.
#
# Letters: N rows, M items, G queries.


DEPTH = 10
COMPARED_AT_A_TIME = 1 << 20
"""Pairs of rows that are compared at once: 8 MB."""


@dataclass(frozen=True)
class QueryRanking:
    """Figures of each query, float64 [G]; NaN where a query has none (no relevant item for nDCG; scores or grades all
    equal for tau).
    """

    ndcg: np.ndarray
    tau: np.ndarray
    bad_case: np.ndarray


def rank_queries(
    query_N: np.ndarray,
    doc_N: np.ndarray,
    score_N: np.ndarray,
    gold_N: np.ndarray,
    *,
    num_queries: int,
    depth: int = DEPTH,
) -> QueryRanking:
    """nDCG@10, Kendall tau-b and bad cases by query, over the items given.

    Args:
        query_N: 0..G-1.
        doc_N: documents, numbered in the order of their ids' text; one that comes again within its query is one item
            whose score and gold are the means of its rows.
        score_N: higher is better.
        gold_N: grades, 0 is irrelevant.
    """
    query_M, doc_M, score_M, gold_M = _items(query_N, doc_N, score_N, gold_N)
    size_G = np.bincount(query_M, minlength=num_queries)
    order = _by_query(query_M, score_M, doc_M)
    top = order[places_in_query(query_M[order], num_queries) < depth]
    query_T = query_M[top]
    gain_M = np.floor(gold_M + 0.5)
    dcg_G = dcg_by_query(
        query_M[order],
        gain_M[order],
        num_queries=num_queries,
        depth=depth,
    )
    ideal_G = ideal_dcg(query_M, gain_M, num_queries=num_queries, depth=depth)
    bad_G = np.bincount(query_T, gold_M[top] < 0.5, minlength=num_queries) > 0
    return QueryRanking(
        dcg_G / np.where(ideal_G > 0, ideal_G, np.nan),
        tau_by_query(query_M, score_M, gold_M, num_queries=num_queries),
        np.where(size_G > 0, bad_G, np.nan),
    )


def _by_query(query_M: np.ndarray, score_M: np.ndarray, doc_M: np.ndarray) -> np.ndarray:
    """Items query by query, by score and then by document, both descending: int64 [M]. What `lexsort` of the three
    gives, which takes three times as long.

    Args:
        query_M, doc_M: numbers from 0, few enough that the product with M is an int64; no document comes twice in a
            query.
    """
    num_docs = int(doc_M.max(initial=0)) + 1
    last_first_M = ranks(-score_M) * num_docs + (num_docs - 1 - doc_M)
    return np.argsort(query_M * len(query_M) + ranks(last_first_M))


def random_order(
    query_N: np.ndarray, doc_N: np.ndarray, gold_N: np.ndarray, *, num_queries: int, depth: int = DEPTH
) -> QueryRanking:
    """What `rank_queries` gives for a random order of each query's items, on average over all orders: exact."""
    query_M, _, _, gold_M = _items(query_N, doc_N, gold_N, gold_N)
    size_G = np.bincount(query_M, minlength=num_queries)
    gain_M = np.floor(gold_M + 0.5)
    ideal_G = ideal_dcg(query_M, gain_M, num_queries=num_queries, depth=depth)
    discount_T = 1 / np.log2(np.arange(depth) + 2)
    discounts_G = np.append(0.0, np.cumsum(discount_T))[np.minimum(size_G, depth)]
    gain_G = np.bincount(query_M, gain_M, minlength=num_queries) / np.maximum(size_G, 1)
    good_G = size_G - np.bincount(query_M, gold_M < 0.5, minlength=num_queries)
    all_good_G = np.ones(num_queries)
    for rank in range(depth):
        left_G = size_G - rank
        all_good_G *= np.where(left_G > 0, np.clip(good_G - rank, 0, None) / np.maximum(left_G, 1), 1.0)
    lowest_G = np.full(num_queries, np.inf)
    np.minimum.at(lowest_G, query_M, gold_M)
    has_two_grades_G = np.bincount(query_M, gold_M > lowest_G[query_M], minlength=num_queries) > 0
    return QueryRanking(
        gain_G * discounts_G / np.where(ideal_G > 0, ideal_G, np.nan),
        np.where(has_two_grades_G, 0.0, np.nan),
        np.where(size_G > 0, 1 - all_good_G, np.nan),
    )


def dcg_by_query(query_M: np.ndarray, gain_M: np.ndarray, *, num_queries: int, depth: int) -> np.ndarray:
    """DCG of the first `depth` rows of each query, float64 [G]; rows in the order of queries and places."""
    place_M = places_in_query(query_M, num_queries)
    is_top_M = place_M < depth
    discount_T = 1 / np.log2(place_M[is_top_M] + 2)
    dcg_G = np.bincount(query_M[is_top_M], gain_M[is_top_M] * discount_T, minlength=num_queries)
    return np.asarray(dcg_G, dtype=np.float64)


def ideal_dcg(query_M: np.ndarray, gain_M: np.ndarray, *, num_queries: int, depth: int) -> np.ndarray:
    """DCG of each query's best order, float64 [G]."""
    gain_rank_M = ranks(-gain_M)
    best = np.argsort(query_M * (gain_rank_M.max(initial=0) + 1) + gain_rank_M)
    return dcg_by_query(
        query_M[best],
        gain_M[best],
        num_queries=num_queries,
        depth=depth,
    )


def places_in_query(query_N: np.ndarray, num_queries: int) -> np.ndarray:
    """The place of each row in its query, from 0: int64 [N].

    Args:
        query_N: 0..G-1, ascending.
    """
    size_G = np.bincount(query_N, minlength=num_queries)
    starts_G = np.cumsum(size_G) - size_G
    return np.asarray(np.arange(len(query_N)) - starts_G[query_N])


def _items(
    query_N: np.ndarray, doc_N: np.ndarray, score_N: np.ndarray, gold_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows as items, one for each document of a query: query, document, mean score, mean grade."""
    pair_N = query_N * (int(doc_N.max(initial=0)) + 1) + doc_N
    if (np.diff(np.sort(pair_N)) > 0).all():
        return query_N, doc_N, score_N, gold_N.astype(np.float64)
    _, first_M, item_N = np.unique(pair_N, return_index=True, return_inverse=True)
    count_M = np.bincount(item_N)
    return (
        query_N[first_M],
        doc_N[first_M],
        np.bincount(item_N, score_N) / count_M,
        np.bincount(item_N, gold_N) / count_M,
    )


def tau_by_query(query_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray, *, num_queries: int) -> np.ndarray:
    """Kendall tau-b of two scores over the rows of each query: float64 [G], NaN where either score is the same
    throughout.
    """
    size_G = np.bincount(query_N, minlength=num_queries)
    order = np.argsort(query_N, kind="stable")
    start_G = np.cumsum(size_G) - size_G
    agreement_G = np.zeros(num_queries)
    differ_G2 = np.zeros((num_queries, 2))
    for size in np.unique(size_G[size_G > 1]):
        same_size = np.flatnonzero(size_G == size)
        queries_at_a_time = max(1, COMPARED_AT_A_TIME // size**2)
        rows_at_a_time = max(1, COMPARED_AT_A_TIME // size)
        for begin in range(0, len(same_size), queries_at_a_time):
            some = same_size[begin : begin + queries_at_a_time]
            rows_QS = order[start_G[some, None] + np.arange(size)]
            for row in range(0, size, rows_at_a_time):
                # against all rows of the query, so that every pair counts twice
                part = slice(row, row + rows_at_a_time)
                first_QPS = _which_is_higher(first_N[rows_QS], part)
                second_QPS = _which_is_higher(second_N[rows_QS], part)
                agreement_G[some] += (first_QPS * second_QPS).sum((1, 2), dtype=np.float64)
                differ_G2[some, 0] += np.count_nonzero(first_QPS, axis=(1, 2))
                differ_G2[some, 1] += np.count_nonzero(second_QPS, axis=(1, 2))
    either_G = np.sqrt(differ_G2).prod(1)
    return np.clip(agreement_G / np.where(either_G > 0, either_G, np.nan), -1.0, 1.0)


def _which_is_higher(value_QS: np.ndarray, part: slice) -> np.ndarray:
    """Some rows of each query against all of them: 1, 0 or -1, int8 [Q, P, S]."""
    some = value_QS[:, part, None]
    every = value_QS[:, None, :]
    return (some > every).astype(np.int8) - (some < every).astype(np.int8)


def rows_by_group(group_N: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Row numbers of each group, ascending."""
    order = np.argsort(group_N, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_N, minlength=num_groups))[:-1])


def cut_names(grades: int) -> list[str]:
    """The cuts of a scale: `0/12` and `01/2` for three grades."""
    digits = "".join(map(str, range(grades)))
    return [f"{digits[:cut]}/{digits[cut:]}" for cut in range(1, grades)]


def auc(score_N: np.ndarray, is_relevant_N: np.ndarray) -> float:
    """Area under the ROC curve: the share of (relevant, other) pairs in the right order, ties a half; NaN where only
    one kind is there.
    """
    relevant = score_N[is_relevant_N]
    other = np.sort(score_N[~is_relevant_N])
    if not len(relevant) or not len(other):
        return float("nan")
    won = np.searchsorted(other, relevant, side="left").sum() + np.searchsorted(other, relevant, side="right").sum()
    return float(won / 2 / (len(relevant) * len(other)))
