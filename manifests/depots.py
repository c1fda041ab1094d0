"""Where bundles are published: big files in and out in blocks, small records by conditional writes, all in one flat space of names.

A depot differs from a run's store in what it holds: files too big for memory, addressed by their digests, and records that are replaced
only if they are still as they were read (compare and swap). `LocalDepot` keeps to a folder; `s3_depots.py` has the same verbs for S3.
Names are relative, with `/`, and can't leave the root. A write is durable when the call returns.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from manifests.digests import sha256_bytes
from manifests.disk_errors import told
from manifests.errors import InputError, StoreError, UsageError
from manifests.file_locks import FileLock
from manifests.filesystems import is_url, scheme_of
from manifests.local_store import TEMP_PREFIX, LocalStore, sync_folder

BLOCK_BYTES = 1 << 22
LOCKS = ".locks"
MAX_RECORD_BYTES = 64 << 20
"""No record is bigger; a bigger one is not read into memory."""

Tick = Callable[[int], None]
"""Told of bytes that have gone through, as they go; may raise to stop the transfer."""


class Tagged(NamedTuple):
    """A record as it was read, with the tag that `replace` holds it to."""

    data: bytes
    tag: str


class Entry(NamedTuple):
    """A file in a listing: when it was written is by the depot's own clock."""

    name: str
    size_bytes: int
    written_s: float


class Held(NamedTuple):
    """What a depot holds under a name."""

    size_bytes: int
    sha256: str


class Depot(Protocol):
    """The verbs of a place to publish to. Reads raise FileNotFoundError where there is nothing of that name.

    Attributes:
        url: what to call the place in a message.
    """

    @property
    def url(self) -> str: ...

    def read(self, name: str) -> Tagged:
        """A record, which fits into memory.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read, or is too big to be a record.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a record if there is none of that name; False if there is one (it is left as it is), whoever wrote it."""

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write a record if what has that name is still what was read; False if not. After a lost reply, False may be our own doing."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """`size` of each name, asked at once where asking takes a journey."""

    def upload(self, name: str, source: Path, held: Held, tick: Tick) -> None:
        """Copy a local file in, in blocks; the name comes to exist whole or not at all, and what had it is replaced.

        Args:
            held: the size and digest that the file is known to have.
        Raises:
            InputError: it has another by now; the name is left as it was.
        """

    def digest(self, name: str, tick: Tick) -> Held:
        """Size and sha256 of what the depot now holds: its own checksum if it keeps one of the whole file, else by reading it back."""

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, in no order (`""`: all there are)."""

    def folders(self) -> list[str]:
        """Names of the folders right inside the root, sorted."""

    def now_s(self) -> float:
        """The depot's own clock, seconds since the epoch."""

    def sweep(self, older_s: float) -> int:
        """Remove what killed uploads left and that is older than so many seconds; returns how many."""


def open_depot(url: str) -> Depot:
    """The depot behind a local path or an `s3://` URL. Touches nothing yet.

    Raises:
        UsageError: neither.
        MissingExtraError: S3 needs a package that is not here.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if not is_url(url):
        return LocalDepot(Path(url))
    if scheme_of(url) == "s3":
        from manifests.s3_depots import S3Depot

        return S3Depot(url)
    raise UsageError(f"{url}: bundles are published to local paths and to s3:// alone, where a pointer can be moved safely.")


class LocalDepot:
    """A depot in a folder on a file system that several hosts may share.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: Path) -> None:
        self._store = LocalStore(root)
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def read(self, name: str) -> Tagged:
        path = self._store.path(name)
        check_record_size(str(path), _size_of_file(path))
        data = self._store.read(name)
        return Tagged(data, sha256_bytes(data))

    def create(self, name: str, data: bytes) -> bool:
        return self._store.create(name, data)

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        with self._locked(name):
            try:
                if self.read(name).tag != tag:
                    return False
            except FileNotFoundError:
                return False
            self._store.put(name, data)
            return True

    def delete(self, name: str) -> None:
        path = self._store.path(name)
        with told("delete", path):
            path.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        try:
            return _size_of_file(self._store.path(name))
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        return {name: self.size(name) for name in names}

    def upload(self, name: str, source: Path, held: Held, tick: Tick) -> None:
        path = self._store.path(name)
        temp = path.with_name(f"{TEMP_PREFIX}upload-{os.getpid()}-{secrets.token_hex(4)}")
        with told("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            found = hashlib.sha256()
            try:
                with source.open("rb") as reader, temp.open("wb") as writer:
                    while block := reader.read(BLOCK_BYTES):
                        found.update(block)
                        writer.write(block)
                        tick(len(block))
                    writer.flush()
                    os.fsync(writer.fileno())
                if found.hexdigest() != held.sha256:
                    raise changed(source)
                temp.replace(path)
            finally:
                temp.unlink(missing_ok=True)
            sync_folder(path.parent)

    def digest(self, name: str, tick: Tick) -> Held:
        return digest_of_blocks(self.blocks(name, 0), tick)

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        path = self._store.path(name)
        _size_of_file(path)
        with told("read", path, is_missing_fine=True), path.open("rb") as file:
            file.seek(start)
            while block := file.read(BLOCK_BYTES):
                yield block

    def entries(self, folder: str) -> Iterator[Entry]:
        top = self._store.path(folder) if folder else self._root
        for path, is_temp in _files_below(top):
            if not is_temp:
                with contextlib.suppress(FileNotFoundError):  # deleted by another while we look
                    held = path.stat()
                    yield Entry(path.relative_to(self._root).as_posix(), held.st_size, held.st_mtime)

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        with told("list", self._root):
            return sorted(path.name for path in self._root.iterdir() if path.is_dir() and path.name != LOCKS)

    def now_s(self) -> float:
        return time.time()

    def sweep(self, older_s: float) -> int:
        now, swept = time.time(), 0
        for path, is_temp in _files_below(self._root):
            if is_temp:
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime >= older_s:
                        path.unlink()
                        swept += 1
        return swept

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self._root / LOCKS / (base64.b32encode(name.encode()).decode().rstrip("=").lower()[:200] + ".lock")
        lock = FileLock(path, f"{self._root}/{name}")
        lock.acquire(waits=True)
        try:
            yield
        finally:
            lock.release()


def digest_of_blocks(blocks: Iterator[bytes], tick: Tick) -> Held:
    """Size and sha256 of what comes in blocks."""
    found, size = hashlib.sha256(), 0
    for block in blocks:
        found.update(block)
        size += len(block)
        tick(len(block))
    return Held(size, found.hexdigest())


def changed(source: Path) -> InputError:
    """What to say of a local file that is no longer what it was when its digest was taken."""
    return InputError(f"{source}: changed while it was uploaded. Export or seal the bundle again.")


def check_record_size(where: str, size: int) -> None:
    """Refuse to read into memory what can't be a record.

    Raises:
        StoreError: it is bigger than any record.
    """
    if size > MAX_RECORD_BYTES:
        raise StoreError(f"{where}: holds {size:,} bytes; a record has at most {MAX_RECORD_BYTES:,}. Something else was put there.")


def _size_of_file(path: Path) -> int:
    """Bytes of an ordinary file; whoever shares the folder may have put a pipe there, which no reader would come back from.

    Raises:
        FileNotFoundError: there is nothing, or a folder.
        StoreError: it is no ordinary file.
    """
    with told("look at", path, is_missing_fine=True):
        found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(str(path))
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path}: is no ordinary file. Somebody put something else there; remove it.")
    return found.st_size


def _files_below(top: Path) -> Iterator[tuple[Path, bool]]:
    """Files below a folder, and whether each is a temporary one; links are not followed."""
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != LOCKS]
        for name in files:
            yield Path(folder) / name, name.startswith(TEMP_PREFIX)
