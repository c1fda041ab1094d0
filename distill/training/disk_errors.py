"""What a disk refuses while a model or a checkpoint is written, in our words; who may read the files, and when they are
on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from relabel.distill.training.checkpoint_folders import how_it_goes_on
from relabel.manifests.errors import DiskFullError, StoreError
from relabel.manifests.storage.local_run_store import sync_folder

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def writing(folder: Path, checkpoints: Path | None) -> Iterator[None]:
    """Turn refusals of the disk into ours, whoever meets them: safetensors has an error of its own, tokenizers raises a
    bare Exception, both with the system's number in its text.

    Args:
        checkpoints: folder of the training's, for the message; None where it is not known.
    Raises:
        DiskFullError: no space is left.
        StoreError: anything else that the operating system says.
    """
    try:
        yield
    except StoreError:  # ours already, and an OSError too
        raise
    except Exception as exc:
        number = exc.errno if isinstance(exc, OSError) else _told_errno(exc)
        if number is None:
            raise
        kept = "--resume goes on from the last checkpoint, if there is one."
        kept = kept if checkpoints is None else how_it_goes_on(checkpoints)
        if number in _FULL:
            raise DiskFullError(f"{folder}: no space left to write it. Free some space. {kept}") from exc
        raise StoreError(f"{folder}: can't be written ({exc}). Fix this. {kept}") from exc


def _told_errno(exc: Exception) -> int | None:
    is_theirs = type(exc) is Exception or type(exc).__name__ == "SafetensorError"
    found = _NUMBER.search(str(exc)) if is_theirs else None
    return int(found[1]) if found else None


def sync_files(folder: Path, *names: str) -> None:
    """Put files of a folder on the disk, all or those named, and their names: what is committed after it names nothing
    that a loss of power takes.
    """
    for file in [folder / name for name in names] or sorted(filter(Path.is_file, folder.iterdir())):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def open_to_readers(folder: Path) -> None:
    """Give the files of a folder the mode that any new file has here (0666 without the umask); safetensors leaves its
    own at 0600.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in filter(Path.is_file, folder.iterdir()):
        if stat.S_IMODE(file.stat().st_mode) != mode:
            file.chmod(mode)
