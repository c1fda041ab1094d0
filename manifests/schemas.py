"""How labels and quarantined rows lie in Parquet: one versioned schema each, and the bytes of a chunk.

The same rows give the same bytes: no times, no process ids, fixed writer options. Column-wise because one chunk of 256
rows must cost a millisecond or two, not ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 3
"""Of label files."""
ROWS_VERSION = 2
"""Of quarantine and answer files."""

KEY_BYTES = 16

_PROBS = pa.list_(pa.float32())

SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("text", pa.string())])
"""`document[start:end]` in code points, and that text."""

KINDS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "string": pa.string(),
    "list<float32>": _PROBS,
    "list<int16>": pa.list_(pa.int16()),
    "list<int32>": pa.list_(pa.int32()),
    "list<string>": pa.list_(pa.string()),
}
"""Of which kinds a labeler's own columns can be, and how they lie in Arrow."""


SAMPLE = pa.struct([("status", pa.string()), ("grade", pa.int8()), ("probs", _PROBS), ("outside_mass", pa.float32())])
"""One of S trajectories; grade and probs are null unless its status is ok."""

LABELS = pa.schema(
    [
        ("row_id", pa.int64()),
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("status", pa.string()),
        ("grade", pa.int8()),
        ("probs", _PROBS),
        ("outside_mass", pa.float32()),
        ("expected_grade", pa.float32()),
        ("evidence", pa.list_(SPAN)),
        ("intent", pa.string()),
        ("reasoning", pa.string()),
        ("flags", pa.list_(pa.string())),
        ("samples", pa.list_(SAMPLE)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("reused", pa.bool_()),
        ("key", pa.binary(KEY_BYTES)),
        ("origin", pa.string()),
    ],
    metadata={"relabel.schema": f"labels-{SCHEMA_VERSION}"},
)
"""The columns of every label file; those that its labeler declares lie behind them (`label_schema`). `key` is the
label's identity (`label_keys.py`), null in labels that came without one; `origin` the fingerprint of the run that asked
a row that was reused, null where this run asked.
"""


DISTRIBUTION = pa.struct([("name", pa.string()), ("probs", pa.list_(pa.float64())), ("outside_mass", pa.float64())])
"""A decision's distribution as the engine gave it; float64, so that a row read from it equals one
read from the answer.
"""

ANSWERS = pa.schema(
    [
        ("key", pa.binary(KEY_BYTES)),
        ("stage", pa.string()),
        ("text", pa.string()),
        ("finish", pa.string()),
        ("distributions", pa.list_(DISTRIBUTION)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("flags", pa.list_(pa.string())),
        ("origin", pa.string()),
    ],
    metadata={"relabel.schema": f"answers-{ROWS_VERSION}"},
)
"""Answers that the rows of a query share (r3a's intents): kept, so that a later run need not ask them again."""

TRY = pa.struct(
    [
        ("stage", pa.string()),
        ("attempt", pa.int32()),
        ("finish", pa.string()),
        ("text", pa.string()),
        ("reason", pa.string()),
    ]
)
"""One answer that was not readable: where, which attempt, how it ended, its whole text, and what was wrong with it."""

QUARANTINE = pa.schema(
    [
        ("row_id", pa.int64()),
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("tries", pa.list_(TRY)),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
    ],
    metadata={"relabel.schema": f"quarantine-{ROWS_VERSION}"},
)


class LabelRow(NamedTuple):
    """One row of `LABELS`, in its column order, and the labeler's own columns by name; plain
    values, structs as dicts.
    """

    row_id: int
    query_id: str
    doc_id: str
    status: str
    grade: int | None
    probs: Sequence[float] | None
    outside_mass: float | None
    expected_grade: float | None
    evidence: list[dict[str, Any]]
    intent: str | None
    reasoning: str | None
    flags: list[str]
    samples: list[dict[str, Any]] | None
    prompt_tokens: int
    output_tokens: int
    reused: bool
    key: bytes | None = None
    origin: str | None = None
    columns: Mapping[str, Any] = MappingProxyType({})


class Try(NamedTuple):
    """One of `TRY`."""

    stage: str
    attempt: int
    finish: str
    text: str
    reason: str


class AnswerRow(NamedTuple):
    """One row of `ANSWERS`, in its column order; distributions are dicts with the fields of `DISTRIBUTION`."""

    key: bytes
    stage: str
    text: str
    finish: str
    distributions: list[dict[str, Any]]
    prompt_tokens: int
    output_tokens: int
    flags: list[str]
    origin: str | None


class QuarantineRow(NamedTuple):
    """One row of `QUARANTINE`, in its column order; `tries` are dicts with the fields of `TRY`."""

    row_id: int
    query_id: str
    doc_id: str
    status: str
    reason: str
    tries: list[dict[str, Any]]
    prompt_tokens: int
    output_tokens: int


def label_schema(columns: Mapping[str, str]) -> pa.Schema:
    """How label files lie whose labeler has these columns of its own, name → kind."""
    return pa.schema([*LABELS, *((name, KINDS[kind]) for name, kind in columns.items())], metadata=LABELS.metadata)


def label_rows(table: pa.Table) -> Iterator[LabelRow]:
    """The rows of a table with the columns of `LABELS`, in any order; all others are the labeler's own."""
    own = [name for name in table.column_names if name not in LABELS.names]
    values = (table[name].to_pylist() for name in (*LABELS.names, *own))
    for row in zip(*values, strict=True):
        yield LabelRow._make((*row[: len(LABELS)], dict(zip(own, row[len(LABELS) :], strict=True))))
