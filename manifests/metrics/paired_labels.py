"""Two label sets over the same rows, neither of them the truth: agreement, shift of grades, distance of distributions, and how the order of
each query's documents changes, all with intervals over queries.

Memory grows with queries, not with rows: rows come some whole queries at a time and leave sums behind.

Letters: N rows, Q queries of one part, G all queries, K grades.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from manifests.metrics.agreement import confusion_by_group, count_figures
from manifests.metrics.bootstrap import Statistic, bootstrap, of_ratio, of_sums
from manifests.metrics.evaluation import Figure, Sheet
from manifests.metrics.triangle import kl_rows, tau_by_query

LN2 = math.log(2.0)


@dataclass(frozen=True)
class PairedRows:
    """Rows that both sets label, all rows of some queries.

    Args:
        query: int64 [N], 0..Q-1, ascending, none left out.
        docs: document ids.
        grades: int64 [N], of the first set and of the second.
        expected: float64 [N], NaN where a row has no distribution.
        probs: float64 [N, K], NaN where a row has none.
    """

    query: np.ndarray
    docs: list[str]
    grades: tuple[np.ndarray, np.ndarray]
    expected: tuple[np.ndarray, np.ndarray]
    probs: tuple[np.ndarray, np.ndarray]

    @property
    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """What rows are ordered by: expected grades to 6 digits, which float32 keeps, or the grade where there is no distribution."""
        first, second = (
            np.round(np.where(np.isnan(expected), grades, expected), 6) for grades, expected in zip(self.grades, self.expected, strict=True)
        )
        return first, second


class QueryMoves(NamedTuple):
    """How each query moved from the first set to the second.

    Args:
        rows: int64 [Q].
        first, second: mean score, float64 [Q].
        tau: Kendall tau-b of the two orders, float64 [Q], NaN where either set scores all rows alike.
        entered: documents of the second set's top that are not in the first's, int64 [Q]; `top` is the size of both.
        top_changed: whether another document comes first, bool [Q].
    """

    rows: np.ndarray
    first: np.ndarray
    second: np.ndarray
    tau: np.ndarray
    entered: np.ndarray
    top: np.ndarray
    top_changed: np.ndarray


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
        self._counts.append(confusion_by_group(first, second, rows.query, num_groups=queries, grades=self.grades).astype(np.float32))
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

    def figures(self, *, resamples: int, seed: int) -> dict[str, Figure]:
        """Every figure with its 95 % interval over queries; at least one row was added."""
        counts_GKK, sums, moves = np.concatenate(self._counts), np.concatenate(self._sums), self.moves
        sheet, grade_K = Sheet(), np.arange(self.grades)
        rows, queries = int(moves.rows.sum()), len(moves.rows)

        def of_counts(counts_KK: np.ndarray) -> dict[str, np.ndarray]:
            found = count_figures(counts_KK)
            total = counts_KK.sum((-2, -1))
            first, second = (counts_KK.sum(axis) @ grade_K / total for axis in (-1, -2))
            return {
                "agreement": found["accuracy"],
                "kappa": found["kappa"],
                "kappa_quadratic": found["kappa_quadratic"],
                "mean_grade_a": first,
                "mean_grade_b": second,
                "mean_grade_difference": second - first,
            }

        self._add(sheet, of_counts, counts_GKK, rows)
        if sums[:, 0].any():

            def of_expected(total: np.ndarray) -> dict[str, np.ndarray]:
                with np.errstate(divide="ignore", invalid="ignore"):
                    first, second = total[..., 1] / total[..., 0], total[..., 2] / total[..., 0]
                return {"mean_expected_a": first, "mean_expected_b": second, "mean_expected_difference": second - first}

            self._add(sheet, of_expected, sums[:, :3], int(sums[:, 0].sum()))
        if sums[:, 3].any():
            for place, name in enumerate(("kl_a_b", "kl_b_a", "js"), start=4):
                mean = float(sums[:, place].sum() / sums[:, 3].sum())
                sheet.add({name: mean}, int(sums[:, 3].sum()), "rows", of_ratio(name, sums[:, place], sums[:, 3]))
        is_ordered = ~np.isnan(moves.tau)
        self._add_ratio(sheet, "kendall_tau", np.where(is_ordered, moves.tau, 0.0), is_ordered)
        stayed = 1 - moves.entered / np.maximum(moves.top, 1)
        self._add_ratio(sheet, f"overlap@{self.depth}", stayed, np.ones(queries))
        self._add_ratio(sheet, "first_changed", moves.top_changed.astype(float), np.ones(queries))
        return sheet.figures(bootstrap(sheet.statistics, num_groups=queries, resamples=resamples, seed=seed))

    @staticmethod
    def _add(sheet: Sheet, figures: Statistic, feature: np.ndarray, rows: int) -> None:
        values = {name: float(value) for name, value in figures(feature.sum(0, dtype=np.float64)).items()}
        sheet.add(values, rows, "rows", of_sums(feature, figures))

    @staticmethod
    def _add_ratio(sheet: Sheet, name: str, total: np.ndarray, count: np.ndarray) -> None:
        over = int(count.sum())
        sheet.add({name: float(total.sum() / over) if over else math.nan}, over, "queries", of_ratio(name, total, count))


def js_rows(first_NK: np.ndarray, second_NK: np.ndarray) -> np.ndarray:
    """Jensen–Shannon divergence of each row: float64 [N], nats, 0 where both are equal, ln 2 where they share no grade.

    Source:
        Lin 1991: ½ KL(p ‖ m) + ½ KL(q ‖ m), m = ½ (p + q).
    """
    middle_NK = (first_NK + second_NK) / 2
    rows_N: np.ndarray = np.clip((kl_rows(first_NK, middle_NK) + kl_rows(second_NK, middle_NK)) / 2, 0.0, LN2)
    return rows_N


def query_moves(rows: PairedRows, queries: int, *, depth: int) -> QueryMoves:
    """How each of some queries moved.

    Equal scores are ordered by document id, descending, as everywhere (`ranking.py`).
    """
    count = np.bincount(rows.query, minlength=queries)
    first, second = rows.scores
    entered, changed = np.zeros(queries, dtype=np.int64), np.zeros(queries, dtype=bool)
    names = np.array([doc.encode("utf-8", "replace") for doc in rows.docs], dtype=object)
    by_name = np.empty(len(names), dtype=np.int64)
    by_name[np.argsort(names, kind="stable")] = np.arange(len(names))
    tops = [np.lexsort((-by_name, -score, rows.query)) for score in (first, second)]
    start = 0
    for query, size in enumerate(count):
        ours, theirs = (top[start : start + min(size, depth)] for top in tops)
        entered[query] = len(np.setdiff1d(theirs, ours, assume_unique=True))
        changed[query] = bool(size) and ours[0] != theirs[0]
        start += size
    means = [np.bincount(rows.query, score, minlength=queries) / np.maximum(count, 1) for score in (first, second)]
    tau = tau_by_query(rows.query, first, second, num_queries=queries)
    return QueryMoves(count, means[0], means[1], tau, entered, np.minimum(count, depth), changed)
