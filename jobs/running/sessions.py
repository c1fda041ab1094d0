"""One worker's pass over some shards: which chunks, under whose lock, committed how."""

from __future__ import annotations

import functools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

from jobs.planning.open_runs import OpenRun
from jobs.running.chunks import ChunkWork
from jobs.running.counts import Progress
from jobs.running.reusing import Book, Reuse, earlier_outputs, label_keys
from jobs.running.shard_log import ShardLogs
from jobs.running.stops import Stop
from jobs.running.watch import Watch
from jobs.running.work_left import WorkLeft
from manifests.asks import EngineFacts
from manifests.errors import LockHeldError
from manifests.labels import Pair
from manifests.plans import shard_row_ids
from manifests.receipts import ChunkFacts, ChunkId, commit_chunk
from manifests.rows import read_chunks
from manifests.schemas import LabelRow, QuarantineRow
from manifests.store import Lock, shard_lock

logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 32
"""Shards under way at once. Each holds an open lock file, and what one worker holds no other can take."""
HELP_CHUNKS = 8
"""Most chunks that a helper takes on at a time."""
LOOK_EVERY_S = 5.0
"""How often a shard under way is looked at for chunks that others committed, seconds."""


class Session:
    """What one execution does to some shards, first attempts or retries.

    A shard's lock is taken when the shard is reached and let go with its last commit, so that workers side by side share a run's shards,
    and open files do not grow with their number.

    Args:
        shards: the plan's shards to work on, in this order.
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
        retries: chunks of this round of retries and their attempt, by shard, where somebody chose the round already.
        helps: once no shard is free, work on open chunks of shards that others hold.
    """

    def __init__(
        self,
        opened: OpenRun,
        shards: list[int],
        *,
        is_retry: bool,
        stop: Stop,
        progress: Progress,
        retries: dict[int, dict[int, int]] | None = None,
        helps: bool = False,
    ) -> None:
        self.opened = opened
        self.is_retry = is_retry
        self.helps = helps and not is_retry
        self.stop = stop
        self.progress = progress
        self.shards = shards
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.watch: Watch | None = None
        self.worker = f"{socket.gethostname()}-{os.getpid()}"
        self.keys = label_keys(opened.job, opened.plan)
        self._logs = ShardLogs(opened.store)
        self.left = WorkLeft(opened, shards, is_retry=is_retry, retries=retries)
        self._locks: dict[int, Lock] = {}
        self._chunks_left: dict[int, int] = {}
        self._guard = threading.Lock()
        self._upcoming = iter(shards)
        self._reached: tuple[int, dict[int, int]] | None = None
        self._untried: dict[int, list[int]] | None = None
        self._looks: dict[int, tuple[float, dict[int, list[int]]]] = {}

    @functools.cached_property
    def _chance(self) -> random.Random:
        """Differs from worker to worker."""
        return random.Random(self.worker)

    def reach(self) -> bool:
        """Find the next work: lock a shard that has some and is free; when there is none left, help with those that others hold, if
        that is wanted. False when there is nothing to do; `busy` holds the shards that others have and that are not done.
        """
        if self._reached is not None:
            return True
        for shard in self._upcoming:
            if not self.left.todo(shard, self.left.seen):
                continue
            lock = shard_lock(self.opened.store, shard)
            try:
                lock.acquire()
            except LockHeldError as exc:
                logger.info("%s", exc)
                self.busy.append(shard)
                continue
            todo = self.left.todo(shard)
            if not todo:  # its last holder finished between the look and the lock
                lock.release()
                continue
            self._locks[shard] = lock
            self._chunks_left[shard] = len(todo)
            self.taken.append(shard)
            self._reached = shard, todo
            return True
        return self._help()

    def _help(self) -> bool:
        """Choose chunks of the shard with the most open chunks among those that others hold. First commit wins.

        A few at a time, since a row group that is read for one chunk can as well serve its neighbours; each chunk once. Which ones is
        drawn, so that many helpers of one shard do not all ask the same rows; the first quarter of what is open is left to the holder.
        """
        if not self.helps:
            return False
        if self._untried is None:
            seen = self.opened.folder.attempts_of_all() if self.busy else {}
            self._untried = {shard: list(self.left.todo(shard, seen)) for shard in self.busy}
        untried = self._untried
        while untried:
            shard = max(untried, key=lambda one: len(untried[one]))
            now = self.left.todo(shard)
            left = untried[shard] = [chunk for chunk in untried[shard] if chunk in now]
            if not left:
                del untried[shard]
            elif len(left) == max(map(len, untried.values())):
                count = max(1, min(HELP_CHUNKS, len(left) // 2))
                first = self._chance.randrange(len(left) // 4, len(left) - count + 1)
                some = left[first : first + count]
                untried[shard] = left[:first] + left[first + count :]
                self._reached = shard, dict.fromkeys(some, 1)
                if shard not in self.taken:
                    self.taken.append(shard)
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
            for folder in ("labels", "quarantine", "answers", "receipts"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            planned = opened.plan.shards[shard]
            self._logs.write(shard, f"start: {len(attempts)} of {len(planned.chunks)} chunks, worker {self.worker}")
            row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
            wanted = self.left.quarantined_ids(shard) if self.is_retry else None
            for chunk, pairs in read_chunks(opened.dataset, planned, row_ids, sorted(attempts), wanted=wanted):
                if self._is_lost(shard):
                    self._give_up(shard, [one for one in attempts if one >= chunk])
                    break
                if self._has_it_now(shard, chunk, attempts[chunk]):
                    self._logs.write(shard, f"chunk {chunk}: another worker committed it; not asked")
                    self._leave(shard)
                    continue
                yield self._begin(ChunkId(shard, chunk, attempts[chunk]), pairs)

    def _is_lost(self, shard: int) -> bool:
        lock = self._locks.get(shard)
        return lock is not None and lock.is_lost

    def _give_up(self, shard: int, chunks: list[int]) -> None:
        """Ask no more of a shard whose lease another worker has by now. What was begun may still be committed, if nobody was faster."""
        self._logs.write(shard, f"lease lost: {len(chunks)} chunks are left to the worker that took it over")
        self.busy.append(shard)
        if self.helps:
            self._untried = {**(self._untried or {}), shard: chunks}
        self._leave(shard, len(chunks))

    def _has_it_now(self, shard: int, chunk: int, attempt: int) -> bool:
        """Whether somebody else committed a chunk since its shard was reached; looked up now and then."""
        now = time.monotonic()
        looked_s, done = self._looks.setdefault(shard, (now, {}))
        if now - looked_s > LOOK_EVERY_S:
            done = self.opened.folder.attempts(shard)
            self._looks[shard] = now, done
        return attempt in done.get(chunk, ())

    def _leave(self, shard: int, count: int = 1) -> None:
        """Note that so many chunks of a shard need no more of this session; with the last one its lock is let go."""
        with self._guard:
            if shard not in self._chunks_left:  # it was helped with
                return
            self._chunks_left[shard] -= count
            is_last = self._chunks_left[shard] == 0
            if is_last:
                del self._chunks_left[shard]
        if is_last:
            self._logs.write(shard, "done", is_end=True)
            self._locks.pop(shard).release()

    def _begin(self, chunk: ChunkId, pairs: list[Pair]) -> ChunkWork:
        work = ChunkWork(chunk, pairs, self.keys.keys(pairs))
        if self.reuse is not None:
            self.progress.reused += self.reuse.fill(work)
        return work

    @functools.cached_property
    def reuse(self) -> Reuse | None:
        """What earlier outputs know; opened when the first chunk is read, so that a run with nothing to do never looks."""
        job = self.opened.job
        if self.is_retry or not job.spec.reuse:
            return None
        return Reuse(job, self.opened.plan, earlier_outputs(job))

    @functools.cached_property
    def book(self) -> Book:
        """Answers that rows share."""
        return self.reuse.book if self.reuse is not None else Book(self.opened.plan, [])

    def commit(self, work: ChunkWork) -> bool:
        """Make a finished chunk durable. Runs in a committer thread."""
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        quarantine = [row for row in work.rows if isinstance(row, QuarantineRow)]
        facts = ChunkFacts(
            fingerprint=self.opened.plan.fingerprint,
            id=work.id,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=asdict(self.facts) if self.facts and work.asked else {},
            worker=self.worker,
            epoch=lock.epoch if (lock := self._locks.get(work.id.shard)) is not None else 0,
            started=_utc(work.started_clock),
            committed=_utc(time.time()),
            answers=sorted({row.key: row for row in work.answers}.values()),
            reused=self.reuse.sources(work) if self.reuse is not None else [],
            reused_answers=work.reused_answers,
        )
        receipt = commit_chunk(self.opened.store, facts, labels, quarantine)
        shard, chunk = work.id.shard, work.id.chunk
        if receipt is None:
            self._logs.write(shard, f"chunk {chunk}: another worker committed it first; our rows are dropped")
        else:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(receipt.statuses.items()))
            counts += f" ({receipt.rows_reused} taken over)" if receipt.reused else ""
            self._logs.write(
                shard,
                f"chunk {chunk} attempt {work.id.attempt}: {counts}, {receipt.seconds:.1f} s",
                *(f"row {row.row_id} quarantined as {row.status}: {row.reason}" for row in quarantine),
            )
        self._leave(shard)
        return receipt is not None

    def close(self) -> None:
        """Let go of every lock; safe to call twice."""
        for shard in list(self._locks):
            self._locks.pop(shard).release()
        self._logs.close()


def _utc(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).isoformat(timespec="milliseconds")
