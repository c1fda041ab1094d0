"""Pairs and labels, in memory and in Parquet: one versioned schema each, and the bytes of a chunk.

The same rows give the same bytes: no times, no process ids, fixed writer options. Column-wise because one chunk of 256
rows must cost a millisecond or two, not ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.asks import Distribution
from relabel.manifests.process import WhenUsed

pc = WhenUsed("pyarrow.compute")


class Pair(NamedTuple):
    """One row of the input.

    `document` is the named columns that are not empty, joined by a blank line; it may be empty. `context` holds up to
    four high-click documents of the query. `columns` holds, by name, those of the labeler's `input_columns` that the
    input has; a null is `""` or `()`. `siblings` holds all rows of the query that the input has, this one too, in row
    order, for labelers with `uses_siblings`; they have no siblings of their own. `broken_text` names the column that is
    not UTF-8, and where, and is empty for most: such a pair is quarantined, and a labeler sees it among siblings alone,
    with U+FFFD for what can't be read.
    """

    row_id: int
    query_id: str
    query: str
    doc_id: str
    document: str
    context: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    siblings: tuple[Pair, ...] = ()
    broken_text: str = ""


class InputColumn(NamedTuple):
    """A further column of the input that a labeler reads where it is there.

    Args:
        name: as it is called in the input.
        kind: `string`, `list<string>`, `list<chunk>` or `list<node>` (`manifests.tables.STRUCT_KINDS`, as dicts).
        about: what it holds, in a line.
        is_required: an input without it is refused.
    """

    name: str
    kind: str
    about: str
    is_required: bool = False


class Reads(NamedTuple):
    """What a labeler reads in addition to the query: all else is no part of a label's key.

    Args:
        context, document: `Pair.context`, `Pair.document`.
        columns: what it finds in `Pair.columns`.
        siblings: `Pair.siblings`.
    """

    context: bool = False
    document: bool = True
    columns: tuple[InputColumn, ...] = ()
    siblings: bool = False

    @property
    def whole_query(self) -> bool:
        """Whether rows of a query take their labels from one answer, about all its documents or none. Chunks then hold
        whole queries, however large, so that whatever interrupts a run, no query has labels of two answers.
        """
        return self.siblings or not self.document


QUERY_AND_DOCUMENT = Reads()
"""What most labelers read."""


class Span(NamedTuple):
    """A piece of the document: `document[start:end]`, in code points, and that text."""

    start: int
    end: int
    text: str


class LabelColumn(NamedTuple):
    """A column of the label files that a labeler declares for its own labels.

    Args:
        name: of lower-case letters, digits and `_`; none of the columns that all label files have.
        kind: `bool`, `int8`, `int32`, `int64`, `float32`, `string`, `list<float32>`, `list<int16>`, `list<int32>` or
            `list<string>`. Null is no value.
        about: what it holds, in a line; `relabel schema labels --labeler NAME` prints it.
    """

    name: str
    kind: str
    about: str


CASCADE_COLUMNS = (
    LabelColumn("answered_by", "string", "`cheap`, `teacher`, `audit` or `calibration`: the last two are the teacher."),
    LabelColumn("cheap_grade", "int8", "What the cheap judges answer; null where one of them has no answer."),
    LabelColumn("cheap_confidence", "float32", "1 less the loss that they expect of it, as a part of the highest."),
)
"""Of a cascade's label files, after the labeler's own."""


@dataclass(slots=True)
class Label:
    """What a labeler read from the answers about one pair.

    Args:
        grade: what the model wrote (or, where it writes nothing, the most probable grade), 0..K-1; None of a labeler
            whose `grades` is 0.
        distribution: over the grades at the decision; None where the engine can't give it.
        columns: values of the columns that the labeler declares, by name; one that is not there is null.
        evidence: quoted spans of the document, in the order quoted.
        flags: remarks on this label, each a word of `[a-z_]`.
    """

    grade: int | None
    distribution: Distribution | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Span, ...] = ()
    intent: str | None = None
    reasoning: str | None = None
    flags: list[str] = field(default_factory=list)


SCHEMA_VERSION = 3
"""Of label files."""
ROWS_VERSION = 2
"""Of quarantine and answer files."""

MOST_OUTSIDE_MASS = 0.5
"""Mean mass outside the grades from which on it is warned of: most of the teacher's answer was no grade."""

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
"""The columns of every label file; those that its labeler declares follow (`label_schema`). `key` is the
label's identity (`reuse.py`), null in labels that came without one; `origin` the fingerprint of the run that asked
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


AnswerRow: TypeAlias = dict[str, Any]
"""One row of `ANSWERS`, by name; distributions are dicts with the fields of `DISTRIBUTION`."""


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


def parquet_bytes(rows: Sequence[LabelRow] | Sequence[QuarantineRow] | Sequence[AnswerRow], schema: pa.Schema) -> bytes:
    """The Parquet file of some rows, the same bytes for the same rows.

    Args:
        rows: at least one, with a value for each column of `schema`.
    Raises:
        ValueError: a label has a column of its own that the schema does not name.
    """
    fields = list(rows[0]) if isinstance(rows[0], dict) else rows[0]._fields
    plain_rows: Sequence[Iterable[Any]] = rows
    if isinstance(rows[0], dict):
        plain_rows = [cast("AnswerRow", row).values() for row in rows]
    values: dict[str, Sequence[Any]] = dict(zip(fields, zip(*plain_rows, strict=True), strict=True))
    own_columns = values.pop("columns", ())
    own_names = schema.names[len(values) :]
    unknown = set().union(*own_columns).difference(own_names)
    if unknown:
        raise ValueError(f"no column for {', '.join(sorted(unknown))}")
    for name in own_names:
        values[name] = [columns.get(name) for columns in own_columns]
    arrays = [_array(list(values[field.name]), field.type) for field in schema]
    return table_bytes(pa.Table.from_arrays(arrays, schema=schema))


def table_bytes(table: pa.Table) -> bytes:
    """The Parquet file of a table, the same bytes for the same rows."""
    sink = pa.BufferOutputStream()
    # No dictionaries and no statistics for a file of a few hundred rows: measured at half the writer's time. Page
    # checksums, so that a flipped bit is an error and not a label.
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


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


def ids_of(texts: Iterable[str]) -> pa.LargeBinaryArray:
    """Texts as ids."""
    return pa.array([text.encode("utf-8", "surrogatepass") for text in texts], pa.large_binary())


def texts_of(ids: pa.LargeBinaryArray) -> list[str]:
    """Ids as texts; null is empty."""
    return [(value or b"").decode("utf-8", "surrogatepass") for value in ids.to_pylist()]


def codes_of(ids: pa.LargeBinaryArray) -> tuple[np.ndarray, pa.LargeBinaryArray]:
    """Ids numbered from 0 in the order of their UTF-8, equal ids alike: int64 [N]; and the different ones."""
    coded = ids.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def pair_codes(query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> np.ndarray:
    """A number for each (query, document), equal pairs alike: int64 [N]; which one means nothing."""
    query = query_ids.dictionary_encode()
    doc = doc_ids.dictionary_encode()
    return np.asarray(query.indices.to_numpy() * np.int64(len(doc.dictionary)) + doc.indices.to_numpy())


def release_unused() -> None:
    """Give freed memory back to the system. malloc keeps it otherwise, and the stages of a command add up."""
    pa.default_memory_pool().release_unused()
