"""Rows whose grade changed, the largest changes first, with their texts rejoined through the run's input and both
answers' reasoning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distill.students.label_tables import read_pairs
from jobs.compare.results import Flip, FlipSide
from manifests.errors import RelabelError
from manifests.judging.label_sets import RunLabels
from manifests.labels import Pair
from manifests.runs.run_inputs import open_run_input
from manifests.schemas import LABELS
from manifests.storage.context import Storage

TEXT_CHARACTERS = 1000
"""Shown of a query, a document or a reasoning."""


class LargestFlips:
    """The rows whose expected grade (or grade, where there is no distribution) changed most, of all that were seen.

    Args:
        count: how many to keep.
    """

    def __init__(self, polars: Any, count: int) -> None:
        self._polars = polars
        self._count = count
        self._held: list[dict[str, Any]] = []
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
        self._held += largest.to_dicts()  # plain values: a slice of a frame would keep all of it
        self._held.sort(key=lambda row: (-abs(row["change"]), row["at"]))
        del self._held[self._count :]

    def rows(self) -> list[dict[str, Any]]:
        """The rows, largest change first."""
        return self._held


def examples(
    rows: list[dict[str, Any]], first: RunLabels, second: RunLabels, storage: Storage
) -> tuple[list[Flip], list[str]]:
    """Rows of `LargestFlips` as they are shown, and remarks: texts are left out, with the reason, where they can't be
    read any more.
    """
    if not rows:
        return [], []
    notes: list[str] = []
    pairs: dict[int, Pair] = {}
    try:
        pairs = _pairs(first, [row["row_a"] for row in rows], storage)
    except RelabelError as exc:
        notes.append(f"texts of the examples are left out: {exc}")
    reasons = {letter: _reasoning(run, rows, letter) for run, letter in ((first, "a"), (second, "b"))}
    found = []
    for row in rows:
        pair = pairs.get(row["row_a"])
        a, b = (
            FlipSide(
                grade=row[f"grade_{letter}"],
                expected_grade=row[f"expected_grade_{letter}"],
                probs=row[f"probs_{letter}"],
                reasoning=_cut(reasons[letter].get(row[f"row_{letter}"])),
            )
            for letter in "ab"
        )
        query, document = (_cut(pair.query), _cut(pair.document)) if pair else (None, None)
        change = round(row["change"], 6)
        found.append(Flip(row["row_a"], row["row_b"], row["query_id"], row["doc_id"], query, document, change, a, b))
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


def _reasoning(run: RunLabels, rows: list[dict[str, Any]], letter: str) -> dict[int, str | None]:
    """What a run wrote about some rows, by row id."""
    found: dict[int, str | None] = {}
    for number in sorted({row[f"file_{letter}"] for row in rows}):
        table = run.folder.table(run.labels[number], LABELS, ["row_id", "reasoning"])
        found |= dict(zip(table["row_id"].to_pylist(), table["reasoning"].to_pylist(), strict=True))
    return found
