"""Two label sets over the same rows, neither of them the truth: agreement, shift of grades, distance of distributions,
and how the order of each query's documents changes, all with intervals over queries.

Memory grows with queries, not with rows: rows come some whole queries at a time and leave sums behind.

Letters: N rows, Q queries of one part, G all queries, K grades.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from relabel.manifests.metrics.agreement import confusion_by_group, kappa
from relabel.manifests.metrics.bootstrap import bootstrap
from relabel.manifests.metrics.metric import Formula, Measured, Metric, MetricSet, MetricValue, mean, share
from relabel.manifests.metrics.paired_rows import PairedRows, QueryMoves, js_rows, query_moves
from relabel.manifests.metrics.statistics import Sums, mean_of_queries
from relabel.manifests.metrics.teacher_statistics import AGREEMENT, KAPPA, kl_rows, of_counts


class PairedSums:
    """What rows leave behind, query by query, until all have been seen.

    Args:
        grades: K.
        depth: of the top that is compared.
    """

    def __init__(self, grades: int, *, depth: int) -> None:
        self.grades = grades
        self.depth = depth
        self._counts: list[np.ndarray] = []
        self._sums: list[np.ndarray] = []
        self._moves: list[QueryMoves] = []

    def add(self, rows: PairedRows) -> QueryMoves:
        """Take in the rows of some queries; how those queries moved."""
        queries = int(rows.query[-1]) + 1
        first, second = rows.grades
        self._counts.append(
            confusion_by_group(first, second, rows.query, num_groups=queries, grades=self.grades).astype(np.float32)
        )
        has_expected = ~np.isnan(rows.expected[0]) & ~np.isnan(rows.expected[1])
        has_probs = ~np.isnan(rows.probs[0][:, 0]) & ~np.isnan(rows.probs[1][:, 0])
        probs = rows.probs[0][has_probs], rows.probs[1][has_probs]
        columns = [
            (has_expected, np.ones(len(first))),
            (has_expected, rows.expected[0]),
            (has_expected, rows.expected[1]),
            (has_probs, np.ones(len(first))),
            (has_probs, kl_rows(*probs)),
            (has_probs, kl_rows(*reversed(probs))),
            (has_probs, js_rows(*probs)),
        ]
        sums = [
            np.bincount(rows.query[kept], weights if len(weights) == kept.sum() else weights[kept], minlength=queries)
            for kept, weights in columns
        ]
        self._sums.append(np.stack(sums, axis=1))
        self._moves.append(query_moves(rows, queries, depth=self.depth))
        return self._moves[-1]

    @property
    def confusion(self) -> np.ndarray:
        """int64 [K, K], rows first set, columns second."""
        return np.asarray(np.concatenate(self._counts).sum(0, dtype=np.float64).round(), dtype=np.int64)

    @property
    def moves(self) -> QueryMoves:
        """Of all queries, in the order in which they came."""
        return QueryMoves(*(np.concatenate(column) for column in zip(*self._moves, strict=True)))

    def figures(self, *, resamples: int, seed: int) -> dict[str, MetricValue]:
        """Every metric with its 95 % interval over queries; at least one row was added."""
        queries = len(self.moves.rows)
        metrics = MetricSet(PAIRED, PairedStatistics(self), num_groups=queries)
        return metrics.with_intervals(bootstrap(metrics.resampled, num_groups=queries, resamples=resamples, seed=seed))


class PairedStatistics:
    """Statistics of two label sets, by query."""

    def __init__(self, sums: PairedSums) -> None:
        moves, by_query = sums.moves, np.concatenate(sums._sums)
        self.depth = sums.depth
        self.counts = Sums(np.concatenate(sums._counts), int(moves.rows.sum()))
        self.expected = Sums(by_query[:, :3], int(by_query[:, 0].sum()))
        """Rows with expected grades in both sets, sum of those of the first, of the second."""
        self.distances = [Sums(by_query[:, [place, 3]], int(by_query[:, 3].sum())) for place in (4, 5, 6)]
        """KL(A ‖ B), KL(B ‖ A) and JS: total, and rows with distributions in both sets."""
        self.tau = mean_of_queries(moves.tau)
        self.stayed = mean_of_queries(1 - moves.entered / np.maximum(moves.top, 1))
        self.first_changed = mean_of_queries(moves.top_changed.astype(float))


Measure = Callable[[PairedStatistics], Mapping[str, Measured]]


def _of_expected(formula: Formula) -> Measure:
    return lambda rows: {"": Measured(rows.expected, formula)} if rows.expected.over else {}


def _distance(place: int) -> Measure:
    return lambda rows: {"": Measured(rows.distances[place], mean)} if rows.distances[place].over else {}


def _mean_grade(counts_KK: np.ndarray, side: int) -> np.ndarray:
    """Of the first set (0) or of the second (1)."""
    grade_K = np.arange(counts_KK.shape[-1])
    return np.asarray(counts_KK.sum(-1 - side) @ grade_K / counts_KK.sum((-2, -1)))


PAIRED = (
    AGREEMENT,
    KAPPA,
    Metric(
        "kappa_quadratic",
        "Cohen kappa, quadratic",
        "higher",
        "rows",
        of_counts(lambda counts: kappa(counts, power=2)),
        "with a disagreement of (a − b)²",
    ),
    Metric(
        "mean_grade_a",
        "mean grade, A",
        "neither",
        "rows",
        of_counts(lambda counts: _mean_grade(counts, 0)),
        "of A's labels",
    ),
    Metric(
        "mean_grade_b",
        "mean grade, B",
        "neither",
        "rows",
        of_counts(lambda counts: _mean_grade(counts, 1)),
        "of B's labels",
    ),
    Metric(
        "mean_grade_difference",
        "mean grade, B - A",
        "neither",
        "rows",
        of_counts(lambda counts: _mean_grade(counts, 1) - _mean_grade(counts, 0)),
        "how much higher B grades",
    ),
    Metric(
        "mean_expected_a",
        "mean expected grade, A",
        "neither",
        "rows",
        _of_expected(lambda sums: sums[..., 1] / sums[..., 0]),
        "of A's distributions",
    ),
    Metric(
        "mean_expected_b",
        "mean expected grade, B",
        "neither",
        "rows",
        _of_expected(lambda sums: sums[..., 2] / sums[..., 0]),
        "of B's distributions",
    ),
    Metric(
        "mean_expected_difference",
        "mean expected grade, B - A",
        "neither",
        "rows",
        _of_expected(lambda sums: sums[..., 2] / sums[..., 0] - sums[..., 1] / sums[..., 0]),
        "how much higher B's distributions lie",
    ),
    Metric("kl_a_b", "mean KL(A ‖ B), nats", "lower", "rows", _distance(0), "over rows where both have a distribution"),
    Metric("kl_b_a", "mean KL(B ‖ A), nats", "lower", "rows", _distance(1), "over rows where both have a distribution"),
    Metric(
        "js", "mean Jensen-Shannon, nats", "lower", "rows", _distance(2), "over rows where both have a distribution"
    ),
    Metric(
        "kendall_tau",
        "Kendall tau, by query",
        "higher",
        "queries",
        lambda rows: {"": Measured(rows.tau, mean)},
        "tau-b of the two orders; mean over queries where both vary",
    ),
    Metric(
        "overlap@{}",
        "share of the top {} that stays",
        "higher",
        "queries",
        lambda rows: {str(rows.depth): Measured(rows.stayed, share)},
        "documents of B's top that are in A's",
    ),
    Metric(
        "first_changed",
        "queries with another first",
        "lower",
        "queries",
        lambda rows: {"": Measured(rows.first_changed, share)},
        "share of queries where another document comes first",
    ),
)
"""Metrics of two label sets of which neither is the truth, in the order in which they are shown."""
