"""Converts a source to TREC, JSON lines or Parquet, a batch of rows at a time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.formats import TREC, Format, source_format, target_format
from relabel.jobs.convert.sources import (
    CheckedRows,
    Duplicates,
    Options,
    Rule,
    Source,
    checked_rows,
    open_source,
    value_of,
)
from relabel.jobs.files import check_free, scratch_folder, written
from relabel.jobs.tables import query_buckets
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import FIRST_RANK, UNWRITABLE
from relabel.manifests.input_files import reading
from relabel.manifests.metrics.measures import EXTRA
from relabel.manifests.process import require

# ------------------------------------------------------------------------------
# What is written: TREC lines, JSON lines or Parquet, some rows at a time.


BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20
"""Rows that are written at a time, and of about how many bytes where rows are long."""
_TREC_TYPES = {"grade": pa.int32(), "rank": pa.int64(), "score": pa.float64()}
"""What the fields of TREC files are in a table; all others are text."""


def write_qrels(polars: Any, rows: CheckedRows, duplicates: Duplicates, file: Path) -> int:
    """`qid 0 docid grade` a line, in the order of the source; returns how many lines."""
    columns = ("query_id", polars.lit("0").alias("iteration"), "doc_id", "value")
    count = 0
    with file.open("wb") as out, pq.ParquetFile(rows.file, pre_buffer=False) as parquet:
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
            kept = rows.kept(polars, polars.from_arrow(batch))
            lines = duplicates.without(kept, "value", row="row").select(columns)
            _write_lines(lines, out)
            count += lines.height
    return count


def write_run(polars: Any, buckets: Iterator[Any], tag: str | None, file: Path) -> int:
    """`qid Q0 docid rank score tag` a line: queries in the order in which they first come, documents by score; returns
    how many lines.

    Equal scores are ordered by document id, descending by its bytes, which is how trec_eval breaks ties whatever the
    ranks say.

    Args:
        tag: of every line; None: the rows' own.
    """
    count = 0
    with file.open("wb") as out:
        for bucket in buckets:
            ranked = bucket.sort("query", "value", "doc_id", descending=[False, True, True])
            lines = ranked.select(
                "query_id",
                polars.lit("Q0").alias("q0"),
                "doc_id",
                polars.int_range(FIRST_RANK, polars.len() + FIRST_RANK).over("query").alias("rank"),
                polars.col("value").cast(polars.String),
                polars.col("tag") if tag is None else polars.lit(tag).alias("tag"),
            )
            _write_lines(lines, out)
            count += lines.height
    return count


def _write_lines(frame: Any, out: BinaryIO) -> None:
    frame.write_csv(out, include_header=False, separator=" ", quote_style="never")


def write_table(polars: Any, source: Source, duplicates: Duplicates, target: Format, file: Path) -> int:
    """All columns of the rows that have a value, in the order of the source; returns how many rows."""
    batches = _batches(polars, source, duplicates, target)
    count = 0
    if target == "jsonl":
        with file.open("wb") as out:
            for batch in batches:
                polars.from_arrow(batch).with_columns(polars.selectors.binary().bin.encode("hex")).write_ndjson(out)
                count += batch.num_rows
        return count
    first = next(batches)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        for batch in itertools.chain([first], batches):
            if batch.num_rows:  # readers fail at a row group without rows (datasets 5.2)
                writer.write_table(batch)
            count += batch.num_rows
    return count


def _batches(polars: Any, source: Source, duplicates: Duplicates, target: Format) -> Iterator[pa.Table]:
    """Rows to write, of one schema; at least one batch, which may be empty."""
    with pq.ParquetFile(source.files[0]) as parquet:
        held = parquet.schema_arrow
    schema = pa.schema([held.field(name) for name in source.names], metadata=held.metadata)
    typed = (
        pa.schema([(name, _TREC_TYPES.get(name, pa.string())) for name in source.names])
        if source.form in TREC
        else schema
    )
    if duplicates.has_settled and source.kind == "score":
        typed = _with_room(typed, source.value)
    yield typed.empty_table()
    place = 0
    for path in source.files:
        with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(batch_size=_batch_rows(parquet.metadata), columns=source.names):
                table = pa.Table.from_batches([batch]).select(source.names).cast(schema)
                kept = _kept(polars, source, duplicates, table, target, place)
                place += table.num_rows
                taken = table.take(kept["place"].to_arrow())
                yield (
                    _with_values(polars, source, taken, kept["value"], typed)
                    if typed is not schema or duplicates.has_settled
                    else taken
                )


def _batch_rows(metadata: pq.FileMetaData) -> int:
    longest = max(
        (
            group.total_byte_size / group.num_rows
            for group in map(metadata.row_group, range(metadata.num_row_groups))
            if group.num_rows
        ),
        default=0,
    )
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))


def _with_room(schema: pa.Schema, name: str) -> pa.Schema:
    """The column of scores as one that can hold a mean, which its integers or decimals can't."""
    place = schema.get_field_index(name)
    held = schema.field(place)
    if pa.types.is_floating(held.type) or pa.types.is_string(held.type) or pa.types.is_large_string(held.type):
        return schema
    return schema.set(place, held.with_type(pa.float64()))


def _kept(polars: Any, source: Source, duplicates: Duplicates, table: pa.Table, target: Format, first: int) -> Any:
    """The rows of a batch that are written, by `place` in it, with their `value`."""
    column = polars.from_arrow(table.select([source.value]))
    value, _ = value_of(polars, source, column.schema[source.value], target)
    rows = column.select(row=polars.int_range(first, polars.len() + first, dtype=polars.Int64), value=value)
    kept = duplicates.without(rows.filter(polars.col("value").is_not_null()), "value", row="row")
    return kept.with_columns(place=polars.col("row") - first)


def _with_values(polars: Any, source: Source, table: pa.Table, value: Any, schema: pa.Schema) -> pa.Table:
    """Rows with the values that were read or settled for them; the numbers of TREC text as numbers."""
    columns = {name: table[name] for name in schema.names}
    columns[source.value] = value.to_arrow()
    if "rank" in columns and columns["rank"].type != schema.field("rank").type:
        # for people: nothing reads it
        columns["rank"] = polars.Series(columns["rank"]).cast(polars.Int64, strict=False).to_arrow()
    return pa.table(columns).cast(schema)


# ------------------------------------------------------------------------------
# One conversion from end to end: read the source once, check it, settle its duplicates, write the target.


TAG = "relabel"
"""The tag of a run file whose source has none."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion came to.

    Args:
        rows: of the source; `written` of them plus `nulls` plus `duplicates` are all.
        nulls: rows without a grade or score, left out.
        quarantined: rows of a run that have no label, and so are no rows of it.
        duplicates: rows beyond the first of their pair, left out; `conflicts` pairs had several values.
        value: the column of grades or scores.
        tag: of a run file; None: that of each row.
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
) -> Conversion:
    """Convert one file or run into one file, which is there whole or not at all.

    Raises:
        UsageError: nothing tells a form, the target is there already, or options that do not go together.
        InputError: see `open_source`, `checked_rows` and `Duplicates`.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target or scratch files can't be written; what was there before stays.
        MissingExtraError: polars is absent.
    """
    form, to = source_format(source, from_format, storage), target_format(target, to_format)
    _check_options(source, form, to, options, duplicates, tag)
    check_free(target, (source,), storage, force=force)
    polars = require("polars", extra=EXTRA, purpose="relabel convert")
    with scratch_folder("relabel-convert-") as folder:
        opened = open_source(polars, source, form, to, options, folder, storage)
        rows = checked_rows(polars, opened, to, folder)
        found = Duplicates(polars, duplicates, opened.kind)
        tag = _tag(rows, opened, tag) if to == "run" else None
        ranked = _settled(polars, opened, rows, found, to, folder)
        with written(target, storage) as file:
            count = _write(polars, opened, rows, found, ranked, to, tag, file)
    return Conversion(
        source,
        form,
        target,
        to,
        rows.total,
        count,
        rows.nulls,
        opened.num_quarantined,
        found.num_dropped,
        found.num_conflicts,
        opened.value,
        tag,
        opened.notes,
    )


def _settled(
    polars: Any, source: Source, rows: CheckedRows, duplicates: Duplicates, to: Format, scratch: Path
) -> Iterator[Any]:
    """Settle duplicates: for a run file bucket by bucket as they are asked for, else all at once. All that goes to
    scratch files is there when this returns, so that a full disk is reported for the folder that it holds.
    """
    settled = map(
        duplicates.settle,
        query_buckets(polars, (rows.file,), lambda frame, _: rows.kept(polars, frame), scratch / "buckets"),
    )
    if to == "run":
        return _begun(settled)
    if duplicates.rule != "keep":
        for _ in settled:
            pass
        duplicates.refuse_conflicts(source.path)
    return iter(())


def _begun(buckets: Iterator[Any]) -> Iterator[Any]:
    """The same, with the first already asked for, before which all of them are written to their files."""
    first = next(buckets, None)
    return buckets if first is None else itertools.chain([first], buckets)


def _write(
    polars: Any,
    source: Source,
    rows: CheckedRows,
    duplicates: Duplicates,
    ranked: Iterator[Any],
    to: Format,
    tag: str | None,
    file: Path,
) -> int:
    """Write; conflicts are refused before the file gets its name."""
    if to == "run":
        count = write_run(polars, ranked, tag, file)
        duplicates.refuse_conflicts(source.path)
        return count
    if to == "qrels":
        return write_qrels(polars, rows, duplicates, file)
    return write_table(polars, source, duplicates, to, file)


def _check_options(source: str, form: Format, to: Format, options: Options, duplicates: Rule, tag: str | None) -> None:
    if options.texts and (form != "labels" or to in TREC):
        raise UsageError(
            f"--texts: {source} is {form}, the target {to}. Texts are joined from a run's output folder (labels), "
            "which knows its input, into a table, .parquet or .jsonl."
        )
    if duplicates == "keep" and to in TREC:
        raise UsageError(f"--duplicates keep: a pair occurs once in a TREC file ({to}). Choose first or mean.")
    if tag is not None and to != "run":
        raise UsageError("--tag: only run files have one.")
    if to == "qrels" and options.score is not None:
        raise UsageError("--score: qrels hold grades. Name their column with --grade, or write a run file.")
    if to == "run" and options.grade is not None:
        raise UsageError(
            "--grade: a run file holds scores. Name their column with --score, which may be one of grades."
        )
    if options.grade is not None and options.score is not None:
        raise UsageError("--grade and --score: rows are kept by one column. Name the one that must not be null.")


def _tag(rows: CheckedRows, source: Source, tag: str | None) -> str | None:
    """The tag of all lines; None where rows have their own.

    Raises:
        UsageError: it would fall apart.
    """
    if tag is None and rows.has_tag:
        return None
    tag = tag or source.run_name or TAG
    if re.search(UNWRITABLE, tag):
        raise UsageError(f"--tag {tag!r}: a field of a run file can't be empty or hold white space.")
    return tag
