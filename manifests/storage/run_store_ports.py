"""What a run's store and its locks are, wherever they lie."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Protocol

from relabel.manifests.errors import ManifestError


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


class RunStore(Protocol):
    """A run's output.

    Attributes:
        root: what to call the place in a message.
        readers: how many reads are worth having under way at once.
    """

    @property
    def root(self) -> str: ...
    @property
    def readers(self) -> int: ...

    def check_conditional_writes(self) -> None:
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
        """Names of the files right inside a folder, sorted, without temporary ones; empty if there
        is no such folder.
        """

    def etags(self, folder: str) -> dict[str, str]:
        """Names of all files below a folder, sorted, each with an ETag, which changes as the file does. Reads none."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file durably, replacing what has that name in one step."""

    def jot(self, name: str, data: bytes) -> None:
        """Write a file in one step as `put` does, so that it outlives this process; a machine that loses power may
        lose it.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably if there is none of that name; of callers with different bytes exactly one gets True.

        Returns:
            False if the name exists already with other bytes (they are left as they are).
        """

    def remove(self, name: str) -> None:
        """Remove a file that nothing depends on; none there is fine."""

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


def parts_of(name: str, root: str) -> tuple[str, ...]:
    """The steps of a name.

    Raises:
        ManifestError: it is absolute or climbs out of the root.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ManifestError(f"{root}: the name {name!r} leaves the folder; refusing to follow it.")
    return pure.parts


def read_if_there(store: RunStore, name: str) -> bytes | None:
    """The bytes of a file; None if there is none."""
    try:
        return store.read(name)
    except FileNotFoundError:
        return None
