"""What is seen of a run while it goes on: bars on a terminal, a line a minute elsewhere, JSON objects on request.
Always on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from jobs import log_format
from jobs.output import clock_text
from jobs.running.counts import ASKED, Progress
from jobs.streams import redacted_streams
from manifests.secrets.redaction import redacted

LINE_EVERY_S = 60.0
DRAW_EVERY_S = 0.25
LOGGERS = ("manifests", "labelers", "jobs")


class _Aloud(logging.Handler):
    """Says warnings above the bars; may be called from any thread."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(record.getMessage(), level=record.levelname.lower(), event=record.name)


class Display:
    """Shows a run's counts and warnings. `update` may be called as often as one likes.

    Args:
        total: pairs that this execution will ask.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._door = contextlib.ExitStack()
        self._console = Console(file=sys.stderr)
        self._bars: Bars | None = None
        self._next_s = 0.0
        self._aloud = _Aloud(self)
        if self._console.is_terminal and not log_format.is_json():
            self._bars = Bars(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("pairs · {task.fields[rates]} · ETA"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bars.add_task("labeling", total=total, rates="starting")

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
            self._door.enter_context(redacted_streams())  # what is printed meanwhile, before the bars wrap it
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._aloud)
        self._next_s = time.perf_counter() + (DRAW_EVERY_S if self._bars else LINE_EVERY_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._aloud)
        self._door.close()
        if self._bars is not None:
            self._bars.stop()

    def update(self) -> None:
        """Draw, or say a line, if it is time to."""
        now = time.perf_counter()
        if now < self._next_s:
            return
        if self._bars is not None:
            self._next_s = now + DRAW_EVERY_S
            self._bars.update(self._task, completed=self._rows_done(), rates=self._rates(now))
        else:
            self._next_s = now + LINE_EVERY_S
            line = f"{self._rows_done():,} of {self._total:,} pairs · {self._rates(now)} · ETA {self._eta(now)}"
            self.say(line, event="progress", **self._counts(now))

    def _rows_done(self) -> int:
        return self._progress.kept("pairs") + self._progress.kept("reused")

    def say(self, line: str, *, level: str = "info", event: str = "note", **fields: Any) -> None:
        """A line above the bars; the fields are in the JSON form alone."""
        if self._bars is not None:
            self._bars.console.print(redacted(log_format.as_text(line, level)), markup=False, highlight=False)
        else:
            log_format.say(line, level=level, event=event, **fields)

    def _counts(self, now: float) -> dict[str, Any]:
        progress = self._progress
        return {
            **{name: progress.kept(name) for name in ASKED if name != "cached_tokens"},
            "reused": progress.kept("reused"),
            "pairs_to_ask": self._total,
            "statuses": dict(progress.kept_statuses),
            "in_vain": progress.in_vain(),
            "chunks_committed": progress.chunks_committed,
            "seconds": round(now - progress.started_s, 3),
        }

    def _rates(self, now: float) -> str:
        seconds = max(now - self._progress.started_s, 1e-9)
        progress = self._progress
        pairs, tokens = progress.kept("pairs"), progress.kept("output_tokens")
        quarantined = pairs - progress.kept_statuses["ok"]
        return f"{pairs / seconds:,.1f} pairs/s · {tokens / seconds:,.0f} output tokens/s · {quarantined} quarantined"

    def _eta(self, now: float) -> str:
        pairs = self._progress.kept("pairs")
        if not pairs:
            return "unknown"
        left_s = max(0, self._total - self._rows_done()) * (now - self._progress.started_s) / pairs
        return clock_text(left_s)
