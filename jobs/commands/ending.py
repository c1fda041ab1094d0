"""SIGTERM for commands that have nothing to drain: as Ctrl-C, so that what they were making is tidied away."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_ends() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt while the block runs, as Ctrl-C does; without it Python ends at once and
    tidies nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # no other may set a handler
        yield
        return
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
