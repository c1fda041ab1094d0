"""Opens a source of any format as local Parquet, checks its rows, and resolves duplicate pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.formats import (
    TREC,
    Block,
    Format,
    blocks,
    json_frame,
    json_names,
    merged_schema,
    refuse_rounded,
    trec_frame,
)
from relabel.jobs.files import full_disk_as_os_error
from relabel.jobs.tables import open_tables, translate_polars_errors
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import BEYOND_GRADES, EXAMPLES, QRELS_COLUMNS, RUN_COLUMNS, UNWRITABLE, WHOLE
from relabel.manifests.label_sets import join_texts
from relabel.manifests.run import file_schema, open_run_labels
from relabel.manifests.store import map_concurrent
from relabel.manifests.tables import require_column

# ------------------------------------------------------------------------------
# A source of any form as local Parquet: text and JSONL are parsed once into a scratch file, a run's labels are checked
# and put together there, a Parquet file is read where it lies.


Kind = Literal["grade", "score"]
SCORES = ("score", "expected_grade")
"""Columns that rank without being named, the first that is there."""
GROUP_BYTES = 16 << 20
"""Rows are gathered to about this size before they are written to the scratch file."""


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

    def scan(self, polars: Any) -> Any:
        """All rows as a lazy frame, in order."""
        return polars.scan_parquet(self.files, glob=False)


def open_source(
    polars: Any, path: str, form: Format, target: Format, options: Options, scratch: Path, storage: Storage
) -> Source:
    """Read a source as far as a target wants it.

    Raises:
        InputError: it can't be read, is not what it is said to be, or lacks a column.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    if form == "labels":
        return _from_run(path, target, options, scratch, storage)
    if form == "qrels":
        return _from_trec(polars, path, form, QRELS_COLUMNS, target, options, scratch, storage)
    if form == "run":
        return _from_trec(polars, path, form, RUN_COLUMNS, target, options, scratch, storage)
    if form == "jsonl":
        return _from_jsonl(polars, path, target, options, scratch, storage)
    return _from_parquet(path, target, options, storage)


def _from_run(path: str, target: Format, options: Options, scratch: Path, storage: Storage) -> Source:
    run = open_run_labels(path, storage, allow_partial=options.allow_partial)
    whole, joined = join_texts(run, storage) if options.texts else (file_schema(run.plan.parts), None)
    names = whole.names
    value, kind = _value(names, path, "labels", target, options)
    by, doc = _ids(names, path, options)
    wanted = list(dict.fromkeys(["row_id", by, doc, value])) if target in TREC else names
    schema = pa.schema([whole.field(name) for name in wanted], metadata=whole.metadata)
    tables = map_concurrent(
        run.folder.store, lambda file: run.folder.table(file, whole, None if wanted == names else wanted), run.labels
    )
    file = _gathered(tables if joined is None else joined, schema, scratch / "labels.parquet")
    return Source(
        path, "labels", [file], wanted, by, doc, value, kind, "row_id", run.num_quarantined, run.plan.name, run.notes
    )


def _from_trec(
    polars: Any,
    path: str,
    form: Format,
    columns: tuple[str, ...],
    target: Format,
    options: Options,
    scratch: Path,
    storage: Storage,
) -> Source:
    names = list(columns)
    value, kind = _value(names, path, form, target, options)
    by, doc = _ids(names, path, options)
    keys = [name for name in names if name not in ("iteration", "q0")]
    schema = pa.schema([("line", pa.int64()), *((name, pa.string()) for name in keys)])
    frames = (trec_frame(polars, block, columns, path=path).select("line", *keys) for block in blocks(path, storage))
    tables = (frame.to_arrow(compat_level=polars.CompatLevel.oldest()).cast(schema) for frame in frames)
    file = _gathered(tables, schema, scratch / "lines.parquet")
    return Source(path, form, [file], keys, by, doc, value, kind, "line")


def _from_jsonl(polars: Any, path: str, target: Format, options: Options, scratch: Path, storage: Storage) -> Source:
    texts = dict.fromkeys((options.by, options.doc), polars.String)
    if target in TREC:
        names = _json_names(polars, path, _wanted(target, options), storage)
        value, kind = _value(names, path, "jsonl", target, options)
        by, doc = _ids(names, path, options)
        schema = {**texts, value: polars.String, **({"tag": polars.String} if "tag" in names else {})}
    else:
        found: dict[str, Any] = {}
        for block in blocks(path, storage):
            found = merged_schema(polars, found, json_frame(polars, block, None, path=path).schema)
        names = list(found)
        value, kind = _value(names, path, "jsonl", target, options)
        by, doc = _ids(names, path, options)
        schema = {**found, **texts}
        schema.setdefault(value, polars.Int64 if kind == "grade" else polars.Float64)  # of an empty file
    arrow = _arrow_schema(polars, schema, path)
    frames = (_exact(polars, block, schema, path) for block in blocks(path, storage))
    tables = (frame.to_arrow(compat_level=polars.CompatLevel.oldest()).cast(arrow) for frame in frames)
    file = _gathered(tables, arrow, scratch / "objects.parquet")
    return Source(path, "jsonl", [file], list(schema), by, doc, value, kind)


def _exact(polars: Any, block: Block, schema: dict[str, Any], path: str) -> Any:
    frame = json_frame(polars, block, schema, path=path)
    refuse_rounded(polars, frame, block, path=path)
    return frame


def _json_names(polars: Any, path: str, wanted: set[str], storage: Storage) -> list[str]:
    """The keys of a JSONL file, as far as it takes to find those wanted."""
    names: dict[str, None] = {}
    for block in blocks(path, storage):
        names.update(dict.fromkeys(json_names(polars, block, path=path)))
        if wanted <= names.keys():
            break
    return list(names)


def _wanted(target: Format, options: Options) -> set[str]:
    value = (options.grade or "grade") if target == "qrels" else (options.score or SCORES[0])
    return {options.by, options.doc, value}


def _from_parquet(path: str, target: Format, options: Options, storage: Storage) -> Source:
    files, schema, _ = open_tables(path, {}, storage, role="SOURCE", ids=(options.by, options.doc))
    names = list(schema)
    by, doc = _ids(names, path, options)
    value, kind = _value(names, path, "parquet", target, options)
    return Source(path, "parquet", files, names, by, doc, value, kind)


def _ids(names: list[str], path: str, options: Options) -> tuple[str, str]:
    if not names:
        return options.by, options.doc
    by = require_column(options.by, names, path=path, role="the query id", option="--by")
    return by, require_column(options.doc, names, path=path, role="the document id", option="--doc")


def _value(names: list[str], path: str, form: Format, target: Format, options: Options) -> tuple[str, Kind]:
    """The column that a row stands or falls with, and what it is."""
    kind: Kind = "score"
    if target == "qrels" or (
        target != "run" and options.score is None and (options.grade or "grade" in names or not names)
    ):
        name, kind = options.grade or "grade", "grade"
    else:
        usual = "expected_grade" if form == "labels" else next((name for name in SCORES if name in names), SCORES[0])
        name = options.score or usual
    return (require_column(name, names, path=path, role=f"the {kind}", option=f"--{kind}") if names else name), kind


def _arrow_schema(polars: Any, schema: dict[str, Any], path: str) -> pa.Schema:
    """The Arrow types of a frame's columns, text and lists as every reader of Parquet knows them.

    Raises:
        InputError: a column can't be in Parquet.
    """
    for name, kind in schema.items():
        if "Int128" in str(kind):  # also of an item or a field
            raise InputError(
                f"{path}: column `{name}` holds whole numbers beyond 64 bits, which no column can hold. Write them as "
                "text."
            )
    empty = polars.DataFrame(schema=schema).to_arrow(compat_level=polars.CompatLevel.oldest())
    return pa.schema([(column.name, _plain(column.type, column.name, path)) for column in empty.schema])


def _plain(kind: pa.DataType, name: str, path: str) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type, name, path))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise InputError(
                f"{path}: column `{name}` holds only empty objects ({{}}), which no column can hold. Leave it out, or "
                "write null."
            )
        return pa.struct([(part.name, _plain(part.type, f"{name}.{part.name}", path)) for part in kind])
    return kind


def _gathered(tables: Iterable[pa.Table], schema: pa.Schema, file: Path) -> str:
    """Tables behind each other in one scratch file; its path."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in _grouped(tables):
            writer.write_table(table.select(schema.names).cast(schema))
    return str(file)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables put together to row groups of a decent size."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        if size >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)


# ------------------------------------------------------------------------------
# The rows of a source as (query, document, grade or score), checked: what can't be read or written is reported, nulls
# are counted.


SHOWN_CHARACTERS = 60
ROW_GROUP_ROWS = 1 << 16
"""Of the scratch file; several are in the making at a time, and polars' own size, four times this, took 100 MB more."""


class CheckedRows(NamedTuple):
    """Checked rows.

    Args:
        file: Parquet with `row` (position in the source), `query_id` and `doc_id` (text), `value`, and `tag` where the
            source has one.
        has_tag: it has.
        total: rows of the source.
        nulls: rows without a value, left out.
    """

    file: Path
    has_tag: bool
    total: int
    nulls: int

    def kept(self, polars: Any, frame: Any) -> Any:
        """Of a frame of the file, lazy or not, the rows that have a value."""
        return frame.filter(polars.col("value").is_not_null()).drop("at", "odd")

    def scan(self, polars: Any) -> Any:
        """The rows that have a value, in order, as a lazy frame."""
        return self.kept(polars, polars.scan_parquet(self.file, glob=False))


def checked_rows(polars: Any, source: Source, target: Format, scratch: Path) -> CheckedRows:
    """Read and check the columns that a conversion turns on, once; they lie in a scratch file from then on.

    Raises:
        InputError: names the first row whose value is not a number (for qrels: no whole one), or whose id is missing or
            can't be in TREC; or a column of ids that would not be written as what they are.
    """
    file = scratch / "rows.parquet"
    frame = source.scan(polars)
    schema = frame.collect_schema()
    value, is_odd = value_of(polars, source, schema[source.value], target)
    index = _free_name(schema)
    shown = polars.col(source.value).cast(polars.String, strict=False).str.slice(0, SHOWN_CHARACTERS)
    wanted = frame.with_row_index(index).select(
        row=polars.col(index).cast(polars.Int64),
        at=polars.col(source.row_column or index).cast(polars.Int64),
        query_id=polars.col(source.by).cast(polars.String),
        doc_id=polars.col(source.doc).cast(polars.String),
        value=value,
        odd=polars.when(is_odd).then(shown) if not isinstance(is_odd, bool) else polars.lit(None, polars.String),
        **({"tag": polars.col("tag")} if target == "run" and schema.get("tag") == polars.String else {}),
    )
    with translate_polars_errors(source.path), full_disk_as_os_error(polars):
        wanted.sink_parquet(file, row_group_size=ROW_GROUP_ROWS)
    found = polars.scan_parquet(file, glob=False)
    _check(polars, found, source, target)
    total, with_value = (
        found.select(polars.len(), polars.col("value").count().alias("kept")).collect(engine="streaming").row(0)
    )
    return CheckedRows(file, "tag" in found.collect_schema(), total, total - with_value)


def _free_name(taken: Any) -> str:
    """A name that no column has."""
    name = "__row"
    while name in taken:
        name += "_"
    return name


def _is_whole(source: Source, target: Format) -> bool:
    return target == "qrels" or (source.form == "qrels" and source.kind == "grade")


def value_of(polars: Any, source: Source, kind: Any, target: Format) -> tuple[Any, Any]:
    """The value as a number, null where it is null, NaN or blank; and which values are no such number.

    Raises:
        InputError: the column holds something that can't be one.
    """
    column = polars.col(source.value)
    is_whole = _is_whole(source, target)
    if kind in (polars.String, polars.Categorical) or isinstance(kind, polars.Enum):
        text = column.cast(polars.String).str.strip_chars()
        text = polars.when(text != "").then(text)
        if is_whole:
            return polars.when(text.str.contains(WHOLE)).then(text).cast(polars.Float64).cast(
                polars.Int64
            ), ~text.str.contains(WHOLE)
        number = text.cast(polars.Float64, strict=False)
        return polars.when(number.is_finite()).then(number), text.is_not_null() & ~number.is_finite().fill_null(
            value=False
        )
    if kind == polars.Null:
        return column.cast(polars.Int64 if is_whole else polars.Float64), False
    if kind.is_integer():
        if source.kind == "score":  # a mean of whole scores has a fraction
            return column.cast(polars.Float64), False
        number = column.cast(polars.Int64, strict=False)
        is_odd = number.is_null()
        if is_whole:
            is_odd |= (number >= BEYOND_GRADES) | (number <= -BEYOND_GRADES)
        return number, column.is_not_null() & is_odd
    if kind.is_float() or kind.is_decimal():
        number = column if kind in (polars.Float32, polars.Float64) else column.cast(polars.Float64)
        number = number.fill_nan(None)
        if not is_whole:
            return number, number.is_infinite()
        is_odd = number.is_infinite() | (number != number.floor()) | (number.abs() >= BEYOND_GRADES)
        return polars.when(~is_odd).then(number).cast(polars.Int64), is_odd
    raise InputError(
        f"{source.path}: column `{source.value}` holds {kind}; a number is wanted. Name another with --{source.kind}."
    )


def _check(polars: Any, found: Any, source: Source, target: Format) -> None:
    kept = polars.col("value").is_not_null()
    trec = f"{EXAMPLES[QRELS_COLUMNS if target == 'qrels' else RUN_COLUMNS]}: fields end at white space"
    is_text = target in TREC
    number = "whole number of at most 9 digits, as qrels want it" if _is_whole(source, target) else "number"
    advice = {
        "odd": f"is not a {number}. Name another column with --{source.kind}, or leave it empty",
        "query_id": "Give every row one, or leave the row out",
        "doc_id": "Give every row one, or leave the row out",
    }
    faults = {"odd": polars.col("odd").is_not_null()}
    faults |= {name: kept & polars.col(name).is_null() for name in ("query_id", "doc_id")}
    texts = ["query_id", "doc_id", *(["tag"] if "tag" in found.collect_schema() else [])] if is_text else []
    faults |= {f"{name} text": kept & polars.col(name).str.contains(UNWRITABLE) for name in texts}
    row = found.select(
        *(fault.fill_null(value=False).sum().alias(f"{name} count") for name, fault in faults.items()),
        *(polars.col("row").filter(fault.fill_null(value=False)).min().alias(name) for name, fault in faults.items()),
    )
    counted = row.collect(engine="streaming").row(0, named=True)
    fault = next((name for name in faults if counted[f"{name} count"]), None)
    if fault is None:
        return
    count = counted[f"{fault} count"]
    held = found.filter(polars.col("row") == counted[fault]).collect(engine="streaming").row(0, named=True)
    where = f"{source.path}: {source.row_column or 'row'} {held['at']}"
    others = f" ({count:,} such rows)" if count > 1 else ""
    if fault in ("query_id", "doc_id"):
        column = source.by if fault == "query_id" else source.doc
        raise InputError(f"{where} has no `{column}`{others}. {advice[fault]}.")
    if fault == "odd":
        raise InputError(f"{where}: {source.value} {held['odd']!r} {advice['odd']}{others}.")
    name = fault.split()[0]
    column = {"query_id": source.by, "doc_id": source.doc}.get(name, name)
    raise InputError(
        f"{where}: `{column}` is {held[name][:SHOWN_CHARACTERS]!r}{others}, which a TREC file can't hold ({trec}). "
        "Write it otherwise in the source, in all files that name it, or convert to .jsonl or .parquet."
    )


# ------------------------------------------------------------------------------
# Pairs that occur more than once: with one value they are one row, with several the user says which holds.


Rule = Literal["error", "first", "mean", "keep"]
SHOWN = 5


@dataclass
class Duplicates:
    """What was found of them so far, bucket by bucket.

    Args:
        num_dropped: rows beyond the first of their pair.
        num_conflicts: pairs with several values.
        examples: of conflicts, for the message.
    """

    polars: Any
    rule: Rule
    kind: Kind
    num_dropped: int = 0
    num_conflicts: int = 0
    examples: list[str] = field(default_factory=list)
    _dropped: list[Any] = field(default_factory=list)
    _settled: list[Any] = field(default_factory=list)

    def settle(self, bucket: Any) -> Any:
        """One row a pair: a bucket (see `query_buckets`) without the rows beyond the first, and with settled values."""
        polars, pair = self.polars, ["query_id", "doc_id"]
        if self.rule == "keep":
            return bucket
        repeated = bucket.filter(polars.struct(pair).is_duplicated())
        if not repeated.height:
            return bucket
        repeated = repeated.with_columns(
            first=polars.col("row").min().over(pair), is_conflict=polars.col("value").n_unique().over(pair) > 1
        )
        dropped = repeated.filter(polars.col("row") != polars.col("first")).select("row")
        conflicts = repeated.filter("is_conflict")
        self._dropped.append(dropped)
        self.num_dropped += dropped.height
        self._note(conflicts)
        kept = bucket.join(dropped, on="row", how="anti", maintain_order="left")
        if self.rule != "mean" or not conflicts.height:
            return kept
        value, count = polars.col("value").sum(), polars.len().cast(polars.Int64)
        mean = (2 * value + count) // (2 * count) if self.kind == "grade" else polars.col("value").mean()
        settled = conflicts.group_by("first").agg(settled=mean).rename({"first": "row"})
        self._settled.append(settled)
        return _with(polars, kept, settled, "row", "value")

    @property
    def has_settled(self) -> bool:
        """Whether any value is not the source's own."""
        return bool(self._settled)

    def without(self, frame: Any, value: str, *, row: str) -> Any:
        """Rows of the source, with their position in `row`: the same rows left out, the same values settled as in the
        buckets.
        """
        polars = self.polars
        if self._dropped:
            self._dropped = [polars.concat(self._dropped)]
            frame = frame.join(self._dropped[0], left_on=row, right_on="row", how="anti", maintain_order="left")
        if self._settled:
            self._settled = [polars.concat(self._settled)]
            frame = _with(polars, frame, self._settled[0], row, value)
        return frame

    def _note(self, conflicts: Any) -> None:
        polars = self.polars
        pairs = conflicts.group_by("first", maintain_order=True).agg(polars.col("query_id", "doc_id").first(), "value")
        self.num_conflicts += pairs.height
        shown = pairs.head(SHOWN - len(self.examples)).select("query_id", "doc_id", "value")
        for query_id, doc_id, values in shown.iter_rows():
            listed = ", ".join(f"{value:g}" for value in values)
            self.examples.append(f"query {query_id}, document {doc_id}: {listed}")

    def refuse_conflicts(self, path: str) -> None:
        """Raise where pairs have several values and nobody said which holds.

        Raises:
            InputError: names them.
        """
        if self.num_conflicts and self.rule == "error":
            more = "; …" if self.num_conflicts > len(self.examples) else ""
            raise InputError(
                f"{path}: {self.num_conflicts:,} pairs have several {self.kind}s that differ "
                f"({'; '.join(self.examples)}{more}). Fix the source, or choose: --duplicates first or --duplicates "
                "mean; .jsonl and .parquet take --duplicates keep."
            )


def _with(polars: Any, frame: Any, settled: Any, row: str, column: str) -> Any:
    """A frame whose settled rows have their value; others keep what they have."""
    joined = frame.join(settled, left_on=row, right_on="row", how="left", maintain_order="left")
    value = polars.coalesce(polars.col("settled").cast(frame.schema[column]), polars.col(column))
    return joined.with_columns(value.alias(column)).drop("settled")
