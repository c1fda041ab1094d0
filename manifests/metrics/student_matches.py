"""Which rows of a student's labels and a teacher's are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.ids import pair_codes, texts_of

BY_ROW = "row_id: both were made from the same input"
BY_IDS = "query_id and doc_id"


@dataclass(frozen=True)
class Labelled:
    """All labels of one set, in the order of its rows.

    Args:
        row_ids: int64 [N]: rows of the run's input, or of the file.
        grades: int64 [N].
        probs: float64 [N, K], NaN where a row has none; None where no row has one.
        num_without_label: rows of the set that hold no label and are not here.
        columns: as those of `Judged`.
    """

    where: str
    row_ids: np.ndarray
    query_ids: pa.LargeBinaryArray
    doc_ids: pa.LargeBinaryArray
    grades: np.ndarray
    probs: np.ndarray | None
    samples: pa.LargeListArray | None
    num_without_label: int
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    def pairs(self, first: int) -> list[tuple[str, str]]:
        """(query_id, doc_id) of the first rows."""
        return list(zip(texts_of(self.query_ids[:first]), texts_of(self.doc_ids[:first]), strict=True))


class Match(NamedTuple):
    """Which rows of two sets are the same: index into the teacher's rows and into the student's, int64 [N] each.

    `num_repeated` counts matched rows beyond the first of their pair, where rows are matched by ids.
    """

    how: str
    teacher: np.ndarray
    student: np.ndarray
    num_repeated: int


def match_rows(teacher: Labelled, student: Labelled, *, is_same_input: bool) -> Match:
    """Find the rows that both sets label.

    A pair that occurs several times in both is matched in the order of its rows: first with first, second with second.

    Args:
        is_same_input: row ids mean the same in both.
    """
    if is_same_input:
        _, ours, theirs = np.intersect1d(teacher.row_ids, student.row_ids, assume_unique=True, return_indices=True)
        return Match(BY_ROW, ours, theirs, 0)
    codes = pair_codes(
        *(
            pa.concat_arrays([ours, theirs])
            for ours, theirs in ((teacher.query_ids, student.query_ids), (teacher.doc_ids, student.doc_ids))
        )
    )
    sides = np.split(np.unique(codes, return_inverse=True)[1], [len(teacher.grades)])
    # the same pair's first row, second row, …
    number_N, number_M = (_numbers(pair) for pair in sides)
    most = max(number_N.max(initial=0), number_M.max(initial=0)) + 1
    keys = sides[0] * most + number_N, sides[1] * most + number_M
    _, ours, theirs = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    order = np.argsort(ours)
    return Match(BY_IDS, ours[order], theirs[order], int((number_N[ours] > 0).sum()))


def _numbers(pair_N: np.ndarray) -> np.ndarray:
    """How many rows of the same pair come before each row: int64 [N]."""
    order = np.argsort(pair_N, kind="stable")
    _, start, count = np.unique(pair_N[order], return_index=True, return_counts=True)
    number_N = np.empty(len(pair_N), dtype=np.int64)
    number_N[order] = np.arange(len(pair_N)) - np.repeat(start, count)
    return number_N


def match_notes(teacher: Labelled, student: Labelled, match: Match) -> list[str]:
    notes = []
    for labels, taken in ((teacher, match.teacher), (student, match.student)):
        if labels.num_without_label:
            notes.append(f"rows of {labels.where} without a readable label, left out: {labels.num_without_label:,}")
        if len(taken) < len(labels.grades):
            notes.append(
                f"labels of {labels.where} that the other set has no row for, left out: "
                f"{len(labels.grades) - len(taken):,}"
            )
    if match.num_repeated:
        notes.append(
            "pairs that occur several times in both sets are matched in order; rows beyond the first: "
            f"{match.num_repeated:,}"
        )
    return notes
