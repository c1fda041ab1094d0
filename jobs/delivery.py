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

from rich import progress as bars
from rich.console import Console

from relabel.export import puller
from relabel.export.bundles import translate_refusals
from relabel.export.puller import Address, File, Progress, Pulled, ServingFolder, Trust
from relabel.jobs.logs import redacted_streams
from relabel.manifests import failpoints
from relabel.manifests.errors import RelabelError, TransientError
from relabel.manifests.files import translate_errors
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.store import Store

# ------------------------------------------------------------------------------
# What a person sees while files move: a bar on a terminal, a line a minute elsewhere. Always on stderr.


LINE_EVERY_S = 60.0


class TransferDisplay:
    """Shows what is moving. Call it as the `progress` of publishing and pulling."""

    def __init__(self) -> None:
        self._door = contextlib.ExitStack()
        self._console = Console(file=sys.stderr)
        self._bar: bars.Progress | None = None
        self._moved_bytes = 0
        self._next_s = time.monotonic() + LINE_EVERY_S
        if self._console.is_terminal:
            columns = (
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.DownloadColumn(),
                bars.TransferSpeedColumn(),
            )
            self._bar = bars.Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("connecting", total=None)

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
        self._console.print(redacted(line), markup=False, highlight=False, soft_wrap=True)


def size_text(size_bytes: int) -> str:
    """Bytes for people: `1.4 GB`."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def files_text(files: Sequence[File]) -> str:
    """A bundle's files for people, its manifest among them: `6 files, 150.9 MB`."""
    return f"{counted(len(files), 'file')}, {size_text(sum(file.size_bytes for file in files))}"


# ------------------------------------------------------------------------------
# Pulling: once, or following a channel until SIGTERM or Ctrl-C. Errors are reported, and the active version goes on.


UNCHANGED = " The active version is unchanged."
JITTER = 0.1
"""Share of the interval by which a tick is early or late, so that a thousand servers do not ask at once."""


def pull_version(
    bundle_store: Store,
    address: Address,
    destination: ServingFolder,
    trust: Trust,
    progress: Progress,
    *,
    keep: int = 3,
    lifts_hold: bool = False,
    checks_parity: bool = False,
) -> Pulled:
    """`puller.pull` over a store of ours, its refusals as relabel's errors.

    Raises:
        ManifestError: there is no such bundle or version, or a record, a file or the destination is damaged or hostile.
        GateError: unsigned, signed by an untrusted key, older than what was seen already, or with answers that differ.
        MissingExtraError: its answers were to be checked, and onnxruntime is absent.
        LockHeldError: another pull to this destination is running.
        DiskFullError: no space for it.
        StoreError: store or disk fail.
    """

    def counted(what: str, count: int) -> None:
        if count:
            failpoints.hit("during_download")
        progress(what, count)

    with translate_refusals(UNCHANGED), translate_errors("pull to", destination.folder):
        return puller.pull(
            bundle_store,
            address,
            destination,
            trust,
            counted,
            keep=keep,
            lifts_hold=lifts_hold,
            checks_parity=checks_parity,
        )


class StoppedError(TransientError):
    """A signal interrupted a pull; what came in is kept."""


@dataclass
class ChannelWatch:
    """What a watch did so far.

    Args:
        pulls: pulls that were begun.
        switches: versions that became active.
        refused: pulls that ended in an error.
        last_error: how the last pull that ended did; None where it went well.
        stopped_by: the signal, once there was one.
        is_pulling: a pull is under way, and may be interrupted.
    """

    pulls: int = 0
    switches: int = 0
    refused: int = 0
    stopped_by: signal.Signals | None = None
    last_error: RelabelError | None = None
    is_pulling: bool = False


def follow(
    pull_once: Callable[[], Pulled], destination: ServingFolder, every_s: float, say: Callable[[str], None]
) -> ChannelWatch:
    """Pull every so often until a signal ends it.

    A signal interrupts a pull wherever it is, in a long wait for a store too: a pull is made to be killed anywhere.

    Args:
        every_s: pause between pulls, seconds.
        say: called with each switch, and with what goes wrong, once for as long as it stays the same.
    """
    watch, asked = ChannelWatch(), threading.Event()
    with _stopping(watch, asked):
        while not asked.is_set():
            watch.pulls += 1
            was, watch.is_pulling = destination.serving(), True
            try:
                pulled = pull_once()
                watch.is_pulling, watch.last_error = False, None
                if pulled.has_switched:
                    watch.switches += 1
                    say(str(pulled))
            except StoppedError:
                if destination.serving() != was:  # the switch was made, and the tidying up interrupted
                    watch.switches, watch.last_error = watch.switches + 1, None
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

    earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
