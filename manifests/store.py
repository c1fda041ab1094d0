"""The folder that a run owns: durable writes, commits by create-if-absent, listings. Local disks now; object stores get the same verbs.

Names are relative, with `/`, and can't leave the root. A write is durable when the call returns: the bytes were synced under a
temporary name before the final name came to exist, and the folder was synced after.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from manifests import failpoints
from manifests.errors import DiskFullError, ManifestError, StoreError

TEMP_PREFIX = ".tmp-"
ABANDONED_S = 3600.0
"""Age at which a temporary file is nobody's any more, seconds: no write takes that long."""
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore:
    """A run's folder on a local or network file system.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._known_folders: set[Path] = set()

    def path(self, name: str) -> Path:
        """Where a name lies.

        Raises:
            ManifestError: the name is absolute or climbs out of the root.
        """
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ManifestError(f"{self.root}: the name {name!r} leaves the folder; refusing to follow it.")
        return self.root.joinpath(*pure.parts)

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read.
        """
        path = self.path(name)
        with told("read", path, is_missing_fine=True):
            return path.read_bytes()

    def names(self, folder: str) -> list[str]:
        """Names of the files right inside a folder, sorted, without temporary ones; empty if there is no such folder."""
        path = self.path(folder)
        try:
            with told("list", path, is_missing_fine=True), os.scandir(path) as entries:
                found = [entry.name for entry in entries if not entry.name.startswith(TEMP_PREFIX)]
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{name}" for name in found)

    def put(self, name: str, data: bytes) -> None:
        """Write a file durably, replacing what has that name in one step."""
        path = self.path(name)
        with told("write", path):
            temp = self._synced_temp(path, data)
            failpoints.hit("before_temp_rename")
            temp.replace(path)
            _sync_folder(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably if there is none of that name; in a race exactly one caller gets True.

        Returns:
            False if the name exists already (its bytes are left as they are).
        """
        path = self.path(name)
        with told("write", path):
            temp = self._synced_temp(path, data)
            failpoints.hit("before_temp_rename")
            try:
                os.link(temp, path)  # a hard link fails where the name exists: all bytes or none, one winner
            except FileExistsError:
                return False
            finally:
                temp.unlink()
            _sync_folder(path.parent)
            return True

    def sweep(self, folder: str) -> int:
        """Remove temporary files that killed writers left right inside a folder (`""`: the root); returns how many.

        Only those of this host's dead processes, and any that are an hour old: where locks are weak, another writer may be at work.
        """
        path = self.path(folder) if folder else self.root
        if not path.is_dir():
            return 0
        left = [entry for entry in path.iterdir() if entry.name.startswith(TEMP_PREFIX) and _is_abandoned(entry)]
        for entry in left:
            entry.unlink(missing_ok=True)
        return len(left)

    def _synced_temp(self, path: Path, data: bytes) -> Path:
        if path.parent not in self._known_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known_folders.add(path.parent)
        temp = path.with_name(f"{TEMP_PREFIX}{_HOST}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with temp.open("xb") as file:
                file.write(data)
                file.flush()
                failpoints.hit("before_temp_sync")
                os.fsync(file.fileno())
        except OSError:
            temp.unlink(missing_ok=True)
            raise
        return temp


def _is_abandoned(temp: Path) -> bool:
    try:
        if time.time() - temp.stat().st_mtime > ABANDONED_S:
            return True
    except OSError:
        return False
    host, _, rest = temp.name.removeprefix(TEMP_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    return host == _HOST and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def told(verb: str, path: Path, *, is_missing_fine: bool = False) -> Iterator[None]:
    """Turn the operating system's refusals into ours.

    Args:
        verb: what was tried, for the message.
        is_missing_fine: let FileNotFoundError through, for callers that expect it.
    """
    try:
        yield
    except OSError as exc:
        if is_missing_fine and isinstance(exc, FileNotFoundError):
            raise
        if exc.errno in _FULL:
            raise DiskFullError(
                f"{path}: no space left to {verb} it. What was committed is safe; free some space and run the same command again."
            ) from exc
        raise StoreError(f"{path}: can't {verb} it ({exc.strerror or exc}). Check the path and its permissions.") from exc
