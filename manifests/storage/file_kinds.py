"""Which kinds of file are opened: no pipe waits, no device is read without end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from relabel.manifests.errors import InputError, ManifestError

_KINDS = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}


def read_file(path: Path) -> bytes:
    """All bytes of a file of ours. Whoever shares the folder may have put a pipe there, which nobody would come back
    from.

    Raises:
        ManifestError: it is not an ordinary file.
        OSError: it can't be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ManifestError(f"{path}: is not an ordinary file. Restore it from a copy, or move it away.")
        return file.read()


def check_kind(path: str, found: os.stat_result, *, takes_pipes: bool = False) -> None:
    """Refuse what is not a regular file before it is opened: a pipe waits for whoever writes into it, and a device may
    never end.

    Args:
        found: what the system says about it.
        takes_pipes: it is read from its beginning to its end, which a pipe can do.
    Raises:
        InputError: says what it is.
    """
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{path}: can't be read: a folder, and a file is wanted.")
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(found.st_mode)), None)
    if kind is not None and not (takes_pipes and kind == "a pipe"):
        raise InputError(f"{path}: can't be read: {kind}, and a file is wanted. Write its content to one.")
