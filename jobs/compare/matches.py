"""Rows of two runs side by side, some whole queries at a time: labelled by both, by one, quarantined in one, missing
from one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relabel.jobs.compare.results import RowCounts
from relabel.jobs.files.query_buckets import query_buckets
from relabel.manifests.metrics.paired_rows import PairedRows
from relabel.manifests.metrics.student_matches import BY_ROW

STATES = ("labelled", "quarantined", "absent")


@dataclass
class MatchCounts:
    """Rows by what each run has of them, added up bucket by bucket.

    Args:
        by_state: rows by (state in A, state in B); both absent does not occur.
        repeated: matched rows beyond the first of their pair, where rows are matched by ids.
    """

    by_state: dict[tuple[str, str], int] = field(default_factory=dict)
    repeated: int = 0

    def of(self, first: str, second: str) -> int:
        """Rows in that state in A and in B."""
        return self.by_state.get((first, second), 0)

    def named(self) -> RowCounts:
        """By name."""
        return RowCounts(
            both=self.of("labelled", "labelled"),
            labelled_a=sum(self.of("labelled", state) for state in STATES),
            labelled_b=sum(self.of(state, "labelled") for state in STATES),
            only_a=self.of("labelled", "absent"),
            only_b=self.of("absent", "labelled"),
            quarantined_a_only=self.of("quarantined", "labelled"),
            quarantined_b_only=self.of("labelled", "quarantined"),
            quarantined_both=self.of("quarantined", "quarantined"),
            quarantined_elsewhere_absent=self.of("quarantined", "absent") + self.of("absent", "quarantined"),
            repeated=self.repeated,
        )


def matches(polars: Any, first: Path, second: Path, how: str, counts: MatchCounts, scratch: Path) -> Iterator[Any]:
    """Frames of whole queries: a row for each row of either run, columns of `ROWS` with `_a` and `_b`, ordered by query
    and row.

    Args:
        how: `BY_ROW`, or by ids: then rows of one pair are matched in their order, first with first.
        counts: is added to.
    """

    def sided(frame: Any, side: int) -> Any:
        return frame.rename({"row_id": "row"}).with_columns(side=polars.lit(side, polars.Int8))

    for bucket in query_buckets(polars, (first, second), sided, scratch):
        key = ["query", "row"] if how == BY_ROW else ["query", "doc_id", "place"]
        placed = bucket.with_columns(place=polars.int_range(polars.len()).over("side", "query", "doc_id"))
        ours, theirs = (
            placed.filter(polars.col("side") == side).drop("side", *(() if how != BY_ROW else ("place",)))
            for side in (0, 1)
        )
        shared = set(key)
        ours, theirs = (
            frame.rename({name: f"{name}_{letter}" for name in frame.columns if name not in shared})
            for frame, letter in ((ours, "a"), (theirs, "b"))
        )
        both = ours.join(theirs, on=key, how="full", coalesce=True)
        if how == BY_ROW:
            both = both.with_columns(row_a=polars.col("row"), row_b=polars.col("row"))
        both = both.with_columns(
            *(
                polars.when(polars.col(f"grade_{letter}").is_not_null())
                .then(polars.lit("labelled"))
                .when(polars.col(f"status_{letter}").is_not_null())
                .then(polars.lit("quarantined"))
                .otherwise(polars.lit("absent"))
                .alias(f"state_{letter}")
                for letter in "ab"
            ),
            query_id=polars.coalesce("query_id_a", "query_id_b"),
            **({"doc_id": polars.coalesce("doc_id_a", "doc_id_b")} if how == BY_ROW else {}),
            at=polars.coalesce("row_a", "row_b"),
        )
        for state_a, state_b, count in both.group_by("state_a", "state_b").len().rows():
            counts.by_state[state_a, state_b] = counts.by_state.get((state_a, state_b), 0) + count
        labelled = (polars.col("state_a") == "labelled") & (polars.col("state_b") == "labelled")
        if how != BY_ROW:
            counts.repeated += both.filter(labelled & (polars.col("place") > 0)).height
        yield both.filter(labelled).sort("query", "at")


def paired_rows(polars: Any, frame: Any, grades: int) -> PairedRows:
    """A frame of `matches` as arrays; queries are numbered anew from 0."""

    def side(letter: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given, expected, probs = frame.select(f"grade_{letter}", f"expected_grade_{letter}", f"probs_{letter}")
        return given.cast(polars.Int64).to_numpy(), _numbers(polars, expected), _distributions(probs, grades)

    queries, docs = frame.select("query", "doc_id")
    _, query_N = np.unique(queries.to_numpy(), return_inverse=True)
    return PairedRows(query_N.astype(np.int64), docs.to_list(), *zip(side("a"), side("b"), strict=True))


def _numbers(polars: Any, column: Any) -> np.ndarray:
    found: np.ndarray = column.cast(polars.Float64).fill_null(float("nan")).to_numpy()
    return found


def _distributions(column: Any, grades: int) -> np.ndarray:
    """float64 [N, K], rows sum to 1, NaN where a row has none."""
    found = np.full((len(column), grades), np.nan)
    has_N = column.is_not_null().to_numpy()
    if has_N.any():
        held = column.drop_nulls().explode().to_numpy().astype(np.float64).reshape(-1, grades)
        found[has_N] = held / held.sum(1, keepdims=True)  # float32 in the files: sums miss 1 by 1e-7
    return found
