"""SIGTERM or Ctrl-C that came while a command makes something.

It raises KeyboardInterrupt wherever the program is just then. A library may swallow that, or make an error of its own
of it (as Python does where a C extension is being imported), and what is made goes on as something else than an
undisturbed call makes. So whoever puts a made thing in its place asks here first.
"""

from __future__ import annotations

import threading
from types import FrameType

_came = threading.Event()  # one for the process, as signals are


def on_signal(_number: int, _frame: FrameType | None) -> None:
    """The handler of a signal that interrupts.

    Raises:
        KeyboardInterrupt: always.
    """
    _came.set()
    raise KeyboardInterrupt


def check_interrupted() -> None:
    """Go on only where no interruption came.

    Raises:
        KeyboardInterrupt: one did, and somebody made something else of it.
    """
    if _came.is_set():
        raise KeyboardInterrupt


def forget_interruptions() -> None:
    """Begin anew, where a command does."""
    _came.clear()
