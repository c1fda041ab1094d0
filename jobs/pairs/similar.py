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
from relabel.jobs.files import written
from relabel.jobs.tables import check_columns, open_tables, stream_tables, write_grouped
from relabel.manifests.columns import INPUT_KINDS, values_of
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_parquet

COSINE, COSINES, SIMILAR = "cosine", "cosines", "similar"
_CHUNKS = "chunks"
_ADDED = {COSINE: pa.float32(), COSINES: pa.large_list(pa.float32()), SIMILAR: pa.large_list(pa.int32())}
_BATCH_ROWS = 256
"""Rows whose texts are embedded together, so that texts of like length share a batch."""


class SimilarPairs:
    """Pairs to be compared: their files, opened without reading rows.

    Args:
        path: file, folder or glob of Parquet files.
        threshold: a chunk is similar above this cosine.
    Raises:
        InputError: a file or column is off, or a column that is written is there already.
    """

    def __init__(self, path: str, threshold: float, storage: Storage) -> None:
        self.path, self._threshold, self._storage = path, threshold, storage
        self._files, types, named = open_tables(path, {"query": "text"}, storage, role="PAIRS")
        self.has_chunks = _CHUNKS in types
        with open_parquet(self._files[0], storage) as first:
            self._schema = first.schema_arrow.remove_metadata()
        self._documents: tuple[str, ...] = (_CHUNKS,)
        if not self.has_chunks:
            self._documents = (
                ("document",) if "document" in types else tuple(n for n in ("title", "body") if n in types)
            )
            check_columns(types, dict.fromkeys(self._documents or ("document",), "text"), file=named, role="PAIRS")
        elif not INPUT_KINDS["list<chunk>"][1](self._schema.field(_CHUNKS).type):
            raise InputError(f"{named} (PAIRS): column `chunks` is not as `relabel pairs chunk` writes it.")
        self.added = {name: kind for name, kind in _ADDED.items() if self.has_chunks or name == COSINE}
        for name in self.added:
            if name in types:
                raise InputError(f"{named} (PAIRS): has a column `{name}` already. Drop or rename it first.")

    def write(self, target: str, embedder: Embedder) -> Counter[str]:
        """Write the rows with the columns that are added, in order; the file is there whole or not at all.

        Raises:
            InputError: the rows can't be read.
            DiskFullError, StoreError: it can't be written; what was there before stays.
        """
        schema = pa.schema([*self._schema, *(pa.field(*one) for one in self.added.items())])
        counts = Counter[str]()
        tables = stream_tables(self._files, self._schema, self.path, self._storage, batch_rows=_BATCH_ROWS)
        with written(target, self._storage) as file:
            write_grouped(file, schema, (self._with_cosines(table, embedder, counts) for table in tables))
        return counts

    def _with_cosines(self, table: pa.Table, embedder: Embedder, counts: Counter[str]) -> pa.Table:
        queries = [text or "" for text in values_of(table["query"], self.path)]
        texts = self._texts(table)
        cosines = cosines_of(queries, texts, embedder)
        best = [max((one for one in row if one is not None), default=None) for row in cosines]
        counts["pairs"] += len(queries)
        counts["pairs_without_cosine"] += best.count(None)
        columns: dict[str, Sequence[Any]] = {COSINE: best}
        if self.has_chunks:
            numbers = [[chunk["n"] for chunk in row or ()] for row in table[_CHUNKS].to_pylist()]
            chosen = [above(*pair, self._threshold) for pair in zip(numbers, cosines, strict=True)]
            counts["chunks"] += sum(map(len, numbers))
            counts["similar"] += sum(map(len, chosen))
            columns |= {COSINES: cosines, SIMILAR: chosen}
        for name, kind in self.added.items():
            table = table.append_column(name, pa.array(columns[name], type=kind))
        return table

    def _texts(self, table: pa.Table) -> list[list[str]]:
        """The texts of each row that are compared with its query."""
        if self.has_chunks:
            return [[chunk["text"] or "" for chunk in row or ()] for row in table[_CHUNKS].to_pylist()]
        parts = zip(*(values_of(table[name], self.path) for name in self._documents), strict=True)
        return [["\n\n".join(part for part in row if part)] for row in parts]


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
