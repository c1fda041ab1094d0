"""What an execution has done so far, in numbers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relabel.jobs.running.live import Live, StageSeen
from relabel.jobs.running.others import Others

if TYPE_CHECKING:
    from relabel.jobs.running.chunks import ChunkWork
    from relabel.manifests.runs.receipts import Receipt

ASKED = ("pairs", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
"""What asking is counted in."""
COUNTED = (*ASKED, "reused")


@dataclass(slots=True, eq=False)
class Progress:
    """Counts since the start, for whoever shows them; written by the loop alone.

    `pairs`, `statuses`, `reused` and what they were asked with count every answer. A chunk that another worker commits
    first was asked in vain: it counts in `lost` too, and what is shown as done is the difference (`kept`), so that a
    row counts once whoever asks it again. `rows_committed` counts what workers of a pool have told of.
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
    rows_committed: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    lost_statuses: Counter[str] = field(default_factory=Counter)
    engine_starts: int = 0
    stages_seen: defaultdict[str, StageSeen] = field(default_factory=lambda: defaultdict(StageSeen))
    live: Live = field(default_factory=Live)
    others: Others = field(default_factory=Others)
    started_s: float = field(default_factory=time.perf_counter)

    def lose(self, work: ChunkWork) -> None:
        """Note a chunk that another worker had committed."""
        self.chunks_lost += 1
        self.lost.update(work.counts())
        self.lost_statuses.update(work.statuses())
        self.others.committed_first(work.id, len(work.pairs))

    def kept(self, name: str) -> int:
        """One of the counts without what was asked in vain."""
        found: int = getattr(self, name) - self.lost[name]
        return max(0, found)

    @property
    def kept_statuses(self) -> Counter[str]:
        """Pairs by status, without those that were asked in vain."""
        return self.statuses - self.lost_statuses

    def settle(self, receipts: Iterable[Receipt]) -> None:
        """End the count by what this execution committed: whatever else was answered, for a chunk that was lost, given
        up at a stop or cut off by a kill, was in vain.
        """
        done, statuses, reused, chunks = Counter[str](), Counter[str](), 0, 0
        for receipt in receipts:
            chunks += 1
            reused += receipt.rows_reused
            statuses.update(receipt.statuses)
            done += asked_for([receipt])
        statuses["ok"] -= reused
        for name in ASKED:
            # a worker that was killed had no time to tell of its last answers
            answered = max(getattr(self, name), done[name])
            setattr(self, name, answered)
            self.lost[name] = answered - done[name]
        self.statuses, self.lost_statuses = +statuses, Counter()
        self.reused, self.lost["reused"] = reused, 0
        self.chunks_committed = chunks

    def in_vain(self) -> dict[str, int]:
        """What was asked in vain."""
        return {name: self.lost[name] for name in ASKED}


def asked_for(receipts: Iterable[Receipt]) -> Counter[str]:
    """Rows asked and what they were asked with, named as in `Progress`."""
    found = Counter[str]()
    for receipt in receipts:
        found["pairs"] += receipt.rows - receipt.rows_reused
        for counts in receipt.stages.values():
            found["requests"] += counts.get("asks", 0)
            found.update({name: counts.get(name, 0) for name in ASKED[2:]})
    return found
