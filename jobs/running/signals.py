"""SIGTERM, Ctrl-C and a deadline become a wish to stop: the first drains, a second Ctrl-C stops now.

While an engine starts there is nothing to drain: then each of them ends the start at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from relabel.jobs.running.stops import DRAIN_S, StartStopped, Stop

WATCH_EVERY_S = 5.0
"""How often the deadline is compared with the clock, which may be set meanwhile."""


@contextlib.contextmanager
def stopping(stop: Stop, say: Callable[[str], None]) -> Iterator[None]:
    """Route signals to `stop` while the block runs, and watch its deadline; restores the earlier handlers after. For
    the main thread.

    Args:
        say: called with what was asked for and what will happen.
    """
    has_interrupt = False
    is_due = threading.Event()

    def on_term(_number: int, _frame: FrameType | None) -> None:
        if is_due.is_set():  # sent by the watch below
            is_due.clear()
            text = f"{stop.reason} is too near for the engine to answer anything: it is not started."
        else:
            stop.drain("SIGTERM")
            text = (
                f"SIGTERM: no new chunks; those under way get {DRAIN_S:.0f} s to finish, then relabel ends with exit "
                "code 20."
            )
        say(text)
        _end_start(stop)

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_interrupt
        if has_interrupt or stop.reason == "SIGTERM":
            stop.now()
            raise KeyboardInterrupt
        has_interrupt = True
        stop.drain("Ctrl-C")
        say(f"Ctrl-C: no new chunks; those under way get {DRAIN_S:.0f} s to finish. Ctrl-C again stops now.")
        _end_start(stop)

    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        with _watching(stop, is_due):
            yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end_start(stop: Stop) -> None:
    if stop.is_starting:
        stop.is_starting = False
        raise StartStopped


@contextlib.contextmanager
def _watching(stop: Stop, is_due: threading.Event) -> Iterator[None]:
    """Wake the main thread by a signal if the deadline comes too near while an engine starts; the loop minds it by
    itself.
    """
    if stop.deadline is None:
        yield
        return
    main, has_ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not has_ended.wait(min(WATCH_EVERY_S, max(0.5, stop.due_in_s(DRAIN_S)))):
            if stop.is_starting and stop.due_in_s(DRAIN_S) <= 0:
                stop.mind(DRAIN_S)
                is_due.set()
                signal.pthread_kill(main, signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="deadline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
