"""Pairs with the chunks of their documents, beside the cleaned text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from relabel.jobs.pairs.chunks import chunk_page
from relabel.jobs.pairs.page_columns import DOCUMENT, TEXT, PageRow, add_page_columns
from relabel.jobs.pairs.reading import Form
from relabel.jobs.pairs.token_counts import CountTokens
from relabel.manifests.inputs.column_types import CHUNK
from relabel.manifests.storage.context import Storage

_CHUNK = pa.struct([CHUNK[0], ("type", TEXT), *list(CHUNK)[1:]])  # the fields of `PageChunk`, in its order
_ADDED = {DOCUMENT: TEXT, "chunks": pa.large_list(_CHUNK), "jsonld": pa.large_list(TEXT)}


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
        InputError, DiskFullError, StoreError, MissingExtraError: see `add_page_columns`.
    """
    counts = ChunkCounts()

    def values(row: PageRow) -> Sequence[Any]:
        page = row.page
        cut, num_duplicates = chunk_page(page, rule.max_tokens, rule.count)
        counts.pairs += 1
        counts.without_chunks += not cut
        counts.duplicates += num_duplicates
        counts.json_ld += len(page.json_ld)
        counts.unreadable_json_ld += page.unreadable_json_ld
        for chunk in cut:
            counts.chunks[chunk.type] += 1
            counts.tokens += chunk.token_len
        return page.text, cut, page.json_ld

    add_page_columns(pairs_path, to, rule.form, rule.column, _ADDED, values, storage)
    return counts
