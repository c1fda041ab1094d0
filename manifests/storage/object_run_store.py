"""A run's output on object storage: commits by conditional put, leases for locks, one retry policy, no temporary files.

Before a process writes anything, a probe proves that the storage heeds conditions: one that accepts and ignores them
would let two workers commit one chunk, so it is refused unless the user vouches for a single writer.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import dataclass, field, replace

from relabel.manifests.errors import StoreError
from relabel.manifests.secrets.redaction import redacted
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import filesystem_of, scheme_of
from relabel.manifests.storage.leases import Lease, LeaseKeeper
from relabel.manifests.storage.objects import ConditionFailedError, Found, FsspecObjects, Objects
from relabel.manifests.storage.retries import Retries
from relabel.manifests.storage.run_store_ports import parts_of
from relabel.manifests.storage.temp_files import HERE

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
        from relabel.manifests.storage.s3_objects import S3Objects

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
