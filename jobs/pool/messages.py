"""Messages between workers and their supervisor: assignments, events and results of a worker."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from relabel.jobs.job import Job, build_job
from relabel.jobs.run.chunks import Live
from relabel.jobs.run.counts import COUNTED, Progress
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Deadline
from relabel.jobs.settings import absolute, read_secrets
from relabel.manifests import errors
from relabel.manifests.errors import RelabelError, TerminalError
from relabel.manifests.files import HERE, absolute_path
from relabel.manifests.secrets import STORAGE_KEY, redacted

# ------------------------------------------------------------------------------
# What a worker is given to do, as the one JSON line that crosses to its process.


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker's share of an execution. Holds no secret of an engine: a worker reads those from its own environment.

    Args:
        values: the job's spec, resolved.
        where: the job file's name, for messages.
        retries: the round of retries, chosen once for all workers: one that comes late must not begin the next round.
        deadline: when the run must have ended, in seconds since the epoch, and what was asked for.
        name: what the worker is called.
        helps, execution: see `Session`.
        storage: the job's storage options, which a spec never dumps; secrets, so that an assignment goes through a pipe
            and nowhere else.
        ledger: see `Job`.
    """

    values: dict[str, Any]
    where: str
    variables: dict[str, str]
    shards: list[int]
    is_retry: bool
    retries: list[tuple[int, int, int]]
    deadline: tuple[str, float] | None = None
    name: str = ""
    cases: list[Any] = field(default_factory=list)
    helps: bool = False
    execution: str = ""
    storage: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    ledger: str | None = None

    def as_line(self) -> str:
        """One line of JSON, as a worker reads it from its standard input; it holds secrets."""
        return json.dumps(asdict(self)) + "\n"

    def named(self, name: str) -> Assignment:
        """The same for the worker of that name."""
        return replace(self, name=name)

    def job(self, environment: Any) -> Job:
        """The job, built and checked again on the worker's side."""
        job = build_job({**self.values, STORAGE_KEY: self.storage}, where=self.where)
        secrets = read_secrets(job.spec.engine, environment)
        return replace(job, secrets=secrets, variables=self.variables, ledger=self.ledger)

    def round(self) -> dict[int, dict[int, int]]:
        """The retries by shard and chunk."""
        found: dict[int, dict[int, int]] = {}
        for shard, chunk, attempt in self.retries:
            found.setdefault(shard, {})[chunk] = attempt
        return found


def assign(session: Session) -> Assignment:
    """What a session leaves to its workers."""
    job, deadline = session.opened.job, session.stop.deadline
    return Assignment(
        values=absolute(job.spec).model_dump(mode="json"),
        where=job.where,
        variables=dict(job.variables),
        shards=session.shards,
        helps=True,  # workers of one command share its shards, whether or not `--shard` chose them
        execution=session.execution,
        storage=job.spec.storage_options,
        ledger=None if job.ledger is None else absolute_path(job.ledger),
        is_retry=session.is_retry,
        retries=[
            (shard, chunk, attempt)
            for shard, chunks in session.left.retries.items()
            for chunk, attempt in chunks.items()
        ],
        deadline=None if deadline is None else (deadline.text, time.time() + deadline.left_s()),
    )


def worker_name(process: int, name: str) -> str:
    """What a worker's receipts call it."""
    return f"{HERE}-{process}-{name}"


def deadline_of(assignment: Assignment) -> Deadline | None:
    """The worker's own deadline; its clock is the one that the supervisor read."""
    return None if assignment.deadline is None else Deadline(assignment.deadline[0], wall_s=assignment.deadline[1])


# ------------------------------------------------------------------------------
# What a worker reports to its supervisor: JSON lines, each an event by name. Both ends are of one version, so the
# lines have none.


@dataclass(frozen=True)
class Begins:
    """A chunk is begun; later events call it by `number`. `chunk` is a `ChunkId`, a list once it was read."""

    number: int
    chunk: tuple[int, int, int] | list[int]
    rows: int


@dataclass(frozen=True)
class Rows:
    """Rows that the engine was given, each with its chunk's number, and rows that it is done with."""

    begun: list[tuple[int, int]]
    ended: list[int]


@dataclass(frozen=True)
class Tries:
    """Rows of a chunk are asked next, with nothing else in flight."""

    number: int
    rows: list[int]


@dataclass(frozen=True)
class Commits:
    """A chunk is in. `counts` are named as in `Progress`; it `was_first`, or another worker had committed the chunk."""

    number: int
    was_first: bool
    counts: dict[str, int]
    statuses: dict[str, int]


@dataclass(frozen=True)
class Counts:
    """All that was answered so far, named as in `Progress`, and what is `Live`."""

    counts: dict[str, int]
    statuses: dict[str, int]
    live: dict[str, Any]


@dataclass(frozen=True)
class EngineUp:
    """The engine has started: what `asks`, in words, and its remarks."""

    asks: str
    remarks: list[str]


@dataclass(frozen=True)
class Ends:
    """The last word of a worker that met no error: shards that it worked on, those that others held, and why it stopped
    early, if so.
    """

    taken: list[int]
    busy: list[int]
    stopped: str | None
    costs: dict[str, Any] | None
    engine_start_s: float
    remarks: list[str]
    canary: dict[str, Any] | None


@dataclass(frozen=True)
class Fails:
    """The last word of a worker that met an error: its class, and whether it is one of `manifests.errors`."""

    error: str
    message: str
    is_terminal: bool
    is_ours: bool

    @classmethod
    def of(cls, error: Exception) -> Fails:
        """Its message is redacted here: whoever reads it may not know this process's secrets."""
        return cls(
            type(error).__name__,
            redacted(str(error)),
            isinstance(error, TerminalError),
            isinstance(error, RelabelError),
        )

    def as_error(self) -> RelabelError | RuntimeError:
        """The same class here, so that it ends in the same exit code; RuntimeError for a fault of ours."""
        if not self.is_ours:
            return RuntimeError(self.message)
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, RelabelError) and kind is not errors.VerdictError:
            return kind(self.message)
        return TerminalError(self.message) if self.is_terminal else errors.TransientError(self.message)


Event = Begins | Rows | Tries | Commits | Counts | EngineUp | Ends | Fails
_KINDS: dict[str, type[Event]] = {
    "begins": Begins,
    "rows": Rows,
    "tries": Tries,
    "commits": Commits,
    "counts": Counts,
    "engine": EngineUp,
    "ends": Ends,
    "fails": Fails,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def event_line(event: Event) -> str:
    """The event as one line."""
    return json.dumps({"event": _NAMES[type(event)], **vars(event)}, separators=(",", ":")) + "\n"


def read_event(line: bytes) -> Event | None:
    """The inverse of `event_line`; None for a line that the end of its process cut short."""
    try:
        held = json.loads(line)
    except ValueError:
        return None
    return _KINDS[held.pop("event")](**held)


# ------------------------------------------------------------------------------
# What one worker did, as it reported it, or several of them together.


@dataclass(slots=True)
class Done:
    """Counts named as in `Progress`.

    Args:
        answered, statuses: all that was answered.
        committed: of it, what was committed.
        lost, lost_statuses: what was asked in vain, as far as that is known yet.
        commits, losses: chunks.
    """

    answered: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    lost_statuses: Counter[str] = field(default_factory=Counter)
    commits: int = 0
    losses: int = 0
    live: Live = field(default_factory=Live)

    def add(self, other: Done) -> None:
        """Another's work beside this."""
        for mine, theirs in (
            (self.answered, other.answered),
            (self.statuses, other.statuses),
            (self.committed, other.committed),
            (self.lost, other.lost),
            (self.lost_statuses, other.lost_statuses),
        ):
            mine.update(theirs)
        self.live.add(other.live)
        self.commits += other.commits
        self.losses += other.losses

    def cut_off(self) -> None:
        """The worker is gone: what it answered beside what it committed was in vain. Its last answers it had no time to
        tell of.
        """
        self.live.in_flight = 0
        self.answered |= self.committed + self.lost
        self.lost = self.answered - self.committed


def show(progress: Progress, all_done: Iterable[Done]) -> None:
    """Bring a progress up to date with what workers did."""
    total = Done()
    for done in all_done:
        total.add(done)
    for name in COUNTED:
        setattr(progress, name, total.answered[name])
    progress.statuses, progress.lost, progress.lost_statuses = total.statuses, total.lost, total.lost_statuses
    progress.live = total.live
    progress.chunks_committed, progress.chunks_lost = total.commits, total.losses
    progress.rows_committed = total.committed["pairs"] + total.committed["reused"]
