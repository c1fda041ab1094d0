"""What the operating system refuses, in our words."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from manifests.errors import DiskFullError, StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def told(verb: str, path: Path, *, is_missing_fine: bool = False) -> Iterator[None]:
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
        if exc.errno in _FULL:
            raise DiskFullError(
                f"{path}: no space left to {verb} it. What was committed is safe; free some space and run the same command again."
            ) from exc
        raise StoreError(f"{path}: can't {verb} it ({exc.strerror or exc}). Check the path and its permissions.") from exc
