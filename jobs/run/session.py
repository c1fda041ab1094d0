"""A worker's session over its shards: locks, open chunks, the rows that cheap judges label, and commits in background
threads."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Self

import numpy as np

from relabel.jobs.job import OpenRun
from relabel.jobs.run.budget import Allowance
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.crashes import CrashJournal
from relabel.jobs.run.reuse import AnswerCache, Reuse, earlier_outputs, keep_answers, known_answers, listed
from relabel.jobs.run.shards import WorkLeft
from relabel.jobs.run.stop import Stop
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import LockHeldError
from relabel.manifests.files import HERE
from relabel.manifests.labels import Pair
from relabel.manifests.plan import Plan, chunk_row_ids
from relabel.manifests.receipts import ChunkId, Receipt, ReusedRows, commit_chunk
from relabel.manifests.reuse import Cascade, LabelKeys
from relabel.manifests.run import Attempts, Snapshot, file_schema
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.store import Lock, shard_lock_name

logger = logging.getLogger(__name__)

COMMITS_IN_FLIGHT = 8
MAX_OPEN_SHARDS = 32
"""Shards under way at once. Each holds an open lock file, and what one worker holds no other can take."""
FREED_EVERY_S, FREED_ON_DISK_EVERY_S = 5.0, 0.2
"""How often the locks of busy shards are checked, seconds: on a store, and on a disk."""
LIST_EVERY_S = 30.0
"""How often the receipts of all shards are listed for the progress shown, seconds for each request to a store."""
NAMES_LISTED = 1000
"""Names that a store lists in one request."""


class CommitThreads:
    """Commits finished chunks in a few threads, so that the loop that fills the engine never waits for a disk.

    A context manager: leaving waits for those under way.

    Args:
        commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
        progress: where finished commits are counted.
        threads: how many commit at a time.
    """

    def __init__(self, commit: Callable[[ChunkWork], bool], progress: Progress, *, threads: int = 2) -> None:
        self._commit = commit
        self._progress = progress
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="commit")
        self._under_way: set[Future[tuple[ChunkWork, bool]]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        ended, self._under_way = self._under_way, set()
        error = self._count(ended)
        if error is not None and kind is None:  # else another is on its way
            raise error

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, work: ChunkWork) -> None:
        """Have a finished chunk committed."""
        self._under_way.add(self._pool.submit(lambda: (work, self._commit(work))))

    def settle(self, *, wait_for_all: bool) -> bool:
        """Take note of finished commits; a failed one raises here. Waits while too many are under way, or for all of
        them.

        Returns:
            Whether any had finished.
        """
        has_news = False
        while self._under_way:
            must_wait = wait_for_all or len(self._under_way) >= COMMITS_IN_FLIGHT
            done, self._under_way = wait(self._under_way, timeout=None if must_wait else 0, return_when=FIRST_COMPLETED)
            has_news = has_news or bool(done)
            error = self._count(done)
            if error is not None:
                raise error
            if not wait_for_all:
                break
        return has_news

    def _count(self, done: set[Future[tuple[ChunkWork, bool]]]) -> BaseException | None:
        """Take note of all of these, which have ended; the error of one that failed, if any did."""
        failed = None
        for future in done:
            error = future.exception()
            if error is not None:
                failed = failed or error
                continue
            work, was_first = future.result()
            if was_first:
                self._progress.chunks_committed += 1
            else:
                self._progress.lose(work)
        return failed


class Session:
    """What one execution does to some shards, first attempts or retries.

    A shard's lock is taken when the shard is reached and released with its last commit, so that several workers share a
    run's shards, and open files do not grow with their number.

    Args:
        shards: the plan's shards to work on, in this order.
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
        part_of: the execution of the command that this worker was started by, which concludes the run.
    """

    def __init__(
        self,
        opened: OpenRun,
        shards: list[int],
        *,
        is_retry: bool,
        stop: Stop,
        progress: Progress,
        part_of: str | None = None,
    ) -> None:
        self.opened = opened
        self.is_retry = is_retry
        self.stop = stop
        self.progress = progress
        self.shards = shards
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.worker = f"{HERE}-{os.getpid()}"
        self.journal = CrashJournal(opened.store, self.worker)
        self.allowance: Allowance | None = None
        self.is_part = part_of is not None
        self.execution = part_of or secrets.token_hex(8)
        self.keys = LabelKeys(opened.plan.parts, opened.job.reads)
        self._schema = file_schema(opened.plan.parts)  # not in a commit thread, where nothing may be compiled
        self.left = WorkLeft(opened, shards, is_retry=is_retry, execution=self.execution)
        self._before = self.left.seen
        self._locks: dict[int, Lock] = {}
        self._given_up: set[int] = set()
        self._chunks_left: dict[int, int] = {}
        self._guard = threading.Lock()
        self._upcoming = iter(shards)
        self._reached: tuple[int, dict[int, int]] | None = None
        self._freed_every_s = FREED_EVERY_S if opened.store.readers > 1 else FREED_ON_DISK_EVERY_S
        self._next_freed_s = -math.inf
        self._next_listing_s = time.monotonic() + list_every_s(opened.plan)

    def reach(self) -> bool:
        """Find the next work: lock a shard that has some and is free. False if there is none; `busy` holds the shards
        that others have and that are not done.
        """
        if self._reached is not None:
            return True
        for shard in itertools.chain(self._upcoming, self._freed()):
            if not self.left.todo(shard, self.left.seen):
                continue
            lock = self.opened.store.lock(shard_lock_name(shard), f"shard {shard}")
            try:
                lock.acquire()
            except LockHeldError as exc:
                logger.info("%s", exc)
                if shard not in self.busy:
                    self.busy.append(shard)
                continue
            todo = self.left.todo(shard)
            if not todo:  # its last holder finished between the listing and the lock
                lock.release()
                continue
            self._locks[shard] = lock
            self._chunks_left[shard] = len(todo)
            self.taken.append(shard)
            self._reached = shard, todo
            return True
        return False

    def _freed(self) -> Iterator[int]:
        """Shards that others held when they were reached and hold no more: their workers were killed or stopped."""
        if self._chunks_left and time.monotonic() < self._next_freed_s:
            return
        self._next_freed_s = time.monotonic() + self._freed_every_s
        for shard in [one for one in self.busy if one not in self._locks and one not in self._given_up]:
            if not self.opened.store.is_locked(shard_lock_name(shard)):
                yield shard

    def chunks(self) -> Iterator[ChunkWork | None]:
        """Rows to ask, chunk by chunk, shard after shard; None while too many shards are open to begin another, or
        others hold all that are left.
        """
        opened = self.opened
        while True:
            if len(self._locks) - (self._reached is not None) >= MAX_OPEN_SHARDS:
                yield None
                continue
            if not self.reach():
                if self.busy and self._chunks_left:  # a lock may come free before this worker's last commit
                    yield None
                    continue
                return
            assert self._reached is not None
            shard, attempts = self._reached
            self._reached = None
            for folder in ("labels", "quarantine", "answers", "receipts", "lost"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            planned = opened.plan.shards[shard]
            wanted = self.left.quarantined_ids(shard) if self.is_retry else None
            self.journal.opens(shard, attempts, self._rows_of(shard, wanted or {}), num_rows=sum(planned.chunks))
            settled = self.left.settled_rows(shard) if self.is_retry else {}
            for chunk, pairs in opened.read(shard, sorted(attempts), wanted=wanted):
                # whether another worker has the lease by now
                lock = self._locks.get(shard)
                if lock is not None and lock.is_lost and shard not in self._given_up:
                    self._give_up(shard, [one for one in attempts if one >= chunk])
                    break
                self._count_others()
                yield self._begin(ChunkId(shard, chunk, attempts[chunk]), pairs, settled)

    def _rows_of(self, shard: int, wanted: Mapping[int, set[int]]) -> Callable[[int], list[int]]:
        """Ids of the rows that a chunk of a shard asks; the file of a scattered shard is read once."""
        by_chunk = functools.cache(functools.partial(chunk_row_ids, self.opened.store, self.opened.plan.shards[shard]))

        def rows_of(chunk: int) -> list[int]:
            return sorted(wanted[chunk]) if chunk in wanted else list(map(int, by_chunk()[chunk]))

        return rows_of

    def _give_up(self, shard: int, chunks: list[int]) -> None:
        """Ask no more of a shard whose lease another worker has by now. What was begun may still be committed first."""
        logger.warning(
            "shard %d: its lease was lost; %d chunks are left to the worker that has it now", shard, len(chunks)
        )
        self._given_up.add(shard)
        self.journal.forgets(shard)
        self.busy.append(shard)
        self._leave(shard, len(chunks))

    def _count_others(self) -> None:
        """Now and then: count what was committed of shards that this worker has not taken."""
        if time.monotonic() < self._next_listing_s or len(self.shards) == 1:
            return
        seen = self.opened.folder.attempts_of_all()
        self._next_listing_s = time.monotonic() + list_every_s(self.opened.plan)
        theirs = set(self.shards) - set(self.taken)
        self.progress.rows_of_others = sum(self.left.rows_since(shard, seen.get(shard, {})) for shard in theirs)

    def _leave(self, shard: int, count: int = 1) -> None:
        """Note that so many chunks of a shard need no more of this session; with the last its lock is released."""
        with self._guard:
            self._chunks_left[shard] -= count
            is_last = self._chunks_left[shard] == 0
            if is_last:
                del self._chunks_left[shard]
        if is_last:
            self.journal.closes(shard)
            self._locks.pop(shard).release()

    def _begin(self, chunk: ChunkId, pairs: list[Pair], settled: Mapping[int, QuarantineRow]) -> ChunkWork:
        work = ChunkWork(chunk, pairs, self.keys.keys(pairs))
        work.settled_rows = {index: settled[pair.row_id] for index, pair in enumerate(pairs) if pair.row_id in settled}
        if self.reuse is not None:
            self.progress.reused += self.reuse.fill(work)
        if (cascade := self.opened.cascade) is not None and not self.is_retry:
            self.progress.reused += take_cheap(cascade, work)
        if chunk in self._kept:
            work.known = work.answered = known_answers(
                self.opened.store, self.opened.plan.fingerprint, self.facts, chunk
            )
        return work

    @functools.cached_property
    def _kept(self) -> set[ChunkId]:
        """Chunks of which an execution that was stopped kept answers."""
        return {chunk for _, chunk in listed(self.opened.store)}

    def keep_answers(self, unfinished: list[ChunkWork]) -> None:
        """Keep the answers of chunks that stay open."""
        keep_answers(self.opened.store, self.opened.plan.fingerprint, self.facts, unfinished)

    @functools.cached_property
    def reuse(self) -> Reuse | None:
        """What earlier outputs know; opened when the first chunk is read, so that a run with
        nothing to do opens none.
        """
        job = self.opened.job
        outputs = [] if self.is_retry else earlier_outputs(job)
        return Reuse(job, self.opened.plan, outputs) if outputs else None

    @functools.cached_property
    def answer_cache(self) -> AnswerCache:
        """Answers that rows share."""
        return self.reuse.answer_cache if self.reuse is not None else AnswerCache(self.opened.plan, [])

    def commit(self, work: ChunkWork) -> bool:
        """Make a finished chunk durable. Runs in a committer thread."""
        cascade = self.opened.cascade
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        if cascade is not None:
            labels = with_sources(cascade, work)
        quarantine = [row for row in work.rows if isinstance(row, QuarantineRow)]
        receipt = commit_chunk(
            self.opened.store,
            work.id,
            labels,
            quarantine,
            schema=self._schema,
            fingerprint=self.opened.plan.fingerprint,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=asdict(self.facts) if self.facts and work.asked else {},
            worker=self.worker,
            epoch=lock.epoch if (lock := self._locks.get(work.id.shard)) is not None else 0,
            started=_utc(work.started_clock),
            committed=_utc(time.time()),
            answers=sorted({row.key: row for row in work.answers}.values()),
            reused=[
                *(self.reuse.sources(work) if self.reuse is not None else []),
                *(cheap_sources(cascade, work) if cascade is not None else []),
            ],
            reused_answers=work.reused_answers,
            execution=self.execution,
        )
        self.journal.commits(work)
        self._leave(work.id.shard)
        return receipt is not None

    def own_receipts(self, found: Snapshot, seen: Attempts) -> Iterator[Receipt]:
        """What was committed for this execution, by all its workers or by the one that this is, among the receipts that
        are there now.

        Args:
            seen: the attempts in `found`.
        """
        receipts = self.opened.folder.new_receipts(self._before, seen, found.etags)
        mine = (receipt for receipt in receipts if receipt.execution == self.execution)
        return (receipt for receipt in mine if not self.is_part or receipt.worker == self.worker)

    def close(self, *, crash: str | None = None) -> None:
        """Release every lock; safe to call twice.

        Args:
            crash: how the engine crashed over its work, so that the rows under way are asked apart next time.
        """
        for shard in list(self._locks):
            self.journal.closes(shard, crash=crash)
            self._locks.pop(shard).release()


def list_every_s(plan: Plan) -> float:
    """How often all receipts of a run are listed for the progress shown, seconds."""
    return LIST_EVERY_S * (1 + plan.num_chunks // NAMES_LISTED)


def _utc(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------------------
# The rows of a chunk that cheap judges label, and the columns that say who labelled which row.


CHEAP = -1
"""Source of a row in `ChunkWork.sources`; earlier outputs are numbered from 0."""


def take_cheap(cascade: Cascade, work: ChunkWork) -> int:
    """Settle the rows of a chunk that the cheap judges are sure of, but for those that are known or drawn for the
    audit. Returns how many.
    """
    before, cheap = work.left, cascade.cheap
    place_N, by_N = cascade.places(work.pairs)
    for index in np.flatnonzero(by_N == "cheap").tolist():
        if work.rows[index] is not None:
            continue
        pair, probs_K = work.pairs[index], cheap.probs_PK[place_N[index]]
        row = LabelRow(
            row_id=pair.row_id,
            query_id=pair.query_id,
            doc_id=pair.doc_id,
            status="ok",
            grade=int(cheap.grade_P[place_N[index]]),
            probs=probs_K.tolist(),
            outside_mass=None,
            expected_grade=float(probs_K @ np.arange(len(probs_K))),
            evidence=[],
            intent=None,
            reasoning=None,
            flags=[],
            samples=None,
            prompt_tokens=0,
            output_tokens=0,
            reused=True,
            key=None,  # so that no later run takes it for the teacher's
            origin=cascade.origin,
        )
        work.take_over(index, row, CHEAP)
    return before - work.left


def with_sources(cascade: Cascade, work: ChunkWork) -> list[LabelRow]:
    """A chunk's labels with the columns of a cascade."""
    place_N, by_N = cascade.places(work.pairs)
    found = []
    for row, place, by in zip(work.rows, place_N.tolist(), by_N.tolist(), strict=True):
        if isinstance(row, LabelRow):
            known_by = "calibration" if row.query_id in cascade.queries else "teacher"
            columns = {
                "answered_by": known_by if by == "cheap" and row.key is not None else by,  # asked by an earlier run
                "cheap_grade": None if place < 0 else int(cascade.cheap.grade_P[place]),
                "cheap_confidence": None if place < 0 else float(cascade.cheap.confidence_P[place]),
            }
            found.append(row._replace(columns={**row.columns, **columns}))
    return found


def cheap_sources(cascade: Cascade, work: ChunkWork) -> list[ReusedRows]:
    """What a chunk's receipt says of its cheap rows: all of them under the first judge."""
    rows = work.sources[CHEAP]
    return [replace(judge, rows=0 if at else rows) for at, judge in enumerate(cascade.judges)] if rows else []
