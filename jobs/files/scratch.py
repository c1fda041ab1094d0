"""A scratch folder that goes when the work in it ends, and what is said when its disk is full: that is not the fault of
what is read or written, and the remedy is another one (TMPDIR).
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relabel.manifests.errors import DiskFullError, StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder in TMPDIR, removed when the body ends. Whatever else the body fills a disk with has to say so
    itself.

    Raises:
        DiskFullError: no space is left for it or in it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except StoreError:  # ours already, and an OSError too
        raise
    except OSError as exc:
        if exc.errno not in _FULL and "No space left" not in str(exc):
            raise
        raise DiskFullError(
            f"{tempfile.gettempdir()}: no space left for scratch files. Nothing was changed; free some, or point "
            "TMPDIR at a folder that "
            "has more, and give the command again."
        ) from exc


@contextlib.contextmanager
def spilling(polars: Any) -> Iterator[None]:
    """Tell a full disk from a damaged source where polars writes: it says the same of both, but for the number of the
    system's error.
    """
    try:
        yield
    except polars.exceptions.PolarsError as exc:
        for number in _FULL:
            if f"(os error {number})" in str(exc):
                raise OSError(number, os.strerror(number)) from exc
        raise
