"""What a run has done so far: its counts, the live files of workers, and a Prometheus file."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import secrets
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from relabel.jobs.output import Exit, clock_text, shown
from relabel.jobs.run.notices import GradeJump, OutsideMass
from relabel.manifests.asks import Answer
from relabel.manifests.budgets import Range
from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.plan import Receipt
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.run_folder import Tally
from relabel.manifests.secrets import redacted_values
from relabel.manifests.store import Store, read_if_there

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# Counts of answers and rows.

ASKED = ("pairs", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
"""What asking is counted in."""

FIRST_ANSWERS = 16
"""If none of so many answers was accepted, that is warned of: chance spoils some, and a wrong prompt all."""
SHOWN_CHARS = 200
MOST_CHARS = 1_000
"""Of a refused answer's text that is passed on while the run goes on."""


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer that could not be read.

    Args:
        attempt: which of the row's attempts at this stage it was, from 1.
        status: what the row would be quarantined as.
        finish: how the engine ended it.
    """

    row_id: int
    stage: str
    attempt: int
    status: str
    finish: str
    reason: str
    text: str

    def line(self) -> str:
        """Which one it was, and the text's first line that is not empty, as a terminal may show it."""
        first = next((line for line in self.text.splitlines() if line.strip()), "") or "(no text)"
        return f"row {self.row_id}, {self.stage}, {self.status}: {_live_cut(self.reason)}: {_live_cut(first)}"


@dataclass(slots=True)
class StageSeen:
    """Of one stage's answers: how many, those of them to a first attempt, and their tokens."""

    answers: int = 0
    first_attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer, *, is_first: bool) -> None:
        """Another answer."""
        self.answers += 1
        self.first_attempts += is_first
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens


@dataclass(slots=True)
class Live:
    """What goes on inside the chunks under way, of one worker or of several together; an answer that several rows share
    counts once.

    Args:
        in_flight: asks that the engine has.
        refused: answers by the status that their rows would be quarantined as.
        begun_chunks, begun_rows, rows_in: chunks that are begun and not done, their rows, and those of these that are
            in.
    """

    in_flight: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    last_refused: RefusedAnswer | None = None
    begun_chunks: int = 0
    begun_rows: int = 0
    rows_in: int = 0

    def count(self, read_as: Sequence[RefusedAnswer | None]) -> None:
        """Count an answer.

        Args:
            read_as: of each row that it is for; None where it could be read, of which one is enough.
        """
        failed = [refused for refused in read_as if refused is not None]
        if failed:
            self.last_refused = replace(failed[-1], text=failed[-1].text[:MOST_CHARS])
        if len(failed) < len(read_as):
            self.accepted += 1
        else:
            self.refused[failed[-1].status] += 1

    def add(self, other: Live) -> None:
        """Add another worker's."""
        for name in ("in_flight", "accepted", "refused", "begun_chunks", "begun_rows", "rows_in"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_refused = other.last_refused or self.last_refused

    def answers_text(self) -> str:
        """Answers by what became of them: `41 answered: 25 accepted, 16 refused (14 format, 2 truncated)`."""
        refused = self.refused.total()
        text = f"{self.accepted + refused:,} answered: {self.accepted:,} accepted, {refused:,} refused"
        if not self.refused:
            return text
        by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(self.refused.items()))
        return f"{text} ({by_status})"

    def warning(self) -> str | None:
        """What to say where the first answers were all refused."""
        if self.accepted or self.refused.total() < FIRST_ANSWERS or self.last_refused is None:
            return None
        why = "the server or engine does not answer, or refuses"
        if self.refused.keys() - {"engine", "refused", "overlong"}:
            why = "the model may be too small for this labeler, or its room to answer too short"
        return (
            f"none of the first {self.refused.total():,} answers was accepted ({', '.join(sorted(self.refused))}): "
            f"{why}. `relabel ask` shows whole answers. The last one: {self.last_refused.line()}"
        )


def _live_cut(text: str) -> str:
    line = shown(" ".join(text.split()))
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"


@dataclass(slots=True, eq=False)
class Counts:
    """What one worker has done since its engine was up, or several together.

    Args:
        kept: answers that earlier executions were given, less those that are left to later ones, as `ASKED` counts
            them; may be negative.
    """

    pairs: int = 0
    reused: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    chunks_committed: int = 0
    chunks_lost: int = 0
    live: Live = field(default_factory=Live)
    jumps: list[GradeJump] = field(default_factory=list)
    outside: OutsideMass = field(default_factory=OutsideMass)
    kept: Counter[str] = field(default_factory=Counter)

    def answered(self, answer: Answer) -> None:
        """An answer came."""
        self.requests += 1
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens

    def takes_kept(self, answer: Answer) -> None:
        """An answer was there from an earlier execution."""
        self.kept["requests"] += 1
        self.kept["prompt_tokens"] += answer.prompt_tokens
        self.kept["cached_tokens"] += answer.cached_tokens
        self.kept["output_tokens"] += answer.output_tokens


@dataclass(slots=True, eq=False)
class Progress(Counts):
    """Counts since the start; written by the loop alone, or by the supervisor of several workers.

    `pairs`, `statuses`, `reused` and what they were asked with count every answer, until `settle` leaves what was
    committed, and puts the rest into `lost`. `rows_of_others` are what other workers have committed since the first
    listing, as of the last one.
    """

    lost: Counter[str] = field(default_factory=Counter)
    engine_starts: int = 0
    stages_seen: defaultdict[str, StageSeen] = field(default_factory=lambda: defaultdict(StageSeen))
    rows_of_others: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def settle(self, receipts: Iterable[Receipt]) -> None:
        """End the count by what this execution committed: whatever else was answered and is not kept for the next one,
        for a chunk that was lost or cut off by a kill, counts as discarded.
        """
        done = Counter[str]()
        statuses = Counter[str]()
        reused = 0
        chunks = 0
        for receipt in receipts:
            chunks += 1
            reused += receipt.rows_reused
            statuses.update(receipt.statuses)
            done += asked_for([receipt])
        statuses["ok"] -= reused
        for name in ASKED:
            # a worker that was killed did not count its last answers
            self.lost[name] = max(0, getattr(self, name) + self.kept[name] - done[name])
            setattr(self, name, done[name])
        self.statuses = +statuses
        self.reused = reused
        self.chunks_committed = chunks


def asked_for(receipts: Iterable[Receipt]) -> Counter[str]:
    """Rows asked and what they were asked with, named as in `Progress`."""
    total = Counter[str]()
    for receipt in receipts:
        total["pairs"] += receipt.rows - receipt.rows_reused
        for counts in receipt.stages.values():
            total["requests"] += counts.get("asks", 0)
            total.update({name: counts.get(name, 0) for name in ASKED[2:]})
    return total


def left_s(total: int, done: int, seconds: float) -> Range | None:
    """Seconds until all rows are done at the pace so far, with two standard errors of a mean over so many rows; None
    before the first.
    """
    if not done:
        return None
    left = seconds / done * max(0, total - done)
    most = 1 + 2 / math.sqrt(done)
    return Range(left / most, left, left * most)


def left_text(left: Range | None) -> str:
    """An interval in words: `0:04:10 to 0:09:00`."""
    if left is None:
        return "unknown"
    low = clock_text(left.low)
    high = clock_text(left.high)
    return low if low == high else f"{low} to {high}"


# ------------------------------------------------------------------------------
# What each worker says of itself in the run folder.

FOLDER = "live"
VERSION = 1
WRITE_EVERY_S = 5.0
STALE_S = 60.0
"""The worker of a file that was not written for so long is gone, or its engine has been at one step since."""


@dataclass(slots=True, kw_only=True)
class WorkerState(Counts):
    """What one worker has done.

    Args:
        execution: of the command that it works for.
        written: UTC, by the worker's clock.
        seconds: since its engine was up; pairs: that it asked, committed or not; prompt_tokens: that no cache held.
    """

    version: int
    worker: str
    execution: str
    written: str
    seconds: float

    @classmethod
    def now(cls, worker: str, execution: str, progress: Progress) -> WorkerState:
        """A worker's counts now."""
        counts = {count.name: getattr(progress, count.name) for count in fields(Counts)}
        counts["prompt_tokens"] -= progress.cached_tokens
        return cls(
            version=VERSION,
            worker=worker,
            execution=execution,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - progress.started_s, 1),
            **counts,
        )

    @property
    def age_s(self) -> float:
        """Seconds since it was written, as far as the clocks of two machines agree."""
        return time.time() - datetime.fromisoformat(self.written).timestamp()

    @property
    def is_stale(self) -> bool:
        """Whether its worker may be gone: it is old, or dated so far ahead that nothing is known."""
        return abs(self.age_s) > STALE_S


class LiveFile:
    """`live/<worker>.json`: what one worker has done, written every few seconds, for `relabel status --live` and for
    the supervisor of several workers.

    No label, no commit and no proof depends on it. It is written by a thread of its own, so that no store keeps the
    engine waiting; if it can't be written, that is warned of once. It is removed at the worker's end; one that a killed
    worker left is stale by its age, and is removed when the run is finished.

    Args:
        stays: its last counts are left for the supervisor, which removes it.
    """

    def __init__(self, store: Store, worker: str, execution: str, progress: Progress, *, stays: bool = False) -> None:
        self._store = store
        self._worker = worker
        self._execution = execution
        self._progress = progress
        self._stays = stays
        self._next_s = time.perf_counter() + WRITE_EVERY_S
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._writing: Future[None] | None = None

    def update(self) -> None:
        """Write if it is due; cheap enough to be called at each turn of the loop."""
        if time.perf_counter() >= self._next_s and (self._writing is None or self._writing.done()):
            self._next_s = time.perf_counter() + WRITE_EVERY_S
            self._submit()

    def _submit(self) -> None:
        state = plain(WorkerState.now(self._worker, self._execution, self._progress))
        self._writing = self._thread.submit(self._write, readable_json(redacted_values(state)))

    def _write(self, data: bytes) -> None:
        name = live_name(self._worker)
        try:
            self._store.put(name, data)
        except (OSError, RelabelError) as exc:
            logger.warning("%s/%s: can't be written (%s); going on without", self._store.root, name, exc)
            self._next_s = math.inf

    def close(self) -> None:
        """Remove the file, if there is one, or write the last counts."""
        if self._stays and self._next_s < math.inf:
            self._submit()
        self._thread.shutdown()
        if self._writing is not None and not self._stays:
            with contextlib.suppress(OSError, RelabelError):
                self._store.remove(live_name(self._worker))


def live_name(worker: str) -> str:
    """The file of a worker."""
    return f"{FOLDER}/{worker}.json"


def live_states(store: Store) -> list[WorkerState]:
    """What workers have written, by name; files of other versions, damaged, or gone by now, are left out."""
    states = []
    for name in store.names(FOLDER):
        with contextlib.suppress(ValueError, OverflowError):
            values = json.loads(read_if_there(store, name) or b"{}")
            if version_of(values) == VERSION:
                states.append(checked(WorkerState, values))
    return states


# ------------------------------------------------------------------------------
# A run's counts as a Prometheus text file, for node_exporter's textfile collector (`--metrics FILE`).
#
# Written at the start, every 15 s and at the end, each time to a file next to it that is then renamed, so that a
# collector never reads half of one. A file that can't be written is warned of once and ends no run.

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
        self.whole: tuple[Tally, int, float] | None = None
        """Of the whole output: what is done, and its rows; and how long the engine took to start, in seconds."""

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
            has_committed = self.progress is not None and self.progress.chunks_committed > 0
            is_idle = code == Exit.PARTIAL and not has_committed
            self._without_commit = self._without_commit + 1 if is_idle else 0.0
        labels = {"job": self.job, "shard": self._shard}
        failure = write_metrics(self._path, self._metrics(code, reason), labels)
        if failure and not self._has_failed:
            self._has_failed = True
            logger.warning(failure)

    def _metrics(self, code: int | None, reason: str) -> list[Metric]:
        metrics: list[Metric] = [
            ("relabel_running", "1 while the execution goes on, 0 once it has ended.", float(code is None)),
            ("relabel_run_start_timestamp_seconds", "When the execution started.", self._started_clock),
            ("relabel_run_seconds", "How long the execution has taken.", time.perf_counter() - self._started_s),
        ]
        if self.progress is not None:
            metrics += _of_progress(self.progress)
        if self.whole is not None:
            tally, num_rows, engine_start_s = self.whole
            rows = {"ok": tally.labelled, **tally.quarantined, "open": num_rows - tally.rows}
            share = tally.num_quarantined / tally.rows if tally.rows else 0.0
            metrics += [
                ("relabel_rows", "Rows of the whole output, by status; open ones have none yet.", ("status", rows)),
                ("relabel_quarantine_fraction", "Share of the output's finished rows that are quarantined.", share),
                ("relabel_chunks_done", "Chunks of the whole output that are committed.", tally.chunks_done),
                ("relabel_engine_start_seconds", "How long the engine took to start.", engine_start_s),
            ]
        if code is not None:
            text = "Exit code of the execution (see docs/something-broke.md); its reason is the kind of the error."
            ending = reason or Exit(code).name.lower()
            metrics.append(("relabel_exit_code", text, ("reason", {ending: code})))
        text = "How many executions in a row, up to the last that ended, exited with 20 and committed nothing."
        metrics.append((WITHOUT_COMMIT, text, self._without_commit))
        if self._last_success is not None:
            metrics.append((LAST_SUCCESS, "When an execution last ended with 0 or 10.", self._last_success))
        return metrics


def _of_progress(progress: Progress) -> list[Metric]:
    statuses = progress.statuses
    pairs = progress.pairs
    share = (statuses.total() - statuses["ok"]) / pairs if pairs else 0.0
    tokens = {kind: getattr(progress, f"{kind}_tokens") for kind in ("prompt", "cached", "output")}
    lost_tokens = {kind: progress.lost[f"{kind}_tokens"] for kind in tokens}
    chunks = {"committed": progress.chunks_committed, "lost": progress.chunks_lost}
    lost = "asked and discarded, counted at the end: another worker committed first, or the run ended."
    return [
        ("relabel_run_rows", "Rows that the execution has finished, by status.", ("status", {"ok": 0, **statuses})),
        ("relabel_run_quarantine_fraction", "Share of those rows that are quarantined.", share),
        ("relabel_run_chunks", "Chunks: committed, or lost to a worker that was first.", ("outcome", chunks)),
        ("relabel_run_tokens", "Tokens; cached ones are part of the prompt.", ("kind", tokens)),
        ("relabel_run_requests", "Requests that the engine answered.", progress.requests),
        ("relabel_run_in_vain_rows", f"Rows {lost}", progress.lost["pairs"]),
        ("relabel_run_in_vain_requests", f"Requests {lost}", progress.lost["requests"]),
        ("relabel_run_in_vain_tokens", f"Tokens {lost}", ("kind", lost_tokens)),
        ("relabel_run_engine_starts", "How often an engine was started.", progress.engine_starts),
        (
            "relabel_run_answers",
            "Answers that could be read, and others; one that several rows share counts once.",
            ("outcome", {"accepted": progress.live.accepted, "refused": progress.live.refused.total()}),
        ),
        ("relabel_run_grade_jumps", "How often the grades varied and then were all the same.", len(progress.jumps)),
        (
            "relabel_run_outside_mass",
            "Mean mass of the model's probability outside the grades, 0 to 1.",
            progress.outside.mean,
        ),
    ]


_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def write_metrics(path: Path, metrics: list[Metric], labels: Mapping[str, str]) -> str:
    """Replace a file by metrics, whole or not at all.

    Args:
        labels: on every sample.
    Returns:
        Why it can't be written; nothing where it was.
    """
    lines = []
    for name, about, value in metrics:
        lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        if not isinstance(value, tuple):
            lines.append(_sample_line(name, labels, value))
            continue
        label, values = value
        lines += [_sample_line(name, {**labels, label: text}, number) for text, number in values.items()]
    part = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        # a file's name need not be text
        part.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")
        part.replace(path)  # a path without a name (`.`, `/`) fails here
    except OSError as exc:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)
        return f"--metrics {path}: can't be written ({exc.strerror}); going on without"
    return ""


def _sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {float(value)!r}"


def check_metrics_file(path: Path) -> None:
    """Refuse what is not a file and would be replaced by one; a folder is refused when it is written.

    Raises:
        InputError: it is a device, a pipe or a socket.
    """
    with contextlib.suppress(OSError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"--metrics {path}: is not a regular file. Name a file.")


def _written_before(path: Path, name: str) -> float | None:
    """What an earlier execution wrote, so that one that fails does not forget it."""
    with contextlib.suppress(OSError, ValueError):
        match = re.search(rf"^{name}\{{.*\}} (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return None if match is None else float(match[1])
    return None
