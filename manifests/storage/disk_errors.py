"""What the operating system refuses, in our words."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from relabel.manifests.errors import DiskFullError, RelabelError, StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = (
    *FULL,
    *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.ENOTDIR),
)
"""What a disk, its rights or a file where a folder belongs do to any program; the other numbers may be of a call that
was wrong.
"""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def translate_errors(verb: str, path: Path, *, is_missing_fine: bool = False) -> Iterator[None]:
    """Turn the operating system's refusals into ours.

    Args:
        verb: what was tried, for the message.
        is_missing_fine: let FileNotFoundError through, for callers that expect it.
    """
    try:
        yield
    except StoreError:  # ours already, and an OSError too
        raise
    except OSError as exc:
        if is_missing_fine and isinstance(exc, FileNotFoundError):
            raise
        raise _translated(exc, verb, path) from exc


def refusal(error: Exception) -> RelabelError | None:
    """What the operating system refused at a place that expects no refusal, in our words; None if an error is nothing
    of that kind, but a fault of the program.
    """
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        return _translated(error, "use", error.filename)
    why = out_of_files(error)
    return None if why is None else StoreError(why)


def _translated(error: OSError, verb: str, path: Path | str) -> RelabelError:
    if error.errno in FULL:
        return DiskFullError(
            f"{path}: no space left to {verb} it. What was committed is safe; free some space and run the same "
            "command again."
        )
    if (why := out_of_files(error)) is not None:
        return StoreError(f"{path}: can't {verb} it: {why}")
    if isinstance(error, FileExistsError | FileNotFoundError) and (link := Path(error.filename or path)).is_symlink():
        return StoreError(
            f"{link}: a link to {link.readlink()}, which is not there. Restore what it led to, or remove the link."
        )
    return StoreError(f"{path}: can't {verb} it ({error.strerror or error}). Check the path and its permissions.")


def out_of_files(error: BaseException) -> str | None:
    """What to say if an error comes of the limit of open files, wherever in its chain; None if it does not.

    Libraries wrap it in errors of their own, and some keep its words alone.
    """
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _NO_DESCRIPTOR) or "Too many open files" in str(seen):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"too many files are open: this process may open {limit:,} (`ulimit -n`). What was committed is safe. "
                "Raise the limit, say `ulimit -n 4096`, and run the same command again."
            )
        seen = seen.__cause__ or seen.__context__
    return None
