"""Labels to be evaluated, of a run or of a file, as tables; and a run's labels with its input's texts."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.forms import (
    FORMS,
    TABLE_SUFFIXES,
    Choice,
    form_by_suffix,
    load_columns,
    load_scores,
    row_text_of,
)
from relabel.manifests.gold import (
    FROM_GOLD,
    GOLD_QUERY,
    GradeMap,
    check_scale,
    grades_seen,
    label_columns,
    load_gold_by_row,
    mapped,
)
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import LABELS
from relabel.manifests.metrics.comparison import Labelled
from relabel.manifests.metrics.judged import RANK, SCORE, column_of, distributions, with_columns
from relabel.manifests.plan import PLAN_NAME, FileRef, Plan, shard_row_ids
from relabel.manifests.process import WhenUsed
from relabel.manifests.rows import open_run_input, read_chunks
from relabel.manifests.run_folder import RunFolder
from relabel.manifests.run_labels import RunLabels, file_schema, open_run_labels, own_columns, read_labels
from relabel.manifests.secrets import shortened
from relabel.manifests.store import map_concurrent, open_run_store, read_if_there
from relabel.manifests.tables import (
    PARQUET_SUFFIXES,
    Column,
    NeededColumn,
    as_ids,
    distinct,
    id_column,
    open_parquet,
    read_grades,
    read_scores,
    reading,
    require_columns,
    rows_of,
)

pc = WhenUsed("pyarrow.compute")

# Labels are read a part at a time, and of a run only the columns that judging needs. A part is a record batch:
#
# row_id int64, of the run's input or of the file; grade int64, null where a row has no label; query_id and doc_id,
# large binary, unless a file names none; probs, lists of floats, outside_mass, what they leave out of the teacher's
# probability, and samples, lists of grades, null for one that failed, where any row has some; and a labeler's own
# columns by which its labels are judged (`label_columns`).

_COLUMNS = ["row_id", "query_id", "doc_id", "grade", "probs", "samples"]
_TYPES = {"row_id": pa.int64(), "grade": pa.int64(), "query_id": pa.large_binary(), "doc_id": pa.large_binary()}
PART_ROWS = 1 << 19
"""Rows of a run that are read at a time, at least: each part is joined to all qrels."""


@dataclass
class LabelSet:
    """One source of labels.

    Args:
        kind: a teacher's run, a student's scores (which lie like a run's labels), a file, or a ranking by scores, whose
            parts have `SCORE` in place of a grade.
        grades: K, where the source states it; None for a file.
        num_quarantined: rows of a run that have no label; None for a file.
        origin: of a run its name, labeler, model and fingerprint (digests), and the model's name; of a file the label
            column, and by which columns its rows were picked.
        plan: of a run.
        parts: reads them; call it once for each pass.
        columns: a labeler's own ones that its parts hold.
        notes: remarks for a reader of the report.
        unknown_gold: of a file that saw gold and does not say of which queries: which gold, and what to do.
        label_map: brought the grades of `parts` to the scale that they are on; `grades` is the source's own.
    """

    where: str
    kind: Literal["run", "student", "file", "ranking"]
    grades: int | None
    num_quarantined: int | None
    origin: dict[str, Any]
    plan: Plan | None
    parts: Callable[[], Iterator[pa.RecordBatch]]
    notes: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    unknown_gold: str = ""
    label_map: GradeMap | None = None


def open_labels(
    path: str,
    storage: Storage,
    *,
    allow_partial: bool = False,
    label: str = "grade",
    by: str | None = None,
    doc: str = "doc_id",
    where: Mapping[str, str] | None = None,
    wants_ids: bool = True,
    may_lack: bool = False,
    has_options: bool = True,
) -> LabelSet:
    """A run's output folder, or a Parquet, JSONL or CSV file, whose `probs` and `samples` are taken where they are as
    in a run's files.

    Args:
        label, by, doc: columns of label, query and document of a file; `by` None for `query_id`.
        where: only rows of a file whose column equals this text.
        wants_ids: query and document ids must be there, since labels are joined by them.
        may_lack: `by` and `doc` are of other files too, so that one without them is read by its usual columns.
        has_options: the command has `--label`, `--by` and `--doc`, for errors.
    Raises:
        UsageError: `where` for a run.
        InputError: unreadable, a column is missing, or labels without grades.
        ManifestError: see `open_run_labels`.
    """
    if is_run(path, storage):
        if where:
            raise UsageError(f"--where: {path} is a run, and runs are judged whole. It picks rows of label files.")
        return label_set(open_run_labels(path, storage, allow_partial=allow_partial))
    rows = _read_rows(
        path,
        partial(load_columns, storage=storage),
        value=label,
        role="the label",
        option="--label" if has_options else "",
        by=by,
        doc=doc,
        where=where or {},
        further=("probs", "samples", FROM_GOLD),
        wants_ids=wants_ids,
        may_lack=may_lack,
    )
    columns = rows.columns
    grades = read_grades(columns[label])
    grades.check_not_scores(path, label)
    if grades.texts and grades.values.null_count == len(grades.values):
        raise InputError(
            f"{path}: column `{label}` holds no grade, but {', '.join(map(repr, grades.texts[:5]))}. Grades are whole "
            "numbers: write these as such, or name another column with --label."
        )
    part = {"row_id": pa.array(rows.kept), "grade": grades.values, **rows.ids}
    for name, item in (("probs", pa.float64()), ("samples", pa.int64())):
        if name not in columns:
            continue
        lists = _lists(columns[name], item, f"{path}: column `{name}`")
        if lists is not None:
            part[name] = lists
    if rows.is_gold_query is not None:
        part[FROM_GOLD] = _flags(columns[FROM_GOLD])
        part[GOLD_QUERY] = rows.is_gold_query
    batch = pa.RecordBatch.from_pydict(part)
    count = len(grades.unreadable)
    examples = ", ".join(map(repr, grades.texts[:5]))
    notes = [f"{count:,} values of `{label}` are no whole number and are left out: {examples}"] if count else []
    origin: dict[str, Any] = {"column": label}
    if where:
        origin["where"] = dict(where)
    return LabelSet(
        where=path,
        kind="file",
        grades=None,
        num_quarantined=None,
        origin=origin,
        plan=None,
        parts=lambda: iter((batch,)),
        notes=notes,
        unknown_gold="" if FROM_GOLD in part else _unknown_gold(path, storage),
    )


@dataclass(frozen=True)
class _Rows:
    """Rows of a file that were picked.

    Args:
        kept: their places in the file, int64 [N].
        columns: of them.
        ids: `query_id` and `doc_id`, where the file has them.
        is_gold_query: see `GOLD_QUERY`; None where the file says nothing of gold.
    """

    kept: np.ndarray
    columns: dict[str, Column]
    ids: dict[str, pa.LargeBinaryArray]
    is_gold_query: pa.BooleanArray | None


def _read_rows(
    path: str,
    load: Callable[[str, Choice], dict[str, Column]],
    *,
    value: str,
    role: str,
    option: str,
    by: str | None,
    doc: str,
    where: Mapping[str, str],
    further: Sequence[str],
    wants_ids: bool,
    may_lack: bool = False,
) -> _Rows:
    """Rows of a file whose columns of `where` equal these texts.

    Args:
        value: the column that must be there; `role` and `option` are what it is for and what names it, for errors.
        by, doc: columns of query and document.
        further: columns that are read where they are there.
        may_lack: see `open_labels`.
    Raises:
        InputError: unreadable, a column is missing, or no row is picked.
    """
    query = by or "query_id"

    def choose(names: list[str]) -> list[str]:
        nonlocal query, doc
        if may_lack:
            query = id_column(query, "query_id", names)
            doc = id_column(doc, "doc_id", names)
        needed = [NeededColumn(value, role, option)]
        if wants_ids or by is not None:
            needed.append(NeededColumn(query, "the query id", option and "--by"))
        if wants_ids:
            needed.append(NeededColumn(doc, "the document id", option and "--doc"))
        needed += [NeededColumn(name, "--where", "--where COLUMN=VALUE") for name in where]
        require_columns(needed, names, path=path)
        return [*where, *(name for name in (value, query, doc, *further) if name in names)]

    columns = load(path, choose)
    is_gold_query = _queries_of_gold(columns.get(FROM_GOLD), columns.get(query), path=path, name=query)
    is_kept = np.ones(len(columns[value]), dtype=bool)
    for name, text in where.items():
        values, code_N = distinct(columns[name])
        is_kept &= np.array([str(one) == text for one in values], dtype=bool)[code_N]
        if not is_kept.any():
            raise InputError(f"{path}: no row with {name}={text}. There are: {sorted(set(map(str, values)))[:10]}.")
    kept = np.flatnonzero(is_kept)
    if where:
        columns = {name: rows_of(column, kept) for name, column in columns.items()}
    named = {"query_id": query, "doc_id": doc}
    return _Rows(
        kept=kept,
        columns=columns,
        ids={
            name: as_ids(columns[column], path=path, name=column) for name, column in named.items() if column in columns
        },
        is_gold_query=None if is_gold_query is None else is_gold_query.take(pa.array(kept)),
    )


def open_ranking(
    path: str,
    storage: Storage,
    *,
    score: str,
    by: str | None = None,
    doc: str = "doc_id",
    where: Mapping[str, str] | None = None,
) -> LabelSet:
    """A TREC run, or another file, whose scores rank and grade nothing; rows without a score are left out.

    Args:
        score, by, doc: columns of score, query and document; `by` None for `query_id`. A column `rank` ranks the lowest
            first, any other the highest.
        where: only rows whose column equals this text.
    Raises:
        InputError: unreadable, a column is missing, or a score is no number.
    """
    rows = _read_rows(
        path,
        partial(load_scores, storage=storage),
        value=score,
        role="the score",
        option="--score",
        by=by,
        doc=doc,
        where=where or {},
        further=(),
        wants_ids=True,
    )
    scores = read_scores(rows.columns[score], path=path, name=score, row_text=row_text_of(form_by_suffix(path, FORMS)))
    if score == RANK:
        scores = pc.negate(scores)
    batch = pa.RecordBatch.from_pydict({"row_id": pa.array(rows.kept), **rows.ids, SCORE: scores})
    origin: dict[str, Any] = {"column": score}
    if where:
        origin["where"] = dict(where)
    return LabelSet(
        where=path,
        kind="ranking",
        grades=None,
        num_quarantined=None,
        origin=origin,
        plan=None,
        parts=lambda: iter((batch,)),
    )


def _queries_of_gold(flags: Column | None, query_ids: Column | None, *, path: str, name: str) -> pa.BooleanArray | None:
    """Which rows are of a query that has a grade from gold: bool [N]; None where a file says nothing of gold.

    Args:
        flags: the column `FROM_GOLD`.
        query_ids: without them each row is a query.
        path, name: of the query ids, for messages.
    """
    if flags is None:
        return None
    is_from_gold = _flags(flags)
    if query_ids is None:
        return is_from_gold
    ids = as_ids(query_ids, path=path, name=name)
    return pc.is_in(ids, value_set=ids.filter(is_from_gold))


def _flags(column: Column) -> pa.BooleanArray:
    """A column of true and false, which text forms write as words; false where a row says neither."""
    held = _plain_array(column)
    if pa.types.is_boolean(held.type):
        return held.fill_null(False)
    texts = [str(value).strip().casefold() for value in held.to_pylist()]
    return pa.array([text == "true" for text in texts])


def _unknown_gold(path: str, storage: Storage) -> str:
    """Of a file that an earlier `relabel combine` anchored with gold, why gold can't judge it; else empty."""
    if PurePosixPath(path).suffix.lower() not in PARQUET_SUFFIXES:
        return ""
    with open_parquet(path, storage) as parquet, reading(path):
        made_of = json.loads((parquet.schema_arrow.metadata or {}).get(b"relabel.combine", b"{}"))
    if not made_of.get("gold_pairs"):
        return ""
    return (
        f"{made_of['gold_pairs']:,} of its labels are the grades of {made_of.get('gold')}, and it was combined by an "
        "earlier relabel that does not say which, so gold can't judge it. Combine it again."
    )


def _plain_array(column: Column) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else pa.array(column)


def label_set(run: RunLabels) -> LabelSet:
    """A run's labels, to be judged.

    Raises:
        InputError: its labels have no grades.
    """
    plan = run.plan
    facts = run.plan.facts
    columns = label_columns(own_columns(plan.parts))
    origin = {
        "name": plan.name,
        "labeler": facts.labeler.name,
        "model": facts.model,
        "model_name": _model_name(run),
        "fingerprint": plan.fingerprint,
    }
    if facts.labeler.grades == 0 and SCORE in own_columns(plan.parts):
        return LabelSet(
            where=run.root,
            kind="ranking",
            grades=None,
            num_quarantined=run.found.tally.num_quarantined,
            origin=origin | {"column": SCORE},
            plan=plan,
            parts=lambda: _ranked_parts(run.folder, run.found.labels),
            notes=run.notes,
        )
    if facts.labeler.grades == 0:
        raise InputError(f"{run.root}: labeler {facts.labeler.name} gives no grades, so there are none to judge.")
    return LabelSet(
        where=run.root,
        kind="student" if facts.kind == "student" else "run",
        grades=facts.labeler.grades,
        num_quarantined=run.found.tally.num_quarantined,
        origin=origin,
        plan=plan,
        parts=lambda: _run_parts(run.folder, run.found.labels, columns),
        notes=run.notes,
        columns=columns,
    )


def _model_name(run: RunLabels) -> str:
    """Of all engines that made the labels; a model in a folder is called by that."""
    names = [str(engine.get("model", "")) for engine in run.found.all_engines]
    shown = [PurePosixPath(name).name if name.startswith(("/", "~")) else name for name in names]
    return " and ".join(dict.fromkeys(filter(None, shown)))


def _ranked_parts(folder: RunFolder, files: list[FileRef]) -> Iterator[pa.RecordBatch]:
    """The rows of a run whose labels are scores."""
    names = ["row_id", "query_id", "doc_id", SCORE]
    types = {**_TYPES, SCORE: pa.float64()}
    schema = file_schema(folder.plan.parts)
    for file in files:
        table = folder.table(file, schema, names)
        yield pa.RecordBatch.from_pydict({name: table[name].combine_chunks().cast(types[name]) for name in names})


def _run_parts(folder: RunFolder, files: list[FileRef], further: Sequence[str]) -> Iterator[pa.RecordBatch]:
    tables: list[pa.Table] = []
    num_rows = 0
    schema = file_schema(folder.plan.parts) if further else LABELS
    names = [*_COLUMNS, "outside_mass", *further]
    for number, file in enumerate(files, start=1):
        tables.append(folder.table(file, schema, names))
        num_rows += file.rows
        if number == len(files) or num_rows >= PART_ROWS:
            table = pa.concat_tables(tables)
            tables = []
            num_rows = 0
            part = {name: table[name].combine_chunks() for name in names}
            part |= {name: part[name].cast(kind) for name, kind in _TYPES.items()}
            part["probs"] = part["probs"].cast(pa.large_list(pa.float32()))
            part["samples"] = _grades_of(part["samples"])
            empty = [name for name in ("probs", "samples", "outside_mass") if part[name].null_count == len(part[name])]
            for name in empty:
                del part[name]
            yield pa.RecordBatch.from_pydict(part)


def is_run(path: str, storage: Storage) -> bool:
    """Whether a path names a folder, as runs are; by URL, a folder is what holds a plan."""
    if not is_url(path):
        return Path(path).is_dir()
    is_table = PurePosixPath(path).suffix.lower() in TABLE_SUFFIXES
    return not is_table and read_if_there(open_run_store(path, storage), PLAN_NAME) is not None


def _lists(column: Column, item: pa.DataType, what: str) -> pa.LargeListArray | None:
    """A column of a file that holds lists of numbers, or of records with a grade; None for one without any.

    Raises:
        InputError: a row holds something else.
    """
    try:
        values = _plain_array(column)
        if pa.types.is_string(values.type):  # of CSV
            values = pa.array([json.loads(text) if text else None for text in values.to_pylist()])
        lists = _grades_of(values) if item == pa.int64() else values.cast(pa.large_list(item))
    except (pa.ArrowException, AttributeError, KeyError, OverflowError, ValueError) as exc:
        raise InputError(f"{what}: a list a row is wanted, of numbers: {shortened(str(exc), 200)}.") from exc
    return lists if lists.null_count < len(lists) else None


def _grades_of(samples: pa.Array) -> pa.LargeListArray:
    """The grades of samples that are records, or that are grades."""
    if pa.types.is_null(samples.type) or not pa.types.is_struct(samples.type.value_type):
        return samples.cast(pa.large_list(pa.int64()))
    return _refilled(samples, pc.struct_field(pc.list_flatten(samples), "grade").cast(pa.int64()))


def _refilled(lists: pa.Array, values: pa.Array) -> pa.LargeListArray:
    """The same lists of other values; null where they are."""
    offsets = np.append(0, np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy()))
    is_null = np.append(lists.is_null().to_numpy(zero_copy_only=False), False)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64(), mask=is_null), values)


def on_scale_of(labels: LabelSet, label_map: GradeMap | None) -> LabelSet:
    """A label set on the map's new scale. One that is on it already stays as it is, with a note.

    Raises:
        InputError: the map would give all grades of a set that has several the same one.
    """
    if label_map is None:
        return labels
    grades = _grades_of_set(labels)
    if isinstance(grades, int):
        if _is_on_new_scale(grades, label_map):
            note = f"{labels.where}: has {grades} grades already, so --map-labels leaves its labels as they are"
            return replace(labels, notes=[*labels.notes, note])
        grades = set(range(grades))
    became = {label_map.get(grade) for grade in grades}
    if len(became) == 1 < len(grades):
        raise InputError(
            f"--map-labels: all grades of {labels.where} ({', '.join(map(str, sorted(grades)))}) would become "
            f"{became.pop()}, so its labels would say nothing. The map is that of another scale: leave these labels "
            "out, or bring them to the new scale first, in a file of their own (query_id, doc_id, grade)."
        )
    return replace(
        labels,
        parts=lambda: (map_labels(part, label_map, where=labels.where) for part in labels.parts()),
        label_map=label_map,
    )


def _is_on_new_scale(grades: int, label_map: GradeMap) -> bool:
    """Whether labels of so many grades are on the scale that the map leads to, and not on the larger one that it leads
    from: a map of 4 grades to 2 says nothing of a yes/no judge.
    """
    return grades == max(label_map.values()) + 1 <= max(label_map)


def _grades_of_set(labels: LabelSet) -> int | set[int]:
    """How many grades its scale has; the grades that occur where that is not known."""
    if labels.grades is not None:
        return labels.grades
    seen: set[int] = set()
    for part in labels.parts():
        if "probs" in part.schema.names and part["probs"].null_count < part.num_rows:
            return int(pc.list_value_length(part["probs"].drop_null()[:1])[0].as_py())
        seen |= grades_seen(part["grade"])
    return seen


def map_labels(part: pa.RecordBatch, label_map: GradeMap | None, *, where: str) -> pa.RecordBatch:
    """Labels, samples and distributions on another scale: the mass of grades that fall together is added.

    Raises:
        InputError: a label that the map does not name.
    """
    if label_map is None:
        return part
    option = "--map-labels"
    columns = {"grade": mapped(part["grade"], label_map, where=where, option=option)}
    if "samples" in part.schema.names:
        samples = pc.list_flatten(part["samples"])
        columns["samples"] = _refilled(part["samples"], mapped(samples, label_map, where=where, option=option))
    if "probs" in part.schema.names:
        size_N = pc.list_value_length(part["probs"]).fill_null(0).to_numpy()
        row_M = pc.list_parent_indices(part["probs"]).to_numpy()
        place_M = np.arange(len(row_M)) - (np.cumsum(size_N) - size_N)[row_M]
        old = pa.array(range(size_N.max(initial=0)), pa.int64())
        new_K = mapped(old, label_map, where=f"{where}, distributions", option=option).to_numpy()
        grades = max(label_map.values()) + 1
        has_N = size_N > 0
        mass_M = pc.list_flatten(part["probs"]).to_numpy(zero_copy_only=False)
        merged_NK = np.bincount(row_M * grades + new_K[place_M], mass_M, minlength=len(size_N) * grades)
        offsets = pa.array(np.append(0, np.cumsum(has_N * grades)), mask=np.append(~has_N, False))
        values = merged_NK.reshape(-1, grades)[has_N].ravel()
        columns["probs"] = pa.LargeListArray.from_arrays(offsets, values)
    return with_columns(part, columns)


def labelled_parts(
    parts: Iterable[pa.RecordBatch], counts: Counter[str], *, grades: int, where: str, option: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows that have a label, or a score; the others are counted as `without_label`.

    Raises:
        InputError: a grade off the scale; `option` is what would map it.
    """
    for part in parts:
        given = column_of(part, SCORE)
        if given is None:
            given = part["grade"]
            check_scale(grades_seen(given), grades, where=where, option=option)
        counts["without_label"] += given.null_count
        yield part.filter(given.is_valid()) if given.null_count else part


def no_labels() -> pa.RecordBatch:
    """The columns that every part has, without a row."""
    return pa.RecordBatch.from_pydict({name: pa.array([], kind) for name, kind in _TYPES.items()})


def put_together(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Parts as one; a column that some lack is null there."""
    whole = pa.concat_tables([pa.Table.from_batches([part]) for part in parts], promote_options="permissive")
    return pa.RecordBatch.from_pydict({name: whole[name].combine_chunks() for name in whole.column_names})


def gather(parts: Iterable[pa.RecordBatch], *, grades: int, where: str, option: str | None = None) -> Labelled:
    """A set's labels in the order of its rows; rows without a label are counted and left out.

    Raises:
        InputError: a grade off the scale, or a distribution that does not sum to 1.
    """
    counts = Counter[str]()
    labelled = labelled_parts(
        parts,
        counts,
        grades=grades,
        where=where,
        option=option,
    )
    rows = put_together([no_labels(), *labelled])
    rows = rows.take(pa.array(np.argsort(rows["row_id"].to_numpy(), kind="stable")))
    probs = distributions(column_of(rows, "probs"), grades, where=where)
    return Labelled(where, rows, probs, counts["without_label"])


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
    column = run.plan.facts.columns.gold
    if column is not None:
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
    folder = run.folder
    files = [file for file in run.found.labels if file.rows]
    tables = map_concurrent(folder.store, lambda file: read_labels(folder, file), files)
    table = next(tables, None)
    for shard in run.plan.shards:
        row_ids = None if shard.row_ids is None else shard_row_ids(folder.store, shard)
        for chunk in read_chunks(dataset, shard, row_ids, range(len(shard.chunks))):
            pairs = {pair.row_id: (pair.query, pair.document) for pair in chunk.pairs}
            while table is not None and table["row_id"][0].as_py() in pairs:
                texts = [pairs[row] for row in table["row_id"].to_pylist()]
                columns = [*table.columns, [query for query, _ in texts], [document for _, document in texts]]
                if gold is not None:
                    columns.append(gold.take(table["row_id"]))
                yield pa.table(columns, schema=schema)
                table = next(tables, None)
    if table is not None:
        raise ManifestError(f"{run.root}: its label files are not in the order of its plan. Restore manifest.json.")
