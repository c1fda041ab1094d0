"""`latency.parquet`: a row a closed-loop cell or an open-loop rate. docs/bench.md says what each column holds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.export.bench.latency_facts import LatencyRow

TABLE_NAME = "latency.parquet"
_ARROW_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _column(name: str, hint: Any) -> tuple[str, pa.DataType]:
    kind, *_ = get_args(hint) or (hint,)  # `int | None` is a column of integers
    return name, _ARROW_TYPES[kind]


LATENCY_SCHEMA = pa.schema([_column(name, hint) for name, hint in get_type_hints(LatencyRow).items()])


def latency_table_bytes(rows: Sequence[LatencyRow]) -> bytes:
    """The table as a Parquet file; the same rows give the same bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=LATENCY_SCHEMA), sink, compression="zstd")
    return sink.getvalue()
