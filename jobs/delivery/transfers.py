"""What a person sees while files move: a bar on a terminal, a line a minute elsewhere. Always on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from relabel.export.bundle_files import BundleFile
from relabel.jobs.streams import redacted_streams
from relabel.manifests.secrets.redaction import redacted

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
