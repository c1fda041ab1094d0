"""Counters of a run: rows done here and by other workers, and the status files of workers."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from relabel.jobs.run.chunks import Live, StageSeen
from relabel.manifests.errors import RelabelError
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.secrets import redacted_values
from relabel.manifests.store import RunStore, read_if_there

if TYPE_CHECKING:
    from relabel.jobs.run.chunks import ChunkWork
    from relabel.manifests.receipts import Receipt

ASKED = ("pairs", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
"""What asking is counted in."""


@dataclass(slots=True, eq=False)
class Progress:
    """Counts since the start; written by the loop alone, or by the supervisor of a pool.

    `pairs`, `statuses`, `reused` and what they were asked with count every answer. A chunk that another worker commits
    first counts in `lost` too, and what is shown as done is the difference (`kept`), so that a row counts once.
    `rows_of_others` are what other workers have committed since the first listing, as of the last one.
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
    lost: Counter[str] = field(default_factory=Counter)
    lost_statuses: Counter[str] = field(default_factory=Counter)
    engine_starts: int = 0
    stages_seen: defaultdict[str, StageSeen] = field(default_factory=lambda: defaultdict(StageSeen))
    live: Live = field(default_factory=Live)
    rows_of_others: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def lose(self, work: ChunkWork) -> None:
        """Note a chunk that another worker had committed."""
        self.chunks_lost += 1
        self.lost.update(work.counts())
        self.lost_statuses.update(work.statuses())
        self.rows_of_others += len(work.pairs)

    def kept(self, name: str) -> int:
        """One of the counts without the discarded ones."""
        found: int = getattr(self, name) - self.lost[name]
        return max(0, found)

    @property
    def kept_statuses(self) -> Counter[str]:
        """Pairs by status, without the discarded ones."""
        return self.statuses - self.lost_statuses

    def settle(self, receipts: Iterable[Receipt]) -> None:
        """End the count by what this execution committed: whatever else was answered, for a chunk that was lost, given
        up at a stop or cut off by a kill, counts as discarded.
        """
        done, statuses, reused, chunks = Counter[str](), Counter[str](), 0, 0
        for receipt in receipts:
            chunks += 1
            reused += receipt.rows_reused
            statuses.update(receipt.statuses)
            done += asked_for([receipt])
        statuses["ok"] -= reused
        for name in ASKED:
            # a worker that was killed did not count its last answers
            answered = max(getattr(self, name), done[name])
            setattr(self, name, answered)
            self.lost[name] = answered - done[name]
        self.statuses, self.lost_statuses = +statuses, Counter()
        self.reused, self.lost["reused"] = reused, 0
        self.chunks_committed = chunks

    def in_vain(self) -> dict[str, int]:
        """What was asked and not committed."""
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


logger = logging.getLogger(__name__)

FOLDER = "live"
VERSION = 1
WRITE_EVERY_S = 5.0
STALE_S = 60.0
"""The worker of a file that was not written for so long is gone, or its engine has been at one step since."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What one worker has done since its engine was up.

    Args:
        execution: of the command that it works for.
        written: UTC, by the worker's clock.
        seconds: since then; pairs: that it asked, committed or not; tokens: prompt tokens that no cache held, and
            output tokens, of all answers.
    """

    version: int
    worker: str
    execution: str
    written: str
    seconds: float
    pairs: int
    reused: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    statuses: dict[str, int]
    chunks_committed: int
    live: Live

    @property
    def age_s(self) -> float:
        """Seconds since it was written, as far as the clocks of two machines agree."""
        return time.time() - datetime.fromisoformat(self.written).timestamp()

    @property
    def is_stale(self) -> bool:
        """Whether its worker may be gone: it is old, or dated so far ahead that nothing is known."""
        return abs(self.age_s) > STALE_S


class LiveFile:
    """`live/<worker>.json`: what one worker has done, written every few seconds and removed at its end, for
    `relabel status --live` and for the supervisor of a pool.

    No label, no commit and no proof depends on it. It is written by a thread of its own, so that no store keeps the
    engine waiting; if it can't be written, that is warned of once. One that a killed worker left is stale by its age,
    and is removed when the run is finished.
    """

    def __init__(self, store: RunStore, worker: str, execution: str, progress: Progress) -> None:
        self._store = store
        self._worker = worker
        self._execution = execution
        self._progress = progress
        self._next_s = time.perf_counter() + WRITE_EVERY_S
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def _name(self) -> str:
        return f"{FOLDER}/{self._worker}.json"

    def update(self) -> None:
        """Write if it is due; cheap enough to be called at each turn of the loop."""
        now_s = time.perf_counter()
        if now_s < self._next_s or (self._writing is not None and not self._writing.done()):
            return
        self._next_s = now_s + WRITE_EVERY_S
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        data = readable_json(redacted_values(plain(state_of(self._worker, self._execution, self._progress))))
        self._writing = self._thread.submit(self._write, data)

    def _write(self, data: bytes) -> None:
        try:
            self._store.put(self._name, data)
        except (OSError, RelabelError) as exc:
            logger.warning("%s/%s: can't be written (%s); going on without", self._store.root, self._name, exc)
            self._next_s = float("inf")

    def close(self) -> None:
        """Remove the file, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()
            with contextlib.suppress(OSError, RelabelError):
                self._store.remove(self._name)


def state_of(worker: str, execution: str, progress: Progress) -> WorkerState:
    """A worker's counts now."""
    return WorkerState(
        VERSION,
        worker,
        execution,
        datetime.now(UTC).isoformat(timespec="seconds"),
        round(time.perf_counter() - progress.started_s, 1),
        progress.pairs,
        progress.reused,
        progress.requests,
        progress.prompt_tokens - progress.cached_tokens,
        progress.output_tokens,
        dict(progress.statuses),
        progress.chunks_committed,
        progress.live.in_short(),
    )


def live_states(store: RunStore) -> list[WorkerState]:
    """What workers have written, by name; files of other versions, damaged, or gone by now, are left out."""
    found = []
    for name in store.names(FOLDER):
        data = read_if_there(store, name)
        with contextlib.suppress(ValueError, OverflowError):
            held = json.loads(data or b"{}")
            if version_of(held) == VERSION:
                found.append(checked(WorkerState, held))
    return found
