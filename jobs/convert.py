"""Converts a source to TREC, JSON lines or Parquet: reads its pairs, settles duplicates, writes the target."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.tables import check_free, open_tables, scratch_folder, translate_polars_errors, write_grouped, written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.label_sets import is_run, join_texts
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.process import require
from relabel.manifests.run import RunLabels, file_schema, open_run_labels
from relabel.manifests.secrets import shortened
from relabel.manifests.store import map_concurrent
from relabel.manifests.tables import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    QRELS_COLUMNS,
    BrokenTexts,
    from_jsonl,
    from_trec,
    read_text,
    reading,
    require_column,
)

# ------------------------------------------------------------------------------
# File formats of `relabel convert`: which one a source or target has.


# TREC's two text forms: qrels (`qid 0 docid grade`) and run files (`qid Q0 docid rank score tag`), one row a line,
# fields by white space.
#
# White space is what Python's `str.split` takes for it, since that is what the readers of such files do (ir_measures
# among them): an id with any of it inside would fall apart, so it can't be written.

RUN_COLUMNS = ("query_id", "q0", "doc_id", "rank", "score", "tag")
EXAMPLES = {QRELS_COLUMNS: "`qid 0 docid grade`", RUN_COLUMNS: "`qid Q0 docid rank score tag`"}

UNWRITABLE = "[\\s\\x1c-\\x1f\ufeff]|^$"
"""What an id can't hold: white space (Python counts four separators of ASCII too), and the mark of byte order, which
readers drop at a file's beginning. Nor may it be empty.
"""
WHOLE = r"^[+-]?[0-9]{1,9}(\.0*)?$"
"""A grade as text: a whole number, which may be written `1.`, as some assessors' exports have it."""

Format = Literal["labels", "qrels", "run", "jsonl", "parquet"]
SOURCES: tuple[str, ...] = get_args(Format)

TREC: tuple[Format, ...] = ("qrels", "run")
"""Text forms, in which a pair occurs once."""
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    ".qrels": "qrels",
    ".qrel": "qrels",
    ".run": "run",
}


def format_of(path: str, named: str | None, option: Literal["--from", "--to"], storage: Storage) -> Format:
    """The form of a source (`--from`) or target: as named, else by its suffix; a source that is a folder with a plan is
    a run's labels.

    Raises:
        UsageError: the form is unclear.
    """
    found = named or SUFFIXES.get(PurePosixPath(path).suffix.lower())
    if named is None and option == "--from":
        # Spark writes folders named like files; what reads a run refuses rounds
        has_plan = not is_url(path) and any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))
        found = "labels" if has_plan or (found is None and is_run(path, storage)) else found
    if found is None:
        known = SOURCES if option == "--from" else SOURCES[1:]
        suffixes = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
        raise UsageError(
            f"{path}: its form is not clear from its name. Name it with {option} {'|'.join(known)}; known suffixes are "
            f"{suffixes}."
        )
    return cast("Format", found)


# ------------------------------------------------------------------------------
# Opens a source of any format as local Parquet files, and reads its pairs with their grades or scores, checked.


Kind = Literal["grade", "score"]
SCORES = ("score", "expected_grade")
"""Columns that rank without being named, the first that is there."""
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
        value: column of grades or scores; `kind` is which.
        row_column: column that says where a row comes from, and what to call it in a message; None: its position.
        run: whose labels they are.
    """

    path: str
    form: Format
    files: list[str]
    names: list[str]
    value: str
    kind: Kind
    row_column: str | None = None
    run: RunLabels | None = None


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
        tables = open_tables(path, {}, storage, role="SOURCE", ids=(options.by, options.doc))
        names = tables.schema.names
        return Source(path, form, tables.files, names, *_columns(names, path, form, target, options))
    text, row_column = read_text(path, storage), None
    if form == "jsonl":
        table = _json_table(path, text, target, options)
    else:
        columns, row_column = QRELS_COLUMNS if form == "qrels" else RUN_COLUMNS, "line"
        wanted = ["line", *(name for name in columns if name not in ("iteration", "q0"))]
        table = pa.table(from_trec(path, text, lambda _: wanted, columns))
    names = [name for name in table.column_names if name != row_column]
    value, kind = _columns(names, path, form, target, options)
    if not names:
        names = [options.by, options.doc, value]
        table = pa.schema(zip(names, (pa.string(), pa.string(), _TYPES[kind]), strict=True)).empty_table()
    with reading(path):
        pq.write_table(table, file, row_group_size=1 << 16)
    return Source(path, form, [str(file)], names, value, kind, row_column)


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
    value, kind = _columns(whole.names, path, "labels", target, options)
    wanted = list(dict.fromkeys(["row_id", options.by, options.doc, value])) if target in TREC else whole.names
    schema = pa.schema([whole.field(name) for name in wanted], whole.metadata)
    tables = map_concurrent(
        run.folder.store,
        lambda one: run.folder.table(one, whole, wanted if target in TREC else None),
        run.found.labels,
    )
    write_grouped(file, schema, (table.select(schema.names).cast(schema) for table in joined or tables))
    return Source(path, "labels", [str(file)], wanted, value, kind, "row_id", run)


def _columns(names: list[str], path: str, form: Format, target: Format, options: Options) -> tuple[str, Kind]:
    """The column of grades or scores by which rows are kept, and which of the two that is.

    Args:
        names: of the source; none where it is empty, and then none is missing.
    """
    has_grades = options.score is None and (options.grade or "grade" in names or not names)
    kind: Kind = "grade" if target == "qrels" or (target != "run" and has_grades) else "score"
    usual = "expected_grade" if form == "labels" else next((name for name in SCORES if name in names), SCORES[0])
    value = options.grade or "grade" if kind == "grade" else options.score or usual
    roles = {"by": (options.by, "the query id"), "doc": (options.doc, "the document id"), kind: (value, f"the {kind}")}
    for option, (name, role) in roles.items() if names else ():
        require_column(name, names, path=path, role=role, option=f"--{option}")
    return value, kind


def read_pairs(polars: Any, source: Source, target: Format, options: Options) -> Any:
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
        query_id=polars.col(options.by).cast(polars.String),
        doc_id=polars.col(options.doc).cast(polars.String),
        value=value,
        odd=polars.when(is_odd).then(shown),
        **({"tag": polars.col("tag")} if target == "run" and schema.get("tag") == polars.String else {}),
    )
    with translate_polars_errors(source.path):
        found = wanted.collect(engine="streaming")
    _check(polars, found, source, target, options)
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


def _check(polars: Any, found: Any, source: Source, target: Format, options: Options) -> None:
    """Raise for the first row that is at fault, in the order of values, missing ids, ids that TREC can't hold."""
    columns = {"query_id": options.by, "doc_id": options.doc, "tag": "tag"}
    kept = found.filter(polars.col("value").is_not_null())
    faults = [("odd", found.filter(polars.col("odd").is_not_null()))]
    faults += [(name, kept.filter(polars.col(name).is_null())) for name in ("query_id", "doc_id")]
    if target in TREC:
        faults += [
            (name, kept.filter(polars.col(name).str.contains(UNWRITABLE)))
            for name in ("query_id", "doc_id", "tag")
            if name in found.columns
        ]
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


# ------------------------------------------------------------------------------
# Converts a source to TREC, JSON lines or Parquet: reads its pairs, settles duplicates, writes the target.


Rule = Literal["error", "first", "mean", "keep"]
SHOWN = 5
BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20
"""Rows of a table that are written at a time, and of about how many bytes where rows are long."""
_TREC_TYPES = {"grade": pa.int32(), "rank": pa.int64(), "score": pa.float64()}
"""What the fields of TREC files are in a table; all others are text."""


def convert(
    source: str,
    target: str,
    storage: Storage,
    *,
    from_format: str | None = None,
    to_format: str | None = None,
    options: Options,
    duplicates: Rule = "error",
    tag: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Convert one file or run into one file, which is there whole or not at all.

    In memory are the ids and values of all rows, and of TREC text and JSON lines the whole source; other columns are
    read and written some rows at a time.

    Raises:
        UsageError: a form is unclear, the target is there already, or options that do not go together.
        InputError: see `open_source` and `read_pairs`, or pairs have several values and `duplicates` is `error`.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target or scratch files can't be written; what was there before stays.
        MissingExtraError: polars is absent.
    Returns:
        What was converted: `rows` of the source, which are those `written` plus `nulls` (without a grade or score) plus
        `duplicates` (beyond the first of their pair, of which `conflicts` had several values); `quarantined` rows of a
        run, which are none of these; the column `value`; the `tag` of a run file, null for that of each row; `notes`.
    """
    form, to = format_of(source, from_format, "--from", storage), format_of(target, to_format, "--to", storage)
    refusals = {
        f"--texts: {source} is {form}, the target {to}. Texts are joined from a run's output folder (labels), which "
        "knows its input, into a table, .parquet or .jsonl.": options.texts and (form != "labels" or to in TREC),
        f"--duplicates keep: a pair occurs once in a TREC file ({to}). Choose first or mean.": (
            duplicates == "keep" and to in TREC
        ),
        "--tag: only run files have one.": tag is not None and to != "run",
        "--score: qrels hold grades. Name their column with --grade, or write a run file.": (
            to == "qrels" and options.score is not None
        ),
        "--grade: a run file holds scores. Name their column with --score, which may be one of grades.": (
            to == "run" and options.grade is not None
        ),
        "--grade and --score: rows are kept by one column. Name the one that must not be null.": (
            options.grade is not None and options.score is not None
        ),
    }
    for text, is_so in refusals.items():
        if is_so:
            raise UsageError(text)
    check_free(target, (source,), storage, force=force)
    polars = require("polars", extra="eval", purpose="relabel convert")
    with scratch_folder("relabel-convert-") as folder:
        opened = open_source(source, form, to, options, folder, storage)
        pairs = read_pairs(polars, opened, to, options)
        valued = pairs.filter(polars.col("value").is_not_null())
        kept, conflicts = _settled(polars, opened, valued, duplicates)
        if to == "run" and (tag is not None or "tag" not in pairs.columns):  # else rows have their own
            tag = tag or (opened.run.plan.name if opened.run else "relabel")
        if tag is not None and re.search(UNWRITABLE, tag):
            raise UsageError(f"--tag {tag!r}: a field of a run file can't be empty or hold white space.")
        texts = BrokenTexts()
        with written(target, storage) as file:
            if to in TREC:
                qrels = kept.select("query_id", polars.lit("0").alias("iteration"), "doc_id", "value")
                lines = qrels if to == "qrels" else _ranked(polars, kept, tag)
                lines.write_csv(file, include_header=False, separator=" ", quote_style="never")
            else:
                typed, batches = _batches(opened, kept, texts, has_means=duplicates == "mean" and conflicts > 0)
                if to == "parquet":
                    write_grouped(file, typed, batches)
                else:
                    with file.open("wb") as out:
                        for batch in map(polars.from_arrow, batches):
                            batch.with_columns(polars.selectors.binary().bin.encode("hex")).write_ndjson(out)
        texts.report()
    return {
        "source": source,
        "source_format": form,
        "target": target,
        "target_format": to,
        "rows": pairs.height,
        "written": kept.height,
        "nulls": pairs.height - valued.height,
        "quarantined": opened.run.found.tally.num_quarantined if opened.run else 0,
        "duplicates": valued.height - kept.height,
        "conflicts": conflicts,
        "value": opened.value,
        "tag": tag,
        "notes": opened.run.notes if opened.run else [],
    }


def _settled(polars: Any, source: Source, rows: Any, rule: Rule) -> tuple[Any, int]:
    """One row a pair, the first, with its value or the mean of the pair's; and how many pairs have several values.

    Raises:
        InputError: pairs have several values and nobody said which counts.
    """
    pair, value = ["query_id", "doc_id"], polars.col("value")
    num_pairs = rows.select(polars.struct(pair).hash().n_unique()).item()  # or more, where hashes collide
    if rule == "keep" or num_pairs == rows.height:
        return rows, 0
    kept = rows.unique(pair, keep="first", maintain_order=True)
    groups = (
        rows.filter(polars.struct(pair).is_duplicated())
        .group_by(pair, maintain_order=True)
        .agg("value")
        .filter(value.list.n_unique() > 1)
    )
    if groups.height and rule == "error":
        examples = [
            f"query {query}, document {doc}: {', '.join(f'{one:g}' for one in values)}"
            for query, doc, values in groups.head(SHOWN).iter_rows()
        ]
        more = "; …" if groups.height > SHOWN else ""
        raise InputError(
            f"{source.path}: {groups.height:,} pairs have several {source.kind}s that differ ({'; '.join(examples)}"
            f"{more}). Fix the source, or choose: --duplicates first or --duplicates mean; .jsonl and .parquet take "
            "--duplicates keep."
        )
    if groups.height and rule == "mean":
        total, count = value.list.sum(), value.list.len().cast(polars.Int64)
        mean = (2 * total + count) // (2 * count) if source.kind == "grade" else value.list.mean()
        kept = kept.join(groups.select(*pair, mean=mean), on=pair, how="left", maintain_order="left")
        kept = kept.with_columns(value=polars.coalesce("mean", "value")).drop("mean")
    return kept, groups.height


def _ranked(polars: Any, rows: Any, tag: str | None) -> Any:
    """The lines of a run file: queries in the order in which they first come, documents by score. Equal scores are
    ordered by document id, descending by its bytes, which is how trec_eval breaks ties whatever the ranks say.

    Args:
        tag: of every line; None: the rows' own.
    """
    ranked = rows.sort(polars.col("row").min().over("query_id"), "value", "doc_id", descending=[False, True, True])
    return ranked.select(
        "query_id",
        polars.lit("Q0").alias("q0"),
        "doc_id",
        polars.int_range(1, polars.len() + 1).over("query_id").alias("rank"),
        polars.col("value").cast(polars.String),
        polars.col("tag") if tag is None else polars.lit(tag).alias("tag"),
    )


def _batches(source: Source, kept: Any, texts: BrokenTexts, *, has_means: bool) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """All columns of the kept rows, in the order of the source, in tables of the schema.

    Args:
        texts: counts those that are not UTF-8, which become such.
    """
    rows, values = kept["row"].to_numpy(), kept["value"].to_arrow()
    held = pq.read_schema(source.files[0])
    schema = pa.schema([held.field(name) for name in source.names], metadata=held.metadata)
    typed, is_read = schema, has_means or source.form in TREC
    if source.form in TREC:
        typed = pa.schema([(name, _TREC_TYPES.get(name, pa.string())) for name in source.names])
    if has_means and source.kind == "score":
        typed = typed.set(typed.get_field_index(source.value), pa.field(source.value, pa.float64()))

    def tables() -> Iterator[pa.Table]:
        place = 0
        for path in source.files:
            file_row = place
            with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                for batch in parquet.iter_batches(batch_size=_batch_rows(parquet.metadata), columns=source.names):
                    begin, end = np.searchsorted(rows, [place, place + batch.num_rows])
                    stored = pa.Table.from_batches([batch]).select(source.names).cast(schema)
                    table = texts.mend(stored, path, place - file_row, ()).cast(schema)
                    table = table.take(pa.array(rows[begin:end] - place))
                    place += batch.num_rows
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
