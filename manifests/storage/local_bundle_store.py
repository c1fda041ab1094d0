"""A bundle store in a local folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import StoreError
from relabel.manifests.storage.bundle_store_ports import (
    BLOCK_BYTES,
    LOCKS,
    Entry,
    Held,
    OnProgress,
    Tagged,
    changed,
    check_record_size,
    digest_of_blocks,
)
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.file_locks import FileLock
from relabel.manifests.storage.local_run_store import LocalRunStore, sync_folder
from relabel.manifests.storage.temp_files import TEMP_PREFIX, held_temp


class LocalBundleStore:
    """A bundle store in a folder on a file system that several hosts may share.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: Path) -> None:
        self._store = LocalRunStore(root)
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
        with translate_errors("delete", path):
            path.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        try:
            return _size_of_file(self._store.path(name))
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        return {name: self.size(name) for name in names}

    def upload(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        path = self._store.path(name)
        with translate_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            found = hashlib.sha256()
            with held_temp(path.parent) as (temp, descriptor):
                with source.open("rb") as reader, open(descriptor, "wb", closefd=False) as writer:
                    while block := reader.read(BLOCK_BYTES):
                        found.update(block)
                        writer.write(block)
                        on_progress(len(block))
                os.fsync(descriptor)
                if found.hexdigest() != held.sha256:
                    raise changed(source)
                temp.replace(path)
            sync_folder(path.parent)

    def digest(self, name: str, on_progress: OnProgress) -> Held:
        return digest_of_blocks(self.blocks(name, 0), on_progress)

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        path = self._store.path(name)
        _size_of_file(path)
        with translate_errors("read", path, is_missing_fine=True), path.open("rb") as file:
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
        with translate_errors("list", self._root):
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


def _size_of_file(path: Path) -> int:
    """Bytes of an ordinary file; whoever shares the folder may have put a pipe there, which no reader would come back
    from.

    Raises:
        FileNotFoundError: there is nothing, or a folder.
        StoreError: it is not an ordinary file.
    """
    with translate_errors("look at", path, is_missing_fine=True):
        found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(str(path))
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path}: is not an ordinary file. Remove it.")
    return found.st_size


def _files_below(top: Path) -> Iterator[tuple[Path, bool]]:
    """Files below a folder, and whether each is a temporary one; links are not followed."""
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != LOCKS]
        for name in files:
            yield Path(folder) / name, name.startswith(TEMP_PREFIX)
