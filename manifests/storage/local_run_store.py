"""A run's output as a local folder: durable writes, commits by create-if-absent, listings.

A write is durable when the call returns: the bytes were synced under a temporary name before the final name came to
exist, and the folder was synced after.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from relabel.manifests import failpoints
from relabel.manifests.secrets.redaction import redacted
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.file_kinds import read_file
from relabel.manifests.storage.file_locks import FileLock
from relabel.manifests.storage.run_store_ports import parts_of
from relabel.manifests.storage.temp_files import TEMP_PREFIX, held_temp, remove_abandoned

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
