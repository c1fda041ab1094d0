"""Labels to be evaluated, of a run or of a file, joined to gold grades and to the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import (
    GradeMap,
    PairGrades,
    check_chunks,
    check_scale,
    columns_taken,
    grades_seen,
    label_columns,
    load_gold_by_row,
    mapped,
    taken,
)
from relabel.manifests.inputs import Dataset
from relabel.manifests.metrics.comparison import BY_IDS, Labelled
from relabel.manifests.metrics.judged import Judged, UnjudgedRows, check_widths, distributions, sample_counts
from relabel.manifests.plan import PLAN_NAME, Plan, shard_row_ids
from relabel.manifests.receipts import FileRef
from relabel.manifests.records import LEFT_OUT
from relabel.manifests.rows import open_run_input, read_chunks
from relabel.manifests.run import RunFolder, RunLabels, file_schema, open_run_labels, own_columns, read_labels
from relabel.manifests.schemas import LABELS, codes_of, release_unused, texts_of
from relabel.manifests.store import map_concurrent, open_run_store, read_if_there
from relabel.manifests.tables import (
    FILE_SUFFIXES,
    Column,
    as_ids,
    distinct,
    load_columns,
    read_grades,
    require_column,
    rows_of,
)


@dataclass(frozen=True)
class LabelPart:
    """Some labels, in columns.

    Args:
        row_ids: rows of the run's input, or of the file.
        grades: null where a row has no label.
        query_ids, doc_ids: None where the file names none.
        probs: lists of floats.
        samples: lists of grades, null for one that failed.
        columns: further ones, by name (`further_columns`): of the labels, and of gold once they are joined.
    """

    row_ids: pa.Int64Array
    grades: pa.Int64Array
    query_ids: pa.LargeBinaryArray | None = None
    doc_ids: pa.LargeBinaryArray | None = None
    probs: pa.LargeListArray | None = None
    samples: pa.LargeListArray | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def table(self) -> pa.Table:
        """All columns that there are."""
        own = {name: column for name, column in vars(self).items() if name != "columns" and column is not None}
        return pa.table({**own, **self.columns})

    @classmethod
    def of(cls, table: pa.Table) -> LabelPart:
        """The inverse of `table`."""
        held = {name: table[name].combine_chunks() for name in table.column_names}
        own = {name: held.pop(name) for name in list(held) if name in cls.__dataclass_fields__}
        return cls(**own, columns=held)

    def taken(self, rows: pa.Array) -> LabelPart:
        """Some rows, by their places."""
        return LabelPart.of(self.table.take(rows))

    def with_columns(self, columns: Mapping[str, pa.Array]) -> LabelPart:
        """With further columns of the same rows."""
        return replace(self, columns={**self.columns, **columns}) if columns else self


def put_together(parts: Sequence[LabelPart]) -> LabelPart:
    """Parts as one; a column that some lack is null there."""
    return LabelPart.of(pa.concat_tables([part.table for part in parts], promote_options="permissive"))


def _kept(lists: pa.LargeListArray) -> pa.LargeListArray | None:
    """Lists, or None where no row has one."""
    return lists if lists.null_count < len(lists) else None


def _grades_of(samples: pa.Array) -> pa.LargeListArray:
    """The grades of samples that are records, or that are grades."""
    held = samples.type.value_type
    grades = pc.list_flatten(samples)
    return _refilled(samples, pc.struct_field(grades, "grade") if pa.types.is_struct(held) else grades)


def _refilled(lists: pa.Array, grades: pa.Array) -> pa.LargeListArray:
    """The same lists, of whole numbers, from what is in all of them; null is an empty one."""
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy()
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(sizes)).astype(np.int64), grades.cast(pa.int64()))


def _lists(column: Column, is_item: Callable[[pa.DataType], bool], wanted: str) -> pa.Array | None:
    """A column of a file that holds lists; None for one without any.

    Raises:
        InputError: a row holds something else.
    """
    try:
        held = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else pa.array(column)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
        raise InputError(f"{wanted} a row is wanted, and rows hold other values, or of different kinds.") from exc
    if pa.types.is_null(held.type):
        return None
    if not (pa.types.is_list(held.type) or pa.types.is_large_list(held.type)) or not is_item(held.type.value_type):
        raise InputError(f"{wanted} a row is wanted, and it holds {held.type}.")
    return held


def file_distributions(column: Column, path: str) -> pa.LargeListArray | None:
    """The column `probs` of a file.

    Raises:
        InputError: a row holds no list of numbers.
    """
    wanted = f"{path}: column `probs`: a list of probabilities"
    held = _lists(column, lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind), wanted)
    if held is None:
        return None
    if pc.min(pc.list_value_length(held)).as_py() == 0 or pc.list_flatten(held).null_count:
        raise InputError(f"{wanted} a row is wanted, and one is empty or holds null.")
    return _kept(held.cast(pa.large_list(pa.float64())))


def file_samples(column: Column, path: str) -> pa.LargeListArray | None:
    """The column `samples` of a file.

    Raises:
        InputError: a row holds no list of grades, or of records with a grade.
    """
    held = _lists(column, _is_grade, f"{path}: column `samples`: a list of grades")
    return None if held is None else _kept(_grades_of(held))


def _is_grade(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("grade") >= 0 and _is_grade(kind.field("grade").type)
    return bool((pa.types.is_integer(kind) and kind != pa.uint64()) or pa.types.is_null(kind))


def map_labels(part: LabelPart, label_map: GradeMap | None, *, where: str) -> LabelPart:
    """Labels, samples and distributions on another scale: the mass of grades that fall together is added.

    Raises:
        InputError: a label that the map does not name.
    """
    if label_map is None:
        return part
    option = "--map-labels"
    grades = mapped(part.grades, label_map, where=where, option=option)
    samples = part.samples and _refilled(
        part.samples, mapped(pc.list_flatten(part.samples), label_map, where=where, option=option)
    )
    probs = part.probs and _merged(part.probs, label_map, where=where, option=option)
    return replace(part, grades=grades, samples=samples, probs=probs)


def _merged(probs: pa.LargeListArray, label_map: GradeMap, *, where: str, option: str) -> pa.LargeListArray:
    """Distributions whose places are mapped."""
    size_N = pc.list_value_length(probs).fill_null(0).to_numpy()
    row_M = pc.list_parent_indices(probs).to_numpy()
    place_M = np.arange(len(row_M)) - (np.cumsum(size_N) - size_N)[row_M]
    new_K = mapped(
        pa.array(range(size_N.max(initial=0)), pa.int64()), label_map, where=f"{where}, distributions", option=option
    ).to_numpy()
    grades = max(label_map.values()) + 1
    mass_M = pc.list_flatten(probs).to_numpy(zero_copy_only=False)
    merged_NK = np.bincount(row_M * grades + new_K[place_M], mass_M, minlength=len(probs) * grades)
    has_N = size_N > 0
    offsets = pa.array(np.append(0, np.cumsum(has_N * grades)), mask=np.append(~has_N, False))
    return pa.LargeListArray.from_arrays(offsets, merged_NK.reshape(-1, grades)[has_N].ravel())


# Labels to be judged: of a run (its manifest or, if asked for, its receipts name the files) or of any file with a
# label column.
#
# Read a part at a time, and of a run only the columns that judging needs.

RUN_COLUMNS = ["row_id", "query_id", "doc_id", "grade", "probs", "samples"]
PART_ROWS = 1 << 19
"""Rows of a run that are read at a time, at least: each part is joined to all qrels."""


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
    """A run's labels, to be judged.

    Raises:
        InputError: its labels have no grades.
    """
    plan, facts = run.plan, run.plan.facts
    if run.grades == 0:
        raise InputError(f"{run.root}: labeler {facts.labeler.name} gives no grades, so there are none to judge.")
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
            table, held = pa.concat_tables(held), []
            column = {name: table[name].combine_chunks() for name in names}
            yield LabelPart(
                column["row_id"],
                column["grade"].cast(pa.int64()),
                column["query_id"].cast(pa.large_binary()),
                column["doc_id"].cast(pa.large_binary()),
                _kept(column["probs"].cast(pa.large_list(pa.float32()))),
                _kept(_grades_of(column["samples"])),
                {name: column[name] for name in further},
            )


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
    if grades.texts:
        examples = ", ".join(map(repr, grades.texts[:5]))
        notes.append(f"{len(grades.unreadable):,} values of `{label}` are no whole number and are left out: {examples}")
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


def join_texts(run: RunLabels, storage: Storage) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Labels with the further columns `query`, `document` and, where the job names one, `gold`. In memory are one chunk
    of the run and the gold of all rows.

    Returns:
        The schema, and a table for each label file, in the order of the run's files. Taking one raises InputError where
        the input holds other texts than those that were labelled, ManifestError where a label file is damaged.
    Raises:
        InputError: the input is gone, or the labels have a column of such a name already.
        ManifestError: the input is not the one that was labelled.
    """
    dataset = open_run_input(run.root, run.plan, storage)
    schema = file_schema(run.plan.parts)
    further = [pa.field("query", pa.large_string()), pa.field("document", pa.large_string())]
    gold = None
    if (column := run.plan.facts.columns.gold) is not None:
        values = load_gold_by_row([file.path for file in dataset.files], column, storage)
        gold = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])  # a list: of mixed types
        further.append(pa.field("gold", gold.type))
    for added in further:
        if added.name in schema.names:
            raise InputError(
                f"{run.root}: its labels have a column `{added.name}` of their own, so that texts can't be joined. "
                "Read the labels without texts, and join the input by `row_id`."
            )
        schema = schema.append(added)
    return schema, _tables(run, dataset, schema, gold)


def _tables(run: RunLabels, dataset: Dataset, schema: pa.Schema, gold: pa.ChunkedArray | None) -> Iterator[pa.Table]:
    folder, files = run.folder, [file for file in run.labels if file.rows]
    tables = map_concurrent(folder.store, lambda file: read_labels(folder, file), files)
    table = next(tables, None)
    for shard in run.plan.shards:
        row_ids = None if shard.row_ids is None else shard_row_ids(folder.store, shard)
        for chunk in read_chunks(dataset, shard, row_ids, range(len(shard.chunks))):
            pairs = {pair.row_id: (pair.query, pair.document) for pair in chunk.pairs}
            while table is not None and table["row_id"][0].as_py() in pairs:
                texts = map(list, zip(*(pairs[row] for row in table["row_id"].to_pylist()), strict=True))
                yield pa.table(
                    [*table.columns, *texts, *([] if gold is None else [gold.take(table["row_id"])])], schema=schema
                )
                table = next(tables, None)
    if table is not None:
        raise ManifestError(f"{run.root}: its label files are not in the order of its plan. Restore manifest.json.")


SHOWN = 3
_NO_IDS, _NO_NUMBERS = pa.array([], pa.large_binary()), pa.array([], pa.int64())
NOTHING = LabelPart(_NO_NUMBERS, _NO_NUMBERS, _NO_IDS, _NO_IDS)


class Join:
    """Collects judged rows part by part; memory grows with what is judged, not with what is labelled.

    Args:
        grades: K.
        pairs: of the qrels, where any label is joined by pair.
        qrels: what to call them in an error.

    Attributes:
        num_labels: labels read.
        num_without_label: rows that hold no label (null or unreadable), which are no label.
        num_gold_null: labels whose pair or row has a null grade.
        num_unjudged: labels whose pair has no grade at all.
        num_relabelled: judged rows beyond the first of their (query_id, doc_id); 0 where rows name no document.
        row_ids: int64 [N], of the judged rows, once `judged` gave them.
        is_labelled: bool [P], the pairs that a judged label has.
    """

    def __init__(self, grades: int, pairs: PairGrades | None, *, qrels: str = "gold") -> None:
        self.grades = grades
        self.qrels = qrels
        self.num_labels = self.num_without_label = self.num_gold_null = self.num_unjudged = self.num_judged = 0
        self.num_relabelled = 0
        self.row_ids = np.zeros(0, dtype=np.int64)
        self.joined_by: set[str] = set()
        self.label_examples: list[str] = []
        self.is_labelled = np.zeros(0 if pairs is None else len(pairs.keys), dtype=bool)
        self._pairs = pairs
        self._parts: list[LabelPart] = []
        self._unjudged: list[LabelPart] = []
        self._golds: list[np.ndarray] = []

    def add_by_pair(self, part: LabelPart, where: str) -> None:
        """Labels whose (query_id, doc_id) has a grade."""
        assert self._pairs is not None
        place_N = self._places(part)
        part = part.with_columns({name: taken(column, place_N) for name, column in self._pairs.columns.items()})
        self._add(part, taken(self._pairs.grades, place_N), place_N >= 0, place_N, where)
        self.joined_by.add(BY_IDS)

    def add_by_row(
        self,
        part: LabelPart,
        gold: pa.Int64Array,
        where: str,
        *,
        by: str,
        columns: Mapping[str, pa.Array] = MappingProxyType({}),
    ) -> None:
        """Labels by the row of `gold`, and of its further `columns`, that they name; `by` says what that row is."""
        everywhere = np.ones(len(part.grades), dtype=bool)
        part = part.with_columns(columns_taken(columns, part.row_ids))
        self._add(part, gold.take(part.row_ids), everywhere, self._places(part), where)
        self.joined_by.add(by)

    def _places(self, part: LabelPart) -> np.ndarray:
        """Where in the qrels each label's pair is, -1 for nowhere."""
        if self._pairs is None or part.query_ids is None or part.doc_ids is None:
            return np.full(len(part.grades), -1)
        return self._pairs.places(part.query_ids, part.doc_ids)

    def _add(
        self, part: LabelPart, golds: pa.Int64Array, is_known_N: np.ndarray, place_N: np.ndarray, where: str
    ) -> None:
        check_scale(grades_seen(part.grades), self.grades, where=where, option="--map-labels")
        if len(self.label_examples) < SHOWN:
            ids = ([""] * SHOWN if ids is None else texts_of(ids[:SHOWN]) for ids in (part.query_ids, part.doc_ids))
            self.label_examples += [f"({query}, {doc})" for query, doc in zip(*ids, strict=False)][: len(part.grades)]
        has_label_N, has_gold_N = (column.is_valid().to_numpy(zero_copy_only=False) for column in (part.grades, golds))
        is_judged_N = has_label_N & has_gold_N
        self.num_without_label += part.grades.null_count
        self.num_labels += int(has_label_N.sum())
        self.num_unjudged += int((has_label_N & ~is_known_N).sum())
        self.num_gold_null += int((has_label_N & is_known_N & ~has_gold_N).sum())
        self.num_judged += int(is_judged_N.sum())
        if not is_judged_N.all():
            if part.columns and part.query_ids is not None:
                self._unjudged.append(part.taken(pa.array(np.flatnonzero(~is_judged_N))))
            rows = pa.array(np.flatnonzero(is_judged_N))
            part, golds, place_N = part.taken(rows), golds.take(rows), place_N[is_judged_N]
        check_widths(part.probs, self.grades, where=where)
        check_chunks(part.columns, part.query_ids, part.doc_ids, where=self.qrels)
        self.is_labelled[place_N[place_N >= 0]] = True
        self._parts.append(part)
        self._golds.append(golds.to_numpy())

    def judged(self) -> Judged:
        """The rows as arrays, of which at least one is there; what was collected is given away.

        Raises:
            InputError: a distribution is none: it does not sum to 1, or holds a negative number.
        """
        has_queries = all(part.query_ids is not None for part in self._parts)
        rows, gold_N = put_together(self._parts), np.concatenate(self._golds)
        unjudged = put_together(self._unjudged) if self._unjudged else None
        self._parts, self._golds, self._unjudged = [], [], []
        self.row_ids = rows.row_ids.to_numpy()
        query_N, query_names = _numbered(rows.query_ids, len(gold_N))
        doc_N, doc_names = _numbered(rows.doc_ids, len(gold_N))
        if len(doc_names) < len(gold_N) and any(texts_of(doc_names[:2])):
            self.num_relabelled = len(gold_N) - len(np.unique(query_N * len(doc_names) + doc_N))
        release_unused()
        correct_N, sampled_N = sample_counts(rows.samples, gold_N)
        return Judged(
            self.grades,
            gold_N,
            rows.grades.to_numpy(),
            query_N if has_queries else None,
            len(query_names) if has_queries else 0,
            doc_N,
            distributions(rows.probs, self.grades, where="labels"),
            correct_N,
            sampled_N,
            query_names if has_queries else None,
            rows.columns,
            None if unjudged is None else UnjudgedRows.of(unjudged.query_ids, query_names, unjudged.columns),
        )


def _numbered(ids: pa.LargeBinaryArray | None, num_rows: int) -> tuple[np.ndarray, pa.LargeBinaryArray]:
    """See `codes_of`; what is missing has the empty text for an id."""
    return codes_of((pa.nulls(num_rows, pa.large_binary()) if ids is None else ids).fill_null(b""))


def gather(parts: Iterable[LabelPart], *, grades: int, where: str, option: str | None = None) -> Labelled:
    """Put a set's parts together, in the order of its rows; rows without a label are counted and left out.

    Raises:
        InputError: a grade off the scale, or a distribution that does not sum to 1.
    """
    held: list[LabelPart] = [NOTHING]
    num_without = 0
    for part in parts:
        check_scale(grades_seen(part.grades), grades, where=where, option=option)
        num_without += part.grades.null_count
        if part.grades.null_count:
            labelled = pa.array(np.flatnonzero(part.grades.is_valid().to_numpy(zero_copy_only=False)))
            held.append(part.taken(labelled))
        else:
            held.append(part)
    whole = put_together(held)
    order = np.argsort(whole.row_ids.to_numpy(), kind="stable")
    whole = whole.taken(pa.array(order))
    assert whole.query_ids is not None
    assert whole.doc_ids is not None
    return Labelled(
        where,
        whole.row_ids.to_numpy(),
        whole.query_ids,
        whole.doc_ids,
        whole.grades.to_numpy(),
        distributions(whole.probs, grades, where=where),
        whole.samples,
        num_without,
        whole.columns,
    )
