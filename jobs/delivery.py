"""Progress of bundle transfers, and following a channel with repeated pulls."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from relabel.export.bundles import BundleFile
from relabel.jobs.logs import redacted_streams
from relabel.manifests.errors import RelabelError, TransientError
from relabel.manifests.secrets import redacted

# ------------------------------------------------------------------------------
# What a person sees while files move: a bar on a terminal, a line a minute elsewhere. Always on stderr.


LINE_EVERY_S = 60.0


class TransferDisplay:
    """Shows what is moving. Call it as the `progress` of publishing and pulling."""

    def __init__(self) -> None:
        self._door = contextlib.ExitStack()
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._moved_bytes = 0
        self._next_s = time.monotonic() + LINE_EVERY_S
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("looking", total=None)

    def __enter__(self) -> TransferDisplay:
        if self._bar is not None:
            self._bar.start()
            self._door.enter_context(redacted_streams())  # what is printed meanwhile, before the bars wrap it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.close()
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, count: int) -> None:
        """Bytes that went through since the last call, and what they belong to."""
        self._moved_bytes += count
        if self._bar is not None:
            self._bar.update(self._task, description=redacted(what), completed=self._moved_bytes)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.say(f"{what} · {size_text(self._moved_bytes)} so far")

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(redacted(line), markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def size_text(size_bytes: int) -> str:
    """Bytes for people: `1.4 GB`."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def files_text(files: Sequence[BundleFile]) -> str:
    """A bundle's files for people, its manifest among them: `6 files, 150.9 MB`."""
    return f"{len(files)} files, {size_text(sum(file.size_bytes for file in files))}"


# ------------------------------------------------------------------------------
# Follow a channel: pull, wait, pull again, until SIGTERM or Ctrl-C. Whatever goes wrong is said, and what serves goes
# on serving.


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
