"""A run's output on a local disk and on object storage, with durable writes and create-if-absent; and files at URLs,
read in ranges."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import io
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from relabel.manifests import failpoints
from relabel.manifests.errors import InputError, ManifestError, StoreError
from relabel.manifests.files import (
    HERE,
    TEMP_PREFIX,
    FileLock,
    Storage,
    check_kind,
    filesystem_of,
    held_temp,
    is_url,
    read_file,
    remove_abandoned,
    scheme_of,
    translate_errors,
)
from relabel.manifests.leases import Lease, LeaseKeeper
from relabel.manifests.objects import ConditionFailedError, Found, FsspecObjects, Objects, Retries
from relabel.manifests.secrets import redacted

# ------------------------------------------------------------------------------
# What a run's store and its locks are, wherever they lie.


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


# ------------------------------------------------------------------------------
# One function over many arguments at a time, in order.


ItemT = TypeVar("ItemT")


ResultT = TypeVar("ResultT")


_AT_A_TIME = 1024


def map_concurrent(store: RunStore, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`map`, with as many calls under way as the store deserves; results in the order of the items."""
    if store.readers <= 1:
        yield from map(function, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(store.readers, thread_name_prefix="read") as pool:
        while some := list(itertools.islice(left, _AT_A_TIME)):
            yield from pool.map(function, some)


# ------------------------------------------------------------------------------
# A run's output as a local folder: durable writes, commits by create-if-absent, listings.
#
# A write is durable when the call returns: the bytes were synced under a temporary name before the final name came to
# exist, and the folder was synced after.


NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that has no hard links: vfat, exfat, SMB and many in user space."""


class LocalRunStore:
    """A run's folder on a local or network file system.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self.readers = 1  # the disk's own cache is faster than any pool of threads
        self._folder = Path(root)
        self._known_folders: set[Path] = set()

    def path(self, name: str) -> Path:
        """Where a name lies.

        Raises:
            ManifestError: the name is absolute or climbs out of the root.
        """
        return self._folder.joinpath(*parts_of(name, self.root))

    def check_conditional_writes(self) -> None:
        """Nothing: links are exclusive, and each `create` would tell."""

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read.
            ManifestError: it is not an ordinary file.
        """
        path = self.path(name)
        with translate_errors("read", path, is_missing_fine=True):
            return read_file(path)

    def names(self, folder: str) -> list[str]:
        """Names of the files right inside a folder, sorted, without temporary ones; empty if there
        is no such folder.
        """
        path = self.path(folder)
        try:
            with translate_errors("list", path, is_missing_fine=True), os.scandir(path) as entries:
                found = [entry.name for entry in entries if not entry.name.startswith(TEMP_PREFIX)]
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{name}" for name in found)

    def etags(self, folder: str) -> dict[str, str]:
        """Names of all files below a folder, sorted, each with its size, inode and time of change for an ETag."""
        top = self.path(folder)
        found = {}
        with translate_errors("list", top):
            for inside, folders, names in os.walk(top, onerror=_unless_missing, followlinks=True):
                folders[:] = [name for name in folders if not _leads_back(Path(inside, name))]
                for name in names:
                    if not name.startswith(TEMP_PREFIX):
                        path = Path(inside, name)
                        try:
                            stat = path.stat()
                        except FileNotFoundError:
                            if path.is_symlink():
                                raise
                            continue  # it was removed since
                        found[path.relative_to(self._folder).as_posix()] = (
                            f"{stat.st_size}-{stat.st_ino}-{stat.st_mtime_ns}"
                        )
        return dict(sorted(found.items()))

    def put(self, name: str, data: bytes) -> None:
        """Write a file durably, replacing what has that name in one step."""
        path = self.path(name)
        with translate_errors("write", path):
            with self._temp(path, data) as temp:
                temp.replace(path)
            sync_folder(path.parent)

    def jot(self, name: str, data: bytes) -> None:
        """Write a file in one step; the disk has it when the kernel likes."""
        path = self.path(name)
        with translate_errors("write", path), self._temp(path, data, is_synced=False) as temp:
            temp.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably if there is none of that name; in a race exactly one caller gets True.

        Returns:
            False if the name exists already (its bytes are left as they are).
        """
        path = self.path(name)
        with translate_errors("write", path):
            with self._temp(path, data) as temp:
                try:
                    os.link(temp, path)  # a hard link fails where the name exists: all bytes or none, one winner
                except FileExistsError:
                    # a network file system that lost the first reply and asked again meets its own link
                    if not temp.samefile(path):
                        return False
                except OSError as exc:
                    if exc.errno not in NO_LINKS:
                        raise
                    return _create_in_place(path, data)
            sync_folder(path.parent)
            return True

    def remove(self, name: str) -> None:
        """Remove a file that nothing depends on; none there is fine."""
        path = self.path(name)
        with translate_errors("remove", path):
            path.unlink(missing_ok=True)

    def sweep(self, folder: str) -> int:
        """Remove temporary files that killed writers left right inside a folder (`""`: the root); returns how many.

        Those of this machine's dead processes, and of others' what is an hour old: where locks are weak, another writer
        may be at work.
        """
        path = self.path(folder) if folder else self._folder
        with translate_errors("clean up", path):
            if not path.is_dir():
                return 0
            return sum(remove_abandoned(entry) for entry in path.iterdir() if entry.name.startswith(TEMP_PREFIX))

    def lock(self, name: str, what: str) -> FileLock:
        """An OS lock, which the kernel frees when its holder dies."""
        return FileLock(self._lock_path(name), what)

    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lock."""
        return FileLock.is_held(self._lock_path(name))

    def log(self, name: str, text: str, *, is_end: bool = False) -> None:
        """Append to a log; no file stays open between lines, since many shards may be under way."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(redacted(text))

    def close(self) -> None:
        """Nothing is held back."""

    def _lock_path(self, name: str) -> Path:
        return self.path(f"leases/{name}.lock")

    @contextlib.contextmanager
    def _temp(self, path: Path, data: bytes, *, is_synced: bool = True) -> Iterator[Path]:
        if path.parent not in self._known_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known_folders.add(path.parent)
        with held_temp(path.parent) as (temp, descriptor):
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            if is_synced:
                failpoints.hit("before_temp_sync")
                os.fsync(descriptor)
                failpoints.hit("before_temp_rename")
            yield temp


def has_links(folder: Path) -> bool:
    """Whether the file system of a folder has hard links, by making one."""
    with held_temp(folder) as (temp, _):
        twin = temp.with_name(f"{temp.name}-link")
        try:
            os.link(temp, twin)
        except OSError as exc:
            return exc.errno not in NO_LINKS
        twin.unlink()
    return True


def _create_in_place(path: Path, data: bytes) -> bool:
    """As `create`, where there are no hard links: one winner, but a kill in the middle of it leaves half a file."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            failpoints.hit("before_temp_sync")
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return True


def _leads_back(folder: Path) -> bool:
    """Whether it is a link to a folder that it lies in, whose files are listed there."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------
# A run's output on object storage: commits by conditional put, leases for locks, one retry policy, no temporary files.
#
# Before a process writes anything, a probe proves that the storage heeds conditions: one that accepts and ignores them
# would let two workers commit one chunk, so it is refused unless the user vouches for a single writer.


PROBE_NAME = "leases/probe"
"""One object for all probes; it stays, so that no permission to delete is needed."""
PROBE = b"Written by relabel to see whether this store heeds conditions.\n"
READERS = 16
LOG_EVERY_S = 60.0
"""A log is an object, and objects can't be added to: lines are kept for so long, then the whole is written anew."""
LOG_PART_CHARS = 1 << 20
"""Then a new object is begun: what is kept in memory and written again each minute stays small."""
_NO_TAG = '"00000000000000000000000000000000"'


def open_object_run_store(url: str, storage: Storage, *, single_writer: bool = False) -> ObjectRunStore:
    """The store behind a URL. Touches nothing yet.

    Raises:
        ConfigError, MissingExtraError, StoreError: see `filesystem_of`.
    """
    objects, path = objects_of(url, storage)
    return ObjectRunStore(objects, path, storage, root=url.rstrip("/"), single_writer=single_writer)


def objects_of(url: str, storage: Storage) -> tuple[Objects, str]:
    """The storage behind a URL, and the key that the URL names there.

    Raises:
        ConfigError, MissingExtraError, StoreError: see `filesystem_of`.
    """
    filesystem, path = filesystem_of(url, storage)
    if scheme_of(url) == "s3":
        from relabel.manifests.objects import S3Objects

        return S3Objects(filesystem, url), path.strip("/")
    return FsspecObjects(filesystem, url), path.rstrip("/")


class ObjectRunStore:
    """A run's objects below one key.

    Args:
        objects: the storage.
        prefix: key of the run's root.
        storage: how long calls are tried and leases live.
        root: what to call it in messages.
        single_writer: believe the user that only one process writes; conditions become a look before the write.
        probe: name of the object that the probe writes.
    """

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        storage: Storage,
        *,
        root: str,
        single_writer: bool = False,
        probe: str = PROBE_NAME,
    ) -> None:
        self.root = root
        self.readers = READERS
        self._objects = _LookFirst(objects) if single_writer else objects
        self._prefix = prefix
        self._lease_s = storage.lease_s
        self._retries = Retries(storage.retry_s)
        self._probe = probe
        self._is_proven = single_writer
        self._guard = threading.Lock()
        self._keeper = LeaseKeeper()
        self._logs: dict[str, _Log] = {}
        self._log_parts: dict[str, int] = {}

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return self._retries.call(
            functools.partial(self._objects.get, self._key(name)), f"{self.root}/{name}: reading it"
        ).data

    def names(self, folder: str) -> list[str]:
        """Names of the objects right inside a folder, sorted."""
        return sorted(self._list(folder, is_deep=False))

    def etags(self, folder: str) -> dict[str, str]:
        """Names of all objects below a folder, sorted, each with its ETag: a request for every thousand, and none for
        each.
        """
        found = self._list(folder, is_deep=True)
        names = sorted(found)  # S3 lists in this order, so that a million names need not be held twice
        return found if names == list(found) else {name: found[name] for name in names}

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing what has that name. A put whose reply was lost is repeated: it writes the same
        bytes.
        """
        self.check_conditional_writes()
        self._retries.call(
            functools.partial(self._objects.put, self._key(name), data), f"{self.root}/{name}: writing it"
        )

    def jot(self, name: str, data: bytes) -> None:
        """As `put`: an object store has no other way."""
        self.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none of that name; of callers with different bytes exactly one gets True.

        A refusal may be our own doing: the put succeeded, its reply was lost, and somebody below us (a client library,
        a proxy) asked again. So a refusal is settled by a look at what is there: our bytes mean that we were the first.
        """
        self.check_conditional_writes()
        key = self._key(name)
        try:
            self._retries.call(
                functools.partial(self._objects.put, key, data, is_new=True), f"{self.root}/{name}: writing it"
            )
        except ConditionFailedError:
            return self.read(name) == data
        return True

    def remove(self, name: str) -> None:
        """Remove an object that nothing depends on; none there is fine."""
        self._retries.call(functools.partial(self._objects.delete, self._key(name)), f"{self.root}/{name}: removing it")

    def sweep(self, folder: str) -> int:
        """Nothing: an object is there whole or not at all."""
        return 0

    def lock(self, name: str, what: str) -> Lease:
        """A lease."""
        self.check_conditional_writes()
        return self._lease(name, what)

    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lease."""
        return self._lease(name, name).is_alive()

    def log(self, name: str, text: str, *, is_end: bool = False) -> None:
        """Add lines to a log of this process's own (its host and number are put into the name), in parts of a megabyte;
        written every minute, at its end, and on `close`.
        """
        with self._guard:
            held = self._logs.setdefault(name, _Log(self._log_parts.get(name, 0)))
            held.text += redacted(text)
            is_full = len(held.text) > LOG_PART_CHARS
            is_due = is_end or is_full or time.monotonic() - held.written_s > LOG_EVERY_S
            if is_end or is_full:
                del self._logs[name]
                self._log_parts[name] = held.part + 1
        if is_due:
            self._write_log(name, held)

    def close(self) -> None:
        """Write out the logs, and wait for the thread that renewed leases if none is held any more."""
        self._keeper.close()
        for name, held in list(self._logs.items()):
            self._write_log(name, held)

    def _write_log(self, name: str, held: _Log) -> None:
        stem, _, ending = name.rpartition(".")
        with self._guard:
            data, is_news = held.text.encode("utf-8", "replace"), len(held.text) != held.written
            held.written, held.written_s = len(held.text), time.monotonic()
        if is_news:
            part = f"-{held.part}" if held.part else ""
            own = f"{stem}-{HERE}-{os.getpid()}{part}.{ending}"
            replace(self._retries, tries=3).call(
                functools.partial(self._objects.put, self._key(own), data), f"{self.root}/{own}: writing it"
            )

    def _lease(self, name: str, what: str) -> Lease:
        return Lease(self._objects, self._key(f"leases/{name}.json"), what, self._lease_s, self._keeper, self._retries)

    def _key(self, name: str) -> str:
        return "/".join((self._prefix, *parts_of(name, self.root)))

    def _list(self, folder: str, *, is_deep: bool) -> dict[str, str]:
        prefix = (self._key(folder) if folder else self._prefix) + "/"
        found: dict[str, str] = {}
        after: str | None = None
        while True:
            page = functools.partial(self._objects.page, prefix, is_deep=is_deep, after=after)
            try:
                entries, after = self._retries.call(page, f"{self.root}/{folder}: listing it")
            except FileNotFoundError:
                return {}
            found.update({key[len(self._prefix) + 1 :]: tag for key, tag in entries if not key.endswith("/")})
            if after is None:
                return found

    def check_conditional_writes(self) -> None:
        """Once a process, before its first write: see that the storage heeds conditions.

        Raises:
            StoreError: it does not, so that two workers could commit one chunk.
        """
        with self._guard:
            if self._is_proven:
                return
            why = (
                None
                if self._objects.has_atomic_conditions
                else "this kind of storage has no conditional write that fsspec offers"
            )
            why = why or self._ignored_condition()
            if why is not None:
                raise StoreError(
                    f"{self.root}: {why}, so that two workers could commit the same chunk. Use a store that has "
                    "conditional writes (docs/storage.md), or set run.single_writer: true if never more than one "
                    "process writes to this output."
                )
            self._is_proven = True

    def _ignored_condition(self) -> str | None:
        """Which condition the storage ignored; None if it heeded both."""
        key = self._key(self._probe)

        def is_refused(*, is_new: bool = False, tag: str | None = None) -> bool:
            try:
                put = functools.partial(self._objects.put, key, PROBE, is_new=is_new, tag=tag)
                self._retries.call(put, f"{self.root}: probing it")
            except ConditionFailedError:
                return True
            return False

        # the first may be refused, where an earlier run left its probe; that proves as much as the second
        if not is_refused(is_new=True) and not is_refused(is_new=True):
            return "the store accepts `If-None-Match: *` and ignores it (it wrote over an object that was there)"
        if not is_refused(tag=_NO_TAG):
            return "the store accepts `If-Match` and ignores it (it wrote over an object of another ETag)"
        return None


@dataclass(slots=True)
class _Log:
    """Lines of one part of a log, how many characters of them are written, and when they were."""

    part: int
    text: str = ""
    written: int = 0
    written_s: float = field(default_factory=time.monotonic)


class _LookFirst:
    """Storage whose conditions are a look before the write: enough for one writer, and mostly for telling overlapping
    ticks apart.
    """

    has_atomic_conditions = False

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.get, self.age_s, self.page, self.delete = objects.get, objects.age_s, objects.page, objects.delete

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        if is_new or tag is not None:
            found = self._find(key)
            if (found is not None) if is_new else (found is None or found.tag != tag):
                raise ConditionFailedError(key)
        return self._objects.put(key, data)

    def _find(self, key: str) -> Found | None:
        try:
            return self._objects.get(key)
        except FileNotFoundError:
            return None


# ------------------------------------------------------------------------------
# Where a run keeps what it owns: one set of verbs for a local folder and for object storage.
#
# Names are relative, with `/`, and can't leave the root. A write is durable when the call returns. `create` is the
# commit: of many callers exactly one gets True. `local_run_store.py` does this with links and fsync,
# `object_run_store.py` with conditional puts.


def open_run_store(url: str | Path, storage: Storage, *, single_writer: bool = False) -> RunStore:
    """The store behind a path or URL. Touches nothing yet.

    Args:
        url: local path, `s3://bucket/prefix` or another URL that fsspec knows.
        single_writer: the user vouches that only one process writes, so that a store without conditional writes will
            do.
    Raises:
        MissingExtraError, StoreError: no way to that kind of storage from here.
    """
    text = str(url)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    if not is_url(text):
        return LocalRunStore(text)

    return open_object_run_store(text, storage, single_writer=single_writer)


def shard_lock(store: RunStore, shard: int) -> Lock:
    """The lock of one shard."""
    return store.lock(shard_lock_name(shard), f"shard {shard}")


def shard_lock_name(shard: int) -> str:
    """What the lock of a shard is called."""
    return f"shard-{shard:05d}"


# ------------------------------------------------------------------------------
# A file at a URL, read in exactly the ranges that are asked for.
#
# fsspec's own files read ahead by megabytes, which for a few columns of a Parquet file fetches most of it. Here a read
# is one ranged request, retried like every other (`retries.py`) and pinned to the version that was opened, so that a
# file that is replaced meanwhile is an error and never a mixture of two.


COPY_BYTES = 32 << 20
"""A file that is copied is fetched in ranges of so many bytes."""
TAIL_BYTES = 1 << 16
"""Fetched on opening and kept: a Parquet footer mostly, and the file's size and version with it, in one request."""


class UrlFile(io.RawIOBase):
    """A readable, seekable file.

    `tag` is the version's that was opened (S3: its ETag).

    Args:
        url: of one object.
    Raises:
        FileNotFoundError: there is none.
        StoreError, StoreUnreachableError: it can't be read.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        super().__init__()
        self._url = url
        self._objects, self._key = objects_of(url, storage)
        self._retries = Retries(storage.retry_s)
        self._place = 0
        try:
            tail = self._retries.call(
                functools.partial(self._objects.get, self._key, start=-TAIL_BYTES), f"{url}: reading its end"
            )
        except EOFError:
            tail = Found(b"", "", 0)
        self._tail, self.tag, self.size_bytes = tail

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move there; reads nothing."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size_bytes}[whence]
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, as many as asked for unless the file ends; all that is left for -1."""
        start = min(self._place, self.size_bytes)
        end = self.size_bytes if size is None or size < 0 else min(start + size, self.size_bytes)
        self._place = end
        kept_from = self.size_bytes - len(self._tail)
        if start >= kept_from:
            return self._tail[start - kept_from : end - kept_from]
        return self._fetch(start, end) if start < end else b""

    def readall(self) -> bytes:
        """All that is left."""
        return self.read(-1)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed's buffer type has no name before 3.12
        """Fill a buffer with the next bytes; returns how many."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _fetch(self, start: int, end: int) -> bytes:
        try:
            get = functools.partial(self._objects.get, self._key, start=start, end=end, tag=self.tag)
            return self._retries.call(get, f"{self._url}: reading bytes {start} to {end}").data
        except (ConditionFailedError, EOFError) as exc:
            raise InputError(f"{self._url}: replaced while it was read. Run again, once it stays as it is.") from exc


def scratch_file(name: str) -> Path:
    """Where a file of this name may be written; gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="relabel-fetched-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / name


def fetched(url: str, storage: Storage) -> Path:
    """A local copy of the file at a URL, under its own name; gone when this process ends.

    Raises:
        InputError: it is not there.
        StoreError, StoreUnreachableError: see `UrlFile`.
    """
    copy = scratch_file(url.rpartition("/")[2])
    try:
        with UrlFile(url, storage) as source, copy.open("wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except FileNotFoundError as exc:
        raise InputError(f"{url}: no such file.") from exc
    return copy


def read_whole(path: str, storage: Storage) -> bytes:
    """All bytes of a file, local or by URL.

    Raises:
        InputError: a device, which may never end, or a folder.
        FileNotFoundError, StoreError, StoreUnreachableError: see `UrlFile`.
    """
    if is_url(path):
        return read_url(path, storage)
    check_kind(path, Path(path).stat(), takes_pipes=True)
    return Path(path).read_bytes()


def read_url(url: str, storage: Storage) -> bytes:
    """All bytes of the file at a URL.

    Raises:
        FileNotFoundError, StoreError, StoreUnreachableError: see `UrlFile`.
    """
    objects, key = objects_of(url, storage)
    try:
        return Retries(storage.retry_s).call(functools.partial(objects.get, key), f"{url}: reading it").data
    except EOFError:
        return b""
