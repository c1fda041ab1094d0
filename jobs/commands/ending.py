"""SIGTERM for commands that have nothing to drain: as Ctrl-C, so that what they were making is tidied away."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from relabel.manifests.interruptions import check_interrupted, forget_interruptions, on_signal


@contextlib.contextmanager
def sigterm_ends(*, has_launcher: bool = False) -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt while the block runs, as Ctrl-C does; without it Python ends at once and
    tidies nothing. An error that a library makes of it leaves the block as KeyboardInterrupt; where one swallows it,
    `check_interrupted` raises it again before anything is put in its place.

    Args:
        has_launcher: see `forget_interruptions`.
    """
    if threading.current_thread() is not threading.main_thread():  # no other may set a handler
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell says to what it starts in the background
        numbers.append(signal.SIGINT)
    forget_interruptions(has_launcher=has_launcher)
    earlier = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    except Exception:
        check_interrupted()
        if has_launcher:  # it ends the others where one has ended, perhaps before this one has said what it met
            earlier = dict.fromkeys(earlier, signal.SIG_IGN)
        raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        forget_interruptions()
