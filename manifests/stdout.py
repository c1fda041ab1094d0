"""Stdout is for results: what libraries print there, from Python, threads or C++, is sent elsewhere for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_apart() -> Iterator[None]:
    """Send what comes to this process's stdout, and to that of processes it starts, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
