"""Temporary files and folders that others may know for abandoned: their maker holds a lock on them.

The kernel frees that lock when the maker dies, in whichever PID namespace it ran, whatever process has its number
since. A lock proves nothing of makers under another kernel where a file system keeps locks to itself, so a name says
under which boot of which machine it was made: those of others go by their age. `HERE` is of one boot and one PID
namespace: where a process number means one process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

TEMP_PREFIX = ".tmp-"
ABANDONED_S = 3600.0
"""Age at which a temporary file of another machine is nobody's any more, seconds: no write takes that long."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


try:
    _BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text()
    BOOT, _NAMESPACE = _digest(_BOOT_ID), _BOOT_ID + str(Path("/proc/self/ns/pid").readlink())
except OSError:  # nothing is known to be of this kernel then but what this process makes
    BOOT, _NAMESPACE = secrets.token_hex(4), ""
HERE = f"{socket.gethostname()}-{_digest(_NAMESPACE)}"


@contextlib.contextmanager
def held_temp(parent: Path, prefix: str = TEMP_PREFIX, *, is_folder: bool = False) -> Iterator[tuple[Path, int]]:
    """A new temporary file, with a descriptor to write to, or folder; held while the body lasts, and removed at its end
    if it has that name still.
    """
    while True:
        temp = parent / f"{prefix}{BOOT}-{secrets.token_hex(8)}"
        try:
            if is_folder:
                temp.mkdir()
            flags = os.O_RDONLY if is_folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(temp, flags | os.O_CLOEXEC, 0o666)
            try:
                with contextlib.suppress(OSError):  # where nothing can be locked, age alone decides
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not temp.exists():  # swept before it was locked
                    continue
                yield temp, descriptor
                return
            finally:
                os.close(descriptor)  # before it is removed: NFS renames what is open
        finally:
            _remove(temp)


def remove_abandoned(temp: Path, *, older_s: float = ABANDONED_S) -> bool:
    """Remove what `held_temp` made if its maker is gone: under this kernel by the lock, under others by age.

    Returns:
        Whether it was removed.
    """
    try:
        descriptor = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_ours = f"-{BOOT}-" in temp.name
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            is_ours = False
        if not is_ours and time.time() - os.fstat(descriptor).st_mtime <= older_s:
            return False
        _remove(temp)
        return True
    finally:
        os.close(descriptor)


def _remove(temp: Path) -> None:
    if temp.is_dir():
        shutil.rmtree(temp, ignore_errors=True)
    else:
        temp.unlink(missing_ok=True)
