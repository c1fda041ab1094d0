"""Digests of the input's bytes as they were first read, kept with the labels and compared with later reads."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests import failpoints
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.records import canonical_json, checked, digest_of, fault_of, read_in_threads, version_of
from relabel.manifests.store import RunStore, UrlFile

# ------------------------------------------------------------------------------
# The bytes of a Parquet file that some of its columns are read from: where they lie, by the
# footer, and their digest.


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


# ------------------------------------------------------------------------------
# The file of one reading: its name, its bytes, and what is in it.


FOLDER = "inputs"
VERSION = 1


@read_in_threads
@dataclass(frozen=True, slots=True)
class Reading:
    """What a block of row groups held when it was first read.

    Args:
        first: number of its first row group.
        groups: for each row group, the sha256 of its bytes by column.
    """

    first: int
    groups: list[dict[str, str]]


@read_in_threads
@dataclass(frozen=True)
class _Kept:
    """A reading's file: `sha256` is the digest of the reading."""

    sha256: str
    reading: dict[str, Any]


def load_reading(store: RunStore, name: str) -> Reading:
    """Read one.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    where = f"{store.root}/{name}"
    try:
        values = json.loads(store.read(name))
        version = version_of(values)
        if version != VERSION:
            raise ManifestError(f"{where}: written as version {version}; this relabel reads {VERSION}.")
        kept = checked(_Kept, values)
        if kept.sha256 != digest_of(kept.reading):
            raise ManifestError(f"{where}: damaged: its sha256 is not that of what it holds. Restore it from a copy.")
        held = checked(Reading, kept.reading)
    except (FileNotFoundError, ValueError) as exc:
        raise ManifestError(f"{where}: no reading of an input ({fault_of(exc)}). Restore it from a copy.") from exc
    if parsed_name(name)[1] != held.first:
        raise ManifestError(f"{where}: holds the reading of row group {held.first}. Restore it from a copy.")
    return held


def reading_name(file: int, first: int) -> str:
    return f"{FOLDER}/{file:05d}-{first:06d}.json"


def parsed_name(name: str) -> tuple[int, int]:
    stem = name.rpartition("/")[2].removesuffix(".json")
    file, _, first = stem.partition("-")
    if not (file.isdigit() and first.isdigit()):
        raise ManifestError(f"{name}: no name of a reading. Remove the file from the output.")
    return int(file), int(first)


def reading_bytes(held: Reading) -> bytes:
    plain: dict[str, Any] = asdict(held)
    return canonical_json({"version": VERSION, "sha256": digest_of(plain), "reading": plain}) + b"\n"


# ------------------------------------------------------------------------------
# What was read of the input first, kept beside the labels, and held against what is read of it later.
#
# A file is known by its size and footer, and neither changes when it is written over in place with values of equal
# length. So whoever is the first to read rows of a block keeps the sha256 of the bytes of each column that is read,
# before a row is used; whoever reads any of these row groups again, for another shard, a retry, a training or a report,
# compares. A block is one row group, or, where these are smaller than a chunk, as many as make up one: so there are not
# many more such files than receipts. First come, first kept: they are created if absent.


logger = logging.getLogger(__name__)

BLOCKS_KEPT = 4096
"""Blocks remembered, so that the shards of one worker need not fetch them again."""


class Readings:
    """The readings of an output's input.

    Args:
        where: the output, for messages.
        block_rows: rows of a chunk: smaller row groups are put together.
        keeps: whether to keep what nobody kept; off where an output is only looked at.
        changed: numbers of files that were written since the plan was made, though their footers say the same.
    """

    def __init__(
        self, store: RunStore, *, where: str, block_rows: int, keeps: bool, changed: Collection[int] = ()
    ) -> None:
        self._store = store
        self._where = where
        self.block_rows = block_rows
        self._keeps = keeps
        self._changed = set(changed)
        self._known: dict[tuple[int, int], Reading] = {}
        self._first: dict[int, list[int]] | None = None

    def prove(
        self,
        file: int,
        path: str,
        block: range,
        touched: Sequence[int],
        found: ColumnBytes,
        decode: Callable[[range], None],
    ) -> None:
        """Hold the row groups of a block that are about to be read against their first reading; keep that, if this is
        it.

        Args:
            decode: decodes a block to its end: bytes that can't be decoded are damage, and never the measure of a later
                reading.
        Raises:
            InputError: one of them is not what it was.
            ManifestError: what was kept is damaged.
        """
        held = self._find(file, block.start)
        if held is None and self._keeps:
            self._look_at_changed(file, path, found)
            found.hold(block)
            decode(block)
            now = Reading(block.start, [found.digests(group) for group in block])
            failpoints.hit("before_reading")
            was_first = self._store.create(reading_name(file, block.start), reading_bytes(now))
            failpoints.hit("after_reading")
            held = now if was_first else self._load(file, block.start)
            self._remember(file, held)
            if now != held:
                for group in block:
                    self._compare(path, group, held, now.groups[group - block.start])
            return
        found.hold(touched)
        if held is not None:
            self._compare_all(path, touched, held, found)

    def compare(self, file: int, path: str, block: Sequence[int], found: ColumnBytes) -> None:
        """Hold the row groups of a block against their first reading; nothing is fetched of a block that nobody read.

        Raises:
            InputError: one of them is not what it was.
            ManifestError: what was kept is damaged.
        """
        held = self._find(file, block[0])
        if held is not None:
            found.hold(block)
            self._compare_all(path, block, held, found)

    def _compare_all(self, path: str, groups: Sequence[int], held: Reading, found: ColumnBytes) -> None:
        for group in groups:
            self._compare(path, group, held, found.digests(group))

    def _compare(self, path: str, group: int, held: Reading, now: dict[str, str]) -> None:
        before = held.groups[group - held.first] if 0 <= group - held.first < len(held.groups) else {}
        other = [name for name, digest in now.items() if before.get(name, digest) != digest]
        if other:
            raise InputError(
                f"{path}: row group {group} holds another `{'`, `'.join(other)}` than when {self._where} first read "
                "it: the file was written over with values of equal length. Restore it, or label the new one into "
                "another output."
            )

    def _look_at_changed(self, file: int, path: str, found: ColumnBytes) -> None:
        """Before anything new is read of a file that was written since the plan: see whether what was read of it before
        is still there.
        """
        if file not in self._changed:
            return
        self._changed.discard(file)
        kept = self._kept().get(file, [])
        if kept:
            held = self._load(file, kept[0])
            found.hold([held.first])
            self._compare(path, held.first, held, found.digests(held.first))
        logger.warning(
            (
                "%s: written since it was planned; its size and footer are the same%s, so what was not read yet is "
                "taken as it is now"
            ),
            path,
            ", and so is what was read of it" if kept else "",
        )

    def _find(self, file: int, group: int) -> Reading | None:
        """The reading that a row group is in, if one was there when this began or was kept since."""
        kept = self._kept().get(file, [])
        place = bisect.bisect_right(kept, group) - 1
        if place < 0:
            return None
        held = self._known.get((file, kept[place])) or self._load(file, kept[place])
        self._remember(file, held)
        return held if group < held.first + len(held.groups) else None

    def _kept(self) -> dict[int, list[int]]:
        """First row groups of all readings there are, ascending, by file; listed once."""
        if self._first is None:
            self._first = {}
            if self._keeps:
                self._store.sweep(FOLDER)
            for name in self._store.names(FOLDER):
                file, first = parsed_name(name)
                self._first.setdefault(file, []).append(first)
            for kept in self._first.values():
                kept.sort()
        return self._first

    def _remember(self, file: int, held: Reading) -> None:
        kept = self._kept().setdefault(file, [])
        place = bisect.bisect_left(kept, held.first)
        if kept[place : place + 1] != [held.first]:
            kept.insert(place, held.first)
        if len(self._known) < BLOCKS_KEPT:
            self._known[file, held.first] = held

    def _load(self, file: int, first: int) -> Reading:
        return load_reading(self._store, reading_name(file, first))


def blocks_of(group_rows: Sequence[int], block_rows: int) -> Iterator[range]:
    """Numbers of a file's row groups, so many at a time that each block but the last has so many rows."""
    first = rows = 0
    for stop, size in enumerate(group_rows, start=1):
        rows += size
        if rows >= block_rows or stop == len(group_rows):
            yield range(first, stop)
            first, rows = stop, 0
