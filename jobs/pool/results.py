"""What a worker pool's workers did, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relabel.jobs.running.conclusions import RunReport, conclude
from relabel.jobs.running.sessions import Session


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
