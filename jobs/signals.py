"""SIGTERM and Ctrl-C become a wish to stop: the first drains, a second Ctrl-C stops now."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from jobs.loop import Stop


@contextlib.contextmanager
def stopping(stop: Stop, say: Callable[[str], None]) -> Iterator[None]:
    """Route signals to `stop` while the block runs; restores the earlier handlers after.

    Args:
        say: told what was asked for and what will happen.
    """

    def on_term(_number: int, _frame: FrameType | None) -> None:
        stop.drain("SIGTERM")
        say("SIGTERM: no new chunks; those under way get 20 s to finish, then relabel ends with exit code 20.")

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop.reason is not None:
            stop.now()
            raise KeyboardInterrupt
        stop.drain("Ctrl-C")
        say("Ctrl-C: no new chunks; those under way get 20 s to finish. Ctrl-C again stops now.")

    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
