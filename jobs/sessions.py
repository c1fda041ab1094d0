"""One worker's pass over some shards: which chunks, under whose lock, committed how."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from jobs.job_files import Job
from jobs.loop import ChunkWork, Progress, Stop
from jobs.shard_log import ShardLogs
from manifests.asks import EngineFacts
from manifests.dataset import Dataset
from manifests.errors import LockHeldError
from manifests.leases import Lock, shard_lock
from manifests.plans import Plan, shard_row_ids
from manifests.receipts import ChunkFacts, ChunkId, commit_chunk
from manifests.rows import read_chunks
from manifests.runs import RunFolder
from manifests.schemas import LabelRow, QuarantineRow
from manifests.store import LocalStore

logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 32
"""Shards under way at once. Each holds an open lock file, and what one worker holds no other can take."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A job's output with a plan that fits the job."""

    job: Job
    dataset: Dataset
    store: LocalStore
    plan: Plan
    folder: RunFolder
    was_planned_now: bool


class Session:
    """What one execution does to some shards, first attempts or retries.

    A shard's lock is taken when the shard is reached and let go with its last commit, so that workers side by side share a run's shards,
    and open files do not grow with their number.

    Args:
        shards: the plan's shards to work on, in this order.
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
    """

    def __init__(self, opened: OpenRun, shards: list[int], *, is_retry: bool, stop: Stop, progress: Progress) -> None:
        self.opened = opened
        self.is_retry = is_retry
        self.stop = stop
        self.progress = progress
        self.shards = shards
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.worker = f"{socket.gethostname()}-{os.getpid()}"
        self._logs = ShardLogs(opened.store)
        self._retries = self._retry_round() if is_retry else {}
        self._locks: dict[int, Lock] = {}
        self._chunks_left: dict[int, int] = {}
        self._guard = threading.Lock()
        self._upcoming = iter(shards)
        self._reached: tuple[int, dict[int, int]] | None = None

    def rows_to_ask(self) -> int:
        """Rows of the chunks to work on, as they stand now."""
        folder = self.opened.folder
        if not self.is_retry:
            return sum(self.opened.plan.shards[shard].chunks[chunk] for shard in self.shards for chunk in folder.pending(shard))
        return sum(
            receipts[-1].quarantine.rows
            for shard in self.shards
            for receipts in folder.chunk_receipts(shard)
            if receipts[-1].quarantine is not None and receipts[-1].chunk in self._retries.get(shard, {})
        )

    def todo(self, shard: int) -> dict[int, int]:
        """Chunks of a shard that this session should still work on, and the attempt that it would be."""
        done = self.opened.folder.attempts(shard)
        if not self.is_retry:
            return {chunk: 1 for chunk in range(len(self.opened.plan.shards[shard].chunks)) if chunk not in done}
        return {chunk: attempt for chunk, attempt in self._retries.get(shard, {}).items() if len(done[chunk]) == attempt - 1}

    def reach(self) -> bool:
        """Lock the next shard that has work and is free. False when there is none left; `busy` holds those that others have."""
        if self._reached is not None:
            return True
        for shard in self._upcoming:
            if not self.todo(shard):
                continue
            lock = shard_lock(self.opened.store, shard)
            try:
                lock.acquire()
            except LockHeldError as exc:
                logger.info("%s", exc)
                self.busy.append(shard)
                continue
            todo = self.todo(shard)
            if not todo:  # its last holder finished between the look and the lock
                lock.release()
                continue
            self._locks[shard] = lock
            self._chunks_left[shard] = len(todo)
            self.taken.append(shard)
            self._reached = shard, todo
            return True
        return False

    def chunks(self) -> Iterator[ChunkWork | None]:
        """Rows to ask, chunk by chunk, shard after shard; None while too many shards are open to begin another."""
        opened = self.opened
        while True:
            if len(self._locks) - (self._reached is not None) >= MAX_OPEN_SHARDS:
                yield None
                continue
            if not self.reach():
                return
            assert self._reached is not None
            shard, attempts = self._reached
            self._reached = None
            for folder in ("labels", "quarantine", "receipts"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            planned = opened.plan.shards[shard]
            self._logs.write(shard, f"start: {len(attempts)} of {len(planned.chunks)} chunks, worker {self.worker}")
            row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
            wanted = self._quarantined_ids(shard) if self.is_retry else None
            for chunk, pairs in read_chunks(opened.dataset, planned, row_ids, sorted(attempts), wanted=wanted):
                yield ChunkWork(ChunkId(shard, chunk, attempts[chunk]), pairs)

    def commit(self, work: ChunkWork) -> bool:
        """Make a finished chunk durable. Runs in a committer thread."""
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        quarantine = [row for row in work.rows if isinstance(row, QuarantineRow)]
        facts = ChunkFacts(
            fingerprint=self.opened.plan.fingerprint,
            id=work.id,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=asdict(self.facts) if self.facts else {},
            worker=self.worker,
            epoch=0,
            started=_utc(work.started_clock),
            committed=_utc(time.time()),
        )
        receipt = commit_chunk(self.opened.store, facts, labels, quarantine)
        shard, chunk = work.id.shard, work.id.chunk
        if receipt is None:
            self._logs.write(shard, f"chunk {chunk}: another worker committed it first; our rows are dropped")
        else:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(receipt.statuses.items()))
            self._logs.write(
                shard,
                f"chunk {chunk} attempt {work.id.attempt}: {counts}, {receipt.seconds:.1f} s",
                *(f"row {row.row_id} quarantined as {row.status}: {row.reason}" for row in quarantine),
            )
        with self._guard:
            self._chunks_left[shard] -= 1
            is_last = self._chunks_left[shard] == 0
        if is_last:
            self._logs.write(shard, "done")
            self._locks.pop(shard).release()
        return receipt is not None

    def close(self) -> None:
        """Let go of every lock; safe to call twice."""
        for shard in list(self._locks):
            self._locks.pop(shard).release()

    def _retry_round(self) -> dict[int, dict[int, int]]:
        """Chunks to retry and their attempt, by shard.

        Retries go in rounds: where a round was cut short (some chunks of the run are an attempt ahead of others that still hold quarantined
        rows), only the ones that lag are asked, so that a retry that was killed and called again ends where an undisturbed one ends.
        """
        folder = self.opened.folder
        every_attempt = (len(done) for shard in range(len(self.opened.plan.shards)) for done in folder.attempts(shard).values())
        level = max(every_attempt, default=1)
        found: dict[int, dict[int, int]] = {}
        lagging: dict[int, dict[int, int]] = {}
        for shard in self.shards:
            for receipts in folder.chunk_receipts(shard):
                if receipts[-1].quarantine is not None:
                    chunk, attempt = receipts[0].chunk, len(receipts) + 1
                    found.setdefault(shard, {})[chunk] = attempt
                    if attempt <= level:
                        lagging.setdefault(shard, {})[chunk] = attempt
        return lagging or found

    def _quarantined_ids(self, shard: int) -> dict[int, set[int]]:
        folder = self.opened.folder
        return {
            receipts[-1].chunk: {row["row_id"] for row in folder.quarantined_rows(receipts[-1])}
            for receipts in folder.chunk_receipts(shard)
            if receipts[-1].quarantine is not None
        }


def _utc(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).isoformat(timespec="milliseconds")
