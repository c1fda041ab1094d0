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

from manifests.errors import InputError, ManifestError, UsageError
from manifests.inputs.dataset import changed_files, open_dataset, open_parquet
from manifests.inputs.input_faults import reading
from manifests.inputs.input_files import list_files
from manifests.inputs.table_files import (
    FILE_SUFFIXES,
    Column,
    as_ids,
    distinct,
    load_columns,
    read_grades,
    read_parquet,
    require_column,
    rows_of,
)
from manifests.judging.further_columns import GoldColumn, label_columns
from manifests.judging.label_columns import LabelPart, file_distributions, file_samples, run_part
from manifests.records import LEFT_OUT
from manifests.runs.label_files import file_schema, own_columns
from manifests.runs.plans import PLAN_NAME, Plan, plan_to_read
from manifests.runs.receipts import FileRef
from manifests.runs.run_folder import RunFolder
from manifests.runs.run_inputs import prove_run_input
from manifests.runs.run_manifest import load_manifest
from manifests.schemas import LABELS
from manifests.specs import InputSpec
from manifests.storage.context import Storage
from manifests.storage.filesystems import is_url
from manifests.storage.run_store_ports import read_if_there
from manifests.storage.run_stores import open_run_store

RUN_COLUMNS = ["row_id", "query_id", "doc_id", "grade", "probs", "samples"]
PART_ROWS = 1 << 19
"""Rows of a run that are read at a time, at least: each part is looked up in all qrels."""
_ALL_OF_THEM = "no labels but those of the whole run are a fair sample"


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


@dataclass(frozen=True)
class RunLabels:
    """A run's output, ready to be read.

    Args:
        labels, quarantine: its files: of the manifest, or of the receipts where it is not finished.
        num_quarantined: rows without a label.
        notes: remarks for a reader of a report.
    """

    root: str
    plan: Plan
    folder: RunFolder
    labels: list[FileRef]
    quarantine: list[FileRef]
    num_quarantined: int
    notes: list[str]

    @property
    def grades(self) -> int:
        """K."""
        return self.plan.facts.labeler.grades


def open_run_labels(root: str, storage: Storage, *, allow_partial: bool) -> RunLabels:
    """The files of an output folder, none of them read yet.

    Raises:
        InputError: the folder holds no run.
        ManifestError: the run is not finished, or over its quarantine limit, and `allow_partial` is off; or a file is
            damaged.
    """
    store = open_run_store(root, storage)
    plan = plan_to_read(store)
    if plan is None:
        raise InputError(
            f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a run's output folder, or a label file."
        )
    folder = RunFolder(store, plan)
    manifest = load_manifest(store)
    found = folder.snapshot()
    num_quarantined = found.tally.num_quarantined
    notes = []
    labels, quarantine = found.labels, found.quarantine
    if manifest is None or manifest.receipts_sha256 != found.digest:
        state = f"{found.tally.rows:,} of {plan.rows:,} rows are done"
        if manifest is not None:
            state += ", and its manifest is older than its receipts"
        if not allow_partial:
            raise ManifestError(
                f"{root}: not finished, {state}; {_ALL_OF_THEM}. "
                "Run the job again to finish it, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is not finished: {state}")
    else:
        labels, quarantine = manifest.labels, manifest.quarantine
    if manifest is not None and manifest.over_limit:
        share = (
            f"{num_quarantined:,} of {manifest.rows.in_:,} rows are in quarantine, limit "
            f"{manifest.max_failed_fraction:.0%}"
        )
        if not allow_partial:
            raise ManifestError(
                f"{root}: over its quarantine limit ({share}); {_ALL_OF_THEM}. "
                "Complete it with `relabel retry`, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is over its quarantine limit: {share}")
    return RunLabels(root, plan, folder, labels, quarantine, num_quarantined, notes)


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


def own_input(root: str, plan: Plan, path: str, grade: str | None, storage: Storage) -> tuple[list[str], str] | None:
    """The files of a run's own input in row order and the name of its gold column, if `path` is that input; None if it
    is not.

    They are the same if their sizes and footers are those that were planned.

    Args:
        root: the run's output.
    Raises:
        InputError, ManifestError: they were written over since the run read them (`prove_run_input`), or it is a folder
            that can't be read.
    """
    columns = plan.facts.columns
    try:
        spec = InputSpec(path=(path,), columns=columns.model_copy(update={"gold": None}))
        found = open_dataset(spec, storage) if list_files(path, storage) else None
    except InputError:
        if not is_url(path) and Path(path).is_dir():
            # grades lie in files: a folder can be nothing else, so its fault is reported
            raise
        return None
    if found is None or changed_files(plan.files, found.files):
        return None
    prove_run_input(root, plan, found)
    return [file.path for file in found.files], grade or columns.gold or "grade"


def load_gold_by_row(files: list[str], column: str, storage: Storage) -> Column:
    """A column of a run's own input, in the order of row ids.

    Raises:
        InputError: it is not there.
    """
    parts: list[pa.ChunkedArray] = []
    for path in files:
        with open_parquet(path, storage) as parquet, reading(path):
            require_column(column, parquet.schema_arrow.names, path=path, role="the gold grade", option="--grade")
            parts.append(read_parquet(parquet, column))
    if len({part.type for part in parts}) > 1:
        return [value for part in parts for value in part.to_pylist()]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def column_names(path: str, storage: Storage) -> list[str]:
    """What the columns of a Parquet file are called."""
    with open_parquet(path, storage) as parquet, reading(path):
        return list(parquet.schema_arrow.names)


def further_of_input(
    files: list[str], further: Sequence[GoldColumn], storage: Storage, *, where: str
) -> dict[str, pa.Array]:
    """Further columns of a run's own input, in the order of row ids, where it has them.

    Args:
        where: what to call the input in an error about a row.
    Raises:
        InputError: some of the files have one and others not, or a row holds something else.
    """
    names = {path: column_names(path, storage) for path in files} if further else {}
    found = {}
    for one in further:
        lacking = [path for path in files if one.name not in names[path]]
        if lacking and len(lacking) < len(files):
            raise InputError(
                f"{lacking[0]}: no column `{one.name}`, which other files of the input have. Give it to all of them, "
                "or to none."
            )
        if not lacking:
            found[one.name] = one.read(load_gold_by_row(files, one.name, storage), where)
    return found


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
