"""The bytes of a Parquet file that some of its columns are read from: where they lie, by the
footer, and their digest.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.storage.url_files import UrlFile

PIECE_BYTES = 1 << 20


class ByteRange(NamedTuple):
    """Bytes from `start` up to `stop`."""

    start: int
    stop: int


def leaves_of(metadata: pq.FileMetaData, schema: pa.Schema, columns: Iterable[str]) -> dict[str, list[int]]:
    """Numbers of the stored columns that make up each column of a table.

    Counted off the schema and not found by their paths: a column `q.id` has the path of the field `id` in a struct `q`.
    """
    counts = [_num_leaves(field.type) for field in schema]
    starts = list(itertools.accumulate(counts, initial=0))
    if starts[-1] != metadata.num_columns:
        raise pa.ArrowInvalid(
            f"its footer names {metadata.num_columns} stored columns, and its schema has {starts[-1]}"
        )
    places = {name: place for place, name in enumerate(schema.names)}
    return {name: list(range(starts[places[name]], starts[places[name] + 1])) for name in columns}


def _num_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _num_leaves(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _num_leaves(kind.value_type)
    if pa.types.is_map(kind):
        return _num_leaves(kind.key_type) + _num_leaves(kind.item_type)
    return (
        sum(_num_leaves(kind.field(place).type) for place in range(kind.num_fields)) if pa.types.is_nested(kind) else 1
    )


class ColumnBytes:
    """Where some columns of an open file lie, and what they hold.

    Args:
        source: the file's bytes; local, or by URL.
        columns: names of columns that it has.
    """

    def __init__(
        self, source: BinaryIO | UrlFile, metadata: pq.FileMetaData, schema: pa.Schema, columns: Sequence[str]
    ) -> None:
        self._source = source
        self._metadata = metadata
        self._leaves = leaves_of(metadata, schema, columns)

    @property
    def columns(self) -> list[str]:
        """Names of the columns whose bytes are read."""
        return list(self._leaves)

    def hold(self, groups: Iterable[int]) -> None:
        """By URL, fetch these row groups now, each range once, for their digests and for who decodes them next."""
        if isinstance(self._source, UrlFile):
            self._source.hold(
                [span for group in groups for leaves in self._leaves.values() for span in self._spans(group, leaves)]
            )

    def digests(self, group: int) -> dict[str, str]:
        """The sha256 of each column's bytes in a row group."""
        return {name: self._digest(self._spans(group, leaves)) for name, leaves in self._leaves.items()}

    def _spans(self, group: int, leaves: list[int]) -> list[ByteRange]:
        held = self._metadata.row_group(group)
        spans = []
        for leaf in leaves:
            chunk = held.column(leaf)
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < start:
                start = chunk.dictionary_page_offset
            if start < 0 or chunk.total_compressed_size < 0:
                raise pa.ArrowInvalid(
                    f"its footer places a column of {chunk.total_compressed_size} bytes at byte {start}"
                )
            spans.append(ByteRange(start, start + chunk.total_compressed_size))
        return spans

    def _digest(self, spans: list[ByteRange]) -> str:
        digest = hashlib.sha256()
        for start, stop in spans:
            self._source.seek(start)
            left = stop - start
            while left and (data := self._source.read(min(left, PIECE_BYTES))):
                # less than was asked for: decoding it will tell
                digest.update(data)
                left -= len(data)
        return digest.hexdigest()
