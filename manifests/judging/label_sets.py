"""Labels to be judged: of a run (its manifest or, if asked for, its receipts name the files) or of any file with a
label column.

Read a part at a time, and of a run only the columns that judging needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from manifests.errors import InputError, ManifestError, UsageError
from manifests.inputs.dataset import changed_files, open_dataset, open_parquet
from manifests.inputs.input_faults import reading
from manifests.inputs.input_files import list_files
from manifests.inputs.table_files import FILE_SUFFIXES, as_ids, load_columns, read_grades, require_column
from manifests.judging.qrels import GradeMap, mapped
from manifests.runs.plans import PLAN_NAME, Plan, load_plan
from manifests.runs.receipts import FileRef
from manifests.runs.run_folder import RunFolder, load_manifest
from manifests.runs.run_inputs import prove_run_input
from manifests.schemas import LABELS
from manifests.specs import Columns, InputSpec
from manifests.storage.context import Storage
from manifests.storage.filesystems import is_url
from manifests.storage.run_stores import open_run_store

RUN_COLUMNS = ["row_id", "query_id", "doc_id", "grade", "probs", "samples"]
_ALL_OF_THEM = "no labels but those of the whole run are a fair sample"


@dataclass
class LabelPart:
    """Some labels, a list entry each. `grades` None: no label. `row_ids` is the row of the run's
    input, or of the file.
    """

    row_ids: list[int]
    query_ids: list[str] | None
    doc_ids: list[str] | None
    grades: list[int | None]
    probs: list[list[float] | None] | None = None
    samples: list[list[int | None] | None] | None = None


@dataclass
class LabelSet:
    """One source of labels.

    Args:
        kind: a teacher's run, a student's scores (which lie like a run's labels), or a file.
        grades: K, where the source says; None for a file.
        num_quarantined: rows of a run that have no label; None for a file.
        about: what made the labels.
        plan: of a run.
        parts: reads them; call it once for each pass.
        notes: remarks for a reader of the report; reading may add to them.
    """

    where: str
    kind: Literal["run", "student", "file"]
    grades: int | None
    num_quarantined: int | None
    about: dict[str, Any]
    plan: Plan | None
    parts: Callable[[], Iterator[LabelPart]]
    notes: list[str] = field(default_factory=list)


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
        return int(self.plan.parts["labeler"]["grades"])


def open_run_labels(root: str, storage: Storage, *, allow_partial: bool) -> RunLabels:
    """The files of an output folder, none of them read yet.

    Raises:
        InputError: the folder holds no run.
        ManifestError: the run is not finished, or over its quarantine limit, and `allow_partial` is off; or a file is
            damaged.
    """
    store = open_run_store(root, storage)
    plan = load_plan(store)
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
    if manifest is None or manifest["receipts_sha256"] != found.digest:
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
        labels, quarantine = ([FileRef(**file) for file in manifest[kind]] for kind in ("labels", "quarantine"))
    if manifest is not None and manifest["over_limit"]:
        share = (
            f"{num_quarantined:,} of {manifest['rows']['in']:,} rows are in quarantine, limit "
            f"{manifest['max_failed_fraction']:.0%}"
        )
        if not allow_partial:
            raise ManifestError(
                f"{root}: over its quarantine limit ({share}); {_ALL_OF_THEM}. "
                "Mend it with `relabel retry`, or judge what is there with --allow-partial."
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
    plan = run.plan
    about = {
        "name": plan.name,
        "labeler": plan.parts["labeler"]["name"],
        "model": plan.parts["model"],
        "fingerprint": plan.fingerprint,
    }
    kind: Literal["run", "student"] = "student" if plan.parts.get("kind") == "student" else "run"
    return LabelSet(
        run.root,
        kind,
        run.grades,
        run.num_quarantined,
        about,
        plan,
        lambda: _run_parts(run.folder, run.labels),
        run.notes,
    )


def _run_parts(folder: RunFolder, files: list[FileRef]) -> Iterator[LabelPart]:
    for file in files:
        held = folder.table(file, LABELS, RUN_COLUMNS).to_pydict()
        samples = None
        if any(held["samples"]):
            samples = [None if row is None else [sample["grade"] for sample in row] for row in held["samples"]]
        yield LabelPart(held["row_id"], held["query_id"], held["doc_id"], held["grade"], held["probs"], samples)


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
    """The labels of a Parquet, JSONL or CSV file; `probs` and `samples` are taken where they stand as in a run's files.

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
    found = LabelSet(
        path, "file", None, None, {"column": label, **({"where": dict(where)} if where else {})}, None, lambda: iter(())
    )
    kept = list(range(len(columns[label])))
    for name, value in where.items():
        values = columns[name]
        kept = [row for row in kept if str(values[row]) == value]
    if where and not kept:
        seen = {name: sorted({str(value) for value in columns[name]})[:10] for name in where}
        raise InputError(f"{path}: no row with {where}. There are: {seen}.")
    part = _file_part(path, columns, kept, label=label, by=by, doc=doc, notes=found.notes)
    found.parts = lambda: iter((part,))
    return found


def _file_part(
    path: str, columns: dict[str, list[Any]], kept: list[int], *, label: str, by: str, doc: str, notes: list[str]
) -> LabelPart:
    def column(name: str) -> list[Any] | None:
        return [columns[name][row] for row in kept] if name in columns else None

    grades = read_grades([columns[label][row] for row in kept])
    if grades.unreadable:
        examples = ", ".join(repr(text) for text in sorted(set(grades.unreadable.values()))[:5])
        notes.append(f"{len(grades.unreadable):,} values of `{label}` are no whole number and are left out: {examples}")
    if grades.odd:
        examples = ", ".join(repr(text) for text in sorted(set(grades.odd))[:5])
        notes.append(f"{len(grades.odd):,} labels are written oddly and read as the number that they are: {examples}")
    query_ids, doc_ids, probs, samples = column(by), column(doc), column("probs"), column("samples")
    return LabelPart(
        kept,
        None if query_ids is None else as_ids(query_ids, path=path, column=by),
        None if doc_ids is None else as_ids(doc_ids, path=path, column=doc),
        grades.values,
        None if probs is None else [_as_probs(row, path) for row in probs],
        None if samples is None else [_as_samples(row, path) for row in samples],
    )


def _as_probs(row: Any, path: str) -> list[float] | None:
    if row is None or (isinstance(row, list) and row and all(isinstance(value, int | float) for value in row)):
        return row
    raise InputError(f"{path}: column `probs` holds {str(row)[:60]!r}; a list of probabilities a row is wanted.")


def _as_samples(row: Any, path: str) -> list[int | None] | None:
    if row is None:
        return None
    if isinstance(row, list):
        values = [sample.get("grade") if isinstance(sample, dict) else sample for sample in row]
        if all(value is None or type(value) is int for value in values):
            return values
    raise InputError(f"{path}: column `samples` holds {str(row)[:60]!r}; a list of grades a row is wanted.")


def map_labels(part: LabelPart, label_map: GradeMap | None, *, where: str) -> LabelPart:
    """Labels, samples and distributions on another scale: the mass of grades that fall together is added.

    Raises:
        InputError: a label that the map does not name.
    """
    if label_map is None:
        return part
    option = "--map-labels"
    grades = mapped(part.grades, label_map, where=where, option=option)
    samples = part.samples and [
        None if row is None else mapped(row, label_map, where=where, option=option) for row in part.samples
    ]
    probs = part.probs and [None if row is None else _map_probs(row, label_map, where) for row in part.probs]
    return LabelPart(part.row_ids, part.query_ids, part.doc_ids, grades, probs, samples)


def _map_probs(row: list[float], label_map: GradeMap, where: str) -> list[float]:
    mapped(range(len(row)), label_map, where=f"{where}, distributions", option="--map-labels")
    merged = [0.0] * (max(label_map.values()) + 1)
    for grade, mass in enumerate(row):
        merged[label_map[grade]] += mass
    return merged


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
    columns = Columns(**plan.parts["columns"])
    try:
        spec = InputSpec(path=(path,), columns=columns.model_copy(update={"gold": None}))
        found = open_dataset(spec, storage, reads_context=False) if list_files(path, storage) else None
    except InputError:
        if not is_url(path) and Path(path).is_dir():
            # grades lie in files: a folder can be nothing else, so what ails it is told
            raise
        return None
    if found is None or changed_files(plan.files, found.files):
        return None
    prove_run_input(root, plan, found)
    return [file.path for file in found.files], grade or columns.gold or "grade"


def load_gold_by_row(files: list[str], column: str, storage: Storage) -> list[Any]:
    """A column of a run's own input, in the order of row ids.

    Raises:
        InputError: it is not there.
    """
    values: list[Any] = []
    for path in files:
        with open_parquet(path, storage) as parquet, reading(path):
            require_column(column, parquet.schema_arrow.names, path=path, role="the gold grade", option="--grade")
            values += parquet.read(columns=[column])[column].to_pylist()
    return values


def is_run(path: str, storage: Storage) -> bool:
    """Whether a path names a folder, as runs are; by URL, a folder is what holds a plan."""
    if not is_url(path):
        return Path(path).is_dir()
    if PurePosixPath(path).suffix.lower() in FILE_SUFFIXES:
        return False
    try:
        open_run_store(path, storage).read(PLAN_NAME)
    except FileNotFoundError:
        return False
    return True


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
