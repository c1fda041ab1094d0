"""What is seen of a run while it goes on, on stderr: bars on a terminal, one line in a notebook that is written over, a
line a minute elsewhere (more often until it is known how long the run takes), JSON objects on request.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from relabel.jobs import logs
from relabel.jobs.logs import redacted_streams
from relabel.jobs.run.progress import ASKED, Progress, left_s, left_text
from relabel.manifests.budgets import Range
from relabel.manifests.records import plain
from relabel.manifests.secrets import redacted

if TYPE_CHECKING:
    from relabel.jobs.run.bars import BarAndLines

FIRST_LINE_S = 15.0
LINE_EVERY_S = 60.0
DRAW_EVERY_S = 0.25
NOTEBOOK_EVERY_S = 1.0
NOTEBOOK_CHARS = 200


class _Aloud(logging.Handler):
    """Says warnings above the bars; may be called from any thread."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.write(record.getMessage(), level=record.levelname.lower(), event=record.name)


class Seen(NamedTuple):
    """What a display shows at one moment.

    Args:
        done, total: pairs.
        by_others: how many of them others did, in words; empty where none.
        inside: what goes on inside the chunks, a line each.
        left: until all rows are done, seconds; None where it is not known yet.
    """

    done: int
    total: int
    by_others: str
    rates: str
    inside: list[str]
    left: Range | None
    seconds: float

    @property
    def eta(self) -> str:
        return f"ETA {left_text(self.left)}"

    def line(self) -> str:
        """All of it, in a line."""
        counts = f"{self.done:,} of {self.total:,} pairs"
        if self.by_others:
            counts = f"{counts}, {self.by_others}"
        return " · ".join([counts, self.rates, *self.inside, self.eta])


class Display:
    """Shows a run's counts and warnings. `update` may be called as often as one likes.

    Args:
        total: pairs that were open when this execution began; it asks those that no other worker does.
        before: pairs of the same shards that were committed by then.
        shows_refused: whether the last refused answer is shown, too.
    """

    def __init__(self, progress: Progress, total: int, *, before: int = 0, shows_refused: bool = False) -> None:
        self._progress = progress
        self._total = total
        self._before = before
        self._shows_refused = shows_refused
        self._has_warned = False
        self._while_shown = contextlib.ExitStack()
        self._bars: BarAndLines | None = None
        self._is_notebook = False
        if total and not logs.is_json():  # nothing is drawn of a run with nothing to do
            self._choose_form()
        is_drawn = self._bars is not None or self._is_notebook
        self._next_s = time.perf_counter() + (DRAW_EVERY_S if is_drawn else min(FIRST_LINE_S, LINE_EVERY_S))

    def _choose_form(self) -> None:
        """Bars on a terminal, one line in a notebook."""
        from rich.console import Console

        console = Console(file=sys.stderr)
        self._is_notebook = console.is_jupyter
        if console.is_terminal:
            from relabel.jobs.run.bars import new_bars

            self._bars = new_bars(console)
            done = self._before
            self._bars.add_task("labeling", total=done + self._total, completed=done, left="the engine is starting")

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._while_shown.enter_context(self._bars)
            self._while_shown.enter_context(redacted_streams())  # what is printed meanwhile, before the bars wrap it
        aloud = _Aloud(self)
        ours = logging.getLogger("relabel")
        ours.addHandler(aloud)
        self._while_shown.callback(ours.removeHandler, aloud)
        return self

    def __exit__(self, *_: object) -> None:
        self._while_shown.close()
        if self._is_notebook:  # a short run is shown once, at its end
            self._next_s = 0.0
            self.update()
            print(file=sys.stderr, flush=True)  # noqa: T201

    def update(self) -> None:
        """Draw, or write a line, if it is time to; warn at once where no answer was accepted."""
        now = time.perf_counter()
        if not self._has_warned:
            self._warn()
        if now < self._next_s:
            return
        now_seen = self._seen(now)
        if self._bars is not None:
            self._next_s = now + DRAW_EVERY_S
            self._draw(self._bars, now_seen)
        elif self._is_notebook:
            self._next_s = now + NOTEBOOK_EVERY_S
            self._write_over(now_seen.line(), end="")
        else:
            is_known = now_seen.left is not None
            self._next_s = now + (LINE_EVERY_S if is_known else min(FIRST_LINE_S, LINE_EVERY_S))
            self.write(now_seen.line(), event="progress", **self._fields(now_seen))

    def _warn(self) -> None:
        warning = self._progress.live.warning()
        if warning is not None:
            self._has_warned = True
            self.write(warning, level="warning", event="none_accepted")

    def _seen(self, now: float) -> Seen:
        progress = self._progress
        pairs = progress.pairs
        others = progress.rows_of_others
        seconds = max(now - progress.started_s, 1e-9)
        # a chunk that a pool has in hand may be another's by now, which is not known yet
        done = self._before + min(pairs + progress.reused + others, self._total)
        to_ask = max(0, self._total - progress.reused)  # what is reused takes no time
        digits = 1 if pairs > seconds else 3
        num_quarantined = progress.statuses.total() - progress.statuses["ok"]  # a chunk being scored has none yet
        return Seen(
            done=done,
            total=self._before + self._total,
            by_others=f"{others:,} by other workers" if others else "",
            rates=f"{pairs / seconds:,.{digits}f} pairs/s · {num_quarantined} quarantined",
            inside=self._inside(seconds),
            left=left_s(to_ask, pairs + others, seconds),
            seconds=seconds,
        )

    def _draw(self, bars: BarAndLines, seen: Seen) -> None:
        rates = f"{seen.by_others} · {seen.rates}" if seen.by_others else seen.rates
        bars.lines = [rates, *seen.inside]
        bars.update(bars.task_ids[0], completed=seen.done, left=seen.eta)

    def _fields(self, seen: Seen) -> dict[str, Any]:
        """What the JSON form of a line holds besides its text."""
        progress = self._progress
        counts = {name: getattr(progress, name) for name in ASKED if name != "cached_tokens"}
        live = plain(progress.live)
        if not self._shows_refused:
            live.pop("last_refused")
        return {
            **counts,
            "reused": progress.reused,
            "by_others": progress.rows_of_others,
            "pairs_to_ask": self._total,
            "statuses": dict(progress.statuses),
            "chunks_committed": progress.chunks_committed,
            **live,
            "left_s": None if seen.left is None else plain(seen.left.rounded(1)),
            "seconds": round(seen.seconds, 3),
        }

    def write(self, line: str, *, level: str = "info", event: str = "note", **fields: Any) -> None:
        """A line above the bars; the fields are in the JSON form alone."""
        if self._bars is not None:
            self._bars.console.print(redacted(logs.as_text(line, level)), markup=False, highlight=False)
        elif self._is_notebook:
            self._write_over(logs.as_text(line, level), end="\n")
        else:
            logs.write(line, level=level, event=event, **fields)

    def _write_over(self, line: str, *, end: str) -> None:
        """A line in place of the one that a notebook shows last; spaces cover what is longer there."""
        text = logs.as_text(redacted(line), "info").ljust(NOTEBOOK_CHARS)
        print(f"\r{text}", end=end, file=sys.stderr, flush=True)  # noqa: T201

    def _inside(self, seconds: float) -> list[str]:
        """What goes on inside the chunks: asks and answers, tokens a second, and the last refused answer on request;
        nothing where nothing is asked yet, or ever, as where a student scores.
        """
        live = self._progress.live
        progress = self._progress
        if not (live.in_flight or live.accepted or live.refused):
            return []
        prompt = (progress.prompt_tokens - progress.cached_tokens) / seconds
        output = progress.output_tokens / seconds
        asks = f"{live.in_flight:,} in flight, {live.answers_text()}"
        lines = [f"{asks} · {prompt:,.0f} prompt + {output:,.0f} output tokens/s"]
        if self._shows_refused and live.last_refused is not None:
            lines.append(f"last refused: {live.last_refused.line()}")
        return lines
