"""Opens a source of any format as local Parquet files, and reads its pairs with their grades or scores, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.formats import TREC, Format
from relabel.jobs.tables import open_tables, translate_polars_errors, write_grouped
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import EXAMPLES, QRELS_COLUMNS, RUN_COLUMNS, UNWRITABLE, WHOLE
from relabel.manifests.input_files import reading
from relabel.manifests.label_sets import join_texts
from relabel.manifests.run import file_schema, open_run_labels
from relabel.manifests.secrets import shortened
from relabel.manifests.store import map_concurrent
from relabel.manifests.tables import from_jsonl, from_trec, read_text, require_column

Kind = Literal["grade", "score"]
SCORES = ("score", "expected_grade")
"""Columns that rank without being named, the first that is there."""
GROUP_ROWS = 1 << 16
_TYPES = {"grade": pa.int64(), "score": pa.float64()}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Options:
    """What `relabel convert` was given about a source; None where the user named no column."""

    by: str = "query_id"
    doc: str = "doc_id"
    grade: str | None = None
    score: str | None = None
    allow_partial: bool = False
    texts: bool = False


@dataclass(frozen=True)
class Source:
    """Rows to convert.

    Args:
        files: Parquet on this machine, with all columns that the target wants.
        names: their columns.
        by, doc, value: columns of query, document, and grade or score.
        kind: what `value` is.
        row_column: column that says where a row comes from, and what to call it in a message; None: its position.
        num_quarantined: rows of a run that have no label.
        run_name: of a run.
        notes: remarks for the user.
    """

    path: str
    form: Format
    files: list[str]
    names: list[str]
    by: str
    doc: str
    value: str
    kind: Kind
    row_column: str | None = None
    num_quarantined: int = 0
    run_name: str | None = None
    notes: list[str] = field(default_factory=list)


def open_source(path: str, form: Format, target: Format, options: Options, scratch: Path, storage: Storage) -> Source:
    """Read a source as far as a target wants it. TREC text and JSON lines are parsed whole into a scratch file, a run's
    labels are checked and gathered there, a Parquet file is read where it is.

    Raises:
        InputError: it can't be read, has another form, or lacks a column.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    file = scratch / "source.parquet"
    if form == "labels":
        return _from_run(path, target, options, file, storage)
    if form == "parquet":
        files, schema, _ = open_tables(path, {}, storage, role="SOURCE", ids=(options.by, options.doc))
        return Source(path, form, files, list(schema), *_columns(list(schema), path, form, target, options))
    text = read_text(path, storage)
    if form == "jsonl":
        table = _json_table(path, text, target, options)
    else:
        columns = QRELS_COLUMNS if form == "qrels" else RUN_COLUMNS
        wanted = ["line", *(name for name in columns if name not in ("iteration", "q0"))]
        table = pa.table(from_trec(path, text, lambda _: wanted, columns))
    row_column = "line" if form in TREC else None
    names = [name for name in table.column_names if name != row_column]
    by, doc, value, kind = _columns(names, path, form, target, options)
    if not names:
        table = pa.table(
            {by: pa.array([], pa.string()), doc: pa.array([], pa.string()), value: pa.array([], _TYPES[kind])}
        )
    with reading(path):
        pq.write_table(table, file, row_group_size=GROUP_ROWS)
    return Source(path, form, [str(file)], names or [by, doc, value], by, doc, value, kind, row_column)


def _json_table(path: str, text: str, target: Format, options: Options) -> pa.Table:
    """JSON lines as a table. Ids, all that a TREC file is made of, and columns with any text are text.

    Raises:
        InputError: a line is no JSON object, or a column can't be held as one.
    """
    columns, texts = {}, {options.by, options.doc}
    if target in TREC:
        texts |= {options.grade or "grade"} if target == "qrels" else {options.score or SCORES[0], *SCORES, "tag"}
    found = from_jsonl(path, text, lambda names: [name for name in names if target not in TREC or name in texts])
    for name, values in found.items():
        is_text = name in texts or any(isinstance(one, str) for one in values)
        written = (one if one is None or isinstance(one, str) else json.dumps(one) for one in values)
        try:
            columns[name] = pa.array(written if is_text else values)
        except (pa.ArrowException, UnicodeError, OverflowError) as exc:  # kinds mixed, half a surrogate pair, 65 bits
            raise InputError(f"{path}: column `{name}` can't be read as one: {shortened(str(exc), 200)}.") from exc
    return pa.table(columns)


def _from_run(path: str, target: Format, options: Options, file: Path, storage: Storage) -> Source:
    run = open_run_labels(path, storage, allow_partial=options.allow_partial)
    whole, joined = join_texts(run, storage) if options.texts else (file_schema(run.plan.parts), None)
    by, doc, value, kind = _columns(whole.names, path, "labels", target, options)
    wanted = list(dict.fromkeys(["row_id", by, doc, value])) if target in TREC else whole.names
    schema = pa.schema([whole.field(name) for name in wanted], metadata=whole.metadata)
    names = None if target not in TREC else wanted
    tables = map_concurrent(run.folder.store, lambda one: run.folder.table(one, whole, names), run.labels)
    found = tables if joined is None else joined
    write_grouped(file, schema, (table.select(schema.names).cast(schema) for table in found))
    quarantined, name = run.num_quarantined, run.plan.name
    return Source(path, "labels", [str(file)], wanted, by, doc, value, kind, "row_id", quarantined, name, run.notes)


def _columns(names: list[str], path: str, form: Format, target: Format, options: Options) -> tuple[str, str, str, Kind]:
    """The columns of query, document, and grade or score, by which rows are kept; and which of the two that is.

    Args:
        names: of the source; none where it is empty, and then none is missing.
    """
    kind: Kind = "score"
    if target == "qrels" or (
        target != "run" and options.score is None and (options.grade or "grade" in names or not names)
    ):
        value, kind = options.grade or "grade", "grade"
    else:
        usual = "expected_grade" if form == "labels" else next((name for name in SCORES if name in names), SCORES[0])
        value = options.score or usual
    if names:
        require_column(options.by, names, path=path, role="the query id", option="--by")
        require_column(options.doc, names, path=path, role="the document id", option="--doc")
        require_column(value, names, path=path, role=f"the {kind}", option=f"--{kind}")
    return options.by, options.doc, value, kind


def read_pairs(polars: Any, source: Source, target: Format) -> Any:
    """All rows of a source as a frame: `row` (position in the source), `query_id` and `doc_id` as text, `value` as a
    number or null, and `tag` where a run file wants it and the source has one.

    Raises:
        InputError: names the first row whose value is not a number (for qrels: no whole one), or whose id is missing or
            can't be in TREC.
    """
    frame = polars.scan_parquet(source.files, glob=False)
    schema = frame.collect_schema()
    value, is_odd = _value_of(polars, source, schema[source.value], target)
    index = next(name for name in ("__row" + "_" * length for length in range(len(schema) + 1)) if name not in schema)
    shown = polars.col(source.value).cast(polars.String, strict=False).str.slice(0, SHOWN_CHARACTERS)
    wanted = frame.with_row_index(index).select(
        row=polars.col(index).cast(polars.Int64),
        at=polars.col(source.row_column or index).cast(polars.Int64),
        query_id=polars.col(source.by).cast(polars.String),
        doc_id=polars.col(source.doc).cast(polars.String),
        value=value,
        odd=polars.when(is_odd).then(shown),
        **({"tag": polars.col("tag")} if target == "run" and schema.get("tag") == polars.String else {}),
    )
    with translate_polars_errors(source.path):
        found = wanted.collect(engine="streaming")
    _check(polars, found, source, target)
    return found.drop("at", "odd")


def _is_whole(source: Source, target: Format) -> bool:
    return target == "qrels" or (source.form == "qrels" and source.kind == "grade")


def _value_of(polars: Any, source: Source, kind: Any, target: Format) -> tuple[Any, Any]:
    """The value as a number, null where it is null, NaN or blank; and which values are no such number.

    Raises:
        InputError: the column holds something that can't be one.
    """
    is_text = kind in (polars.String, polars.Categorical, polars.Null) or isinstance(kind, polars.Enum)
    if not is_text and not kind.is_numeric():
        raise InputError(
            f"{source.path}: column `{source.value}` holds {kind}; a number is wanted. Name another with "
            f"--{source.kind}."
        )
    column = polars.col(source.value)
    text = (column.fill_nan(None) if kind.is_float() else column).cast(polars.String).str.strip_chars()
    text = polars.when(text != "").then(text)
    number = (text if is_text else column).cast(polars.Float64, strict=False)
    if _is_whole(source, target):
        is_number = text.str.contains(WHOLE)
        return polars.when(is_number).then(number).cast(polars.Int64), ~is_number
    is_number = number.is_finite().fill_null(value=False)
    return polars.when(is_number).then(number), text.is_not_null() & ~is_number


def _check(polars: Any, found: Any, source: Source, target: Format) -> None:
    """Raise for the first row that is at fault, in the order of values, missing ids, ids that TREC can't hold."""
    columns = {"odd": source.value, "query_id": source.by, "doc_id": source.doc, "tag": "tag"}
    kept = found.filter(polars.col("value").is_not_null())
    faults = [("odd", found.filter(polars.col("odd").is_not_null()))]
    faults += [(name, kept.filter(polars.col(name).is_null())) for name in ("query_id", "doc_id")]
    if target in TREC:
        texts = [name for name in ("query_id", "doc_id", "tag") if name in found.columns]
        faults += [(name, kept.filter(polars.col(name).str.contains(UNWRITABLE))) for name in texts]
    for name, rows in faults:
        if not rows.height:
            continue
        held = rows.row(0, named=True)
        where = f"{source.path}: {source.row_column or 'row'} {held['at']}"
        others = f" ({rows.height:,} such rows)" if rows.height > 1 else ""
        if name == "odd":
            number = "whole number of at most 9 digits, as qrels want it" if _is_whole(source, target) else "number"
            raise InputError(
                f"{where}: {source.value} {held['odd']!r} is not a {number}{others}. Name another column with "
                f"--{source.kind}, or leave it empty."
            )
        if held[name] is None:
            raise InputError(f"{where} has no `{columns[name]}`{others}. Give every row one, or leave the row out.")
        form = EXAMPLES[QRELS_COLUMNS if target == "qrels" else RUN_COLUMNS]
        raise InputError(
            f"{where}: `{columns[name]}` is {held[name][:SHOWN_CHARACTERS]!r}{others}, which a TREC file can't hold "
            f"({form}: fields end at white space). Write it otherwise in the source, in all files that name it, or "
            "convert to .jsonl or .parquet."
        )
