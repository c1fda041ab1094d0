"""Locks on a local file system: `flock` on `leases/shard-00003.lock`, held by a live process and freed by the kernel
when it dies.

The lock keeps workers from doing the same work twice; it is not what keeps labels single (receipts are), so a file
system with weak locks costs time and never rows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from relabel.manifests.errors import LockHeldError, ManifestError, StoreError
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.file_kinds import read_file


class FileLock:
    """An exclusive lock on a file, held by this process until `release` or its death.

    Args:
        what: what is locked, for messages.
    """

    epoch = 0
    is_lost = False

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._descriptor: int | None = None

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lock.

        Args:
            waits: until its holder lets go, instead of failing at once.
        Raises:
            LockHeldError: a live process holds it.
            StoreError: the file system can't make or lock the file.
        """
        with translate_errors("lock", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as exc:
            os.close(descriptor)
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(
                    f"{self.path}: this file system can't lock ({exc.strerror}). Use a local disk for `output`."
                ) from exc
            holder = self.holder()
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            raise LockHeldError(
                f"{self.what} is being worked on by {who} ({self.path}). Try again when it has ended."
            ) from exc
        self._descriptor = descriptor
        with contextlib.suppress(OSError):
            # on a full disk the lock holds all the same, and only its holder's name is missing
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def release(self) -> None:
        """Let go; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> dict[str, Any] | None:
        """What the holder wrote of itself; for messages only."""
        try:
            held: dict[str, Any] = json.loads(read_file(self.path))
        except (OSError, ValueError, ManifestError):
            return None
        return held if "pid" in held and "host" in held else None

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether a live process holds the lock on that file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False
