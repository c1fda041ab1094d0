"""`latency.parquet`: a row a closed-loop cell or an open-loop rate. docs/bench.md says what each column holds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from export.bench.quantiles import QUANTILES

TABLE_NAME = "latency.parquet"
_TEXTS = ("provider", "precision", "model", "preset", "loop", "cell", "scope")
_COUNTS = (
    "rows",
    "tokens",
    "max_batch",
    "samples",
    "warm_up",
    "unanswered",
    "peak_rss_bytes",
    "device_bytes",
    "threads",
)
_NUMBERS = (
    "offered_rate", "answered_rate", "max_wait_ms", "mean_batch", "seconds", "min_ms", "max_ms", "cv", "cpu_ms",
    "pairs_per_s", "pairs_per_s_low", "pairs_per_s_high",
    *(f"{name}_{part}" for name in ("mean", *QUANTILES) for part in ("ms", "low", "high")),
)  # fmt: skip
LATENCY_SCHEMA = pa.schema(
    [(name, pa.string()) for name in _TEXTS]
    + [(name, pa.int64()) for name in _COUNTS]
    + [(name, pa.float64()) for name in _NUMBERS]
)


def blank_latency_row() -> dict[str, Any]:
    """A row in which nothing is known yet."""
    return dict.fromkeys(LATENCY_SCHEMA.names)


def latency_table_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The table as a Parquet file; the same rows give the same bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=LATENCY_SCHEMA), sink, compression="zstd")
    return sink.getvalue()
