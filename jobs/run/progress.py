"""Progress on a terminal, in logs and as a Prometheus text file."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from relabel.jobs import logs
from relabel.jobs.exits import Exit
from relabel.jobs.logs import redacted_streams
from relabel.jobs.run.counts import ASKED, Progress
from relabel.jobs.run.execution import left_s, left_text
from relabel.manifests.errors import InputError
from relabel.manifests.records import plain
from relabel.manifests.run import Range
from relabel.manifests.secrets import redacted

if TYPE_CHECKING:
    from relabel.jobs.run.results import RunReport

# ------------------------------------------------------------------------------
# What is seen of a run while it goes on: bars on a terminal, one line in a notebook that is written over, a line a
# minute elsewhere (more often until it is known how long the run takes), JSON objects on request. Always on stderr.


FIRST_LINE_S, LINE_EVERY_S = 15.0, 60.0
DRAW_EVERY_S = 0.25
NOTEBOOK_EVERY_S, NOTEBOOK_CHARS = 1.0, 200
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
        shows_refused: whether the last refused answer is shown, too.
    """

    def __init__(
        self,
        progress: Progress,
        total: int,
        *,
        before: int = 0,
        shows_refused: bool = False,
    ) -> None:
        self._progress = progress
        self._total = total
        self._before = before
        self._shows_refused = shows_refused
        self._has_warned = False
        self._door = contextlib.ExitStack()
        self._console = Console(file=sys.stderr)
        self._bars: _BarAndLines | None = None
        self._next_s = 0.0
        self._aloud = _Aloud(self)
        self._is_notebook = self._console.is_jupyter and not logs.is_json()
        if self._console.is_terminal and not logs.is_json():
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
        first_s = DRAW_EVERY_S if self._bars or self._is_notebook else min(FIRST_LINE_S, LINE_EVERY_S)
        self._next_s = time.perf_counter() + first_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._aloud)
        self._door.close()
        if self._bars is not None:
            self._bars.stop()
        if self._is_notebook:  # a short run is shown once, at its end
            self._next_s = 0.0
            self.update()
            print(file=sys.stderr, flush=True)  # noqa: T201

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
            if self._is_notebook:
                self._next_s = now + NOTEBOOK_EVERY_S
                self._write_over(line, end="")
            else:
                self.say(line, event="progress", **self._counts(now))

    def _write_over(self, line: str, *, end: str) -> None:
        """A line in place of the one that a notebook shows last; spaces cover what is longer there."""
        text = logs.as_text(redacted(line), "info").ljust(NOTEBOOK_CHARS)
        print(f"\r{text}", end=end, file=sys.stderr, flush=True)  # noqa: T201

    def _rows_done(self) -> int:
        """A chunk that a pool has in hand may be another's by now, which is not known yet."""
        done = self._progress.kept("pairs") + self._progress.kept("reused") + self._progress.rows_of_others
        return min(done, self._total)

    def _by_others(self) -> tuple[str, ...]:
        rows = self._progress.rows_of_others
        return (f"{rows:,} by other workers",) if rows else ()

    def say(self, line: str, *, level: str = "info", event: str = "note", **fields: Any) -> None:
        """A line above the bars; the fields are in the JSON form alone."""
        if self._bars is not None:
            self._bars.console.print(redacted(logs.as_text(line, level)), markup=False, highlight=False)
        elif self._is_notebook:
            self._write_over(logs.as_text(line, level), end="\n")
        else:
            logs.say(line, level=level, event=event, **fields)

    def _counts(self, now: float) -> dict[str, Any]:
        progress, left = self._progress, self._left_s(now)
        live = plain(progress.live.in_short())
        return {
            **{name: progress.kept(name) for name in ASKED if name != "cached_tokens"},
            "reused": progress.kept("reused"),
            "by_others": progress.rows_of_others,
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
        prompt, output = self._progress.prompt_tokens - self._progress.cached_tokens, self._progress.output_tokens
        asks = f"{live.in_flight:,} in flight, {live.answers_text()}"
        tokens = f"{prompt / seconds:,.0f} prompt + {output / seconds:,.0f} output tokens/s"
        if not (live.in_flight or live.accepted or live.refused):  # nothing is asked yet, or ever: a student scores
            return ()
        refused = live.last_refused if self._shows_refused else None
        return (f"{asks} · {tokens}", *([f"last refused: {refused.line()}"] if refused is not None else ()))

    def _left_s(self, now: float) -> Range | None:
        """At the pace of this worker and of others together."""
        kept, others = self._progress.kept, self._progress.rows_of_others
        reused = kept("reused")  # which takes no time
        return left_s(max(0, self._total - reused), kept("pairs") + others, now - self._progress.started_s)


# ------------------------------------------------------------------------------
# A run's counts as a Prometheus text file, for node_exporter's textfile collector (`--metrics FILE`).
#
# Written at the start, every 15 s and at the end, each time to a file next to it that is then renamed, so that a
# collector never reads half of one. A file that can't be written is warned of once and ends no run.


logger = logging.getLogger(__name__)

METRICS_EVERY_S = 15.0
LAST_SUCCESS = "relabel_last_success_timestamp_seconds"
WITHOUT_COMMIT = "relabel_exits_without_commit"


Metric = tuple[str, str, float | tuple[str, Mapping[str, float]]]
"""A gauge's name, its help, and its value, or a label's name with the value for each text of that label. Each execution
counts from zero.
"""


class MetricsFile:
    """The metrics of one execution.

    Args:
        path: the file; its ending should be `.prom`, which is what the collector reads.
        job: label; the job file's stem until the job's name is known.
        shard: label: `--shard` as given, `all` without.
    """

    def __init__(self, path: str, *, job: str, shard: str) -> None:
        self._path = Path(path)
        self.job = job
        self._shard = shard
        self._started_clock = time.time()
        self._started_s = time.perf_counter()
        self._next_s = 0.0
        self._has_failed = False
        check_metrics_file(self._path)
        self._last_success = _written_before(self._path, LAST_SUCCESS)
        self._without_commit = _written_before(self._path, WITHOUT_COMMIT) or 0.0
        self.progress: Progress | None = None
        self.report: RunReport | None = None

    def update(self) -> None:
        """Write if it is time to. May be called as often as one likes."""
        if time.perf_counter() >= self._next_s:
            self.write()

    def write(self, code: int | None = None, reason: str = "") -> None:
        """Replace the file.

        Args:
            code: the exit code, at the end of the run.
            reason: why it is that: the kind of the error, or nothing where there was none.
        """
        self._next_s = time.perf_counter() + METRICS_EVERY_S
        if code in (Exit.DONE, Exit.NOTHING_TO_DO):
            self._last_success = time.time()
        if code is not None:
            is_idle = code == Exit.PARTIAL and not (self.progress and self.progress.chunks_committed)
            self._without_commit = self._without_commit + 1 if is_idle else 0.0
        labels = {"job": self.job, "shard": self._shard}
        why = write_metrics(self._path, self._metrics(code, reason), labels)
        if why and not self._has_failed:
            self._has_failed = True
            logger.warning(why)

    def _metrics(self, code: int | None, reason: str) -> list[Metric]:
        found: list[Metric] = [
            ("relabel_running", "1 while the execution goes on, 0 once it has ended.", float(code is None)),
            ("relabel_run_start_timestamp_seconds", "When the execution started.", self._started_clock),
            ("relabel_run_seconds", "How long the execution has taken.", time.perf_counter() - self._started_s),
        ]
        if self.progress is not None:
            found += _of_progress(self.progress)
        if self.report is not None:
            tally = self.report.tally
            rows = {"ok": tally.labelled, **tally.quarantined, "open": self.report.rows - tally.rows}
            found += [
                ("relabel_rows", "Rows of the whole output, by status; open ones have none yet.", ("status", rows)),
                (
                    "relabel_quarantine_fraction",
                    "Share of the output's finished rows that are quarantined.",
                    tally.num_quarantined / tally.rows if tally.rows else 0.0,
                ),
                ("relabel_chunks_done", "Chunks of the whole output that are committed.", tally.chunks_done),
                ("relabel_engine_start_seconds", "How long the engine took to start.", self.report.engine_start_s),
            ]
        if code is not None:
            text = "Exit code of the execution (see docs/something-broke.md); its reason is the kind of the error."
            found.append(("relabel_exit_code", text, ("reason", {reason or Exit(code).name.lower(): code})))
        text = "How many executions in a row, up to the last that ended, exited with 20 and committed nothing."
        found.append((WITHOUT_COMMIT, text, self._without_commit))
        if self._last_success is not None:
            found.append((LAST_SUCCESS, "When an execution last ended with 0 or 10.", self._last_success))
        return found


def write_metrics(path: Path, metrics: list[Metric], labels: Mapping[str, str]) -> str:
    """Replace a file by metrics, whole or not at all.

    Returns:
        Why it can't be written; nothing where it was.
    """
    part = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        # a file's name need not be text
        part.write_text(rendered(metrics, labels), encoding="utf-8", errors="replace")
        part.replace(path)  # a path without a name (`.`, `/`) fails here
    except OSError as exc:
        part.unlink(missing_ok=True) if part.parent.is_dir() else None
        return f"--metrics {path}: can't be written ({exc.strerror}); going on without"
    return ""


def rendered(metrics: list[Metric], labels: Mapping[str, str]) -> str:
    """Metrics in Prometheus's text format.

    Args:
        labels: on every sample.
    """
    lines = []
    for name, about, value in metrics:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        label, values = value if isinstance(value, tuple) else ("", {"": value})
        for text, one in values.items():
            held = {**labels, **({label: text} if label else {})}
            inner = ",".join(f'{key}="{_escaped(part)}"' for key, part in held.items())
            lines.append(f"{name}{{{inner}}} {float(one)!r}")
    return "\n".join(lines) + "\n"


def _of_progress(progress: Progress) -> list[Metric]:
    statuses, pairs = dict(progress.kept_statuses), progress.kept("pairs")
    quarantined = sum(count for status, count in statuses.items() if status != "ok")
    tokens = {kind: progress.kept(f"{kind}_tokens") for kind in ("prompt", "cached", "output")}
    lost_tokens = {kind: progress.lost[f"{kind}_tokens"] for kind in tokens}
    chunks = {"committed": progress.chunks_committed, "lost": progress.chunks_lost}
    lost = "asked and discarded: another worker committed first, or the run ended."
    return [
        ("relabel_run_rows", "Rows that the execution has finished, by status.", ("status", {"ok": 0, **statuses})),
        (
            "relabel_run_quarantine_fraction",
            "Share of those rows that are quarantined.",
            quarantined / pairs if pairs else 0.0,
        ),
        ("relabel_run_chunks", "Chunks: committed, or lost to a worker that was first.", ("outcome", chunks)),
        ("relabel_run_tokens", "Tokens; cached ones are part of the prompt.", ("kind", tokens)),
        ("relabel_run_requests", "Requests that the engine answered.", progress.kept("requests")),
        ("relabel_run_in_vain_rows", f"Rows {lost}", progress.lost["pairs"]),
        ("relabel_run_in_vain_requests", f"Requests {lost}", progress.lost["requests"]),
        ("relabel_run_in_vain_tokens", f"Tokens {lost}", ("kind", lost_tokens)),
        ("relabel_run_engine_starts", "How often an engine was started.", progress.engine_starts),
    ]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def check_metrics_file(path: Path) -> None:
    """Refuse what is not a file and would be replaced by one; a folder is refused when it is written.

    Raises:
        InputError: it is a device, a pipe or a socket.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"--metrics {path}: is not a regular file. Name a file.")


def _written_before(path: Path, name: str) -> float | None:
    """What an earlier execution wrote, so that one that fails does not forget it."""
    try:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return float(found[1]) if found else None
    except (OSError, ValueError):
        return None
