"""Columns as Python values, whatever bytes their texts hold."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa

logger = logging.getLogger(__name__)


def values_of(column: pa.Array | pa.ChunkedArray, path: str) -> list[Any]:
    """The values of a column of texts, of lists of them or of numbers; bytes that are not UTF-8 are U+FFFD.

    Args:
        path: what the user called the file, for the log.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        # one bad document must not stop all others, so its bytes become replacement characters, and it is said
        logger.warning("%s: text that is not UTF-8; its bad bytes are read as U+FFFD", path)
        return [_decoded(value) for value in _as_bytes(column).to_pylist()]


def _as_bytes(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_bytes(column.cast(kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return column.cast(pa.large_list(pa.large_binary()))
    return column.cast(pa.large_binary())


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    return value
