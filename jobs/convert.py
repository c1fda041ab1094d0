"""Converts a source to TREC, a search tool's judgments, JSON lines or Parquet: reads its pairs, settles duplicates,
writes the target.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.dataset_card import CARD_NAME, render_dataset_card
from relabel.jobs.output import values_table
from relabel.jobs.query_texts import load_queries, with_ids, with_texts
from relabel.jobs.tables import check_free, open_tables, scratch_folder, translate_polars_errors, written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.forms import (
    FORMS,
    GZIP_SUFFIX,
    LINE,
    PARQUET,
    RUN,
    TREC,
    Form,
    file_columns,
    form_by_suffix,
    form_of,
    read_text,
    row_text_of,
    write_grouped,
)
from relabel.manifests.gold import FROM_GOLD
from relabel.manifests.judgments import Heading
from relabel.manifests.label_sets import is_run, join_texts
from relabel.manifests.metrics.judged import RANK
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.process import require
from relabel.manifests.run_labels import RunLabels, file_schema, open_run_labels
from relabel.manifests.secrets import counted, one_line, shortened
from relabel.manifests.store import map_concurrent
from relabel.manifests.tables import BrokenTexts, NeededColumn, is_score, own_column, reading, require_columns

# ------------------------------------------------------------------------------
# Which form a source or target has. A source may also be a run's output folder, whose form is `labels`.


WHOLE = r"^[+-]?[0-9]{1,9}(\.0*)?$"
"""A grade as text: a whole number, which may be written `1.`, as some assessors' exports have it."""

LABELS = "labels"
WRITABLE = tuple(form for form in FORMS if form.write is not None)
"""What a target may be; a source may be any form, or a run."""


def source_form(path: str, named: str | None, storage: Storage) -> Form | None:
    """The form of a source: as named, else by its suffix; None for a run's output folder.

    Raises:
        InputError: nothing is there, under a name without a known suffix.
        UsageError: the form is unclear.
    """
    if named == LABELS:
        return None
    if named is not None:
        return _form_named(named)
    form = form_by_suffix(path, FORMS)
    # Spark writes folders named like files; what reads a run refuses rounds
    has_plan = not is_url(path) and any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))
    if has_plan or (form is None and is_run(path, storage)):
        return None
    form = form_of(path, FORMS, storage)
    if form is None:
        if not is_url(path) and not Path(path).exists():
            raise InputError(f"{path}: no such file or folder.")
        raise _unclear(path, "--from", FORMS, [LABELS])
    return form


def target_form(path: str, named: str | None) -> Form:
    """The form of a target: as named, else by its suffix.

    Raises:
        UsageError: the form is unclear.
    """
    if path.lower().endswith(GZIP_SUFFIX):
        raise UsageError(f"{path}: files are written unpacked. Leave {GZIP_SUFFIX} off, and compress it afterwards.")
    form = form_by_suffix(path, WRITABLE) if named is None else _form_named(named)
    if form is None:
        raise _unclear(path, "--to", WRITABLE, [])
    return form


def _form_named(name: str) -> Form:
    return next(form for form in FORMS if form.name == name)


def _unclear(path: str, option: str, forms: Sequence[Form], further: Sequence[str]) -> UsageError:
    names = [*further, *(form.name for form in forms)]
    suffixes = ", ".join(f"{suffix} ({form.name})" for form in forms for suffix in form.suffixes)
    return UsageError(
        f"{path}: its form is not clear from its name. Name it with {option} {'|'.join(names)}; known suffixes are "
        f"{suffixes}."
    )


# ------------------------------------------------------------------------------
# Opens a source of any format as local Parquet files, and reads its pairs with their grades or scores, checked.


Kind = Literal["grade", "score"]
Rule = Literal["error", "first", "mean", "keep"]
SCORES = ("score", "expected_grade")
"""Columns that rank without being named, the first that is there."""
_TYPES = {"grade": pa.int64(), "score": pa.float64()}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ConvertOptions:
    """What `relabel convert` was given: forms and columns are None where the user named none.

    Args:
        by, doc, query: columns of query, document and the query's text of a table.
        queries: a table of query ids and texts, for a source that has only one of them.
        columns_of_queries: its columns of ids and texts.
        index, template: of judgments for a search tool, see `Heading`; the template is a file.
        tag: of a run file's rows.
        duplicates: what becomes of a pair with several values.
        texts: add a run's texts.
        card: of a run: write a data set's card next to the target.
    """

    from_format: str | None = None
    to_format: str | None = None
    by: str = "query_id"
    doc: str = "doc_id"
    query: str = "query"
    queries: str | None = None
    columns_of_queries: tuple[str, str] = ("query_id", "query")
    index: str | None = None
    template: str | None = None
    grade: str | None = None
    score: str | None = None
    tag: str | None = None
    duplicates: Rule = "error"
    texts: bool = False
    card: bool = False
    allow_partial: bool = False
    force: bool = False


@dataclass(frozen=True)
class Source:
    """Rows to convert.

    Args:
        form: None for a run's labels.
        files: Parquet on this machine, with all columns that the target wants.
        names: their columns.
        value: column of grades or scores; `kind` is which. Empty: the source has none, and all its rows are written.
        row_column: column that says where a row comes from, and what to call it in a message; None: its position.
        run: whose labels they are.
    """

    path: str
    form: Form | None
    files: list[str]
    names: list[str]
    value: str
    kind: Kind
    row_column: str | None = None
    run: RunLabels | None = None

    def row_text(self, at: int) -> str:
        """How messages name a row."""
        return row_text_of(self.form)(at) if self.row_column is None else f"{self.row_column} {at}"


def open_source(
    path: str, form: Form | None, target: Form, options: ConvertOptions, scratch: Path, storage: Storage
) -> Source:
    """Read a source as far as a target wants it. A Parquet file is read where it is, a run's labels are checked and
    gathered in a scratch file, all else is read whole into one.

    Raises:
        InputError: it can't be read, has another form, or lacks a column.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    file = scratch / "source.parquet"
    if form is None:
        return _from_run(
            path,
            target,
            options,
            file,
            storage,
        )
    if form is PARQUET:
        tables = open_tables(
            path,
            {},
            storage,
            role="SOURCE",
            ids=(options.by, options.doc),
        )
        names = tables.schema.names
        value, kind = _columns(names, path, target, options)
        return Source(
            path=path,
            form=form,
            files=tables.files,
            names=names,
            value=value,
            kind=kind,
        )
    table = _table(
        path,
        form,
        target,
        options,
        storage,
    )
    names = [name for name in table.column_names if name != LINE]
    value, kind = _columns(names, path, target, options)
    if not names:
        names = [options.by, options.doc, value]
        table = pa.schema(zip(names, (pa.string(), pa.string(), _TYPES[kind]), strict=True)).empty_table()
    with reading(path):
        pq.write_table(table, file, row_group_size=1 << 16)
    row_column = LINE if form in TREC else None
    return Source(
        path=path,
        form=form,
        files=[str(file)],
        names=names,
        value=value,
        kind=kind,
        row_column=row_column,
    )


def with_columns_of_queries(
    path: str, form: Form | None, queries: str, options: ConvertOptions, storage: Storage
) -> ConvertOptions:
    """Options that name the columns of the source and of the table of queries, which may be called otherwise in one of
    the two: a file for a search tool has its own names whatever a team calls its columns.
    """
    if form is None:
        names = ["query_id", "query"]
    elif form is PARQUET:
        names = open_tables(path, {}, storage, role="SOURCE").schema.names
    else:
        names = file_columns(path, storage, form)
    names_of_queries = file_columns(queries, storage)
    return replace(
        options,
        by=own_column(options.by, "query_id", names, names_of_queries),
        query=own_column(options.query, "query", names, names_of_queries),
        columns_of_queries=(
            own_column(options.by, "query_id", names_of_queries, names),
            own_column(options.query, "query", names_of_queries, names),
        ),
    )


def _table(path: str, form: Form, target: Form, options: ConvertOptions, storage: Storage) -> pa.Table:
    """A file that is read whole, as a table. Ids, all that a TREC file is made of, and columns with any text are text.

    Raises:
        InputError: it is not of this form, or a column can't be held as one.
    """
    texts = {options.by, options.doc}
    if target is RUN:
        texts |= {options.score or SCORES[0], *SCORES, "tag"}
    elif target.columns:
        texts |= {options.query, options.grade or "grade"}

    def choose(names: list[str]) -> list[str]:
        _columns(names, path, target, options)
        if form in TREC:
            return [LINE, *(name for name in names if name not in ("iteration", "q0"))]
        return [name for name in names if not target.columns or name in texts or name == FROM_GOLD]

    columns = {}
    for name, values in form.read(path, choose, storage).items():
        is_text = name in texts or any(isinstance(value, str) for value in values)
        try:
            columns[name] = pa.array(map(_as_text, values) if is_text else values)
        except (pa.ArrowException, UnicodeError, OverflowError) as exc:  # kinds mixed, half a surrogate pair, 65 bits
            raise InputError(f"{path}: column `{name}` can't be read as one: {shortened(str(exc), 200)}.") from exc
    table = pa.table(columns)
    if options.queries is None or not form.is_by_text or target.is_by_text:
        return table
    queries = load_queries(options.queries, *options.columns_of_queries, storage)
    return with_ids(table, path, queries, row_text=row_text_of(form))


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _from_run(path: str, target: Form, options: ConvertOptions, file: Path, storage: Storage) -> Source:
    run = open_run_labels(path, storage, allow_partial=options.allow_partial)
    if target.columns and target is not RUN and run.plan.facts.labeler.grades == 0:
        raise UsageError(
            f"{path}: labeler {run.plan.facts.labeler.name} gives no grades, and {target.name} holds nothing else. "
            "Convert it to a table, or a reranker's scores to a run file."
        )
    wants_text = target.wants_text and options.queries is None
    has_texts = options.texts or wants_text
    whole, joined = join_texts(run, storage) if has_texts else (file_schema(run.plan.parts), None)
    value, kind = _columns(whole.names, path, target, options)
    wanted = list(whole.names)
    if target.columns:
        wanted = list(dict.fromkeys(["row_id", options.by, options.doc, value]))
        if wants_text:
            wanted.append("query")
    schema = pa.schema([whole.field(name) for name in wanted], whole.metadata)
    tables = map_concurrent(
        run.folder.store,
        lambda one: run.folder.table(one, whole, wanted if target.columns else None),
        run.found.labels,
    )
    write_grouped(file, schema, (table.select(schema.names).cast(schema) for table in joined or tables))
    return Source(
        path=path,
        form=None,
        files=[str(file)],
        names=wanted,
        value=value,
        kind=kind,
        row_column="row_id",
        run=run,
    )


def _columns(names: list[str], path: str, target: Form, options: ConvertOptions) -> tuple[str, Kind]:
    """The column of grades or scores by which rows are kept, and which of the two that is. The column is empty where a
    table without any becomes another table.

    Args:
        names: of the source; none where it is empty, and then none is missing.
    """
    is_named = options.grade is not None or options.score is not None
    is_chosen = is_named or options.duplicates in ("first", "mean")
    if names and not target.columns and not is_chosen and not {"grade", *SCORES} & set(names):
        return "", "grade"
    kind = _kind(names, target, options)
    if kind == "grade":
        value = options.grade or "grade"
    else:
        value = options.score or next((name for name in SCORES if name in names), SCORES[0])
    if names:
        needed = (
            NeededColumn(options.by, "the query id", "--by"),
            NeededColumn(options.doc, "the document id", "--doc"),
            NeededColumn(value, f"the {kind}", f"--{kind}"),
        )
        require_columns(needed, names, path=path)
    return value, kind


def _kind(names: list[str], target: Form, options: ConvertOptions) -> Kind:
    if target.columns and target.has_grades:
        return "grade"
    if target is RUN or options.score is not None:
        return "score"
    return "grade" if options.grade or "grade" in names or not names else "score"


def read_pairs(polars: Any, source: Source, target: Form, options: ConvertOptions, storage: Storage) -> Any:
    """All rows of a source as a frame: `row` (position in the source), `query_id` and `doc_id` as text, `value` as a
    number or null, and, where the target wants it, `tag` if the source has one, and `query`, the query's text. Of a
    target that knows queries by their texts, `query_id` is the text, and `id` the id.

    Raises:
        InputError: names the first row whose value is not a number (a grade: no whole one), or whose id or text is
            missing or can't be in the target.
    """
    frame = polars.scan_parquet(source.files, glob=False)
    schema = frame.collect_schema()
    value, is_odd = _value_of(polars, source, schema[source.value])
    index = next(name for name in ("__row" + "_" * length for length in range(len(schema) + 1)) if name not in schema)
    shown = polars.col(source.value).cast(polars.String, strict=False).str.slice(0, SHOWN_CHARACTERS)
    further = {}
    if target is RUN and schema.get("tag") == polars.String:
        further["tag"] = polars.col("tag")
    if target.wants_text and options.queries is None:
        further["query"] = polars.col(_text_column(source, list(schema), target, options)).cast(polars.String)
    wanted = frame.with_row_index(index).select(
        row=polars.col(index).cast(polars.Int64),
        at=polars.col(source.row_column or index).cast(polars.Int64),
        query_id=polars.col(options.by).cast(polars.String),
        doc_id=polars.col(options.doc).cast(polars.String),
        value=value,
        odd=polars.when(is_odd).then(shown),
        **further,
    )
    with translate_polars_errors(source.path):
        rows = wanted.collect(engine="streaming")
    if target.wants_text and options.queries is not None:
        queries = load_queries(options.queries, *options.columns_of_queries, storage)
        rows = with_texts(polars, rows, options.queries, queries)
    if target.is_by_text:
        rows = rows.with_columns(id=polars.col("query_id"), query_id=polars.col("query"))
    _check(
        polars,
        rows,
        source,
        target,
        options,
    )
    return rows.drop("at", "odd")


def _text_column(source: Source, names: list[str], target: Form, options: ConvertOptions) -> str:
    """The column of the query's text.

    Raises:
        InputError: there is none.
    """
    column = "query" if source.run is not None else options.query
    if column not in names:
        held = ", ".join(name for name in names if name != LINE)
        raise InputError(
            f"{source.path}: no column `{column}`, and {target.example} wants the texts of queries; it has {held}. "
            "Name it with --query, or give a table of query ids and texts with --queries FILE."
        )
    return column


def _value_of(polars: Any, source: Source, kind: Any) -> tuple[Any, Any]:
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
    if source.kind == "grade":
        is_number = text.str.contains(WHOLE)
        return polars.when(is_number).then(number).cast(polars.Int64), ~is_number
    is_number = number.is_finite().fill_null(value=False)
    return polars.when(is_number).then(number), text.is_not_null() & ~is_number


def _check(polars: Any, frame: Any, source: Source, target: Form, options: ConvertOptions) -> None:
    """Raise for the first row that is at fault, in the order of values, missing ids, ids that the target can't hold."""
    names = {"query_id": options.by, "doc_id": options.doc, "query": options.query, "tag": "tag"}
    wanted = ["query_id", "doc_id"]
    if target.wants_text:
        wanted.insert(0, "query")
    valued = frame.filter(polars.col("value").is_not_null())
    faults = [("odd", frame.filter(polars.col("odd").is_not_null()))]
    faults += [(name, valued.filter(polars.col(name).is_null())) for name in wanted]
    if target.unwritable:
        texts = [name for name in (*wanted, "tag") if name in frame.columns]
        faults += [(name, valued.filter(polars.col(name).str.contains(target.unwritable))) for name in texts]
    for name, rows in faults:
        if not rows.height:
            continue
        first = rows.row(0, named=True)
        where = f"{source.path}: {source.row_text(first['at'])}"
        others = f" ({rows.height:,} such rows)" if rows.height > 1 else ""
        if name == "odd":
            raise InputError(f"{where}: {_odd_text(source, first['odd'], others)}")
        if first[name] is None and name == "query" and options.queries is not None:
            raise InputError(
                f"{where}: {options.queries} has no text for query {first.get('id', first['query_id'])!r}{others}. Add "
                "it, or leave the row out."
            )
        if first[name] is None:
            raise InputError(f"{where} has no `{names[name]}`{others}. Give every row one, or leave the row out.")
        raise InputError(
            f"{where}: `{names[name]}` is {first[name][:SHOWN_CHARACTERS]!r}{others}, which {_kind_of_file(target)} "
            f"can't hold ({target.example}: {target.limits}). {_how_to_write(source, target)}"
        )


def _kind_of_file(target: Form) -> str:
    return "a TREC file" if target in TREC else f"a file of {target.name}"


def _how_to_write(source: Source, target: Form) -> str:
    """What to do about a text that a target can't hold."""
    if source.form is not None and source.form.is_by_text and not target.is_by_text:
        return "Give the queries' ids with --queries FILE, or convert to .jsonl or .parquet."
    return "Write it otherwise in the source, in all files that name it, or convert to .jsonl or .parquet."


def _odd_text(source: Source, value: str, others: str) -> str:
    """What is wrong with a value that is no grade, or no score, and what to do."""
    number = "whole number of at most 9 digits, as grades are" if source.kind == "grade" else "number"
    text = f"{source.value} {value!r} is not a {number}{others}. "
    if source.kind == "grade" and is_score(value):
        text += f"If it is a score, convert it with --score {source.value}, to a run file or a table. "
    return f"{text}Name another column with --{source.kind}, or leave it empty."


# ------------------------------------------------------------------------------
# Converts a source: reads its pairs, settles duplicates, writes the target.


SHOWN = 5
BATCH_ROWS = 1 << 16
BATCH_BYTES = 16 << 20
"""Rows of a table that are written at a time, and of about how many bytes where rows are long."""
_TREC_TYPES = {"grade": pa.int32(), "rank": pa.int64(), "score": pa.float64()}
"""What the fields of forms that are no tables are in a table; all others are text."""


@dataclass(frozen=True)
class Converted:
    """What was converted.

    Args:
        rows: of the source: those `written`, and the next two.
        nulls: without a grade or score.
        quarantined: rows of a run, which are none of `rows`.
        duplicates: rows beyond the first of their pair, of which `conflicts` pairs had several values.
        value: the column that rows were kept by.
        tag: of a run file; None for that of each row.
        notes: on the run, and on what the target can't say.
        seconds: that it took.
    """

    source: str
    source_format: str
    target: str
    target_format: str
    rows: int
    written: int
    nulls: int
    quarantined: int
    duplicates: int
    conflicts: int
    value: str
    tag: str | None
    notes: list[str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The result for people."""
        head = f"Wrote {self.written:,} rows to {self.target} ({self.target_format})"
        return [one_line(head), values_table(self.as_json())]


def convert(source: str, target: str, options: ConvertOptions, storage: Storage) -> Converted:
    """Convert one file or run into one file, which is there whole or not at all.

    In memory are the ids and values of all rows, and of TREC text and JSON lines the whole source; other columns are
    read and written some rows at a time.

    Raises:
        UsageError: a form is unclear, the target is there already, or options that do not go together.
        InputError: see `open_source` and `read_pairs`, or pairs have several values and `duplicates` is `error`.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target or scratch files can't be written; what was there before stays.
        MissingExtraError: polars is absent.
    """
    started = time.perf_counter()
    form = source_form(source, options.from_format, storage)
    to = target_form(target, options.to_format)
    check_options(source, form, to, options)
    if options.queries is not None and (options.by, options.query) != options.columns_of_queries:
        options = with_columns_of_queries(source, form, options.queries, options, storage)
    heading = heading_of(target, to, options, storage)
    inputs = (source, *filter(None, (options.queries, options.template)))
    check_free(target, inputs, storage, force=options.force)
    card_place = card_of(target)
    if options.card:
        try:
            check_free(card_place, inputs, storage, force=options.force)
        except UsageError as exc:
            raise UsageError(
                f"--card writes {CARD_NAME} next to the target, and can't: {exc} Or put the target into a "
                "folder of its own."
            ) from exc
    polars = require("polars", extra="eval", purpose="relabel convert")
    with scratch_folder("relabel-convert-") as folder:
        opened = open_source(
            path=source,
            form=form,
            target=to,
            options=options,
            scratch=folder,
            storage=storage,
        )
        if opened.value:
            pairs = read_pairs(polars, opened, to, options, storage)
            valued = pairs.filter(polars.col("value").is_not_null())
            kept, conflicts = _settled(polars, opened, valued, options.duplicates)
        else:
            pairs = valued = kept = _all_rows(polars, opened)
            conflicts = 0
        tag = options.tag
        if tag is None and to is RUN and "tag" not in pairs.columns:  # else rows have their own
            tag = opened.run.plan.name if opened.run else "relabel"
        if tag is not None and re.search(RUN.unwritable, tag):
            raise UsageError(f"--tag {tag!r}: a field of a run file can't be empty or hold white space.")
        texts = BrokenTexts()
        if to is RUN:
            schema, tables = _ranked(polars, kept, tag)
        elif to.columns:
            schema, tables = _judgments(polars, kept)
        else:
            has_means = options.duplicates == "mean" and conflicts > 0
            schema, tables = _batches(opened, kept, texts, has_means=has_means)
        assert to.write is not None
        with written(target, storage) as file:
            to.write(file, schema, tables, heading)
        if options.card and opened.run:
            card = render_dataset_card(opened.run, schema, kept.height)
            with written(card_place, storage) as file:
                file.write_text(card, encoding="utf-8")
        texts.report()
        notes = [*(opened.run.notes if opened.run else []), *_remarks(opened, kept)]
        if options.card:
            notes.append(f"the card is in {card_place}")
        if FROM_GOLD in opened.names and to.columns:
            notes.append(
                f"{source} says which of its labels are gold's (`{FROM_GOLD}`), and {target} can't: do not judge it by "
                "that gold"
            )
    return Converted(
        source=source,
        source_format=_name_of(form),
        target=target,
        target_format=to.name,
        rows=pairs.height,
        written=kept.height,
        nulls=pairs.height - valued.height,
        quarantined=opened.run.found.tally.num_quarantined if opened.run else 0,
        duplicates=valued.height - kept.height,
        conflicts=conflicts,
        value=opened.value,
        tag=tag,
        notes=notes,
        seconds=round(time.perf_counter() - started, 3),
    )


def _all_rows(polars: Any, source: Source) -> Any:
    """The rows of a source without grades and scores, as `read_pairs` returns them, but without ids and values."""
    num_rows = sum(pq.read_metadata(file).num_rows for file in source.files)
    return polars.select(row=polars.int_range(num_rows), value=polars.lit(None, polars.Int64))


def _remarks(source: Source, kept: Any) -> Iterator[str]:
    """What a target holds that its reader may not expect."""
    if not source.value:
        yield (
            f"{source.path} has neither grades nor scores, so that all its rows are written as they are; --grade or "
            "--score names a column of them"
        )
    elif source.kind == "grade":
        num_negative = int((kept["value"] < 0).sum())
        if num_negative:
            yield (
                f"{counted(num_negative, 'grade')} of {source.path} below 0, written as they are: in TREC's qrels they "
                "mean not judged, or spam. `relabel evaluate --map` says what they count as"
            )


def card_of(target: str) -> str:
    """Where the card of a data set lies: next to it."""
    return f"{target.rpartition('/')[0]}/{CARD_NAME}" if "/" in target else CARD_NAME


def check_options(source: str, form: Form | None, target: Form, options: ConvertOptions) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: which, and what to give instead.
    """
    if options.texts and (form is not None or target.columns):
        raise UsageError(
            f"--texts: {source} is {_name_of(form)}, the target {target.name}. Texts are joined from a run's output "
            "folder (labels), which knows its input, into a table, .parquet or .jsonl."
        )
    if options.card and (form is not None or target.columns):
        raise UsageError(
            f"--card: {source} is {_name_of(form)}, the target {target.name}. A card says what made a run's labels, so "
            "the source is an output folder, and the target a table, .parquet or .jsonl."
        )
    if options.duplicates == "keep" and target.columns:
        raise UsageError(
            f"--duplicates keep: a pair occurs once in {_kind_of_file(target)} ({target.name}). Choose first or mean."
        )
    if options.tag is not None and target is not RUN:
        raise UsageError("--tag: only run files have one.")
    if options.score is not None and target is not RUN and target.columns:
        raise UsageError(f"--score: {target.name} holds grades. Name their column with --grade, or write a run file.")
    if options.score == RANK and target is RUN:
        raise UsageError(
            f"--score {RANK}: ranks count from the best, and a run file's scores rank the highest first. Name a column "
            "of scores; `relabel systems` and `evaluate --baseline` take ranks as they are."
        )
    if options.grade is not None and target is RUN:
        raise UsageError(
            "--grade: a run file holds scores. Name their column with --score, which may be one of grades."
        )
    if form is RUN and (options.grade is not None or (target is not RUN and target.columns)):
        raise UsageError(
            f"{source}: a TREC run is a ranking by scores, and has no grades. Convert it to a run file or a table "
            "(--score names the column); `relabel systems` compares rankings."
        )
    if options.grade is not None and options.score is not None:
        raise UsageError("--grade and --score: rows are kept by one column. Name the one that must not be null.")


def heading_of(target: str, form: Form, options: ConvertOptions, storage: Storage) -> Heading:
    """What the target says besides its rows.

    Raises:
        UsageError: an option is missing, or the form has no place for one.
        InputError: the search request can't be read, or has no place for the query.
    """
    if options.index is not None and "index" not in form.needs:
        raise UsageError(f"--index: {form.name} names none.")
    if options.template is not None and not {"template", "request"} & set(form.needs):
        raise UsageError(f"--template: {form.name} has none.")
    if options.index is None and "index" in form.needs:
        raise UsageError(f"--index: {form.name} names the index that its documents are in.")
    if options.template is None and "template" in form.needs:
        raise UsageError(f"--template: {form.name} names the file of the search request.")
    if options.template is None and "request" in form.needs:
        raise UsageError(
            f"--template: {form.name} holds a search request. Give a file with one, in which {{{{query}}}} becomes the "
            "query's text."
        )
    request = None
    if options.template is not None and "request" in form.needs:
        request = _request(options.template, storage)
    name = PurePosixPath(target).name.split(".")[0]
    template = None if options.template is None else PurePosixPath(options.template).name
    return Heading(name, options.index, template, request)


def _request(path: str, storage: Storage) -> Any:
    text = read_text(path, storage)
    try:
        request = json.loads(text)
    except ValueError as exc:
        raise InputError(f"{path}: not readable as JSON: {exc}.") from exc
    if "{{query}}" not in text:
        raise InputError(f"{path}: {{{{query}}}} is not in it, so that all queries would ask the same.")
    return request


def _name_of(form: Form | None) -> str:
    return LABELS if form is None else form.name


def _settled(polars: Any, source: Source, rows: Any, rule: Rule) -> tuple[Any, int]:
    """One row a pair, the first, with its value or the mean of the pair's; and how many pairs have several values.

    Raises:
        InputError: pairs have several values and nobody said which counts.
    """
    pair = ["query_id", "doc_id"]
    value = polars.col("value")
    num_pairs = rows.select(polars.struct(pair).hash().n_unique()).item()  # or more, where hashes collide
    if rule == "keep" or num_pairs == rows.height:
        return rows, 0
    kept = rows.unique(pair, keep="first", maintain_order=True)
    ids = polars.col("id" if "id" in rows.columns else "query_id").unique(maintain_order=True).alias("ids")
    groups = (
        rows.filter(polars.struct(pair).is_duplicated())
        .group_by(pair, maintain_order=True)
        .agg("value", ids)
        .filter(value.list.n_unique() > 1)
    )
    if groups.height and rule == "error":
        examples = [
            f"query {query}, document {doc}: {', '.join(f'{one:g}' for one in values)}{_ids_text(ids, query)}"
            for query, doc, values, ids in groups.head(SHOWN).iter_rows()
        ]
        more = "; …" if groups.height > SHOWN else ""
        raise InputError(
            f"{source.path}: {groups.height:,} pairs have several {source.kind}s that differ ({'; '.join(examples)}"
            f"{more}). Fix the source, or choose: --duplicates first or --duplicates mean; .jsonl and .parquet take "
            "--duplicates keep."
        )
    if groups.height and rule == "mean":
        total = value.list.sum()
        count = value.list.len().cast(polars.Int64)
        mean = (2 * total + count) // (2 * count) if source.kind == "grade" else value.list.mean()
        kept = kept.join(groups.select(*pair, mean=mean), on=pair, how="left", maintain_order="left")
        kept = kept.with_columns(value=polars.coalesce("mean", "value")).drop("mean")
    return kept, groups.height


def _ids_text(ids: list[str], query: str) -> str:
    """The ids of a query that is known by its text, where they are not that text."""
    return "" if ids == [query] else f" (of ids {', '.join(ids[:SHOWN])})"


def _judgments(polars: Any, rows: Any) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Judgments as `Write` wants them."""
    query = polars.col("query") if "query" in rows.columns else polars.lit(None, polars.String).alias("query")
    judgments = rows.select("query_id", query, "doc_id", polars.col("value").alias("grade")).to_arrow()
    return judgments.schema, iter([judgments])


def _ranked(polars: Any, rows: Any, tag: str | None) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The lines of a run file: queries in the order in which they first come, documents by score. Equal scores are
    ordered by document id, descending by its bytes, which is how trec_eval breaks ties whatever the ranks say.

    Args:
        tag: of every line; None: the rows' own.
    """
    ranked = rows.sort(polars.col("row").min().over("query_id"), "value", "doc_id", descending=[False, True, True])
    lines = ranked.select(
        "query_id",
        polars.lit("Q0").alias("q0"),
        "doc_id",
        polars.int_range(1, polars.len() + 1).over("query_id").alias("rank"),
        polars.col("value").cast(polars.String),
        polars.col("tag") if tag is None else polars.lit(tag).alias("tag"),
    ).to_arrow()
    return lines.schema, iter([lines])


def _batches(source: Source, kept: Any, texts: BrokenTexts, *, has_means: bool) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """All columns of the kept rows, in the order of the source, in tables of the schema.

    Args:
        texts: counts those that are not UTF-8, which become such.
    """
    rows = kept["row"].to_numpy()
    values = kept["value"].to_arrow()
    stored_schema = pq.read_schema(source.files[0])
    schema = pa.schema([stored_schema.field(name) for name in source.names], metadata=stored_schema.metadata)
    typed = schema
    has_fields = source.form is not None and bool(source.form.columns)
    is_read = has_means or has_fields
    if has_fields:
        typed = pa.schema([(name, _TREC_TYPES.get(name, pa.string())) for name in source.names])
    if source.kind == "score" and (has_means or (has_fields and source.value == "grade")):
        typed = typed.set(typed.get_field_index(source.value), pa.field(source.value, pa.float64()))

    def tables() -> Iterator[pa.Table]:
        row = 0
        for path in source.files:
            file_row = row
            with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                for batch in parquet.iter_batches(batch_size=_batch_rows(parquet.metadata), columns=source.names):
                    begin, end = np.searchsorted(rows, [row, row + batch.num_rows])
                    stored = pa.Table.from_batches([batch]).select(source.names).cast(schema)
                    table = texts.mend(stored, path, row - file_row, ()).cast(schema)
                    table = table.take(pa.array(rows[begin:end] - row))
                    row += batch.num_rows
                    if is_read:
                        at = table.column_names.index(source.value)
                        table = table.set_column(
                            at, source.value, values.slice(begin, end - begin).cast(typed.field(at).type)
                        )
                    if table.num_rows:  # readers fail at a row group without rows (datasets 5.2)
                        yield table.cast(typed)

    return typed, tables()


def _batch_rows(metadata: pq.FileMetaData) -> int:
    groups = [group for group in map(metadata.row_group, range(metadata.num_row_groups)) if group.num_rows]
    longest = max((group.total_byte_size / group.num_rows for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))
