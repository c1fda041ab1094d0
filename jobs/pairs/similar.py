"""How similar a query and its documents are, by the cosine of their embeddings: for a ranking, and for RES-RAG's
heuristic labels, the chunks of a document whose cosine is above 0.4.

Source: RES-RAG, section 3.4.1 (a sentence embedding model, chunks above 0.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.distill.students.bases import Embedder
from relabel.jobs.tables import PairsFile, add_columns, check_columns, open_pairs, refuse_taken
from relabel.manifests.columns import INPUT_KINDS, values_of
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage

COSINE, COSINES, SIMILAR = "cosine", "cosines", "similar"
_CHUNKS = "chunks"
_ADDED = {COSINE: pa.float32(), COSINES: pa.large_list(pa.float32()), SIMILAR: pa.large_list(pa.int32())}
_BATCH_ROWS = 256
"""Rows whose texts are embedded together, so that texts of like length share a batch."""


def open_compared(path: str, storage: Storage) -> PairsFile:
    """Pairs to be compared, checked without reading rows.

    Raises:
        InputError: a file or column is off, or a column that is written is there already.
    """
    pairs = open_pairs(path, {"query": "text"}, storage)
    if _CHUNKS not in pairs.types:
        check_columns(pairs.types, dict.fromkeys(_documents(pairs), "text"), file=pairs.named, role="PAIRS")
    elif not INPUT_KINDS["list<chunk>"][1](pairs.schema.field(_CHUNKS).type):
        raise InputError(f"{pairs.named} (PAIRS): column `chunks` is not as `relabel pairs chunk` writes it.")
    refuse_taken(pairs, _added(pairs))
    return pairs


def _documents(pairs: PairsFile) -> tuple[str, ...]:
    names = () if "document" in pairs.types else tuple(name for name in ("title", "body") if name in pairs.types)
    return names or ("document",)


def _added(pairs: PairsFile) -> dict[str, pa.DataType]:
    return {name: kind for name, kind in _ADDED.items() if _CHUNKS in pairs.types or name == COSINE}


def add_cosines(pairs: PairsFile, to: str, embedder: Embedder, threshold: float, storage: Storage) -> Counter[str]:
    """Write the pairs with the columns `cosine` and, where they have chunks, `cosines` and `similar`; counts of pairs,
    chunks and similar ones.

    Args:
        threshold: a chunk is similar above this cosine.
    Raises:
        InputError, DiskFullError, StoreError: see `add_columns`.
    """
    counts = Counter[str]()

    def values(table: pa.Table) -> dict[str, Sequence[Any]]:
        queries = [text or "" for text in values_of(table["query"], pairs.path)]
        chunks = table[_CHUNKS].to_pylist() if _CHUNKS in pairs.types else None
        if chunks is not None:
            texts = [[chunk["text"] or "" for chunk in row or ()] for row in chunks]
        else:
            parts = zip(*(values_of(table[name], pairs.path) for name in _documents(pairs)), strict=True)
            texts = [["\n\n".join(part for part in row if part)] for row in parts]
        cosines = cosines_of(queries, texts, embedder)
        best = [max((one for one in row if one is not None), default=None) for row in cosines]
        counts["pairs"] += len(queries)
        counts["pairs_without_cosine"] += best.count(None)
        if chunks is None:
            return {COSINE: best}
        numbers = [[chunk["n"] for chunk in row or ()] for row in chunks]
        chosen = [above(*pair, threshold) for pair in zip(numbers, cosines, strict=True)]
        counts["chunks"] += sum(map(len, numbers))
        counts["similar"] += sum(map(len, chosen))
        return {COSINE: best, COSINES: cosines, SIMILAR: chosen}

    add_columns(pairs, to, _added(pairs), values, storage, batch_rows=_BATCH_ROWS)
    return counts


def cosines_of(queries: Sequence[str], texts: Sequence[Sequence[str]], embedder: Embedder) -> list[list[float | None]]:
    """The cosine of each row's query with each of its texts, -1 to 1; None where either is blank."""
    distinct = {text: place for place, text in enumerate(dict.fromkeys(queries))}
    queries_QD = embedder.embed(list(distinct), "query")
    flat = [text for row in texts for text in row]
    texts_ND = embedder.embed(flat, "document")
    rows = np.repeat([distinct[query] for query in queries], [len(row) for row in texts]).astype(np.int64)
    found = iter(np.einsum("nd,nd->n", queries_QD[rows], texts_ND).clip(-1.0, 1.0).tolist())
    return [
        [cosine if query.strip() and text.strip() else None for text, cosine in zip(row, found, strict=False)]
        for query, row in zip(queries, texts, strict=True)
    ]


def above(numbers: Sequence[int], cosines: Sequence[float | None], threshold: float) -> list[int]:
    """The numbers of the chunks whose cosine is above the threshold, the most similar first, of equals the earlier."""
    held = [(-cosine, place) for place, cosine in enumerate(cosines) if cosine is not None and cosine > threshold]
    return [numbers[place] for _, place in sorted(held)]
