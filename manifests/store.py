"""Where a run keeps what it owns: one set of verbs for a local folder and for object storage.

Names are relative, with `/`, and can't leave the root. A write is durable when the call returns. `create` is the commit: of many callers
exactly one gets True. `local_store.py` does this with links and fsync, `object_store.py` with conditional puts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from manifests.errors import ManifestError
from manifests.filesystems import is_url

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_AT_A_TIME = 1024


class Lock(Protocol):
    """Who works on a thing: held by one live process, freed by its `release` or its death."""

    @property
    def epoch(self) -> int:
        """How many holders there were, this one included; 0 where the kernel keeps the lock and nobody counts."""

    @property
    def is_lost(self) -> bool:
        """Whether another process has it by now, because this one did not renew it in time."""

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lock.

        Args:
            waits: until its holder lets go or is dead, instead of failing at once.
        Raises:
            LockHeldError: a live process holds it.
            StoreError: the store can't lock.
        """

    def release(self) -> None:
        """Let go; safe to call twice."""


class Store(Protocol):
    """A run's output.

    Attributes:
        root: what to call the place in a message.
        readers: how many reads are worth having under way at once.
    """

    @property
    def root(self) -> str: ...
    @property
    def readers(self) -> int: ...

    def prove(self) -> None:
        """See, before the first write, that commits will be single here; once a process, later calls do nothing.

        Raises:
            StoreError: the storage ignores conditions, so that two workers could commit one chunk.
        """

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read.
        """

    def names(self, folder: str) -> list[str]:
        """Names of the files right inside a folder, sorted, without temporary ones; empty if there is no such folder."""

    def marks(self, folder: str) -> dict[str, str]:
        """Names of all files below a folder, sorted, each with a mark that changes when its bytes do. Reads no file."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file durably, replacing what has that name in one step."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably if there is none of that name; of callers with different bytes exactly one gets True.

        Returns:
            False if the name exists already with other bytes (they are left as they are).
        """

    def sweep(self, folder: str) -> int:
        """Remove temporary files that killed writers left right inside a folder (`""`: the root); returns how many."""

    def lock(self, name: str, what: str) -> Lock:
        """The lock of that name in `leases/`, not yet taken.

        Args:
            what: what it locks, for messages.
        """

    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lock, without taking it for longer than the look."""

    def log(self, name: str, text: str, *, is_end: bool = False) -> None:
        """Add lines to a log for people, redacted. Never synced, may be held back for a while.

        Args:
            is_end: no more lines are expected, so nothing is held back and nothing kept in memory.
        Raises:
            OSError: it can't be written.
        """

    def close(self) -> None:
        """Write out what was held back. The store can be used again afterwards."""


def open_store(url: str | Path, *, single_writer: bool = False, lease_s: float | None = None) -> Store:
    """The store behind a path or URL. Touches nothing yet.

    Args:
        url: local path, `s3://bucket/prefix` or another URL that fsspec knows.
        single_writer: the user vouches that only one process writes, so that a store without conditional writes will do.
        lease_s: time after which a lease that is not renewed is dead, seconds, on stores that have leases.
    Raises:
        MissingExtraError, StoreError: no way to that kind of storage from here.
    """
    text = str(url)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    if not is_url(text):
        from manifests.local_store import LocalStore

        return LocalStore(text)
    from manifests.object_store import open_object_store

    return open_object_store(text, single_writer=single_writer, lease_s=lease_s)


def shard_lock(store: Store, shard: int) -> Lock:
    """The lock of one shard."""
    return store.lock(shard_lock_name(shard), f"shard {shard}")


def shard_lock_name(shard: int) -> str:
    """What the lock of a shard is called."""
    return f"shard-{shard:05d}"


def parts_of(name: str, root: str) -> tuple[str, ...]:
    """The steps of a name.

    Raises:
        ManifestError: it is absolute or climbs out of the root.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ManifestError(f"{root}: the name {name!r} leaves the folder; refusing to follow it.")
    return pure.parts


def each(store: Store, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`map`, with as many calls under way as the store deserves; results in the order of the items."""
    if store.readers <= 1:
        yield from map(function, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(store.readers, thread_name_prefix="read") as pool:
        while some := list(itertools.islice(left, _AT_A_TIME)):
            yield from pool.map(function, some)
