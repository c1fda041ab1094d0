"""What one worker did, as it reported it, or several of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from relabel.jobs.running.counts import COUNTED, Progress
from relabel.jobs.running.live import Live


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
