"""Rows of an input's columns as pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.manifests.inputs.column_types import STRUCT_KINDS
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.inputs.text_values import values_of
from relabel.manifests.labels import Pair


def pairs_of(rows: np.ndarray, batch: pa.RecordBatch, path: str, dataset: Dataset) -> Iterator[Pair]:
    names = dataset.columns
    held: dict[str, list[Any]] = {}
    with reading(path):
        for name in dataset.text_columns:
            held[name] = values_of(batch.column(name), path)
    query_ids, doc_ids = ([value or "" for value in held[name]] for name in dataset.id_columns)
    queries = [query or "" for query in held[names.query]]
    texts = [held[name] for name in names.document]
    documents = (
        [text or "" for text in texts[0]]
        if len(texts) == 1
        else ["\n\n".join(filter(None, parts)) for parts in zip(*texts, strict=True)]
    )
    if names.context is None and not dataset.reads.columns:
        return map(Pair, rows.tolist(), query_ids, queries, doc_ids, documents)
    contexts = [_texts(context)[:4] for context in held[names.context]] if names.context else [()] * len(rows)
    if not dataset.reads.columns:
        return map(Pair, rows.tolist(), query_ids, queries, doc_ids, documents, contexts)
    own = dataset.reads.columns
    of_rows = zip(*([_READ_AS[one.kind](value) for value in held[one.name]] for one in own), strict=True)
    columns = [dict(zip((one.name for one in own), values, strict=True)) for values in of_rows]
    return map(Pair, rows.tolist(), query_ids, queries, doc_ids, documents, contexts, columns)


def _texts(values: list[str | None] | None) -> tuple[str, ...]:
    return tuple(text for text in values or () if text)


def _structs_of(kind: pa.StructType) -> Callable[[Any], tuple[dict[str, Any], ...]]:
    """With all fields in each: a null text is `""`, and a null number stays null, as all numbers of a null struct do:
    what one means is for the labeler to refuse.
    """
    fields: dict[str, Any] = {one.name: _NOTHING[one.type] for one in kind}

    def read(values: list[dict[str, Any] | None] | None) -> tuple[dict[str, Any], ...]:
        held = (dict.fromkeys(fields) if one is None else one for one in values or ())
        return tuple(
            {name: nothing if one[name] is None else one[name] for name, nothing in fields.items()} for one in held
        )

    return read


_NOTHING: dict[pa.DataType, Any] = {pa.int32(): None, pa.large_string(): "", pa.large_list(pa.large_string()): []}
_READ_AS: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: value or "",
    "list<string>": _texts,
    **{name: _structs_of(kind) for name, kind in STRUCT_KINDS.items()},
}
"""By kind of a labeler's input column: its value for a row."""
