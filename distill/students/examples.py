"""What a student learns from: labels of finished runs or of Parquet files, the texts of their pairs and trusted grades
joined to them, as arrays of targets and weights by head; and the train, dev and test split by a hash of the query."""

import base64
import contextlib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relabel.distill.students.spec import (
    HEADS,
    KINDS,
    NODE_HEADS,
    DataFacts,
    DistillSpec,
    GoldSource,
    LabelSource,
    LearnedGold,
    LearnedLabels,
    LossSection,
    SourceRows,
    SplitFacts,
    SplitSection,
    SplitSide,
)
from relabel.manifests.errors import ConfigError, InputError, ManifestError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.forms import TABLE_SUFFIXES
from relabel.manifests.gold import (
    DEFAULT_GRADE,
    PairGrades,
    check_scale,
    column_names,
    columns_of_owner,
    grades_by_pair,
    load_gold_by_row,
    load_qrels,
    mapped,
    own_input,
)
from relabel.manifests.inputs import Dataset, list_input, open_dataset
from relabel.manifests.label_sets import open_labels
from relabel.manifests.labels import KINDS as COLUMN_KINDS
from relabel.manifests.labels import LABELS, Pair, table_of, texts_of
from relabel.manifests.phi import DEFAULT_PHI, NODE_SCORES, PhiTable, check_phi, default_phi, unreached_grades
from relabel.manifests.plan import PLAN_NAME, Plan, ShardPlan
from relabel.manifests.records import digest_of, plain, sha256_bytes
from relabel.manifests.rows import open_run_input, read_chunks
from relabel.manifests.run_folder import RunFolder, open_planned
from relabel.manifests.run_labels import read_labels
from relabel.manifests.run_manifest import MANIFEST_NAME, RunManifest, load_manifest
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import read_whole
from relabel.manifests.tables import PARQUET_SUFFIXES, Column, as_ids, document_line, read_grades, reading

# N rows, K grades

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
    shard = ShardPlan(
        rows=len(distinct),
        first_row=int(distinct[0]) if is_range else None,
        row_ids=None,
        chunks=sizes,
        estimated_tokens=0,
        read_bytes=0,
    )
    by_row: dict[int, Pair] = {}
    for chunk in read_chunks(dataset, shard, None if is_range else distinct, range(len(sizes))):
        by_row.update((pair.row_id, pair) for pair in chunk.pairs)
    return [by_row[row] for row in rows.tolist()]


# ------------------------------------------------------------------------------
# A finished run, opened to train on its labels: proven row by row and byte by byte (what `relabel verify` does), and
# within its quarantine limit.


class ProvenRun(NamedTuple):
    """A run that is finished and proves itself.

    Args:
        root: its output.
    """

    root: str
    plan: Plan
    folder: RunFolder
    manifest: RunManifest

    def about(self, *, weight: float, labels: int) -> LearnedLabels:
        """The run as a source of labels.

        Args:
            weight: of each label.
            labels: those that could be used.
        """
        facts = self.plan.facts
        manifest = self.manifest
        return LearnedLabels(
            path=self.root,
            kind="run",
            name=self.plan.name,
            labeler=facts.labeler.name,
            model=facts.model,
            fingerprint=self.plan.fingerprint,
            manifest_sha256=sha256_bytes(self.folder.store.read(MANIFEST_NAME)),
            rows=SourceRows(**vars(manifest.rows)),
            quarantined_by_status=manifest.quarantined_by_status,
            over_limit=manifest.over_limit,
            weight=weight,
            labels=labels,
        )


def open_proven_run(root: str, storage: Storage, *, allow_over_limit: bool) -> ProvenRun:
    """Open a run's output.

    Args:
        allow_over_limit: take it with more quarantined rows than its limit.
    Raises:
        InputError: there is no run.
        ManifestError: it is unfinished, over its limit or damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a finished run's output folder."
    folder = open_planned(root, storage, InputError(no_run))
    manifest = load_manifest(folder.store)
    receipts = folder.snapshot()
    if manifest is None or manifest.receipts_sha256 != receipts.digest:
        raise ManifestError(
            f"{root}: not finished ({receipts.tally.rows:,} of {folder.plan.rows:,} rows are done). Run the job again "
            "until it exits 0."
        )
    rows = manifest.rows
    if manifest.over_limit and not allow_over_limit:
        raise ManifestError(
            f"{root}: over its limit ({rows.quarantined:,} of {rows.in_:,} rows quarantined, "
            f"{manifest.max_failed_fraction:.0%} allowed). What is missing is seldom a fair sample: fix it with "
            "`relabel retry`, or set allow_over_limit: true to take what is there."
        )
    proven = folder.prove(receipts, check_bytes=True).by_kind()
    if proven != rows:
        raise ManifestError(
            f"{root}: its manifest says {plain(rows)}, its files hold {plain(proven)}. `relabel verify` says more."
        )
    return ProvenRun(root, folder.plan, folder, manifest)


def refuse_twice(sources: Sequence[LearnedLabels], *, key: str) -> None:
    """
    Args:
        key: of the spec, that names the sources.
    Raises:
        InputError: two sources are the same bytes: all their rows would count twice, unnoticed.
    """
    digests = [source.manifest_sha256 or source.sha256 for source in sources]
    for source, digest in zip(sources, digests, strict=True):
        first = sources[digests.index(digest)]
        if first is not source:
            raise InputError(f"{key}: {first.path} and {source.path} are the same labels. Name them once.")


# ------------------------------------------------------------------------------
# Labels to learn from: of finished runs, through their manifest alone, or of files. A label's text is the row of the
# input that it names by `row_id`; query and document id must agree, else somebody changed one of the two. Labels of
# files without `row_id` are joined by these ids.


NO_GRADE = -1
"""Of a row without one, in arrays."""
SUM_TOLERANCE = 1e-3
"""How far a distribution's sum may lie from 1: probabilities are stored as float32."""
COLUMNS = ["row_id", "query_id", "doc_id", "status", "grade", "probs", "outside_mass", "answered_by"]
"""What is read of a label file, in addition to `NODE_COLUMNS`."""
NODE_COLUMNS = dict.fromkeys(NODE_HEADS, COLUMN_KINDS["int8"]) | {
    f"{name}_probs": COLUMN_KINDS["list<float32>"] for name in NODE_HEADS
}


class HeadLabels(NamedTuple):
    """The labels of one head.

    Args:
        grades: int64 [N], -1 where there is none.
        probs: float64 [N, K], NaN where the teacher gave no distribution; None where it never did.
    """

    grades: np.ndarray
    probs: np.ndarray | None = None


@dataclass
class LabelTable:
    """The usable labels of one source, with their texts.

    Args:
        where: they are, for messages.
        heads: labels by head.
        outside_mass: float64 [N], NaN where the teacher gave no distribution.
        weight: float32 [N].
        columns: of the pairs.
        grades: K of the relevance grade, where the source has it; None for a file of bare grades.
        plan: of a run.
        phi: of a run whose labeler has a rule map.
        about: what made the labels, for the manifest; None for rows that have gold grades alone.
        notes: what a reader should know of them.
    """

    where: str
    pairs: list[Pair]
    heads: dict[str, HeadLabels]
    outside_mass: np.ndarray
    weight: np.ndarray
    columns: Columns
    grades: int | None = None
    plan: Plan | None = None
    phi: PhiTable | None = None
    about: LearnedLabels | None = None
    notes: Sequence[str] = ()


def load_labels(source: LabelSource, storage: Storage, *, allow_over_limit: bool, key: str = "labels") -> LabelTable:
    """Read one source.

    Raises:
        InputError: there is nothing, it is not a label file, its texts do not fit, or it holds no usable label.
        ManifestError: a run is unfinished, over its limit, damaged, or its inputs changed.
        ConfigError: a label file without `pairs`.
    """
    if not _is_run(source.path):
        return _load_file(source, storage, key)
    run = open_proven_run(source.path, storage, allow_over_limit=allow_over_limit or source.allow_over_limit)
    tables = [read_labels(run.folder, file, [*COLUMNS, *NODE_COLUMNS]) for file in run.manifest.labels]
    labels = pa.concat_tables(tables) if tables else LABELS.empty_table().select(COLUMNS[:-1])
    return _usable(
        labels,
        open_run_input(run.root, run.plan, storage),
        source,
        run.about(weight=source.weight, labels=0),
        run.plan,
    )


def _is_run(path: str) -> bool:
    if is_url(path):
        return not path.endswith(TABLE_SUFFIXES)
    return Path(path).is_dir()


def _load_file(source: LabelSource, storage: Storage, key: str) -> LabelTable:
    path = source.path
    try:
        data = read_whole(path, storage)
    except FileNotFoundError as exc:
        raise InputError(
            f"{path}: no such file or folder (from {Path.cwd()}). `labels` wants outputs of runs, or label files."
        ) from exc
    schema = None
    if path.endswith(PARQUET_SUFFIXES):
        with reading(path):
            schema = pq.read_schema(pa.BufferReader(data))
        _check_not_scores(schema, path)
    if source.pairs is None:
        has_texts = schema is not None and "query" in schema.names
        pairs = path if has_texts else "pairs.parquet"
        raise ConfigError(f"{path}: labels without their texts. Name them: {{path: {path}, pairs: {{path: {pairs}}}}}")
    with in_words_of_the_spec(f"{key}.pairs"):
        dataset = open_dataset(InputSpec(path=source.pairs.path, columns=source.pairs.columns), storage)
    notes: Sequence[str] = ()
    if schema is not None and "row_id" in schema.names:
        with reading(path):
            labels = table_of(data, label_columns(schema, path))
    else:
        labels, notes = _labels_by_ids(path, dataset, storage)
    statuses = Counter({"ok": labels.num_rows})
    if "status" in labels.column_names:
        statuses = Counter(labels["status"].to_pylist())
    about = LearnedLabels(
        path=path,
        kind="file",
        sha256=sha256_bytes(data),
        rows=SourceRows(labels.num_rows),
        rows_by_status=dict(sorted(statuses.items())),
        weight=source.weight,
        labels=0,
    )
    return replace(_usable(labels, dataset, source, about), notes=notes)


def _check_not_scores(schema: pa.Schema, path: str) -> None:
    """Refuse a file of scores at once, with all that it lacks.

    Raises:
        InputError: it has no grades, and a column of fractions.
    """
    scores = [field.name for field in schema if pa.types.is_floating(field.type)]
    if "grade" in schema.names or not scores:
        return
    missing = [name for name in ("query_id", "doc_id", "grade") if name not in schema.names]
    score = f'pl.col("{scores[0]}")'
    line = f"grade=({score} > LOW).cast(int) + ({score} > HIGH).cast(int)"
    for name, text in (("query_id", "query"), ("doc_id", "doc" if "doc" in schema.names else "document")):
        if name in missing:
            line += f', {name}=pl.col("{text}").hash().cast(str)'
    raise InputError(
        f"{path}: no column {', '.join(missing)}; it has {', '.join(schema.names)}. A student learns grades, and "
        f"`{scores[0]}` holds scores, which can't be learned as they are. Make grades of them, cut where you choose, "
        f"for instance by Polars: frame.with_columns({line})"
    )


def _labels_by_ids(path: str, dataset: Dataset, storage: Storage) -> tuple[pa.Table, Sequence[str]]:
    """Grades, and distributions where there are any, of a file without `row_id`, read as `relabel evaluate` reads it;
    and what to know of them.

    Raises:
        InputError: it can't be read, lacks a column, or the pairs have a labelled one never or several times.
    """
    labels = open_labels(path, storage, has_options=False)
    (batch,) = labels.parts()
    query_column, doc_column = dataset.id_columns
    files = [file.path for file in dataset.files]
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, pair in enumerate(zip(_ids(files, query_column, storage), _ids(files, doc_column, storage), strict=True)):
        rows_of.setdefault(pair, []).append(row)
    columns = {name: batch[name] for name in ("grade", "probs") if name in batch.schema.names}
    columns |= {name: texts_of(batch[name]) for name in ("query_id", "doc_id")}
    columns["row_id"] = []
    repeated: list[list[int]] = []
    for query, doc in zip(columns["query_id"], columns["doc_id"], strict=True):
        rows = rows_of.get((query, doc), [])
        if not rows:
            raise InputError(
                f"{path}: a label is of query {query}, document {doc}, which the pairs ({files[0]}) do not have. Are "
                "they the right pairs?"
            )
        if len(rows) > 1:
            repeated.append(rows)
        columns["row_id"].append(rows[0])
    _check_same_texts(repeated, path, dataset)
    return pa.table(columns), labels.notes


def _check_same_texts(repeated: Sequence[Sequence[int]], path: str, dataset: Dataset) -> None:
    """Pairs that occur several times, as in the inputs of two days, have to be the same texts.

    Args:
        repeated: the rows of each.
    Raises:
        InputError: some are not, so that it is not known which was labelled.
    """
    pairs = read_pairs(dataset, np.array(list(itertools.chain.from_iterable(repeated)), dtype=np.int64))
    by_row = {pair.row_id: pair for pair in pairs}
    for rows in repeated:
        first = by_row[rows[0]]
        for row in rows[1:]:
            if (by_row[row].query, by_row[row].document) != (first.query, first.document):
                raise InputError(
                    f"{path}: a label is of query {first.query_id}, document {first.doc_id}, which are rows {rows[0]} "
                    f"and {row} of the pairs ({dataset.files[0].path}), with other texts. Leave one out, or give "
                    "labels as Parquet with `row_id`, the row of the pairs from 0."
                )


def _ids(files: list[str], column: str, storage: Storage) -> list[str]:
    """A column of ids of the pairs, in the order of their rows."""
    ids = load_gold_by_row(files, column, storage, role="an id of the pairs", option="pairs.columns")
    return texts_of(as_ids(ids, path=files[0], name=column))


def label_columns(schema: pa.Schema, path: str) -> list[str]:
    """What to read of a label file: node columns only if they are of our types. A column that only has such a name, as
    a product's subject, is none.

    Raises:
        InputError: it is another schema, or another version.
    """
    ours = (LABELS.metadata or {}).get(b"relabel.schema", b"").decode()
    theirs = (schema.metadata or {}).get(b"relabel.schema", b"").decode()
    if theirs and theirs.partition("-")[0] != ours.partition("-")[0]:
        raise InputError(f"{path}: holds {theirs}, labels are wanted ({ours}).")
    missing = [name for name in ("query_id", "doc_id", "grade") if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: no label file: no column {', '.join(missing)}; it has {', '.join(schema.names)}. `relabel "
            "schema labels` shows them."
        )
    tests = {"grade": pa.types.is_integer, "row_id": pa.types.is_integer, "probs": _is_float_list}
    for name, is_right in tests.items():
        if name in schema.names and not is_right(schema.field(name).type):
            raise InputError(
                f"{path}: column `{name}` holds {schema.field(name).type}, label files hold {LABELS.field(name).type}."
            )
    columns = [name for name in COLUMNS if name in schema.names]
    for name, kind in NODE_COLUMNS.items():
        if name in schema.names and schema.field(name).type == kind:
            columns.append(name)
    return columns


def _is_float_list(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_floating(kind.value_type))


def _usable(
    labels: pa.Table, dataset: Dataset, source: LabelSource, about: LearnedLabels, plan: Plan | None = None
) -> LabelTable:
    """The labels of a source that can be learned from.

    Args:
        about: the source; how many labels can be used is not known yet.
        plan: of a run.
    """
    where = source.path
    size = labels.num_rows
    grades = plan.facts.labeler.grades if plan else None
    phi = plan.facts.labeler.phi or None if plan else None
    if source.weights and "answered_by" not in labels.column_names:
        raise InputError(f"{where}: `weights` are by the column answered_by, which the labels of a cascade alone have.")
    if "status" in labels.column_names:
        labels = labels.filter(pc.equal(labels["status"], "ok"))
    labels = labels.filter(pc.is_valid(labels["grade"]))
    if not labels.num_rows:
        raise InputError(f"{where}: no row with status ok and a grade, of {size}. There is nothing to learn from.")
    absent = pa.nulls(labels.num_rows)
    columns = {name: labels[name] for name in labels.column_names}
    probs = columns.get("probs", absent)
    if grades is None and probs.null_count < len(probs):
        grades = pc.list_value_length(probs).drop_null()[0].as_py()
    heads = {"relevance": head_labels(columns["grade"], probs, grades, f"{where}, `grade`")}
    for name in NODE_HEADS:
        node_grades = columns.get(name, absent)
        node_probs = columns.get(f"{name}_probs", absent)
        heads[name] = head_labels(node_grades, node_probs, NODE_SCORES, f"{where}, `{name}`")
    ids = {name: labels[name].to_pylist() for name in ("row_id", "query_id", "doc_id")}
    pairs = rejoin(ids, dataset, where)
    outside = columns.get("outside_mass", absent).cast(pa.float64()).to_numpy(zero_copy_only=False)
    by_source = [source.weights.get(by, 1.0) for by in columns.get("answered_by", absent).to_pylist()]
    return LabelTable(
        where=where,
        pairs=pairs,
        heads=heads,
        outside_mass=outside,
        weight=np.array(by_source, dtype=np.float32) * source.weight,
        columns=dataset.columns,
        grades=grades,
        plan=plan,
        phi=phi,
        about=replace(about, labels=len(pairs)),
    )


def head_labels(values: Any, probs: Any, grades: int | None, where: str) -> HeadLabels:
    """Grades and distributions, each checked: one bad number would be learned without a word.

    Args:
        values, probs: columns of integers, and of lists of floats.
    Raises:
        InputError: a grade is off the scale, or a distribution is none.
    """
    check_scale(set(values.drop_null().to_pylist()), grades or 11, where=where, option=None)
    grade_N = values.cast(pa.int64()).fill_null(NO_GRADE).to_numpy(zero_copy_only=False)
    is_given = pc.and_(pc.is_valid(values), pc.is_valid(probs))
    given = probs.filter(is_given)
    if grades is None or not len(given):
        return HeadLabels(grade_N)
    probs_NK = np.full((len(grade_N), grades), np.nan)
    if pc.all(pc.equal(pc.list_value_length(given), grades)).as_py():
        probs_NK[is_given.to_numpy(zero_copy_only=False)] = pc.list_flatten(given).to_numpy().reshape(-1, grades)
    is_right_N = (probs_NK >= 0).all(1) & (np.abs(probs_NK.sum(1) - 1) <= SUM_TOLERANCE)  # NaN is not
    if is_right_N.sum() < len(given):
        raise InputError(f"{where}: a distribution is wanted to be {grades} numbers that sum to 1, and one is not.")
    return HeadLabels(grade_N, probs_NK)


def grade_array(values: Sequence[int | None]) -> np.ndarray:
    """Grades as int64 [N]."""
    return np.array([NO_GRADE if value is None else value for value in values], dtype=np.int64)


# ------------------------------------------------------------------------------
# Trusted grades: joined to labels by row or by pair, and as rows of their own to learn from.


_KEYS = {
    "input.path": "path",
    "input.columns.gold": "grade",
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
    by_pair: PairGrades | None = None

    def of(self, plan: Plan | None, pairs: Sequence[Pair]) -> list[int | None]:
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
        return GoldGrades(
            source=source,
            storage=storage,
            pairs=[],
            grades=[],
            columns=None,
            about=about,
            key=key,
        )
    if not source.path.endswith(PARQUET_SUFFIXES) and (is_url(source.path) or not Path(source.path).is_dir()):
        raise InputError(
            f"{source.path}: gold that is learned from wants Parquet with the pairs' texts and the grades."
        )
    with in_words_of_the_spec(key):
        columns = source.columns.model_copy(update={"gold": source.grade, "context": None})
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage)
        files = [file.path for file in dataset.files]
        grades = _grades(load_gold_by_row(files, source.grade, storage), source).to_pylist()
    pairs = read_pairs(dataset, np.arange(dataset.rows))
    about = replace(
        about,
        document=dataset.columns.document,
        rows=len(grades),
        without_grade=grades.count(None),
        inputs_sha256=digest_of([list(file.identity) for file in dataset.files]),
    )
    return GoldGrades(
        source=source,
        storage=storage,
        pairs=pairs,
        grades=grades,
        columns=dataset.columns,
        about=about,
        key=key,
    )


@contextlib.contextmanager
def in_words_of_the_spec(spec_key: str) -> Iterator[None]:
    """Readers are those of `relabel evaluate` and of a job's input, and name their flags and keys."""
    try:
        yield
    except InputError as exc:
        text = str(exc).replace("nothing to label", "nothing to learn from")
        text = re.sub(r"input\.columns\.(?!gold\b)(\w+)", rf"`{spec_key}.columns.\1`", text)
        for flag, key in _KEYS.items():
            text = text.replace(flag, f"`{spec_key}.{key}`")
        raise InputError(text) from exc


def _grades(column: Column, source: GoldSource) -> pa.Int64Array:
    return mapped(
        read_grades(column).readable(source.path, source.grade),
        source.map,
        where=f"{source.path}, column `{source.grade}`",
        option="gold.map",
    )


# ------------------------------------------------------------------------------
# Which side a query falls on: train, dev or test, by a hash of the query alone.
#
# So all rows of a query stay together, however many runs and files they come from, and a query never changes sides when
# data is added. What the hash puts on train or dev is what a student learned from only if it was among its data, so its
# manifest keeps a digest of each such query: any other query is test.


TRAIN = 0
DEV = 1
TEST = 2
SIDES = ("train", "dev", "test")
PACKED_BYTES = 5
"""Of a query's digest that a manifest keeps: to a student of a million queries, one foreign query in a million looks
like one of them.
"""


def split_queries(keys: Sequence[str], *, dev: float, test: float, seed: int) -> np.ndarray:
    """The side of each key: int8 [N], 0 train, 1 dev, 2 test.

    Args:
        keys: query ids (or folded query texts), one a row; equal keys get equal sides.
        dev, test: expected shares of the distinct keys.
    """
    side_of: dict[str, int] = {}
    for key in keys:
        if key in side_of:
            continue
        share = int.from_bytes(_query_digest(key, seed)[:8], "big") / 2.0**64
        if share < test:
            side_of[key] = TEST
        elif share < test + dev:
            side_of[key] = DEV
        else:
            side_of[key] = TRAIN
    return np.array([side_of[key] for key in keys], dtype=np.int8)


def _query_digest(key: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()


def pack_queries(keys: Iterable[str], seed: int) -> str:
    """The first bytes of each query's digest, ascending, as base64."""
    digests = sorted({_query_digest(key, seed)[:PACKED_BYTES] for key in keys})
    return base64.b64encode(b"".join(digests)).decode()


def query_sides(split: SplitFacts) -> Callable[[Sequence[str]], np.ndarray]:
    """What gives any query its side of a student's split, int8 [N] of keys [N]: `test` if it is not among those that
    the student learned from. Of a student of earlier days, which does not record them, the side that it would have had.
    """
    learned = None
    if split.learned_queries is not None:
        data = base64.b64decode(split.learned_queries)
        learned = {data[start : start + PACKED_BYTES] for start in range(0, len(data), PACKED_BYTES)}

    def sides_of(keys: Sequence[str]) -> np.ndarray:
        side_N = split_queries(keys, dev=split.shares["dev"], test=split.shares["test"], seed=split.seed)
        if learned is None:
            return side_N
        is_learned_N = [_query_digest(key, split.seed)[:PACKED_BYTES] in learned for key in keys]
        return np.where(is_learned_N, side_N, np.int8(TEST))

    return sides_of


def folded(text: str) -> str:
    """A query's text as a key: case folded, runs of white space one blank."""
    return " ".join(text.casefold().split())


def split_facts(split: SplitSection, keys: Sequence[str], texts: Sequence[str], side_N: np.ndarray) -> SplitFacts:
    """Rows and queries of each side, and a digest of which query lies where. Counted are also queries of dev and test
    that have the text of a training query: ids that keep such queries apart leak.

    Args:
        texts: each row's query text, folded.
    """
    rows = list(zip(side_N.tolist(), keys, texts, strict=True))
    texts_of_train = {text for side, _, text in rows if side == TRAIN}
    queries: dict[int, set[str]] = {TRAIN: set(), DEV: set(), TEST: set()}
    leaking: dict[int, set[str]] = {TRAIN: set(), DEV: set(), TEST: set()}
    for side, key, text in rows:
        queries[side].add(key)
        if text in texts_of_train:
            leaking[side].add(key)
    sides: dict[str, SplitSide] = {}
    for number, name in enumerate(SIDES):
        num_leaking = None if number == TRAIN else len(leaking[number])
        sides[name] = SplitSide(int((side_N == number).sum()), len(queries[number]), num_leaking)
    return SplitFacts(
        split.by,
        split.seed,
        {"dev": split.dev, "test": split.test},
        **sides,
        sha256=digest_of([sorted(queries[number]) for number in range(len(SIDES))]),
        learned_queries=pack_queries(queries[TRAIN] | queries[DEV], split.seed),
    )


# ------------------------------------------------------------------------------
# Rows to learn from as arrays: targets by head, masks, weights, gold, and the side that each row's query falls on.
#
# A row without a node is masked for that head, never guessed.


SAME_TARGET = 1e-3
"""Distributions that differ by less are one and the same target."""


@dataclass
class Examples:
    """All rows of a distillation.

    Args:
        texts: (query, document) of each row.
        names: where each row comes from, for messages: `(source, row_id)`.
        queries: what keeps each row's query on one side: its id, or its folded text (`split.by`).
        docs: document id of each row.
        targets: by head float32 [N, K]; rows sum to 1, or are zero where `weights` of the head is 0.
        weights: by head float32 [N]: weight of a row in that head's loss, 0 where it has no label of it.
        row_weight: float32 [N], for losses that need no label.
        teacher: int64 [N], the teacher's grade, -1 where there is none.
        teacher_probs: float32 [N, K], NaN where the teacher gave none.
        gold: int64 [N], the trusted grade, -1 where there is none.
        side: int8 [N], 0 train, 1 dev, 2 test.
        heads: number of grades by head that is trained.
        documents: which columns make the document, a line for each source.
    """

    texts: list[tuple[str, str]]
    names: list[tuple[str, int]]
    queries: list[str]
    docs: list[str]
    targets: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    row_weight: np.ndarray
    teacher: np.ndarray
    teacher_probs: np.ndarray
    gold: np.ndarray
    side: np.ndarray
    heads: dict[str, int]
    phi: PhiTable
    columns: Columns
    about: DataFacts
    notes: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    @property
    def grades(self) -> int:
        """Those of the relevance head."""
        return self.heads["relevance"]

    def rows_of(self, side: int) -> np.ndarray:
        """Row numbers of one side, ascending."""
        return np.flatnonzero(self.side == side)


def check_examples(examples: Examples) -> None:
    """What is left can be trained on; remarks are added where it teaches little.

    Raises:
        InputError: no training row, one grade only, or a head without a training row.
    """
    rows = examples.rows_of(TRAIN)
    if not len(rows):
        raise InputError(
            f"no query is left to train on, of {len(examples.texts)} rows. Lower split.dev and split.test, or bring "
            "more queries."
        )
    for name, weight in examples.weights.items():
        if not (weight[rows] > 0).any():
            raise InputError(
                f"head {name} has no row to train on: none of the rows that train has such a label with a weight above "
                f"0 (labels' `weight`, loss.weight_by), of {int((weight > 0).sum())} that have."
            )
    targets = examples.targets["relevance"][rows][examples.weights["relevance"][rows] > 0]
    seen = np.unique(targets.argmax(1))
    if len(seen) < 2 and np.ptp(targets, axis=0).max() < SAME_TARGET:
        raise InputError(
            f"all {len(rows)} rows to train on have grade {seen[0]}: one class alone teaches nothing. "
            "Is it the right grade column, or should a map be another?"
        )
    if len(seen) < 2:
        examples.notes.append(
            f"grade {seen[0]} is the most probable one of every row to train on: the student learns how sure the "
            "teacher was"
        )
    split = examples.about.split
    for name, side in split.sides().items():
        if split.shares.get(name) and not side.rows:
            examples.notes.append(
                f"the {name} split is empty: no query fell there, of {len(set(examples.texts))} pairs"
            )
        if side.texts_seen_in_train:
            examples.notes.append(
                f"{side.texts_seen_in_train} queries of the {name} split have the text of a training query, under "
                "another id: its figures flatter. `split.by: query` keeps them together"
            )


# ------------------------------------------------------------------------------
# Labels and gold become examples: all sources concatenated, a target and a weight for each row and head.


def load_examples(spec: DistillSpec, storage: Storage) -> Examples:
    """Read labels and gold, and turn them into targets.

    Raises:
        InputError, ManifestError, ConfigError: a source is off, scales differ, or what is left can't be trained on.
    """
    tables = []
    for number, source in enumerate(spec.labels):
        key = f"labels[{number}]"
        tables.append(load_labels(source, storage, allow_over_limit=spec.allow_over_limit, key=key))
    sources = [table.about for table in tables if table.about is not None]
    refuse_twice(sources, key="labels")
    _refuse_labels_of_queries(spec, sources)
    tables, gold, gold_N = _with_gold(spec, tables, storage)
    pairs: list[Pair] = []
    names: list[tuple[str, int]] = []
    for table in tables:
        pairs += table.pairs
        names += [(table.where, pair.row_id) for pair in table.pairs]
    is_labelled_N = np.concatenate([np.full(len(table.pairs), table.about is not None) for table in tables])
    num_labelled = int(is_labelled_N.sum())
    widths = {"relevance": _scale(spec, tables, gold_N), **dict.fromkeys(NODE_HEADS, NODE_SCORES)}
    labels = {name: _stacked(tables, name, width) for name, width in widths.items()}
    heads = {name: widths[name] for name in _trained_heads(spec, labels)}
    probs_NK = np.asarray(labels["relevance"].probs, dtype=np.float32)
    row_weight = _row_weight(spec.loss, tables, probs_NK)
    targets, weights = _taught(spec.loss, {name: labels[name] for name in heads}, row_weight)
    _mix_gold(
        spec.loss.gold_weight,
        target_NK=targets["relevance"],
        weight_N=weights["relevance"],
        gold_N=gold_N,
        is_labelled_N=is_labelled_N,
    )
    split = spec.split
    texts = [folded(pair.query) for pair in pairs]
    keys = texts if split.by == "query" else [pair.query_id for pair in pairs]
    side_N = split_queries(keys, dev=split.dev, test=split.test, seed=split.seed)
    num_graded = int((gold_N >= 0).sum())
    examples = Examples(
        texts=[(pair.query, pair.document) for pair in pairs],
        names=names,
        queries=keys,
        docs=[pair.doc_id for pair in pairs],
        targets=targets,
        weights=weights,
        row_weight=row_weight,
        teacher=np.where(is_labelled_N, labels["relevance"].grades, NO_GRADE),
        teacher_probs=probs_NK,
        gold=gold_N,
        side=side_N,
        heads=heads,
        phi=DEFAULT_PHI,
        columns=tables[0].columns,
        about=DataFacts(
            labels=sources,
            gold=None if gold is None else replace(gold.about, graded_rows=num_graded),
            rows={"all": len(pairs), "labelled": num_labelled, "gold_alone": len(pairs) - num_labelled},
            rows_by_head={name: int((weight > 0).sum()) for name, weight in weights.items()},
            split=split_facts(split, keys, texts, side_N),
        ),
        documents=_document_lines(spec, tables),
        notes=[f"{table.where}: {note}" for table in tables for note in table.notes],
    )
    check_examples(examples)
    train_rows = examples.rows_of(TRAIN)
    num_alone = int((~is_labelled_N[train_rows]).sum())
    if num_alone and num_labelled:
        examples.notes.append(
            f"{num_alone:,} of {len(train_rows):,} rows to train on have gold alone: each weighs "
            f"{spec.loss.gold_weight:g} of a labelled one (loss.gold_weight)"
        )
    examples.phi = _phi(spec, tables, heads)  # after the labels were checked: a wrong grade column is reported as that
    if spec.train.class_balance == "weights":
        _balance(examples)
    return examples


def _refuse_labels_of_queries(spec: DistillSpec, sources: Sequence[LearnedLabels]) -> None:
    """
    Raises:
        InputError: labels are about queries alone, and the student grades pairs.
    """
    for source in sources:
        if source.labeler == "complexity" and not KINDS[spec.student.kind].reads_query:
            raise InputError(
                f"{source.path}: labels of `complexity` are about queries, not about pairs; a student grades pairs. "
                "Set student.kind: logistic."
            )


def _with_gold(
    spec: DistillSpec, tables: list[LabelTable], storage: Storage
) -> tuple[list[LabelTable], GoldGrades | None, np.ndarray]:
    """The tables, and after them one of the graded rows that none of them has; the gold; and its grade of each row of
    these tables, int64 [N], `NO_GRADE` where it has none.

    Raises:
        InputError: the gold can't be read, or has no grade of a labelled pair.
    """
    if spec.gold is None:
        return tables, None, np.full(sum(len(table.pairs) for table in tables), NO_GRADE)
    source = _as_its_run_names_it(spec.gold, tables, storage)
    gold = load_gold(source, storage, is_learned=spec.loss.gold_weight > 0)
    gold_of = [grade_array(gold.of(table.plan, table.pairs)) for table in tables]
    if gold.pairs:
        graded = _gold_rows(gold, tables)
        tables = [*tables, graded]
        gold_of.append(graded.heads["relevance"].grades)
    gold_N = np.concatenate(gold_of) if gold_of else np.full(0, NO_GRADE)
    if not (gold_N >= 0).any():  # else the labels would judge themselves, unnoticed
        raise InputError(
            f"{gold.source.path}: none of its grades belongs to a labelled pair, joined by "
            f"{gold.about.joined_by or 'row'}. Do the ids mean the same things, and does `gold.grade` name the "
            "right column? Fix it, or leave `gold` out."
        )
    return tables, gold, gold_N


def _as_its_run_names_it(source: GoldSource, tables: Sequence[LabelTable], storage: Storage) -> GoldSource:
    """A gold source with the columns of the job whose own input it is, where the spec names none. A student's manifest
    has the spec with its defaults in it, and means the same.
    """
    columns = columns_of_owner((table.plan for table in tables), source.path, storage)
    if columns is None:
        return source
    update: dict[str, Any] = {}
    if source.columns == Columns():
        update["columns"] = columns
    if source.grade == DEFAULT_GRADE and columns.gold is not None:
        first = list_input(source.path, storage).files[0]
        if source.grade not in column_names(first, storage):
            update["grade"] = columns.gold
    return source.model_copy(update=update)


def _document_lines(spec: DistillSpec, tables: Sequence[LabelTable]) -> list[str]:
    """Which columns make the document, a line for each source."""
    is_named = [source.pairs is None or bool(source.pairs.columns.document) for source in spec.labels]
    if spec.gold is not None:
        is_named.append(bool(spec.gold.columns.document))
    return [
        document_line(table.where, table.columns.document, is_named=named)
        for table, named in zip(tables, is_named, strict=False)  # gold that is not learned from has no table
    ]


def _gold_rows(gold: GoldGrades, tables: Sequence[LabelTable]) -> LabelTable:
    """Graded rows that no source has labelled, as a table of their own."""
    labelled: set[tuple[str, str]] = set()
    for table in tables:
        labelled.update((pair.query_id, pair.doc_id) for pair in table.pairs)
    pairs: list[Pair] = []
    grades: list[int] = []
    for pair, grade in zip(gold.pairs, gold.grades, strict=True):
        if grade is not None and (pair.query_id, pair.doc_id) not in labelled:
            pairs.append(pair)
            grades.append(grade)
    if not pairs and not tables:
        raise InputError(
            f"{gold.source.path}: no row with a grade in `{gold.source.grade}`. There is nothing to learn from."
        )
    size = len(pairs)
    heads = dict.fromkeys(NODE_HEADS, HeadLabels(np.full(size, NO_GRADE)))
    heads["relevance"] = HeadLabels(grade_array(grades))
    assert gold.columns is not None
    return LabelTable(
        where=gold.source.path,
        pairs=pairs,
        heads=heads,
        outside_mass=np.full(size, np.nan),
        weight=np.ones(size, dtype=np.float32),
        columns=gold.columns,
    )


def _scale(spec: DistillSpec, tables: Sequence[LabelTable], gold_N: np.ndarray) -> int:
    """K of the relevance head: of the spec, of runs and distributions, or one more than the highest grade.

    Raises:
        InputError: sources disagree, or a grade is off the scale.
    """
    given = {table.where: table.grades for table in tables if table.grades is not None}
    if spec.student.heads != "auto":
        given["student.heads"] = spec.student.heads["relevance"]
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{where} has {grades}" for where, grades in given.items())
        raise InputError(f"different numbers of grades can't train one head: {listed}. Use those of one scale.")
    all_grades = np.concatenate([gold_N, *(table.heads["relevance"].grades for table in tables)])
    seen = set(all_grades.tolist()) - {NO_GRADE}
    num_grades = next(iter(given.values()), None) or max(2, max(seen) + 1)
    where = spec.gold.path if spec.gold else "labels"
    check_scale(seen, num_grades, where=where, option="gold.map")
    if num_grades > 10:
        raise InputError(
            f"{where}: grades up to {num_grades - 1}; a scale has at most 10. Is `grade` the right column?"
        )
    return num_grades


def _stacked(tables: Sequence[LabelTable], name: str, width: int) -> HeadLabels:
    """The labels of all sources for a head of so many grades."""
    grades: list[np.ndarray] = []
    probs: list[np.ndarray] = []
    for table in tables:
        labels = table.heads[name]
        absent = np.full((len(labels.grades), width), np.nan)
        grades.append(labels.grades)
        probs.append(absent if labels.probs is None else labels.probs)
    return HeadLabels(np.concatenate(grades), np.concatenate(probs))


def _trained_heads(spec: DistillSpec, labels: Mapping[str, HeadLabels]) -> list[str]:
    """Relevance, and where none are named, nodes with labels that some weight trains.

    Raises:
        InputError: nothing would train relevance.
    """
    loss = spec.loss
    heads = ["relevance"]
    if spec.student.heads == "auto" and KINDS[spec.student.kind].has_nodes:
        labelled = [name for name in NODE_HEADS if (labels[name].grades != NO_GRADE).any()]
        induces = loss.consistency > 0 and len(labelled) == len(NODE_HEADS)
        heads += [name for name in labelled if getattr(loss, name) > 0 or induces]
    if loss.relevance == 0 and (loss.consistency == 0 or len(heads) < len(HEADS)):
        raise InputError(
            "nothing trains the relevance head: loss.relevance is 0, and consistency wants the heads subject and "
            f"attribute (there are {', '.join(heads)}). Raise loss.relevance, or bring labels with both nodes."
        )
    return heads


def _taught(
    loss: LossSection, labels: Mapping[str, HeadLabels], row_weight: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Targets and weights of the rows by head, float32 [N, K] and [N], as the labels have them."""
    kinds = loss.targets
    if not isinstance(kinds, dict):
        kinds = dict.fromkeys(labels, kinds)
    targets: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    for name, of_head in labels.items():
        targets[name] = _targets(of_head, is_soft=kinds.get(name, "soft") == "soft")
        weights[name] = np.where(of_head.grades != NO_GRADE, row_weight, 0.0).astype(np.float32)
    return targets, weights


def _mix_gold(
    share: float, target_NK: np.ndarray, weight_N: np.ndarray, gold_N: np.ndarray, is_labelled_N: np.ndarray
) -> None:
    """Bring gold into relevance: (1-g)·teacher + g·gold on rows with both; weight g on rows with gold alone."""
    if not share:
        return
    both = np.flatnonzero(is_labelled_N & (gold_N >= 0))
    target_NK[both] *= 1.0 - share
    target_NK[both, gold_N[both]] += share
    weight_N[~is_labelled_N] *= share


def _targets(labels: HeadLabels, *, is_soft: bool) -> np.ndarray:
    """What a head learns of each row, float32 [N, K]: the teacher's distribution if it may be soft, else the grade."""
    assert labels.probs is not None
    has_N = labels.grades != NO_GRADE
    target_NK = np.zeros(labels.probs.shape, dtype=np.float32)
    target_NK[has_N, labels.grades[has_N]] = 1.0
    if is_soft:
        given_N = ~np.isnan(labels.probs).any(1)
        given_probs = labels.probs[given_N]
        target_NK[given_N] = given_probs / given_probs.sum(1, keepdims=True)
    return target_NK


def _row_weight(loss: LossSection, tables: Sequence[LabelTable], probs_NK: np.ndarray) -> np.ndarray:
    """Weight of each row, float32 [N]: its source's, by the teacher's confidence and its mass outside the grades."""
    weight = np.concatenate([table.weight for table in tables])
    if "confidence" in loss.weight_by:
        weight *= np.where(np.isnan(probs_NK).any(1), 1.0, np.nan_to_num(probs_NK).max(1))
    if "outside_mass" in loss.weight_by:
        outside_mass = np.concatenate([table.outside_mass for table in tables])
        weight *= np.clip(1.0 - np.nan_to_num(outside_mass), 0.0, 1.0)
    return weight


def _phi(spec: DistillSpec, tables: Sequence[LabelTable], heads: Mapping[str, int]) -> PhiTable:
    """The rule map: of the spec, of the runs, or the default.

    Raises:
        InputError: runs with different maps, and the spec chooses none.
        ConfigError: the map gives grades that the relevance head has not, misses one that the loss's direction needs,
            or is missing where there are more or fewer than three grades.
    """
    given = {table.phi for table in tables if table.phi is not None}
    if spec.phi is None and len(given) > 1:
        raise InputError("the label runs have different rule maps; say which one holds in `phi`.")
    phi = spec.phi or next(iter(given), None)
    grades = heads["relevance"]
    if len(heads) < len(HEADS):
        return phi or DEFAULT_PHI
    phi = check_phi(phi or default_phi(grades, key="phi"), grades=grades)
    missing = unreached_grades(phi, grades)
    if missing and spec.loss.consistency and spec.loss.consistency_direction == "direct_to_induced":
        raise InputError(f"phi gives no pair of scores grade {missing[0]}, so KL(p_r ‖ p_ind) would be infinite.")
    return phi


def _balance(examples: Examples) -> None:
    """Multiply weights by N / (K · N_k) of each row's most probable grade k, counted on the training rows; by 1 for
    grades that do not occur there.
    """
    grade_N = examples.targets["relevance"].argmax(1)
    count_K = np.bincount(grade_N[examples.rows_of(TRAIN)], minlength=examples.grades)
    factor_K = np.where(count_K > 0, count_K.sum() / ((count_K > 0).sum() * np.maximum(count_K, 1)), 1.0)
    factor_N = factor_K[grade_N].astype(np.float32)
    for name, weight in examples.weights.items():
        examples.weights[name] = (weight * factor_N).astype(np.float32)
    examples.row_weight = (examples.row_weight * factor_N).astype(np.float32)
