"""Labels to be judged: of a run (its manifest or, if asked for, its receipts name the files) or of any file with a
label column.

Read a part at a time, and of a run only the columns that judging needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from relabel.manifests.judging.further_columns import label_columns
from relabel.manifests.judging.label_columns import LabelPart, run_part
from relabel.manifests.judging.run_labels import RunLabels, open_run_labels
from relabel.manifests.records import LEFT_OUT
from relabel.manifests.runs.label_files import file_schema, own_columns
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.receipts import FileRef
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.schemas import LABELS
from relabel.manifests.storage.context import Storage

RUN_COLUMNS = ["row_id", "query_id", "doc_id", "grade", "probs", "samples"]
PART_ROWS = 1 << 19
"""Rows of a run that are read at a time, at least: each part is looked up in all qrels."""


@dataclass(frozen=True)
class LabelOrigin:
    """What made labels: of a run its name, labeler, model and fingerprint (digests); of a file the label column, and by
    which columns its rows were picked.
    """

    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    column: str | None = field(default=None, metadata=LEFT_OUT)
    where: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass
class LabelSet:
    """One source of labels.

    Args:
        kind: a teacher's run, a student's scores (which lie like a run's labels), or a file.
        grades: K, where the source says; None for a file.
        num_quarantined: rows of a run that have no label; None for a file.
        plan: of a run.
        parts: reads them; call it once for each pass.
        columns: further ones that its parts hold.
        notes: remarks for a reader of the report; reading may add to them.
    """

    where: str
    kind: Literal["run", "student", "file"]
    grades: int | None
    num_quarantined: int | None
    origin: LabelOrigin
    plan: Plan | None
    parts: Callable[[], Iterator[LabelPart]]
    notes: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()


def open_run(root: str, storage: Storage, *, allow_partial: bool) -> LabelSet:
    """The labels of an output folder.

    Raises:
        InputError, ManifestError: see `open_run_labels`.
    """
    return label_set(open_run_labels(root, storage, allow_partial=allow_partial))


def label_set(run: RunLabels) -> LabelSet:
    """A run's labels, to be judged."""
    plan, facts = run.plan, run.plan.facts
    origin = LabelOrigin(plan.name, facts.labeler.name, facts.model, plan.fingerprint)
    kind: Literal["run", "student"] = "student" if facts.kind == "student" else "run"
    columns = label_columns(own_columns(plan.parts))
    return LabelSet(
        run.root,
        kind,
        run.grades,
        run.num_quarantined,
        origin,
        plan,
        lambda: _run_parts(run.folder, run.labels, columns),
        run.notes,
        columns,
    )


def _run_parts(folder: RunFolder, files: list[FileRef], further: Sequence[str]) -> Iterator[LabelPart]:
    held: list[pa.Table] = []
    schema, names = file_schema(folder.plan.parts) if further else LABELS, [*RUN_COLUMNS, *further]
    for number, file in enumerate(files, start=1):
        held.append(folder.table(file, schema, names))
        if number == len(files) or sum(table.num_rows for table in held) >= PART_ROWS:
            columns = {name: pa.concat_tables(held)[name].combine_chunks() for name in names}
            held = []
            yield run_part(**columns)
