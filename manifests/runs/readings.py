"""What was read of the input first, kept beside the labels, and held against what is read of it later.

A file is known by its size and footer, and neither changes when it is written over in place with values of equal
length. So whoever is the first to read rows of a block keeps the sha256 of the bytes of each column that is read,
before a row is used; whoever reads any of these row groups again, for another shard, a retry, a training or a report,
compares. A block is one row group, or, where these are smaller than a chunk, as many as make up one: so there are not
many more such files than receipts. First come, first kept: they are created if absent.
"""

from __future__ import annotations

import bisect
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manifests import failpoints
from manifests.digests import canonical_json, digest_of
from manifests.errors import InputError, ManifestError
from manifests.inputs.column_bytes import ColumnBytes
from manifests.records import checked, fault_of, version_of
from manifests.runs.plans import Plan
from manifests.runs.run_manifest import RunManifest
from manifests.storage.concurrency import map_concurrent
from manifests.storage.run_store_ports import RunStore

logger = logging.getLogger(__name__)

FOLDER = "inputs"
VERSION = 1
BLOCKS_KEPT = 4096
"""Blocks remembered, so that the shards of one worker need not fetch them again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a block of row groups held when it was first read.

    Args:
        first: number of its first row group.
        groups: for each row group, the sha256 of its bytes by column.
    """

    first: int
    groups: list[dict[str, str]]


@dataclass(frozen=True)
class _Kept:
    """A reading's file: `sha256` is the digest of the reading."""

    sha256: str
    reading: dict[str, Any]


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
            was_first = self._store.create(_name(file, block.start), _as_bytes(now))
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
                file, first = _parsed(name)
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
        return load_reading(self._store, _name(file, first))


def blocks_of(group_rows: Sequence[int], block_rows: int) -> Iterator[range]:
    """Numbers of a file's row groups, so many at a time that each block but the last has so many rows."""
    first = rows = 0
    for stop, size in enumerate(group_rows, start=1):
        rows += size
        if rows >= block_rows or stop == len(group_rows):
            yield range(first, stop)
            first, rows = stop, 0


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
    if _parsed(name)[1] != held.first:
        raise ManifestError(f"{where}: holds the reading of row group {held.first}. Restore it from a copy.")
    return held


def listed_readings(store: RunStore) -> dict[str, str]:
    """Every reading by name, with the sha256 of what it says: what a manifest keeps of them.

    Raises:
        ManifestError: one is damaged.
    """
    return {name: digest_of(asdict(held)) for name, held in _all(store)}


def check_readings(store: RunStore, plan: Plan, manifest: RunManifest | None) -> None:
    """Hold the readings of an output against its plan, and against its manifest where that names them.

    Raises:
        ManifestError: names one that is damaged, missing, not the one that was kept, or of no row group of its own.
    """
    found, stops = {}, {}
    for name, held in _all(store):
        found[name], stops[name] = digest_of(asdict(held)), held.first + len(held.groups)
    said = found if manifest is None or manifest.readings is None else manifest.readings
    for name in sorted(found.keys() | said.keys()):
        if name not in found:
            raise ManifestError(f"{store.root}/{name}: what was read of the input is missing. Restore it from a copy.")
        if found[name] != said.get(name):
            raise ManifestError(
                f"{store.root}/{name}: not what was read of the input when the run finished. Restore it from a copy."
            )
    before = -1, 0
    for (file, first), name in sorted((_parsed(name), name) for name in found):
        if file >= len(plan.files):
            raise ManifestError(f"{store.root}/{name}: the plan has no file {file}. Move it away.")
        if (file, first) < before:
            raise ManifestError(
                f"{store.root}/{name}: row group {first} is in another reading too. Restore both from a copy."
            )
        before = file, stops[name]


def differing_readings(first: RunStore, second: RunStore) -> tuple[int, int] | None:
    """The first file and row group, by number, that two outputs of one list of input files read differently; None if
    there is none.

    Chunks of another size make other blocks, so it is row groups that are compared.

    Raises:
        ManifestError: what was kept is damaged.
    """
    ours = dict(_groups(first))
    for place, other in sorted(_groups(second)):
        one = ours.get(place, {})
        if any(one[column] != other[column] for column in one.keys() & other.keys()):
            return place
    return None


def _groups(store: RunStore) -> Iterator[tuple[tuple[int, int], dict[str, str]]]:
    """What each row group held, by the numbers of file and row group."""
    for name, held in _all(store):
        for group, digests in enumerate(held.groups, start=held.first):
            yield (_parsed(name)[0], group), digests


def _all(store: RunStore) -> Iterator[tuple[str, Reading]]:
    names = sorted(store.names(FOLDER))
    return zip(names, map_concurrent(store, functools.partial(load_reading, store), names), strict=True)


def refuse_differing(first: RunStore, second: RunStore, plan: Plan) -> None:
    """Refuse to put the labels of two outputs of one plan together if they are of other texts.

    Raises:
        InputError: names the file and the row group.
        ManifestError: what was kept is damaged.
    """
    other = differing_readings(first, second)
    if other is not None:
        raise InputError(
            f"{plan.files[other[0]].path}: row group {other[1]} held other texts when {first.root} read it than when "
            f"{second.root} did, so "
            "their labels don't go together. Label it again into one of them."
        )


def copy_readings(source: RunStore, target: RunStore, first_file: int) -> None:
    """Bring an output's readings into one that holds its labels, and whose list of files has its own from `first_file`
    on.

    Raises:
        ManifestError: one of them is damaged, or the target holds another.
    """
    for name in source.names(FOLDER):
        held = load_reading(source, name)
        copy = _name(first_file + _parsed(name)[0], held.first)
        if not target.create(copy, _as_bytes(held)) and load_reading(target, copy) != held:
            raise ManifestError(
                f"{target.root}/{copy}: {source.root}/{name} says otherwise. Merge into a folder of its own."
            )


def _name(file: int, first: int) -> str:
    return f"{FOLDER}/{file:05d}-{first:06d}.json"


def _parsed(name: str) -> tuple[int, int]:
    stem = name.rpartition("/")[2].removesuffix(".json")
    file, _, first = stem.partition("-")
    if not (file.isdigit() and first.isdigit()):
        raise ManifestError(f"{name}: no name of a reading. Remove the file from the output.")
    return int(file), int(first)


def _as_bytes(held: Reading) -> bytes:
    plain: dict[str, Any] = asdict(held)
    return canonical_json({"version": VERSION, "sha256": digest_of(plain), "reading": plain}) + b"\n"
