"""What stored columns hold, by one rule for all that reads them: text however it is stored is text, ids are text, and a
column that no file holds may be in the names of the folders that it lies in (`query_id=q1/part.parquet`).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relabel.manifests.errors import InputError

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose column is null, as Hive names it, and all writers after it."""
UUID_BYTES = 16
_EXACT_FLOAT = 2**53
"""Whole numbers below have a float64 of their own."""


def folder_columns(path: str, stored: Collection[str]) -> dict[str, str | None]:
    """Columns of a file that the names of its folders hold, each with the value that all its rows have.

    Args:
        stored: columns that the file itself holds, which count before names.
    """
    steps = [step.partition("=") for step in path.split("/")[:-1]]
    found = {unquote(name): None if value == NO_VALUE else unquote(value) for name, equals, value in steps if equals}
    return {name: value for name, value in found.items() if name and name not in stored}


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column of a stored type is read as."""
    if isinstance(kind, pa.UuidType):
        return pa.large_string()
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if isinstance(kind, pa.Bool8Type) else plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if _is_text(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.large_string()
    if _is_list(kind) and not pa.types.is_nested(kind.value_type):
        inner = kind.value_type.value_type if pa.types.is_dictionary(kind.value_type) else kind.value_type
        return pa.large_list(pa.large_string() if _is_text(inner) else kind.value_type)
    return kind


def _is_text(kind: pa.DataType) -> bool:
    """Text, or bytes that may be text: ClickHouse and Impala mark none as such."""
    tests = (
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
    )
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    tests = (
        *(pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
        *(pa.types.is_list_view, pa.types.is_large_list_view),
    )
    return any(test(kind) for test in tests)


def plain(column: pa.Array) -> pa.Array:
    """A stored column as its plain type (`plain_type`). Text that is not UTF-8 stays as it is; reading it says so."""
    kind = column.type
    if isinstance(kind, pa.UuidType):
        return _uuid_texts(column.storage, may_be_text=False)
    if pa.types.is_fixed_size_binary(kind) and kind.byte_width == UUID_BYTES:
        return _uuid_texts(column, may_be_text=True)
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if pa.types.is_fixed_size_binary(kind) or (_is_text(kind) and "binary" in str(kind)):
        return column.cast(pa.large_binary()).view(pa.large_string())
    wanted = plain_type(kind)
    return column if wanted == kind else column.cast(wanted)


def _uuid_texts(column: pa.Array, *, may_be_text: bool) -> pa.Array:
    """16 bytes a row as UUIDs.

    Args:
        may_be_text: nothing marks them as UUIDs, so that 16 characters of printable ASCII are text. No
            UUID of RFC 9562 is such: its ninth byte is above 127.
    """
    texts = []
    for value in column.to_pylist():
        is_text = may_be_text and value is not None and value.isascii() and value.decode().isprintable()
        texts.append(None if value is None else value.decode() if is_text else str(uuid.UUID(bytes=value)))
    return pa.array(texts, pa.large_string())


def is_id_type(kind: pa.DataType) -> bool:
    """Whether a plain type may hold ids: text, or numbers, which have to be whole."""
    tests = (pa.types.is_large_string, pa.types.is_null, *_NUMBERS)
    return any(test(kind) for test in tests)


def is_number_type(kind: pa.DataType) -> bool:
    """Whether a plain type may hold grades."""
    return any(test(kind) for test in (pa.types.is_null, *_NUMBERS))


_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


def id_texts(column: pa.Array, *, path: str, name: str) -> pa.Array:
    """A column of ids as text: text as it is, whole numbers of any type as their digits, NaN as null.

    Args:
        column: of a plain type.
        path, name: of the column, for messages.
    Raises:
        InputError: another type, a number that is not whole, or one too large to be exact.
    """
    kind = column.type
    try:
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), None, column.cast(pa.float64()))
            if (pc.max(pc.abs(column)).as_py() or 0) >= _EXACT_FLOAT:
                raise pa.ArrowInvalid("too large to be exact")
            column = column.cast(pa.int64())
        elif pa.types.is_decimal(kind):
            column = column.cast(pa.decimal256(76, 0))
        elif not is_id_type(kind):
            raise InputError(f"{path}: column `{name}` holds {kind}; ids are text or whole numbers.")
        return column.cast(pa.large_string())
    except pa.ArrowInvalid as exc:
        raise InputError(
            f"{path}: column `{name}` holds {kind}, and not all of its numbers are whole: "
            f"{_first_fraction(column)}. Ids are text or whole numbers; store them as such."
        ) from exc


def _first_fraction(column: pa.Array) -> Any:
    values = (value for value in column.to_pylist() if value is not None)
    return next((value for value in values if value != value // 1 or abs(value) >= _EXACT_FLOAT), "?")


class PlainParquet(pq.ParquetFile):  # type: ignore[misc]
    """An open Parquet file whose columns are read as plain ones, those in the names of its folders included.

    Args:
        path: what the user calls it.
        options: pyarrow's.
    """

    def __init__(self, source: Any, path: str, **options: Any) -> None:
        super().__init__(source, page_checksum_verification=True, **options)
        self.path = path
        self.folder_columns = folder_columns(path, self.schema_arrow.names)

    @property
    def plain_schema(self) -> pa.Schema:
        """All columns with the types that they are read as."""
        held = [pa.field(one.name, plain_type(one.type)) for one in self.schema_arrow]
        return pa.schema([*held, *(pa.field(name, pa.large_string()) for name in self.folder_columns)])

    def plain_batches(
        self,
        names: Sequence[str],
        *,
        ids: Collection[str] = (),
        batch_rows: int,
        row_groups: Sequence[int] | None = None,
        use_threads: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Some columns, in this order, as plain types; those of `ids` as text.

        Raises:
            InputError: an id is neither text nor a whole number.
        """
        stored = [name for name in names if name not in self.folder_columns]
        for batch in self.iter_batches(batch_rows, row_groups, columns=stored, use_threads=use_threads):
            columns = [self.plain_column(batch, name, is_id=name in ids) for name in names]
            yield pa.RecordBatch.from_arrays(columns, names=[*names])

    def plain_column(self, batch: pa.RecordBatch, name: str, *, is_id: bool = False) -> pa.Array:
        """A column of a batch that was read of this file, as its plain type; as text if it `is_id`.

        Raises:
            InputError: an id is neither text nor a whole number.
        """
        if name in self.folder_columns:
            return pa.repeat(pa.scalar(self.folder_columns[name], pa.large_string()), batch.num_rows)
        stored = batch.column(name)
        column = plain(stored)
        if not is_id:
            return column
        if "binary" in str(stored.type):
            _refuse_other_bytes(column, self.path, name)
        return id_texts(column, path=self.path, name=name)


def _refuse_other_bytes(texts: pa.Array, path: str, name: str) -> None:
    """Refuse bytes that are no text as ids: read with replacement characters, two ids would become one.

    Raises:
        InputError: names the column.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise InputError(
            f"{path}: column `{name}` holds bytes that are not UTF-8. Ids are text, whole numbers or UUIDs: store them "
            "as hexadecimal text."
        ) from exc
