"""Pairs with their documents cleaned and cut into chunks: some rows read, some written, so that memory grows with the
longest pages and not with the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.files.durable_files import written
from jobs.files.tables import check_columns, open_tables, stream_tables
from jobs.pairs.chunks import PageChunk, chunk_page
from jobs.pairs.reading import Form, read_page
from jobs.pairs.token_counts import CountTokens
from manifests.errors import InputError
from manifests.inputs.column_types import CHUNK
from manifests.inputs.dataset import open_parquet
from manifests.storage.context import Storage

DOCUMENT, CHUNKS, JSON_LD = "document", "chunks", "jsonld"
_TEXT = pa.large_string()
_CHUNK = pa.struct([CHUNK[0], ("type", _TEXT), *list(CHUNK)[1:]])  # the fields of `PageChunk`, in its order
_ADDED = {DOCUMENT: _TEXT, CHUNKS: pa.large_list(_CHUNK), JSON_LD: pa.large_list(_TEXT)}
_BATCH_ROWS = 32
"""Rows read at a time; a page may have megabytes."""
_GROUP_ROWS = 16_384
_GROUP_BYTES = 64 << 20
"""A row group is written at so many rows or bytes."""


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How documents are read and cut.

    Args:
        form: of the documents; a title is text in any case.
        column: that holds them; None for `html`, else the columns that a job would read.
        max_tokens: of a chunk.
        count: tokens of a text.
    """

    form: Form
    column: str | None
    count: CountTokens
    max_tokens: int


@dataclass(slots=True)
class ChunkCounts:
    """What came of it."""

    pairs: int = 0
    without_chunks: int = 0
    """Pairs whose document has no text."""
    chunks: dict[str, int] = field(default_factory=lambda: {"text": 0, "table": 0, "list": 0})
    duplicates: int = 0
    tokens: int = 0
    json_ld: int = 0
    unreadable_json_ld: int = 0


def chunk_pairs(pairs_path: str, to: str, rule: ChunkRule, storage: Storage) -> ChunkCounts:
    """Write the pairs with the columns `document`, `chunks` and `jsonld`, rows in the order of the input.

    Raises:
        InputError: a file or column is off, or a column that is written is there already.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        MissingExtraError: what reads the documents is not installed.
    """
    files, types, named = open_tables(pairs_path, {}, storage, role="PAIRS")
    columns = _document_columns(rule, list(types), named)
    check_columns(types, dict.fromkeys(columns, "text"), file=named, role="PAIRS")
    with open_parquet(files[0], storage) as first:
        held = first.schema_arrow.remove_metadata()
    kept = [one for one in held if one.name not in _ADDED]
    schema = pa.schema([*kept, *(pa.field(name, kind) for name, kind in _ADDED.items())])
    counts = ChunkCounts()
    with written(to, storage) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        waiting = [schema.empty_table()]
        for table in stream_tables(files, held, pairs_path, storage, batch_rows=_BATCH_ROWS):
            texts = [table[name].cast(_TEXT).to_pylist() for name in columns]
            rows = list(zip(*texts, strict=True))
            waiting.append(_with_chunks(table.select([one.name for one in kept]), rows, columns, rule, counts))
            if sum(map(len, waiting)) >= _GROUP_ROWS or sum(one.nbytes for one in waiting) >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    return counts


def _document_columns(rule: ChunkRule, names: list[str], file: str) -> tuple[str, ...]:
    """The columns that hold the documents.

    Raises:
        InputError: there are none, or a column that is written would replace one that is not read.
    """
    if rule.column is not None:
        columns: tuple[str, ...] = (rule.column,)
    else:
        given = ("html",) if "html" in names else (DOCUMENT,) if DOCUMENT in names else ("title", "body")
        columns = tuple(name for name in given if name in names)
        if not columns:
            raise InputError(
                f"{file} (PAIRS): no column for the document: neither `html`, `document`, `title` nor `body`. It has "
                f"{', '.join(names)}. Name it with --column."
            )
    for name in _ADDED:
        if name in names and (name != DOCUMENT or DOCUMENT not in columns):
            raise InputError(f"{file} (PAIRS): has a column `{name}` already. Drop or rename it first.")
    return columns


def _with_chunks(
    table: pa.Table, rows: list[tuple[str | None, ...]], columns: Sequence[str], rule: ChunkRule, counts: ChunkCounts
) -> pa.Table:
    """The table with the columns that are written."""
    documents: list[str] = []
    chunks: list[list[PageChunk]] = []
    json_ld: list[tuple[str, ...]] = []
    for row in rows:
        read = read_page(
            (text, "text" if name == "title" and rule.column is None else rule.form)
            for name, text in zip(columns, row, strict=True)
            if text
        )
        cut, num_duplicates = chunk_page(read, rule.max_tokens, rule.count)
        documents.append(read.text)
        chunks.append(cut)
        json_ld.append(read.json_ld)
        counts.pairs += 1
        counts.without_chunks += not cut
        counts.duplicates += num_duplicates
        counts.json_ld += len(read.json_ld)
        counts.unreadable_json_ld += read.unreadable_json_ld
        for chunk in cut:
            counts.chunks[chunk.type] += 1
            counts.tokens += chunk.token_len
    added = zip(_ADDED.items(), (documents, chunks, json_ld), strict=True)
    for (name, kind), values in added:
        table = table.append_column(name, pa.array(values, type=kind))
    return table
