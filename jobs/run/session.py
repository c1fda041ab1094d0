"""A worker's session over its shards: locks, budget, open chunks, the rows that cheap judges label, and commits in
background threads."""

import functools
import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import UTC, datetime
from typing import Self

import numpy as np

from relabel.jobs.job import OpenRun
from relabel.jobs.run.allowance import Allowance, open_allowance
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.crashes import CrashJournal
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.reuse import Reuse, earlier_outputs
from relabel.jobs.run.shards import WorkLeft
from relabel.jobs.run.stop import Stop
from relabel.manifests.asks import EngineFacts
from relabel.manifests.cascade import Cascade
from relabel.manifests.errors import LockHeldError
from relabel.manifests.files import HERE
from relabel.manifests.label_keys import LabelKeys
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import (
    ChunkId,
    FinishedRows,
    Plan,
    ReusedWork,
    WorkFacts,
    chunk_row_ids,
    commit_chunk,
    note_health_check,
)
from relabel.manifests.records import fields_of
from relabel.manifests.run_labels import file_schema
from relabel.manifests.store import Lock, shard_lock_name

logger = logging.getLogger(__name__)

COMMITS_IN_FLIGHT = 8
MAX_OPEN_SHARDS = 32
"""Shards under way at once. Each holds an open lock file, and what one worker holds no other can take."""
FREED_EVERY_S = 5.0
FREED_ON_DISK_EVERY_S = 0.2
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
        self._under_way: set[Future[bool]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        try:
            self._count(self._under_way)
        except Exception:
            if kind is None:  # else another error is on its way
                raise

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, work: ChunkWork) -> None:
        """Have a finished chunk committed."""
        self._under_way.add(self._pool.submit(self._commit, work))

    def settle(self, *, wait_for_all: bool = False) -> bool:
        """Take note of finished commits; a failed one raises here. Waits while too many are under way, or for all of
        them.

        Returns:
            Whether any had finished.
        """
        timeout_s = None if wait_for_all or len(self._under_way) >= COMMITS_IN_FLIGHT else 0
        until = ALL_COMPLETED if wait_for_all else FIRST_COMPLETED
        done, self._under_way = wait(self._under_way, timeout=timeout_s, return_when=until)
        self._count(done)
        return bool(done)

    def _count(self, done: set[Future[bool]]) -> None:
        """Take note of all of these, which have ended, and raise the error of one that failed."""
        for future in done:
            if future.exception() is None:
                self._progress.chunks_committed += future.result()
                self._progress.chunks_lost += not future.result()
        for future in done:
            future.result()


class Session:
    """What one execution does to some shards, first attempts or retries.

    A shard's lock is taken when the shard is reached and released with its last commit, so that several workers share a
    run's shards, and open files do not grow with their number.

    Args:
        shards: the plan's shards to work on, in this order.
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
        part_of: the execution of the command that this worker was started by, which concludes the run.
        most_shards: under way at once; with other workers its share, even if its engine would take the rows of all.
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
        most_shards: int = MAX_OPEN_SHARDS,
    ) -> None:
        self.opened = opened
        self.shards = shards
        self.is_retry = is_retry
        self.stop = stop
        self.progress = progress
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.worker = f"{HERE}-{os.getpid()}"
        is_remote = opened.job.spec.engine.args.runs_elsewhere
        self.journal = CrashJournal(opened.store, self.worker, is_remote=is_remote)
        self.is_part = part_of is not None
        self.execution = part_of or secrets.token_hex(8)
        self._most_shards = min(most_shards, MAX_OPEN_SHARDS)
        self.keys = LabelKeys(opened.plan.parts, opened.job.reads)
        self._schema = file_schema(opened.plan.parts)  # not in a commit thread, where nothing may be compiled
        self.left = WorkLeft(opened, shards, is_retry=is_retry, execution=self.execution)
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
            self._reached = (shard, todo)
            self.taken.append(shard)
            return True
        return False

    def _freed(self) -> Iterator[int]:
        """Shards that others held when they were reached and hold no more: their workers were killed or stopped."""
        if self._chunks_left and time.monotonic() < self._next_freed_s:
            return
        self._next_freed_s = time.monotonic() + self._freed_every_s
        for shard in list(self.busy):
            is_others = shard not in self._locks and shard not in self._given_up
            if is_others and not self.opened.store.is_locked(shard_lock_name(shard)):
                yield shard

    def chunks(self) -> Iterator[ChunkWork | None]:
        """Rows to ask, chunk by chunk, shard after shard; None while too many shards are open to begin another, or
        others hold all that are left.
        """
        while True:
            if len(self._locks) - (self._reached is not None) >= self._most_shards:
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
            yield from self._chunks_of(shard, attempts)

    def _chunks_of(self, shard: int, attempts: dict[int, int]) -> Iterator[ChunkWork]:
        """The open chunks of a shard whose lock was just taken.

        Args:
            attempts: by chunk, which attempt it is.
        """
        opened = self.opened
        for folder in ("labels", "quarantine", "answers", "receipts", "lost"):
            opened.store.sweep(f"{folder}/shard-{shard:05d}")
        wanted = self.left.quarantined_ids(shard) if self.is_retry else None
        rows_of = self._rows_of(shard, wanted or {})
        num_rows = sum(opened.plan.shards[shard].chunks)
        turns = self.journal.opens(
            shard,
            attempts,
            rows_of,
            num_rows=num_rows,
            convicts=self.left.isolated_ids(shard) if self.is_retry else {},
        )
        settled = self.left.settled_rows(shard) if self.is_retry else {}
        left = set(attempts)
        for chunk, pairs in itertools.chain.from_iterable(opened.read(shard, turn, wanted=wanted) for turn in turns):
            lock = self._locks.get(shard)
            if lock and lock.is_lost and shard not in self._given_up:  # another worker has the lease by now
                self._give_up(shard, list(left))
                return
            left.remove(chunk)
            self._count_others()
            yield self._begin(ChunkId(shard, chunk, attempts[chunk]), pairs, settled)

    def _rows_of(self, shard: int, wanted: Mapping[int, set[int]]) -> Callable[[int], list[int]]:
        """Ids of the rows that a chunk of a shard asks; the file of a scattered shard is read once."""
        store = self.opened.store
        planned = self.opened.plan.shards[shard]
        ids_by_chunk = functools.cache(lambda: chunk_row_ids(store, planned))

        def rows_of(chunk: int) -> list[int]:
            if chunk in wanted:
                return sorted(wanted[chunk])
            return [int(row_id) for row_id in ids_by_chunk()[chunk]]

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
        if time.monotonic() < self._next_listing_s or len(self.shards) <= 1:
            return
        now = self.opened.folder.attempts_of_all()
        theirs = set(self.shards) - set(self.taken)
        self._next_listing_s = time.monotonic() + list_every_s(self.opened.plan)
        self.progress.rows_of_others = sum(self.left.rows_since(shard, now.get(shard, {})) for shard in theirs)

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
        self.progress.reused += self.reuse.fill(work)
        cascade = self.opened.cascade
        if cascade is not None and not self.is_retry:
            self.progress.reused += take_cheap(cascade, work)
        return work

    @functools.cached_property
    def allowance(self) -> Allowance | None:
        """What of the budget this worker may spend; None without one."""
        return open_allowance(self.opened, self.worker, self.stop)

    @functools.cached_property
    def reuse(self) -> Reuse:
        """What earlier outputs know; opened when the first chunk is read, so that a run with
        nothing to do opens none.
        """
        job = self.opened.job
        plan = self.opened.plan
        return Reuse(job, plan, [] if self.is_retry else earlier_outputs(job))

    def commit(self, work: ChunkWork) -> bool:
        """Make a finished chunk durable. Runs in a committer thread."""
        receipt = commit_chunk(
            self.opened.store,
            work.id,
            self._finished_rows(work),
            self._facts_of(work),
            self._reused_by(work),
        )
        self.journal.commits(work)
        self._leave(work.id.shard)
        return receipt is not None

    def note_health_check(self, work: ChunkWork) -> None:
        """Count what was asked to see whether the engine still works."""
        note_health_check(self.opened.store, work.id, self._facts_of(work))

    def _finished_rows(self, work: ChunkWork) -> FinishedRows:
        cascade = self.opened.cascade
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        quarantine: list[QuarantineRow] = []
        if len(labels) < len(work.rows):
            quarantine = [row for row in work.rows if isinstance(row, QuarantineRow)]
        answers = {row["key"]: row for row in work.answers}
        return FinishedRows(
            labels=labels if cascade is None else with_sources(cascade, work),
            quarantine=quarantine,
            answers=sorted(answers.values(), key=lambda row: bytes(row["key"])),
            schema=self._schema,
        )

    def _facts_of(self, work: ChunkWork) -> WorkFacts:
        lock = self._locks.get(work.id.shard)
        return WorkFacts(
            fingerprint=self.opened.plan.fingerprint,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=fields_of(self.facts) if self.facts and work.asked else {},
            worker=self.worker,
            epoch=0 if lock is None else lock.epoch,
            started=_utc(work.started_clock),
            committed=_utc(time.time()),
            execution=self.execution,
        )

    def _reused_by(self, work: ChunkWork) -> ReusedWork:
        rows = self.reuse.sources(work)
        num_cheap = work.sources[CHEAP]
        if self.opened.cascade is not None and num_cheap:
            first, *others = self.opened.cascade.judges  # all of them are counted under the first judge
            rows.append(replace(first, rows=num_cheap))
            rows += [replace(judge, rows=0) for judge in others]
        return ReusedWork(rows, work.reused_answers)

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
    before = work.left
    cheap = cascade.cheap
    place_N, by_N = cascade.places(work.pairs)
    for index in np.flatnonzero(by_N == "cheap").tolist():
        pair = work.pairs[index]
        if work.rows[index] is not None or pair.broken_text:
            continue
        place = place_N[index]
        probs_K = cheap.probs_PK[place]
        row = LabelRow(
            row_id=pair.row_id,
            query_id=pair.query_id,
            doc_id=pair.doc_id,
            status="ok",
            grade=int(cheap.grade_P[place]),
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
    labels = list[LabelRow]()
    for row, place, by in zip(work.rows, place_N.tolist(), by_N.tolist(), strict=True):
        if not isinstance(row, LabelRow):
            continue
        answered_by = by
        if by == "cheap" and row.key is not None:  # asked by an earlier run
            answered_by = "calibration" if row.query_id in cascade.queries else "teacher"
        columns = {
            "answered_by": answered_by,
            "cheap_grade": None if place < 0 else int(cascade.cheap.grade_P[place]),
            "cheap_confidence": None if place < 0 else float(cascade.cheap.confidence_P[place]),
        }
        labels.append(row._replace(columns={**row.columns, **columns}))
    return labels
