"""What was read of the input first, kept beside the labels, and held against what is read of it later.

A file is known by its size and footer, and neither changes when it is written over in place with values of equal
length. So whoever is the first to read rows of a block keeps the sha256 of the bytes of each column that is read,
before a row is used; whoever reads any of these row groups again, for another shard, a retry, a training or a report,
compares. A block is one row group, or, where these are smaller than a chunk, as many as make up one: so there are not
many more such files than receipts. First come, first kept: they are created if absent.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from relabel.manifests import failpoints
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.column_bytes import ColumnBytes
from relabel.manifests.runs.reading_files import FOLDER, Reading, load_reading, parsed_name, reading_bytes, reading_name
from relabel.manifests.storage.run_store_ports import RunStore

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
