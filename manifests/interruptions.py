"""SIGTERM or Ctrl-C that came while a command makes something.

It raises KeyboardInterrupt wherever the program is just then. A library may swallow that, or make an error of its own
of it (as Python does where a C extension is being imported), and what is made goes on as something else than an
undisturbed call makes. So whoever puts a made thing in its place asks here first.

Whoever can come to a good end soon takes the first signal as a wish (`draining`); the second one raises. But where a
launcher passes signals on, the first alone counts: who stops the launcher often signals its processes too, so that each
gets it again, and the launcher itself kills those that take too long.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_came = threading.Event()  # one for the process, as signals are
_wish = threading.Event()
_is_draining = threading.Event()
_has_launcher = threading.Event()
_is_term = threading.Event()
"""Whether the last signal that counted was SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, and not Ctrl-C."""


def on_signal(number: int, _frame: FrameType | None) -> None:
    """The handler of a signal that interrupts.

    Raises:
        KeyboardInterrupt: but for the first signal while somebody drains, and for what a launcher repeats.
    """
    # no time tells a repetition: it waits for the end of whatever torch is at, as long as a step
    if _has_launcher.is_set() and (_wish.is_set() or _came.is_set()):
        return
    (_is_term.set if number == signal.SIGTERM else _is_term.clear)()
    if _is_draining.is_set() and not _wish.is_set():
        _wish.set()
        return
    _came.set()
    raise interruption()


def interruption() -> KeyboardInterrupt:
    """What to raise for the signal that came."""
    return Terminated() if _is_term.is_set() else KeyboardInterrupt()


def check_interrupted() -> None:
    """Go on only where no interruption came.

    Raises:
        KeyboardInterrupt: one did, and somebody made something else of it.
    """
    if _came.is_set():
        raise interruption()


@contextlib.contextmanager
def draining() -> Iterator[None]:
    """Take the first signal as a wish to stop soon, which `is_stop_wished` tells.

    Raises:
        KeyboardInterrupt: at the end of the block, if there was one.
    """
    _is_draining.set()
    try:
        yield
    finally:
        _is_draining.clear()
    if _wish.is_set():
        raise interruption()


def is_stop_wished() -> bool:
    """Whether a signal came that `draining` took as a wish."""
    return _wish.is_set()


def forget_interruptions(*, has_launcher: bool = False) -> None:
    """Begin anew, where a command does.

    Args:
        has_launcher: another process passes signals on to this one, and ends it.
    """
    _came.clear()
    _wish.clear()
    _is_term.clear()
    (_has_launcher.set if has_launcher else _has_launcher.clear)()
