"""Rows that two sets of labels share, and how each query's ranking moves between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relabel.manifests.metrics.ranking import tau_by_query
from relabel.manifests.metrics.teacher_statistics import kl_rows


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
        """What rows are ordered by: expected grades to 6 digits, which float32 keeps, or the grade where there is no
        distribution.
        """
        first, second = (
            np.round(np.where(np.isnan(expected), grades, expected), 6)
            for grades, expected in zip(self.grades, self.expected, strict=True)
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


LN2 = math.log(2.0)


def js_rows(first_NK: np.ndarray, second_NK: np.ndarray) -> np.ndarray:
    """Jensen–Shannon divergence of each row: float64 [N], nats, 0 where both are equal, ln 2 where they share no grade.

    Source:
        Lin 1991: ½ KL(p ‖ m) + ½ KL(q ‖ m), m = ½ (p + q).
    """
    middle_NK = (first_NK + second_NK) / 2
    rows_N: np.ndarray = np.clip((kl_rows(first_NK, middle_NK) + kl_rows(second_NK, middle_NK)) / 2, 0.0, LN2)
    return rows_N
