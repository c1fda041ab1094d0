"""The supervisor of one node: a worker process for each GPU, restarts within limits, and the combined results."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relabel.jobs.pool.messages import Assignment, Commits, Done, Ends, EngineUp, Event, Rows, assign, show, worker_name
from relabel.jobs.pool.processes import ProcessGuard, Slot, WorkerProcess, log_name
from relabel.jobs.run.chunks import Isolation, plain_cases
from relabel.jobs.run.results import RunReport, conclude
from relabel.jobs.run.session import Session
from relabel.manifests import errors
from relabel.manifests.errors import EngineLostError, RelabelError
from relabel.manifests.receipts import load_receipt
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# What a worker pool's workers did, put together.


@dataclass(slots=True)
class Results:
    """What workers did, beside what the progress counts.

    Args:
        taken, busy: shards that they worked on, and shards that others held, themselves among them.
        remarks: each once, in the order they came.
        engine_start_s: the longest start of an engine.
        costs: of engines that are paid for, together.
        canary: what asking labelled rows again came to; one worker does it for all.
    """

    taken: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    remarks: dict[str, None] = field(default_factory=dict)
    engine_start_s: float = 0.0
    costs: dict[str, Any] | None = None
    restarts: int = 0
    canary: dict[str, Any] | None = None

    def add(self, other: Results) -> None:
        """Another's results together with these."""
        self.taken |= other.taken
        self.busy |= other.busy
        self.remarks.update(other.remarks)
        self.engine_start_s = max(self.engine_start_s, other.engine_start_s)
        self.costs = (
            other.costs if self.costs is None else self.costs if other.costs is None else _sum(self.costs, other.costs)
        )
        self.restarts += other.restarts
        self.canary = self.canary or other.canary

    def report(self, session: Session) -> RunReport:
        """Conclude the run, with what the workers did in it."""
        session.taken = sorted(self.taken)
        session.busy = sorted((self.busy - self.taken) & set(session.left.open_shards()))
        report = conclude(session)
        report.engine_start_s = self.engine_start_s
        report.remarks = list(self.remarks)
        report.engine_restarts = self.restarts
        report.did.costs, report.did.canary = self.costs, self.canary
        return report


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Costs of two engines together; what one of them does not know is not known of both."""
    parts = {key: (one.get(key), other.get(key)) for key in {**one, **other}}
    return {key: None if mine is None or theirs is None else mine + theirs for key, (mine, theirs) in parts.items()}


# ------------------------------------------------------------------------------
# One node, several engines: a process that loads no model starts a worker for each GPU, watches over them, and
# concludes the run.
#
# Each worker is an ordinary worker of the run (`workers.py`): it takes free shards and commits by receipts, so that
# nothing here can lose or double a row. What is decided here is what follows a crash: the worker is started again, the
# rows that its engine was at are isolated (`isolation.py`), and one that goes down again and again without getting
# anything done is given up.


logger = logging.getLogger(__name__)

LISTEN_S = 0.1
CLOSING_S = 60.0
"""How long a worker that has said its last word may take to free its device, seconds."""
GRACE_S = 8.0
"""How long past the end of a drain a worker may take to close its engine, seconds."""


class RestartLimits(NamedTuple):
    """When enough is enough.

    Args:
        crashes: of one worker in a row, with neither a commit nor a row caught in between, before it is given up.
        backoff_s: before a worker is started again after its first such crash; doubled for each further one.
        isolated_rows, isolated_share: rows that an execution may set aside because engines went down over them, as a
            number and as a share of the rows it has committed; above both, it is not the rows.
    """

    crashes: int = 3
    backoff_s: float = 1.0
    isolated_rows: int = 8
    isolated_share: float = 0.01


class Supervisor:
    """Has a session's work done by worker processes.

    Args:
        session: opened here, worked on by the workers; its `progress` is kept up to date.
        environment: what workers inherit.
        say: a line for the user.
        on_progress: called often.
    """

    def __init__(
        self,
        session: Session,
        slots: list[Slot],
        *,
        limits: RestartLimits = RestartLimits(),  # noqa: B008 (immutable)
        environment: Mapping[str, str] = os.environ,
        say: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session
        self.slots = slots
        self.isolation = Isolation()
        self._limits = limits
        self._environment = environment
        self._say = say
        self._on_progress = on_progress
        self._error: RelabelError | RuntimeError | None = None
        self._is_ending = False
        self._has_lost_one = False
        self._said: set[str] = set()
        self._can_log = True
        self.results = Results()
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._guard: ProcessGuard | None = None
        self._assignment: Assignment | None = None

    def run(self) -> RunReport:
        """Work until nothing is left that can be done here, and conclude.

        Raises:
            EngineLostError: every worker was given up.
            RelabelError: what a worker met that starting it again would not fix, in its own words.
        """
        started = time.perf_counter()
        self.work()
        report = self.results.report(self.session)
        report.seconds = time.perf_counter() - started
        return report

    def work(self) -> None:
        """The same without the conclusion; what was done is in `results`.

        Raises:
            EngineLostError, RelabelError: as `run` does.
        """
        if self.session.left.open_shards():
            self._assignment = assign(self.session)
            self._watch_over()
        if self._error is not None:
            raise self._error

    def _watch_over(self) -> None:
        with ProcessGuard() as self._guard, self._selector:
            try:
                while True:
                    self._begin_due()
                    for key, _ in self._selector.select(LISTEN_S):
                        key.data()
                    for slot in self.slots:
                        if slot.process is not None and slot.process.has_ended(self._selector):
                            self._ended(slot, slot.process)
                    self._mind_stop()
                    self._mind_silence()
                    self._count()
                    self._on_progress()
                    if not self._is_busy() and not self._wake_one():
                        return
            finally:
                self._end_all()

    def _is_busy(self) -> bool:
        may_start = self.session.stop.reason is None and self._error is None
        return any(slot.process is not None or (may_start and slot.starts_s is not None) for slot in self.slots)

    def _begin_due(self) -> None:
        if self.session.stop.reason is not None or self._error is not None:
            return
        for slot in self.slots:
            if slot.process is None and slot.starts_s is not None and time.perf_counter() >= slot.starts_s:
                self._begin(slot)

    def _begin(self, slot: Slot) -> None:
        assert self._guard is not None
        assert self._assignment is not None
        slot.starts_s = None
        self.results.restarts += slot.num_processes > 0
        slot.num_processes += 1
        slot.process = WorkerProcess(
            self._assignment.named(slot.name),
            {**self._environment, **slot.variables},
            self.isolation.cases,
            guard=self._guard,
            on_event=lambda event: self._heard(slot, event),
            on_log=lambda line: self._log(slot, line),
        )
        slot.process.register(self._selector)

    def _heard(self, slot: Slot, event: Event) -> None:
        process = slot.process
        assert process is not None
        match event:
            case EngineUp(asks, remarks):
                self.session.progress.engine_starts += 1
                if not self._said:
                    self.session.progress.started_s = time.perf_counter()
                for line in (
                    f"{self.session.opened.job.spec.labeler.name} asks {asks}",
                    *(f"note: {remark}" for remark in remarks),
                ):
                    if line not in self._said:
                        self._said.add(line)
                        self._say(line)
            case Rows(_, ended) if process.apart is not None:
                number, rows = process.apart
                cleared = set(ended) & set(rows)
                if cleared and number in process.chunks:
                    self.isolation.cleared(process.chunks[number], sorted(cleared))
            case Commits(number):
                slot.crashes = 0
                if number in process.chunks:
                    self.isolation.committed(process.chunks[number])

    def _log(self, slot: Slot, line: str) -> None:
        """A worker's line: to the user with its name before it, and to its file."""
        self._say(f"[{slot.name}] {line}")
        if not self._can_log:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            self.session.opened.store.log(log_name(slot), f"{stamp} {line}\n".replace("\r", " "))
        except OSError as exc:
            self._can_log = False
            logger.warning(
                "%s/logs: can't be written (%s); going on without logs", self.session.opened.store.root, exc.strerror
            )

    def _ended(self, slot: Slot, process: WorkerProcess) -> None:
        """A worker's process is gone: take note of what it did, and decide what follows."""
        slot.process = None
        if process.end is None:
            process.did.cut_off()
        slot.past.add(process.did)
        if process.end is not None:
            self._finished(process.end)
            return
        if self._is_ending or self.session.stop.reason is not None:
            return  # it was asked to end, or crashed at a time when nothing is begun any more
        failure = process.failure
        if failure is None or failure.error == "EngineCrashError" or not failure.is_ours:
            self._crashed(slot, process)
            return
        error = failure.as_error()
        if isinstance(error, errors.ModelError | errors.MissingExtraError):
            # one device may be off where the others are not
            self._give_up(slot, error)
        else:
            self._error = error
            self._drain_all("an error")

    def _finished(self, end: Ends) -> None:
        remarks = dict.fromkeys(end.remarks)
        self.results.add(
            Results(set(end.taken), set(end.busy), remarks, end.engine_start_s, end.costs, canary=end.canary)
        )
        if end.stopped is not None:
            self.session.stop.drain(end.stopped)

    def _crashed(self, slot: Slot, process: WorkerProcess) -> None:
        words = process.last_words()
        self.results.taken.update(chunk.shard for chunk in process.chunks.values())
        if self._committed_unheard(slot, process):
            slot.crashes = 0
        in_flight = process.rows_in_flight()
        rows = [row for rows in in_flight.values() for row in rows]
        number, group = process.apart if process.apart is not None else (-1, [])
        if rows and number in process.chunks and set(rows) <= set(group):
            chunk = process.chunks[number]
            row = self.isolation.crashed_apart(chunk, rows, words)
            if row is None:
                note = f"{counted(len(rows), 'row')} of chunk {chunk.chunk} of shard {chunk.shard} in flight, no other"
            else:
                for one in self.slots:
                    one.crashes = 0  # a row that is caught is as good as a commit
                note = f"row {row} was alone in flight again: it goes to quarantine as `engine`"
        else:
            slot.crashes += 1
            self.isolation.crashed(in_flight)
            note = f"in flight: {counted(len(rows), 'row')}; to be asked apart" if rows else "no row was in flight"
        self._log(slot, f"the engine went down ({words}); {note}.")
        if self._is_not_the_rows():
            self._error = EngineLostError(
                f"engines went down over {self.isolation.num_isolated} single rows, beside {self._committed_rows():,} "
                f"that are done: it is not the rows. The last words were: {words}. {self._see_log(slot)}"
            )
            self._drain_all("an error")
        elif slot.crashes >= self._limits.crashes:
            self._give_up(slot, self._lost(slot, process, words))
        else:
            delay_s = self._limits.backoff_s * 2 ** (slot.crashes - 1) if slot.crashes else 0.0
            slot.starts_s = time.perf_counter() + delay_s
        self._share_cases()

    def _committed_unheard(self, slot: Slot, process: WorkerProcess) -> bool:
        """Whether this life committed a chunk that it did not live to tell of. Forgets the chunks that have a receipt,
        whoever's it is.
        """
        folder = self.session.opened.folder
        done = {shard: folder.attempts(shard) for shard in {chunk.shard for chunk in process.chunks.values()}}
        found = [
            number
            for number, chunk in process.chunks.items()
            if chunk.attempt in done[chunk.shard].get(chunk.chunk, [])
        ]
        chunks = [process.chunks.pop(number) for number in found]
        for chunk in chunks:
            self.isolation.committed(chunk)
        name = worker_name(process.process.pid, slot.name)
        return any(load_receipt(folder.store, chunk.receipt_name).worker == name for chunk in chunks)

    def _is_not_the_rows(self) -> bool:
        count = self.isolation.num_isolated
        return count > self._limits.isolated_rows and count > self._limits.isolated_share * self._committed_rows()

    def _committed_rows(self) -> int:
        return sum(done.committed["pairs"] for done in self.done())

    def _lost(self, slot: Slot, process: WorkerProcess, words: str) -> RelabelError | RuntimeError:
        text = (
            f"worker {slot.name}: its engine went down {slot.crashes} times without a commit in between. The last "
            f"words were: {words}. {self._see_log(slot)}"
        )
        is_fault = process.failure is not None and not process.failure.is_ours
        return RuntimeError(text) if is_fault else EngineLostError(text)

    def _see_log(self, slot: Slot) -> str:
        return f"See {self.session.opened.store.root}/{log_name(slot)}; what was committed is safe."

    def _give_up(self, slot: Slot, error: RelabelError | RuntimeError) -> None:
        slot.error = error
        slot.starts_s = None
        self._has_lost_one = True
        if all(other.error is not None for other in self.slots):
            self._error = error
            return
        self.results.remarks[f"worker {slot.name} was given up: {error}"] = None
        self._say(f"worker {slot.name} is given up: {error}")

    def _wake_one(self) -> bool:
        """Where a worker was given up after others had ended, what it held is free again: have one of them look."""
        if not self._has_lost_one or self._error is not None or self.session.stop.reason is not None:
            return False
        self._has_lost_one = False
        idle = next((slot for slot in self.slots if slot.error is None), None)
        if idle is None or not self.session.left.open_shards():
            return False
        idle.starts_s = 0.0
        return True

    def _share_cases(self) -> None:
        cases = plain_cases(self.isolation.cases)
        for slot in self.slots:
            if slot.process is not None:
                slot.process.tell(cases=cases)

    def _mind_stop(self) -> None:
        """Pass a wish to stop on, once; and end those that take too long over it."""
        stop = self.session.stop
        stop.mind(0.0)
        if stop.reason is None:
            return
        self._drain_all(stop.reason)
        if stop.is_now or time.perf_counter() > stop.deadline_s + GRACE_S:
            self._end_all()

    def _drain_all(self, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        for slot in self.slots:
            slot.starts_s = None
            if slot.process is None:
                continue
            if slot.process.is_engine_up:
                slot.process.tell(drain=reason)
            else:
                slot.process.kill()  # it has begun nothing

    def _mind_silence(self) -> None:
        """A worker whose loop does not turn, or that can't end."""
        now_s = time.perf_counter()
        limits = self.session.opened.job.spec.run
        for slot in self.slots:
            process = slot.process
            if process is None:
                continue
            silent_s = now_s - process.heard_s
            if process.end is not None or process.failure is not None:
                if silent_s > CLOSING_S:
                    process.kill()
            elif process.in_flight and silent_s > limits.ask_timeout_s + 2 * LISTEN_S:
                rows = len(process.in_flight)
                process.kill(
                    f"its engine did not come back from its work on {counted(rows, 'row')} (run.ask_timeout_s is "
                    f"{limits.ask_timeout_s:g})."
                )
            elif not process.is_engine_up and silent_s > limits.start_timeout_s:
                process.kill(f"its engine did not start (run.start_timeout_s is {limits.start_timeout_s:g}).")

    def _end_all(self) -> None:
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
        for slot in self.slots:
            if slot.process is not None:
                slot.process.process.wait()
                process = slot.process
                if process.has_ended(self._selector):
                    self._is_ending = True
                    self._ended(slot, process)

    def _count(self) -> None:
        """Bring the session's progress up to date: what was committed, and what living workers have in hand."""
        show(self.session.progress, self.done())

    def done(self) -> list[Done]:
        """What each worker did, in its lives before and in this one."""
        lives = [slot.process for slot in self.slots]
        return [slot.past for slot in self.slots] + [process.did for process in lives if process is not None]
