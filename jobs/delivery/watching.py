"""Follow a channel: pull, wait, pull again, until SIGTERM or Ctrl-C. Whatever goes wrong is said, and what serves goes
on serving.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from relabel.manifests.errors import RelabelError, TransientError

JITTER = 0.1
"""Share of the interval by which a tick is early or late, so that a thousand servers do not ask at once."""


class StoppedError(TransientError):
    """A signal broke a pull off; what came in is kept."""


@dataclass
class ChannelWatch:
    """What a watch did so far.

    Args:
        pulls: looks at the channel.
        switches: versions that came to serve.
        refused: looks that ended in a refusal or in trouble.
        last_error: how the last look that came to an end ended; None where it went well.
        stopped_by: the signal, once there was one.
        is_pulling: a pull is under way, and may be broken off.
    """

    pulls: int = 0
    switches: int = 0
    refused: int = 0
    stopped_by: signal.Signals | None = None
    last_error: RelabelError | None = None
    is_pulling: bool = False


def follow(pull_once: Callable[[], bool], every_s: float, say: Callable[[str], None]) -> ChannelWatch:
    """Pull every so often until a signal ends it.

    A signal breaks a pull off wherever it is, in a long wait for a store too: a pull is made to be killed anywhere.

    Args:
        pull_once: pulls; True if another version serves now.
        every_s: pause between pulls, seconds.
        say: called with what goes wrong, once for as long as it stays the same.
    """
    watch, asked = ChannelWatch(), threading.Event()
    with _stopping(watch, asked):
        while not asked.is_set():
            watch.pulls += 1
            try:
                watch.is_pulling = True
                watch.switches += pull_once()
                watch.is_pulling = False
                watch.last_error = None
            except StoppedError:
                break
            except RelabelError as exc:
                watch.is_pulling = False
                watch.refused += 1
                if str(exc) != str(watch.last_error):
                    say(f"relabel: {exc}")
                watch.last_error = exc
            asked.wait(every_s * random.uniform(1 - JITTER, 1 + JITTER))
    return watch


@contextlib.contextmanager
def _stopping(watch: ChannelWatch, asked: threading.Event) -> Iterator[None]:
    def on_signal(number: int, _frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        watch.stopped_by = signal.Signals(number)
        asked.set()
        if watch.is_pulling:
            watch.is_pulling = False
            raise StoppedError("stopped in the middle of a pull; what came in is kept")

    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in earlier:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
