"""A worker process: an ordinary worker of a run, watched over by the process that started it (`supervise.py`).

Started as `python -P -m relabel.jobs.pool.workers REPORT_FD`. Its first line of stdin is its assignment, later ones
say which rows are isolated and when to stop; the end of stdin means that its supervisor is gone, and it ends at once
with all that its engine started. It reports in JSON lines: which chunk it began, which rows its engine is at, what it
committed. Receipts stay the truth; reports only say what a crash cost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import TextIO

from relabel.jobs.environment import keep_environment
from relabel.jobs.job import open_run
from relabel.jobs.logs import redacted_streams
from relabel.jobs.pool.messages import (
    Assignment,
    Begins,
    Commits,
    Counts,
    Ends,
    EngineUp,
    Event,
    Fails,
    Rows,
    Tries,
    deadline_of,
    event_line,
    worker_name,
)
from relabel.jobs.pool.processes import kill_group
from relabel.jobs.run.chunks import ChunkWork, read_cases
from relabel.jobs.run.counts import COUNTED, Progress
from relabel.jobs.run.execution import work
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop, stopping
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import RelabelError
from relabel.manifests.receipts import ChunkId
from relabel.manifests.records import plain

PROGRESS_EVERY_S = 0.5


class Reporter:
    """Says over a pipe what a worker does; the loop's `Watch`."""

    def __init__(self, descriptor: int, progress: Progress) -> None:
        self.cases = read_cases([])
        self._progress = progress
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")
        self._guard = threading.Lock()
        self._numbers: dict[ChunkId, int] = {}
        self._in: list[tuple[int, int]] = []
        self._out: list[int] = []
        self._next_s = 0.0

    def say(self, event: Event) -> None:
        """One line, from any thread. A supervisor that is gone is noticed elsewhere."""
        line = event_line(event)
        with self._guard, contextlib.suppress(BrokenPipeError):
            self._pipe.write(line)
            self._pipe.flush()

    def begins(self, work: ChunkWork) -> None:
        """Number the chunk, and look what is held against its rows."""
        number = self._numbers[work.id] = len(self._numbers)
        self.say(Begins(number, work.id, len(work.pairs)))
        case = self.cases.get(work.id)
        if case is not None:
            work.apply(case)

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """Say so before their first ask."""
        self.flush()
        self.say(Tries(self._numbers[work.id], [work.pairs[index].row_id for index in indexes]))

    def asks(self, work: ChunkWork, index: int) -> None:
        """Kept until the next `flush`."""
        self._in.append((self._numbers[work.id], work.pairs[index].row_id))

    def ends(self, work: ChunkWork, index: int) -> None:
        """Kept until the next `flush`."""
        self._out.append(work.pairs[index].row_id)

    def flush(self) -> None:
        """What was kept, if anything."""
        if self._in or self._out:
            self.say(Rows(self._in, self._out))
            self._in, self._out = [], []

    def commits(self, work: ChunkWork, *, was_first: bool) -> None:
        """Called from a commit thread."""
        self.say(Commits(self._numbers[work.id], was_first, dict(work.counts()), dict(work.statuses())))

    def update(self) -> None:
        """Counts, twice a second: they also show that the loop turns."""
        now = time.perf_counter()
        if now >= self._next_s:
            self._next_s = now + PROGRESS_EVERY_S
            self.counts()

    def counts(self) -> None:
        """Counts as they stand."""
        counts = {name: getattr(self._progress, name) for name in COUNTED}
        self.say(Counts(counts, dict(self._progress.statuses), plain(self._progress.live.in_short())))


def main() -> int:
    """The whole life of a worker; its exit code is of interest only where it could not say how it ended."""
    progress = Progress()
    reporter = Reporter(int(sys.argv[1]), progress)
    line = sys.stdin.readline()
    if not line:
        return 1
    assignment = Assignment(**json.loads(line))
    reporter.cases = read_cases(assignment.cases)
    stop = Stop(deadline_of(assignment))
    threading.Thread(target=_heed, args=(sys.stdin, reporter, stop), daemon=True).start()
    keep_environment(os.environ)
    with redacted_streams():
        return _ended(assignment, reporter, stop, progress)


def _ended(assignment: Assignment, reporter: Reporter, stop: Stop, progress: Progress) -> int:
    """Do the work and report how it ended; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        with stopping(stop, lambda text: print(text, file=sys.stderr)):  # noqa: T201
            _work(assignment, reporter, stop, progress)
    except KeyboardInterrupt:
        return 130
    except Exception as exc:  # noqa: BLE001 (a worker's top: whoever watches over it decides what follows)
        if not isinstance(exc, RelabelError):
            traceback.print_exception(exc)
        reporter.counts()
        reporter.say(Fails.of(exc))
        return 1
    return 0


def _work(assignment: Assignment, reporter: Reporter, stop: Stop, progress: Progress) -> None:
    opened = open_run(assignment.job(os.environ), may_plan=False)
    retries = assignment.round() if assignment.is_retry else None
    session = Session(
        opened,
        assignment.shards,
        is_retry=assignment.is_retry,
        stop=stop,
        progress=progress,
        retries=retries,
        helps=assignment.helps,
        execution=assignment.execution,
    )
    session.worker = worker_name(os.getpid(), assignment.name)
    session.watch = reporter

    def on_engine(facts: EngineFacts, remarks: list[str]) -> None:
        device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
        reporter.say(EngineUp(f"{facts.model} on {facts.family} {facts.version} ({device})", remarks))

    worked = work(session, on_progress=reporter.update, on_engine=on_engine)
    reporter.counts()
    canary = None if worked.canary is None else asdict(worked.canary)
    reporter.say(
        Ends(session.taken, session.busy, stop.reason, worked.costs, worked.engine_start_s, worked.remarks, canary)
    )


def _heed(control: TextIO, reporter: Reporter, stop: Stop) -> None:
    """Take what the supervisor says until it has no more to say, because it is gone."""
    for line in control:
        message = json.loads(line)
        if "cases" in message:
            reporter.cases = read_cases(message["cases"])
        if "drain" in message:
            stop.drain(message["drain"])
    kill_group(os.getpid())  # this process, which leads its group, and what its engine started


if __name__ == "__main__":
    sys.exit(main())
