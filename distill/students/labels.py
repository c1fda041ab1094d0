"""Labels to learn from: rows of finished runs or of Parquet files, the texts of their pairs, and trusted grades joined
to them."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.manifest import LearnedGold, LearnedLabels, SourceRows
from relabel.distill.students.spec import NODE_HEADS, GoldSource, LabelSource
from relabel.manifests.errors import ConfigError, InputError, ManifestError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import PairGrades, grades_by_pair, load_gold_by_row, load_qrels, mapped, own_input
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.labels import NODE_SCORES, Pair, PhiTable
from relabel.manifests.plan import PLAN_NAME, Plan, ShardPlan
from relabel.manifests.records import digest_of, plain, sha256_bytes
from relabel.manifests.rows import open_run_input, read_chunks
from relabel.manifests.run import MANIFEST_NAME, RunFolder, RunManifest, load_manifest, open_planned, read_labels
from relabel.manifests.schemas import KINDS, LABELS, table_of
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import RunStore, read_whole
from relabel.manifests.tables import PARQUET_SUFFIXES, Column, read_grades, reading

# ------------------------------------------------------------------------------
# Which columns of a label file are read, and whether they are of the types that they should be.


COLUMNS = ["row_id", "query_id", "doc_id", "status", "grade", "probs", "outside_mass", "answered_by"]
"""What is read of a label file, in addition to `NODE_COLUMNS`."""
NODE_COLUMNS = dict.fromkeys(NODE_HEADS, KINDS["int8"]) | {
    f"{name}_probs": KINDS["list<float32>"] for name in NODE_HEADS
}


def check_schema(schema: pa.Schema, path: str) -> None:
    """A label file has the columns of the label schema, or those of them that matter, in their types.

    Raises:
        InputError: it is another schema, or another version.
    """
    ours = (LABELS.metadata or {}).get(b"relabel.schema", b"").decode()
    theirs = (schema.metadata or {}).get(b"relabel.schema", b"").decode()
    if theirs and theirs.partition("-")[0] != ours.partition("-")[0]:
        raise InputError(f"{path}: holds {theirs}, labels are wanted ({ours}).")
    missing = [name for name in ("row_id", "query_id", "doc_id", "grade") if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: no label file: no column {', '.join(missing)}; it has {', '.join(schema.names)}. `relabel "
            "schema labels` shows them."
        )
    wanted = {"grade": pa.types.is_integer, "row_id": pa.types.is_integer, "probs": _is_float_list}
    for name, test in wanted.items():
        if name in schema.names and not test(schema.field(name).type):
            raise InputError(
                f"{path}: column `{name}` holds {schema.field(name).type}, label files hold {LABELS.field(name).type}."
            )


def file_columns(schema: pa.Schema) -> list[str]:
    """What to read of a label file: node columns only if they are of our types. A column that only has such a name, as
    a product's subject, is none.
    """
    wanted = [name for name in COLUMNS if name in schema.names]
    return wanted + [
        name for name, kind in NODE_COLUMNS.items() if name in schema.names and schema.field(name).type.equals(kind)
    ]


def _is_float_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(pa.types.is_null(kind) or (is_list and pa.types.is_floating(kind.value_type)))


# ------------------------------------------------------------------------------
# What labels say to a head: grades, and distributions where the teacher gave some.


SUM_TOLERANCE = 1e-3
"""How far a distribution's sum may lie from 1: probabilities are stored as float32."""


NO_GRADE = -1
"""Of a row without one, in arrays."""


class Said(NamedTuple):
    """What the labels say about one head, a place a row.

    Args:
        grades: int64 [N], -1 where there is none.
        probs: distributions; None where the teacher gave none.
    """

    grades: np.ndarray
    probs: Sequence[list[float] | None]


def checked_labels(
    values: Sequence[int | None], probs: Sequence[list[float] | None], grades: int | None, where: str, column: str
) -> Said:
    """Grades and distributions, each checked: one bad number would be learned without a word."""
    for row, (value, given) in enumerate(zip(values, probs, strict=True)):
        if value is not None and not 0 <= value < (grades or 11):
            raise InputError(f"{where}: label {row} has `{column}` {value}, off the scale 0 to {(grades or 11) - 1}.")
        if value is not None and given is not None and not _is_distribution(given, grades):
            raise InputError(
                f"{where}: label {row} has the distribution {given} for `{column}`; {grades} numbers that sum to 1 are "
                "wanted."
            )
    return Said(grade_array(values), probs)


def grade_array(values: Sequence[int | None]) -> np.ndarray:
    """Grades as int64 [N]."""
    return np.array([NO_GRADE if value is None else value for value in values], dtype=np.int64)


def _is_distribution(given: list[float], grades: int | None) -> bool:
    numbers = np.asarray(given, dtype=np.float64)
    return len(given) == grades and bool(numbers.min() >= 0 and abs(numbers.sum() - 1) <= SUM_TOLERANCE)  # NaN is not


# ------------------------------------------------------------------------------
# Texts of labelled rows, read from the pairs that were labelled.


READ_ROWS = 4096


def rejoin(columns: dict[str, list[Any]], dataset: Dataset, where: str) -> list[Pair]:
    """The pair that each label is of.

    Args:
        columns: `row_id`, `query_id` and `doc_id` of the labels.
        where: they are, for errors.
    Raises:
        InputError: the pairs have other rows than the labels name.
    """
    rows = np.array(columns["row_id"], dtype=np.int64)
    total = sum(file.rows for file in dataset.files)
    beyond = rows[(rows < 0) | (rows >= total)]
    if len(beyond):
        raise InputError(
            f"{where}: label of row {int(beyond[0])}, while the pairs have rows 0 to {total - 1}. Are they the right "
            "pairs?"
        )
    pairs = read_pairs(dataset, rows)
    for pair, *ids in zip(pairs, columns["query_id"], columns["doc_id"], strict=True):
        if (str(ids[0]), str(ids[1])) != (pair.query_id, pair.doc_id):
            raise InputError(
                f"{where}: the label of row {pair.row_id} is of query {ids[0]}, document {ids[1]}; that row of the "
                f"pairs is query {pair.query_id}, document {pair.doc_id}. Are they the right pairs, in the right "
                "order?"
            )
    return pairs


def read_pairs(dataset: Dataset, rows: np.ndarray) -> list[Pair]:
    """The rows with these ids, in their order; row groups without one are not read."""
    if not len(rows):
        return []
    distinct = np.unique(rows)
    sizes = [min(READ_ROWS, len(distinct) - start) for start in range(0, len(distinct), READ_ROWS)]
    is_range = len(distinct) == distinct[-1] - distinct[0] + 1
    shard = ShardPlan(len(distinct), int(distinct[0]) if is_range else None, None, sizes, 0, 0)
    chunks = read_chunks(dataset, shard, None if is_range else distinct, range(len(sizes)))
    found = {pair.row_id: pair for chunk in chunks for pair in chunk.pairs}
    return [found[row] for row in rows.tolist()]


# ------------------------------------------------------------------------------
# A finished run, opened to train on its labels: proven row by row and byte by byte (what `relabel verify`
# does), and within its quarantine limit.


class ProvenRun(NamedTuple):
    """A run that is finished and proves itself.

    Args:
        root: its output.
    """

    root: str
    store: RunStore
    plan: Plan
    folder: RunFolder
    manifest: RunManifest

    def about(self, *, weight: float, labels: int) -> LearnedLabels:
        """The run as a source of labels.

        Args:
            weight: of each label.
            labels: those that could be used.
        """
        facts, manifest = self.plan.facts, self.manifest
        return LearnedLabels(
            path=self.root,
            kind="run",
            name=self.plan.name,
            labeler=facts.labeler.name,
            model=facts.model,
            fingerprint=self.plan.fingerprint,
            manifest_sha256=sha256_bytes(self.store.read(MANIFEST_NAME)),
            rows=SourceRows(**vars(manifest.rows)),
            quarantined_by_status=manifest.quarantined_by_status,
            over_limit=manifest.over_limit,
            weight=weight,
            labels=labels,
        )


def open_proven_run(root: str, storage: Storage, *, allow_over_limit: bool, then: str) -> ProvenRun:
    """Open a run's output.

    Args:
        allow_over_limit: take it with more quarantined rows than its limit.
        then: the command that the run is opened for.
    Raises:
        InputError: there is no run.
        ManifestError: it is unfinished, over its limit or damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a finished run's output folder" + (
        ", or a Parquet file." if then == "distill" else "."
    )
    folder = open_planned(root, storage, InputError(no_run))
    store, plan = folder.store, folder.plan
    manifest = load_manifest(store)
    found = folder.snapshot()
    if manifest is None or manifest.receipts_sha256 != found.digest:
        state = (
            f"{found.tally.rows:,} of {plan.rows:,} rows are done"
            if manifest is None
            else "its manifest is older than its receipts"
        )
        raise ManifestError(f"{root}: not finished ({state}). Run the job again until it exits 0, then {then}.")
    rows, limit = manifest.rows, manifest.max_failed_fraction
    if manifest.over_limit and not allow_over_limit:
        raise ManifestError(
            f"{root}: over its limit ({rows.quarantined:,} of {rows.in_:,} rows quarantined, {limit:.0%} "
            "allowed). What is missing is seldom a fair sample: fix it with `relabel retry`, or set "
            "allow_over_limit: true to take what is there."
        )
    fates = folder.prove(found, check_bytes=True)
    if fates.by_kind() != rows:
        raise ManifestError(
            f"{root}: its manifest says {plain(rows)}, its files hold {plain(fates.by_kind())}. `relabel verify` says "
            "more."
        )
    return ProvenRun(root, store, plan, folder, manifest)


def refuse_twice(sources: Sequence[LearnedLabels], *, key: str) -> None:
    """
    Args:
        key: of the spec, that names the sources.
    Raises:
        InputError: two sources are the same bytes: all their rows would count twice, unnoticed.
    """
    seen: dict[str | None, str] = {}
    for source in sources:
        digest = source.manifest_sha256 or source.sha256
        if digest in seen:
            raise InputError(f"{key}: {seen[digest]} and {source.path} are the same labels. Name them once.")
        seen[digest] = source.path


# ------------------------------------------------------------------------------
# Labels to learn from: of finished runs, through their manifest alone, or of Parquet files with the label schema;
# texts rejoined by row.
#
# A run is read only if it is finished, proves itself row by row and byte by byte (what `relabel verify` does), and lies
# within its quarantine limit. A label's text is the row of the input that it names; query and document id must agree,
# else somebody changed one of the two.


@dataclass
class LabelTable:
    """The usable labels of one source, a list entry a row, with their texts.

    Args:
        grades: K of the relevance grade, where the source says; None for a file of bare grades.
        said: by head, what the rows say.
        outside_mass: None where the teacher gave no distribution.
        plan: of a run.
        phi: of a run whose labeler has a rule map.
        columns: of the pairs.
        about: what made the labels, for the manifest; None for rows that have gold grades alone.
        weights: what the source's weight is multiplied by, by row; empty for 1.
    """

    where: str
    grades: int | None
    pairs: list[Pair]
    said: dict[str, Said]
    outside_mass: Sequence[float | None]
    plan: Plan | None
    phi: PhiTable | None
    columns: Columns
    about: LearnedLabels | None
    weights: list[float] = field(default_factory=list)


def load_labels(source: LabelSource, storage: Storage, *, allow_over_limit: bool) -> LabelTable:
    """Read one source.

    Raises:
        InputError: there is nothing, it is not a label file, its texts do not fit, or it holds no usable label.
        ManifestError: a run is unfinished, over its limit, damaged, or its inputs changed.
        ConfigError: a label file without `pairs`.
    """
    is_run = not source.path.endswith(PARQUET_SUFFIXES) if is_url(source.path) else Path(source.path).is_dir()
    if is_run:
        return _load_run(source, storage, allow_over_limit=allow_over_limit or source.allow_over_limit)
    return _load_file(source, storage)


def _load_run(source: LabelSource, storage: Storage, *, allow_over_limit: bool) -> LabelTable:
    run = open_proven_run(source.path, storage, allow_over_limit=allow_over_limit, then="distill")
    root, plan, manifest = run.root, run.plan, run.manifest
    labeler = plan.facts.labeler
    tables = [read_labels(run.folder, file, [*COLUMNS, *NODE_COLUMNS]) for file in manifest.labels]
    dataset = open_run_input(root, plan, storage)
    held = pa.concat_tables(tables) if tables else LABELS.empty_table().select(COLUMNS[:-1])
    table = _usable(held, dataset, root, labeler.grades, source.weights)
    about = run.about(weight=source.weight, labels=len(table.pairs))
    return replace(table, plan=plan, phi=labeler.phi or None, about=about)


def _load_file(source: LabelSource, storage: Storage) -> LabelTable:
    path = source.path
    try:
        data = read_whole(path, storage)
    except FileNotFoundError as exc:
        raise InputError(
            f"{path}: no such file or folder (from {Path.cwd()}). `labels` wants outputs of runs, or Parquet files."
        ) from exc
    with reading(path):
        schema = pq.read_schema(io.BytesIO(data))
        check_schema(schema, path)
        held = table_of(data, file_columns(schema))
    if source.pairs is None:
        raise ConfigError(
            f"{path}: labels without their texts. Name them: {{path: {path}, pairs: {{path: pairs.parquet}}}}"
        )
    dataset = open_dataset(InputSpec(path=source.pairs.path, columns=source.pairs.columns), storage)
    statuses = Counter(held["status"].to_pylist()) if "status" in held.column_names else Counter({"ok": held.num_rows})
    table = _usable(held, dataset, path, None, source.weights)
    about = LearnedLabels(
        path=path,
        kind="file",
        sha256=sha256_bytes(data),
        rows=SourceRows(held.num_rows),
        rows_by_status=dict(sorted(statuses.items())),
        weight=source.weight,
        labels=len(table.pairs),
    )
    return replace(table, about=about)


def _usable(
    held: pa.Table, dataset: Dataset, where: str, grades: int | None, weights: Mapping[Any, float]
) -> LabelTable:
    """The labels that can be learned from, as of a file; what made them is not known yet.

    Args:
        weights: by `answered_by`.
    """
    if weights and "answered_by" not in held.column_names:
        raise InputError(f"{where}: `weights` are by the column answered_by, which the labels of a cascade alone have.")
    columns = {name: held[name].to_pylist() for name in held.column_names}
    size = held.num_rows
    statuses = columns.get("status") or ["ok"] * size
    usable = [row for row in range(size) if statuses[row] == "ok" and columns["grade"][row] is not None]
    if not usable:
        raise InputError(f"{where}: no row with status ok and a grade, of {size}. There is nothing to learn from.")
    columns = {name: [values[row] for row in usable] for name, values in columns.items()}
    probs = columns.get("probs") or [None] * len(usable)
    grades = grades or next((len(row) for row in probs if row is not None), None)
    said = {"relevance": checked_labels(columns["grade"], probs, grades, where, "grade")}
    nothing = [None] * len(usable)
    for name in NODE_HEADS:
        said[name] = checked_labels(
            columns.get(name, nothing), columns.get(f"{name}_probs", nothing), NODE_SCORES, where, name
        )
    pairs = rejoin(columns, dataset, where)
    outside = columns.get("outside_mass") or [None] * len(usable)
    by_source = [weights.get(by, 1.0) for by in columns["answered_by"]] if weights else []
    return LabelTable(where, grades, pairs, said, outside, None, None, dataset.columns, None, by_source)


# ------------------------------------------------------------------------------
# Trusted grades: joined to labels by row or by pair, and as rows of their own to learn from.


_KEYS = {
    "input.path": "path",
    "input.columns.gold": "grade",
    "input.columns": "columns",
    "--grade": "grade",
    "--duplicates mean": "duplicates: mean",
    "--duplicates first": "duplicates: first",
    "--by": "columns.query_id",
    "--doc": "columns.doc_id",
    "--map": "map",
}


@dataclass
class GoldGrades:
    """All grades of a gold source.

    Args:
        pairs: its rows with texts, where they are learned from; else empty.
        grades: of those rows, None where there is none.
        key: of the source in its spec.
        by_pair: by (query_id, doc_id), filled on first use.
    """

    source: GoldSource
    storage: Storage
    pairs: list[Pair]
    grades: list[int | None]
    columns: Columns | None
    about: LearnedGold
    key: str = "gold"
    by_pair: PairGrades | None = field(default=None)

    def of(self, where: str, plan: Plan | None, pairs: Sequence[Pair]) -> list[int | None]:
        """The grade of each label's pair; by row where the gold file is the run's own input, else by (query_id,
        doc_id).

        Raises:
            InputError: grades can't be joined, or a pair has several.
        """
        with in_words_of_the_spec(self.key):
            own = plan and own_input(plan, self.source.path, self.source.grade, self.storage)
            if own:
                grades = _grades(load_gold_by_row(*own, self.storage), self.source)
                self.about = replace(self.about, joined_by="row of the labels' own input")
                return list(grades.take(pa.array([pair.row_id for pair in pairs], pa.int64())).to_pylist())
            if self.by_pair is None:
                source = self.source
                qrels = load_qrels(
                    source.path,
                    self.storage,
                    grade=source.grade,
                    by=source.columns.query_id,
                    doc=source.columns.doc_id,
                    grade_map=source.map,
                )
                self.by_pair = grades_by_pair(qrels, source.duplicates, source.path)
            self.about = replace(self.about, joined_by="query_id and doc_id")
            return self.by_pair.grades_of([(pair.query_id, pair.doc_id) for pair in pairs])


def load_gold(source: GoldSource, storage: Storage, *, is_learned: bool, key: str = "gold") -> GoldGrades:
    """Open a gold source; texts are read only where they are learned from.

    Args:
        key: of the source in its spec, for errors.
    Raises:
        InputError: it can't be read, has no texts while it is learned from, or its grades are off.
    """
    about = LearnedGold(path=source.path, grade=source.grade, map=source.map)
    if not is_learned:
        return GoldGrades(source, storage, [], [], None, about, key)
    is_folder = not is_url(source.path) and Path(source.path).is_dir()
    if not is_folder and not source.path.endswith(PARQUET_SUFFIXES):
        raise InputError(
            f"{source.path}: gold that is learned from wants Parquet with the pairs' texts and the grades."
        )
    columns = source.columns.model_copy(update={"gold": source.grade, "context": None})
    with in_words_of_the_spec(key):
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage)
        column = load_gold_by_row([file.path for file in dataset.files], source.grade, storage)
        grades = _grades(column, source).to_pylist()
    pairs = read_pairs(dataset, np.arange(dataset.rows))
    about = replace(
        about,
        rows=len(grades),
        without_grade=grades.count(None),
        inputs_sha256=digest_of([list(file.identity) for file in dataset.files]),
    )
    return GoldGrades(source, storage, pairs, grades, dataset.columns, about, key)


@contextlib.contextmanager
def in_words_of_the_spec(spec_key: str) -> Iterator[None]:
    """Readers are those of `relabel evaluate` and of a job's input, and name their flags and keys."""
    try:
        yield
    except InputError as exc:
        text = str(exc).replace("nothing to label", "nothing to learn from")
        for flag, key in _KEYS.items():
            text = text.replace(flag, f"`{spec_key}.{key}`")
        raise InputError(text) from exc


def _grades(column: Column, source: GoldSource) -> pa.Int64Array:
    found = read_grades(column).readable(source.path, source.grade)
    return mapped(found, source.map, where=f"{source.path}, column `{source.grade}`", option="gold.map")
