"""What is seen of a run while it goes on: bars on a terminal, a line a minute elsewhere (more often until it is known
how long the run takes), JSON objects on request. Always on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from relabel.jobs import log_format
from relabel.jobs.running.counts import ASKED, Progress
from relabel.jobs.running.forecast import DoneSoFar, Expected, at_pace, left_s, left_text, together
from relabel.jobs.streams import redacted_streams
from relabel.manifests.records import plain
from relabel.manifests.runs.ranges import Range
from relabel.manifests.secrets.redaction import redacted

FIRST_LINE_S, LINE_EVERY_S = 15.0, 60.0
DRAW_EVERY_S = 0.25
LOGGERS = ("relabel",)


class _Aloud(logging.Handler):
    """Says warnings above the bars; may be called from any thread."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(record.getMessage(), level=record.levelname.lower(), event=record.name)


class _BarAndLines(Bars):
    """A bar, and below it lines of text, each cut to the terminal's width."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(redacted(line), no_wrap=True, overflow="ellipsis", style="dim") for line in self.lines)


class Display:
    """Shows a run's counts and warnings. `update` may be called as often as one likes.

    Args:
        total: pairs that were open when this execution began; it asks those that no other worker does.
        before: pairs of the same shards that were committed by then.
        expected: what a pair takes, for the time before any is done.
        shows_refused: whether the last refused answer is shown, too.
    """

    def __init__(
        self,
        progress: Progress,
        total: int,
        *,
        before: int = 0,
        expected: Expected | None = None,
        shows_refused: bool = False,
    ) -> None:
        self._progress = progress
        self._total = total
        self._before = before
        self._expected = expected
        self._shows_refused = shows_refused
        self._has_warned = False
        self._door = contextlib.ExitStack()
        self._console = Console(file=sys.stderr)
        self._bars: _BarAndLines | None = None
        self._next_s = 0.0
        self._aloud = _Aloud(self)
        if self._console.is_terminal and not log_format.is_json():
            self._bars = _BarAndLines(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("pairs · {task.fields[rates]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bars.add_task(
                "labeling", total=before + total, completed=before, rates="the engine is starting"
            )

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
            self._door.enter_context(redacted_streams())  # what is printed meanwhile, before the bars wrap it
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._aloud)
        self._next_s = time.perf_counter() + (DRAW_EVERY_S if self._bars else min(FIRST_LINE_S, LINE_EVERY_S))
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
        """Draw, or say a line, if it is time to; say at once that no answer was accepted."""
        now = time.perf_counter()
        if not self._has_warned and (warning := self._progress.live.warning()) is not None:
            self._has_warned = True
            self.say(warning, level="warning", event="none_accepted")
        if now < self._next_s:
            return
        left, done = self._left_s(now), self._before + self._rows_done()
        if self._bars is not None:
            self._next_s = now + DRAW_EVERY_S
            self._bars.lines = self._inside(now)
            rates = " · ".join((*self._by_others(), self._rates(now), f"ETA {left_text(left)}"))
            self._bars.update(self._task, completed=done, rates=rates)
        else:
            self._next_s = now + (LINE_EVERY_S if left is not None else min(FIRST_LINE_S, LINE_EVERY_S))
            pairs = ", ".join((f"{done:,} of {self._before + self._total:,} pairs", *self._by_others()))
            line = " · ".join((pairs, self._rates(now), *self._inside(now), f"ETA {left_text(left)}"))
            self.say(line, event="progress", **self._counts(now))

    def _rows_done(self) -> int:
        """A chunk that a pool has in hand may be another's by now, which is not known yet."""
        done = self._progress.kept("pairs") + self._progress.kept("reused") + self._progress.others.rows
        return min(done, self._total)

    def _by_others(self) -> tuple[str, ...]:
        rows = self._progress.others.rows
        return (f"{rows:,} by other workers",) if rows else ()

    def say(self, line: str, *, level: str = "info", event: str = "note", **fields: Any) -> None:
        """A line above the bars; the fields are in the JSON form alone."""
        if self._bars is not None:
            self._bars.console.print(redacted(log_format.as_text(line, level)), markup=False, highlight=False)
        else:
            log_format.say(line, level=level, event=event, **fields)

    def _counts(self, now: float) -> dict[str, Any]:
        progress, left = self._progress, self._left_s(now)
        live = plain(progress.live.in_short())
        return {
            **{name: progress.kept(name) for name in ASKED if name != "cached_tokens"},
            "reused": progress.kept("reused"),
            "by_others": progress.others.rows,
            "pairs_to_ask": self._total,
            "statuses": dict(progress.kept_statuses),
            "in_vain": progress.in_vain(),
            "chunks_committed": progress.chunks_committed,
            **{name: value for name, value in live.items() if name != "last_refused" or self._shows_refused},
            "left_s": None if left is None else plain(left.rounded(1)),
            "seconds": round(now - progress.started_s, 3),
        }

    def _rates(self, now: float) -> str:
        pairs, seconds = self._progress.kept("pairs"), max(now - self._progress.started_s, 1e-9)
        rate = f"{pairs / seconds:,.{1 if pairs > seconds else 3}f}"
        return f"{rate} pairs/s · {pairs - self._progress.kept_statuses['ok']} quarantined"

    def _inside(self, now: float) -> tuple[str, ...]:
        """What goes on inside the chunks: asks and answers, tokens a second, and the last refused answer on request."""
        live, seconds = self._progress.live, max(now - self._progress.started_s, 1e-9)
        prompt, output = self._tokens_run()
        asks = f"{live.in_flight:,} in flight, {live.answers_text()}"
        tokens = f"{prompt / seconds:,.0f} prompt + {output / seconds:,.0f} output tokens/s"
        refused = live.last_refused if self._shows_refused else None
        return (f"{asks} · {tokens}", *([f"last refused: {refused.line()}"] if refused is not None else ()))

    def _tokens_run(self) -> tuple[int, int]:
        """Prompt tokens that no cache held, and output tokens: of the engine's work where it tells, else of answers."""
        progress, work = self._progress, self._progress.live.work
        prompt = max(work.prefilled_tokens, progress.prompt_tokens - progress.cached_tokens)
        return prompt, max(work.decoded_tokens, progress.output_tokens)

    def _left_s(self, now: float) -> Range | None:
        others = self._progress.others
        rows, pairs_per_s = max(0, self._total - self._rows_done()), others.pairs_per_s()
        theirs = None if pairs_per_s is None else at_pace(rows, pairs_per_s, seen=others.rows)
        return together(self._left_alone_s(now), theirs)

    def _left_alone_s(self, now: float) -> Range | None:
        """Where others commit nothing more."""
        progress, live = self._progress, self._progress.live
        answered = progress.prompt_tokens - progress.cached_tokens + progress.output_tokens
        reused = progress.kept("reused")
        return left_s(
            max(0, self._total - reused - progress.others.rows),
            DoneSoFar(
                now - progress.started_s,
                progress.kept("pairs"),
                live.in_flight,
                progress.requests,
                live.refused.total(),
                answered,
                live.work,
            ),
            self._expected,
        )
