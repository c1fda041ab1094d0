"""What a worker is given to do, as the one JSON line that crosses to its process."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from relabel.jobs.planning.job_files import build_job
from relabel.jobs.planning.jobs import Job
from relabel.jobs.planning.settings import read_secrets
from relabel.jobs.planning.spec_places import absolute
from relabel.jobs.running.deadlines import Deadline
from relabel.jobs.running.sessions import Session
from relabel.manifests.secrets.secret_names import STORAGE_KEY
from relabel.manifests.storage.filesystems import absolute_path
from relabel.manifests.storage.temp_files import HERE


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
