"""Labels to be judged: of a run (its manifest or, if asked for, its receipts name the files) or of any file with a
label column.

Read a part at a time, and of a run only the columns that judging needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import pyarrow as pa

from manifests.errors import InputError, UsageError
from manifests.inputs.grade_columns import read_grades
from manifests.inputs.table_files import FILE_SUFFIXES, Column, as_ids, distinct, load_columns, require_column, rows_of
from manifests.judging.further_columns import label_columns
from manifests.judging.label_columns import LabelPart, file_distributions, file_samples, run_part
from manifests.judging.run_labels import RunLabels, open_run_labels
from manifests.records import LEFT_OUT
from manifests.runs.label_files import file_schema, own_columns
from manifests.runs.plans import PLAN_NAME, Plan
from manifests.runs.receipts import FileRef
from manifests.runs.run_folder import RunFolder
from manifests.schemas import LABELS
from manifests.storage.context import Storage
from manifests.storage.filesystems import is_url
from manifests.storage.run_store_ports import read_if_there
from manifests.storage.run_stores import open_run_store

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


def open_label_file(
    path: str,
    storage: Storage,
    *,
    label: str,
    by: str,
    doc: str,
    where: Mapping[str, str],
    wants_ids: bool,
    is_by_named: bool,
) -> LabelSet:
    """The labels of a Parquet, JSONL or CSV file; `probs` and `samples` are taken where they are as in a run's files.

    Args:
        label, by, doc: columns of label, query and document.
        where: only rows whose column equals this text.
        wants_ids: query and document ids must be there, since labels are joined by them.
        is_by_named: the user named `by`, so it must be there.
    Raises:
        InputError: unreadable, or a column is missing.
    """

    def choose(names: list[str]) -> list[str]:
        require_column(label, names, path=path, role="the label", option="--label")
        if wants_ids or is_by_named:
            require_column(by, names, path=path, role="the query id", option="--by")
        if wants_ids:
            require_column(doc, names, path=path, role="the document id", option="--doc")
        for name in where:
            require_column(name, names, path=path, role="--where", option="--where COLUMN=VALUE")
        return [*where, *(name for name in (label, by, doc, "probs", "samples") if name in names)]

    columns = load_columns(path, choose, storage)
    origin = LabelOrigin(column=label, where=dict(where) or None)
    found = LabelSet(path, "file", None, None, origin, None, lambda: iter(()))
    is_kept = np.ones(len(columns[label]), dtype=bool)
    seen: dict[str, list[str]] = {}
    for name, value in where.items():
        values, code_N = distinct(columns[name])
        texts = [str(one) for one in values]
        seen[name] = sorted(set(texts))[:10]
        is_kept &= np.array([text == value for text in texts], dtype=bool)[code_N]
    if where and not is_kept.any():
        raise InputError(f"{path}: no row with {where}. There are: {seen}.")
    kept = np.flatnonzero(is_kept)
    if len(kept) < len(is_kept):
        columns = {name: rows_of(column, kept) for name, column in columns.items()}
    part = _file_part(path, columns, kept, label=label, by=by, doc=doc, notes=found.notes)
    found.parts = lambda: iter((part,))
    return found


def _file_part(
    path: str, columns: dict[str, Column], kept: np.ndarray, *, label: str, by: str, doc: str, notes: list[str]
) -> LabelPart:
    grades = read_grades(columns[label])
    if grades.unreadable is not None:
        examples = ", ".join(map(repr, grades.unreadable.texts[:5]))
        notes.append(f"{grades.unreadable.rows:,} values of `{label}` are no whole number and are left out: {examples}")
    if grades.odd is not None:
        examples = ", ".join(map(repr, grades.odd.texts[:5]))
        notes.append(f"{grades.odd.rows:,} labels are written oddly and read as the number that they are: {examples}")
    query_ids, doc_ids = (
        as_ids(columns[name], path=path, name=name) if name in columns else None for name in (by, doc)
    )
    return LabelPart(
        pa.array(kept),
        grades.values,
        query_ids,
        doc_ids,
        file_distributions(columns["probs"], path) if "probs" in columns else None,
        file_samples(columns["samples"], path) if "samples" in columns else None,
    )


def is_run(path: str, storage: Storage) -> bool:
    """Whether a path names a folder, as runs are; by URL, a folder is what holds a plan."""
    if not is_url(path):
        return Path(path).is_dir()
    if PurePosixPath(path).suffix.lower() in FILE_SUFFIXES:
        return False
    return read_if_there(open_run_store(path, storage), PLAN_NAME) is not None


def open_labels(
    path: str,
    storage: Storage,
    *,
    allow_partial: bool,
    label: str,
    by: str,
    doc: str,
    where: Mapping[str, str],
    wants_ids: bool,
    is_by_named: bool,
) -> LabelSet:
    """A run's output folder, or a label file.

    Raises:
        UsageError: `--where` for a run.
        InputError, ManifestError: see `open_run` and `open_label_file`.
    """
    if is_run(path, storage):
        if where:
            raise UsageError(f"--where: {path} is a run, and runs are judged whole. It picks rows of label files.")
        return open_run(path, storage, allow_partial=allow_partial)
    return open_label_file(
        path, storage, label=label, by=by, doc=doc, where=where, wants_ids=wants_ids, is_by_named=is_by_named
    )
