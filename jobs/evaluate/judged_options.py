"""What `relabel evaluate` is told of gold, and gold as it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from relabel.jobs.evaluate.sides import Side
from relabel.manifests.judging.qrels import (
    Duplicates,
    GradeMap,
)


@dataclass(frozen=True)
class JudgingOptions:
    """What `relabel evaluate` was given. `grade` and `by` are None where the user named no column, `qrels` where nobody
    judges; `pass_at` is empty where the k of pass@k were left open; `side` None takes the test side of a student:
    one of the sets, or one of `students`, outputs that are judged beside them.
    """

    qrels: str | None = None
    label: str = "grade"
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grades: int | None = None
    grade_map: GradeMap | None = None
    label_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    where: Mapping[str, str] = field(default_factory=dict)
    allow_partial: bool = False
    pass_at: tuple[int, ...] = ()
    side: Side | None = None
    students: tuple[str, ...] = ()


@dataclass
class Gold:
    """Gold grades and further columns for one label set: by row of its own input or file, or, where that is not what
    the qrels are, by pair.
    """

    by_row: pa.Int64Array | None
    how: str
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
