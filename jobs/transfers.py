"""What a person sees while files move: a bar on a terminal, a line a minute elsewhere. Always on stderr."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from rich import filesize
from rich import progress as bars
from rich.console import Console

from relabel.jobs.logs import redacted_streams
from relabel.manifests.secrets import redacted

LINE_EVERY_S = 60.0


class TransferDisplay(contextlib.ExitStack):
    """Shows what is moving. Call it as the `progress` of publishing and pulling."""

    def __init__(self) -> None:
        super().__init__()
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

    def __enter__(self) -> Self:
        if self._bar is not None:
            self.enter_context(self._bar)
            self.enter_context(redacted_streams())  # what is printed meanwhile, before the bars wrap it
        return self

    def __call__(self, what: str, count: int) -> None:
        """Bytes that went through since the last call, and what they belong to."""
        self._moved_bytes += count
        if self._bar is not None:
            self._bar.update(self._task, description=redacted(what), completed=self._moved_bytes)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.write(f"{what} · {self.moved_text} so far")

    @property
    def moved_text(self) -> str:
        """How much went through."""
        return size_text(self._moved_bytes)

    def write(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(redacted(line), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def shown_fetch(what: str, slot: Path) -> Iterator[TransferDisplay]:
    """Show that something is fetched into a folder, how far it is, and what came."""
    started_s = time.monotonic()
    with TransferDisplay() as display:
        display.write(f"fetching {what} into {slot}")
        yield display
        display.write(f"fetched {display.moved_text} in {time.monotonic() - started_s:.0f} s")


@contextlib.contextmanager
def watched(folder: Path, what: str, display: TransferDisplay) -> Iterator[None]:
    """Show how the largest file below a folder grows, which another program writes there."""
    has_ended = threading.Event()

    def watch() -> None:
        shown_bytes = 0
        is_last = False
        while not is_last:
            is_last = has_ended.wait(0.5)
            largest_bytes = shown_bytes
            for file in folder.rglob("*"):
                with contextlib.suppress(OSError):  # moved meanwhile
                    largest_bytes = max(largest_bytes, file.stat().st_size)
            display(what, largest_bytes - shown_bytes)
            shown_bytes = largest_bytes

    watcher = threading.Thread(target=watch, name="watch-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()


def size_text(size_bytes: int) -> str:
    """Bytes for people: `1.4 GB`."""
    return filesize.decimal(size_bytes)
