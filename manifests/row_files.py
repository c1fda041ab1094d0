"""Rows of labels, answers and quarantine as the bytes of Parquet files, the same bytes for the same rows, and back."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy.ma  # noqa: F401 — see `read_in_threads`: pandas brings it, at pyarrow's first array, if it is installed
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.schemas import AnswerRow, LabelRow, QuarantineRow


def parquet_bytes(rows: Sequence[LabelRow] | Sequence[QuarantineRow] | Sequence[AnswerRow], schema: pa.Schema) -> bytes:
    """The Parquet file of some rows, the same bytes for the same rows.

    Args:
        rows: at least one, with a value for each column of `schema`.
    Raises:
        ValueError: a label has a column of its own that the schema does not name.
    """
    values: dict[str, Sequence[Any]] = dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
    own = values.pop("columns", ())
    names = schema.names[len(values) :]
    if strange := {name for row in own for name in row}.difference(names):
        raise ValueError(f"no column for {', '.join(sorted(strange))}")
    values |= {name: [row.get(name) for row in own] for name in names}
    arrays = [_array(list(values[field.name]), field.type) for field in schema]
    return table_bytes(pa.Table.from_arrays(arrays, schema=schema))


def table_bytes(table: pa.Table) -> bytes:
    """The Parquet file of a table, the same bytes for the same rows."""
    sink = io.BytesIO()
    # No dictionaries and no statistics for a file of a few hundred rows: measured at half the writer's time. Page
    # checksums, so that a
    # flipped bit is an error and not a label.
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", use_dictionary=False, write_statistics=False, write_page_checksum=True
    ) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table_of(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The table that a Parquet file's bytes hold, page checksums verified; the inverse of `table_bytes`.

    On the calling thread alone. Arrow's own threads would let go of `data` a moment after the table is there, for which
    they want the interpreter; where it is ending by then, that aborts the process: "terminate called without an active
    exception", exit code 134 (14 of 400 short processes on a busy machine, 2026-11-20; pyarrow 26.0). A chunk's file is
    too small to gain from threads.

    Args:
        columns: those to read; all by default.
    Raises:
        pa.ArrowException, OSError: it is not a whole Parquet file.
    """
    with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True) as file:
        return file.read(columns=columns, use_threads=False)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 holds: an answer or id made of broken UTF-16
        return pa.array([_without_surrogates(value) for value in values], kind)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(inner) for inner in value]
    return value
