"""Rows whose grade changed, the largest changes first, with their texts rejoined through the run's input and both
answers' reasoning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from relabel.distill.students.pair_texts import read_pairs
from relabel.jobs.compare.results import Flip, FlipSide
from relabel.manifests.errors import RelabelError
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.labels import Pair
from relabel.manifests.runs.run_inputs import open_run_input
from relabel.manifests.schemas import LABELS
from relabel.manifests.storage.context import Storage

TEXT_CHARACTERS = 1000
"""Shown of a query, a document or a reasoning."""


class RowOfRun(NamedTuple):
    """A row as one run labelled it; `file` is the label file's number in the run."""

    row: int
    file: int
    grade: int
    expected_grade: float | None
    probs: list[float] | None


class ChangedRow(NamedTuple):
    """A row whose grade changed, as both runs labelled it.

    Args:
        change: of the expected grade, or of the grade where there is no distribution.
        at: where it is among the rows.
    """

    change: float
    at: int
    query_id: str
    doc_id: str
    a: RowOfRun
    b: RowOfRun


class LargestFlips:
    """The rows whose expected grade (or grade, where there is no distribution) changed most, of all that were seen.

    Args:
        count: how many to keep.
    """

    def __init__(self, polars: Any, count: int) -> None:
        self._polars = polars
        self._count = count
        self._held: list[ChangedRow] = []
        self.up = 0
        self.down = 0

    def add(self, frame: Any) -> None:
        """Take in a frame of `matches`."""
        polars = self._polars
        scores = [
            polars.coalesce(f"expected_grade_{letter}", f"grade_{letter}").cast(polars.Float64) for letter in "ab"
        ]
        changed = frame.filter(polars.col("grade_a") != polars.col("grade_b")).with_columns(
            score_a=scores[0], score_b=scores[1], change=scores[1] - scores[0]
        )
        self.up += changed.filter(polars.col("grade_b") > polars.col("grade_a")).height
        self.down += changed.filter(polars.col("grade_b") < polars.col("grade_a")).height
        largest = changed.sort(polars.col("change").abs(), "at", descending=[True, False]).head(self._count)
        self._held += _changed_rows(largest)
        self._held.sort(key=lambda row: (-abs(row.change), row.at))
        del self._held[self._count :]

    def rows(self) -> list[ChangedRow]:
        """The rows, largest change first."""
        return self._held


def _changed_rows(frame: Any) -> list[ChangedRow]:
    """Plain values: a slice of a frame would keep all of it."""
    names = [f"{name}_{letter}" for letter in "ab" for name in RowOfRun._fields]
    found = frame.select("change", "at", "query_id", "doc_id", *names).iter_rows()
    middle = len(RowOfRun._fields)
    return [
        ChangedRow(change, at, query, doc, RowOfRun(*sides[:middle]), RowOfRun(*sides[middle:]))
        for change, at, query, doc, *sides in found
    ]


def examples(
    rows: list[ChangedRow], first: RunLabels, second: RunLabels, storage: Storage
) -> tuple[list[Flip], list[str]]:
    """Rows of `LargestFlips` as they are shown, and remarks: texts are left out, with the reason, where they can't be
    read any more.
    """
    if not rows:
        return [], []
    notes: list[str] = []
    pairs: dict[int, Pair] = {}
    try:
        pairs = _pairs(first, [row.a.row for row in rows], storage)
    except RelabelError as exc:
        notes.append(f"texts of the examples are left out: {exc}")
    reasons_a, reasons_b = _reasoning(first, [row.a for row in rows]), _reasoning(second, [row.b for row in rows])
    found = []
    for row in rows:
        pair = pairs.get(row.a.row)
        a, b = (
            FlipSide(side.grade, side.expected_grade, side.probs, _cut(reasons.get(side.row)))
            for side, reasons in ((row.a, reasons_a), (row.b, reasons_b))
        )
        query, document = (_cut(pair.query), _cut(pair.document)) if pair else (None, None)
        change = round(row.change, 6)
        found.append(Flip(row.a.row, row.b.row, row.query_id, row.doc_id, query, document, change, a, b))
    return found, notes


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + " …"


def _pairs(run: RunLabels, row_ids: list[int], storage: Storage) -> dict[int, Pair]:
    """Query and document of some rows of a run's input.

    Raises:
        InputError, ManifestError: the input is gone, or is not any more what was labelled.
    """
    dataset, readings = open_run_input(run.root, run.folder.store, run.plan, storage)
    return {pair.row_id: pair for pair in read_pairs(dataset, np.array(row_ids, dtype=np.int64), readings=readings)}


def _reasoning(run: RunLabels, rows: list[RowOfRun]) -> dict[int, str | None]:
    """What a run wrote about some rows, by row id."""
    found: dict[int, str | None] = {}
    for number in sorted({row.file for row in rows}):
        row_ids, reasons = run.folder.table(run.labels[number], LABELS, ["row_id", "reasoning"]).columns
        found |= dict(zip(row_ids.to_pylist(), reasons.to_pylist(), strict=True))
    return found
