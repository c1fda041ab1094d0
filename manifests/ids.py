"""Query and document ids of many rows, in Arrow: their UTF-8, of which half a surrogate pair, as JSON can hold one, is
part like any other text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


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
    """A number for each (query, document), equal pairs alike: int64 [N]; which one says nothing."""
    query, doc = query_ids.dictionary_encode(), doc_ids.dictionary_encode()
    return np.asarray(query.indices.to_numpy() * np.int64(len(doc.dictionary)) + doc.indices.to_numpy())
