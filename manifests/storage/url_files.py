"""A file at a URL, read in exactly the ranges that are asked for.

fsspec's own files read ahead by megabytes, which for a few columns of a Parquet file fetches most of it. Here a read is
one ranged request, retried like every other (`retries.py`) and pinned to the version that was opened, so that a file
that is replaced meanwhile is an error and never a mixture of two.
"""

from __future__ import annotations

import atexit
import functools
import io
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from relabel.manifests.errors import InputError
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.file_kinds import check_kind
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.object_run_store import objects_of
from relabel.manifests.storage.objects import ConditionFailedError, Found
from relabel.manifests.storage.retries import Retries

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
        self._held: list[tuple[int, bytes]] = []

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
        for first, data in self._held:
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        return self._fetch(start, end) if start < end else b""

    def hold(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch these ranges, those that touch as one, and keep them in place of those held before; reads within them
        cost no request.
        """
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        self._held = []
        kept_from = self.size_bytes - len(self._tail)
        self._held = [
            (start, self._fetch(start, min(stop, self.size_bytes))) for start, stop in joined if start < kept_from
        ]

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
