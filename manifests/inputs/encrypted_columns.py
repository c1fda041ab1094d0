"""Which columns of a Parquet file are encrypted, by its footer's own bytes: Arrow ends the process where it is asked
about one.

A footer is a struct in Thrift's compact protocol. Only what leads to a column's `crypto_metadata` is looked at, all
else is skipped.

Source:
    parquet.thrift: FileMetaData (4 row_groups), RowGroup (1 columns), ColumnChunk (3 meta_data, 8 crypto_metadata),
    ColumnMetaData (3 path_in_schema), EncryptionWithColumnKey (1 path_in_schema).
"""

from __future__ import annotations

from typing import Any

STRUCT = 12
LISTS = (9, 10)
MAX_DEPTH = 32
_FIXED = {3: 1, 7: 8}  # a byte, a double
_VARINTS = (4, 5, 6)


def encrypted_columns(footer: bytes) -> list[str]:
    """Paths of the encrypted columns of a file's first row group, in order.

    Args:
        footer: the bytes of its FileMetaData; more may follow.
    Raises:
        ValueError: they can't be read as that.
    """
    try:
        groups = _Reader(footer).struct({4: {1: {3: {3: None}, 8: {2: {1: None}}}}}).get(4) or []
        columns = groups[0].get(1) or [] if groups else []
        return [_path(column) for column in columns if 8 in column]
    except (IndexError, AttributeError, TypeError) as exc:
        raise ValueError(f"not a footer: {type(exc).__name__}") from exc


def _path(column: dict[int, Any]) -> str:
    held = (column.get(3) or {}).get(3) or ((column[8] or {}).get(2) or {}).get(1) or [b"?"]
    return ".".join(step.decode("utf-8", "replace") for step in held)


class _Reader:
    """Reads on from one place to the next."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, wanted: dict[int, Any], depth: int = 0) -> dict[int, Any]:
        """The wanted fields of a struct, by number: structs as such, lists as lists, text as bytes."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind = head & 15
            number = number + (head >> 4) if head >> 4 else _unzigzag(self._varint())
            value = self._value(kind, wanted.get(number), depth)
            if number in wanted:
                found[number] = value
        return found

    def _value(self, kind: int, wanted: dict[int, Any] | None, depth: int) -> Any:
        if kind in (1, 2):  # truth, in the field's head
            return kind == 1
        if kind in _FIXED:
            self._at += _FIXED[kind]
            return None
        if kind in _VARINTS:
            return _unzigzag(self._varint())
        if kind == 8:
            size = self._varint()
            self._at += size
            return self._data[self._at - size : self._at]
        if kind in LISTS:
            return self._list(wanted, depth)
        if kind == STRUCT:
            return self.struct(wanted or {}, depth + 1)
        raise ValueError(f"a value of kind {kind}")

    def _list(self, wanted: dict[int, Any] | None, depth: int) -> list[Any]:
        head = self._byte()
        kind, size = head & 15, head >> 4
        if size == 15:
            size = self._varint()
        if kind in (1, 2):
            self._at += size
            return []
        return [self._value(kind, wanted, depth) for _ in range(size)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
