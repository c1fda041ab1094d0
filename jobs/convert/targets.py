"""What is written: TREC lines, JSON lines or Parquet, some rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.duplicates import Duplicates
from relabel.jobs.convert.formats import TREC, Format
from relabel.jobs.convert.rows import CheckedRows, value_of
from relabel.jobs.convert.sources import Source
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.judging.trec import FIRST_RANK

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
