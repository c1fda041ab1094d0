"""Queries that moved: those whose mean score changed most, with what became of their order."""

from __future__ import annotations

import math

import numpy as np

from relabel.jobs.compare.results import MovedQuery, QueryMoveCounts
from relabel.manifests.metrics.paired_rows import QueryMoves

TINY = 1e-6
"""Changes below this are float32's."""


class MovedQueries:
    """The queries that moved most, of all that were seen.

    Args:
        count: how many to keep.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[MovedQuery] = []

    def add(self, names: list[str], moves: QueryMoves) -> None:
        """Take in the moves of some queries, and what these are called."""
        change_Q = moves.second - moves.first
        order = np.lexsort((np.arange(len(names)), -np.abs(change_Q)))[: self._count]
        for query in order.tolist():
            tau = float(moves.tau[query])
            self._held.append(
                MovedQuery(
                    query_id=names[query],
                    rows=int(moves.rows[query]),
                    mean_a=round(float(moves.first[query]), 6),
                    mean_b=round(float(moves.second[query]), 6),
                    change=round(float(change_Q[query]), 6),
                    kendall_tau=None if math.isnan(tau) else round(tau, 6),
                    entered_top=int(moves.entered[query]),
                    top=int(moves.top[query]),
                    first_changed=bool(moves.top_changed[query]),
                )
            )
        self._held.sort(key=lambda one: -abs(one.change))
        del self._held[self._count :]

    def rows(self) -> list[MovedQuery]:
        """The queries, largest change first."""
        return [one for one in self._held if abs(one.change) > TINY]


def summary(moves: QueryMoves) -> QueryMoveCounts:
    """How many queries moved, and how."""
    change_G = moves.second - moves.first
    return QueryMoveCounts(
        queries=len(moves.rows),
        moved=int((np.abs(change_G) > TINY).sum()),
        up=int((change_G > TINY).sum()),
        down=int((change_G < -TINY).sum()),
        top_changed=int((moves.entered > 0).sum()),
        first_changed=int(moves.top_changed.sum()),
    )
