"""A worker's session over its shards: locks, open chunks, and commits in background threads."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Protocol, Self

import numpy as np

from relabel.jobs.job import OpenRun
from relabel.jobs.run.budget import Allowance
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.crashes import CrashJournal
from relabel.jobs.run.reuse import (
    AnswerCache,
    Reuse,
    earlier_outputs,
    keep_answers,
    kept_chunks,
    known_answers,
    label_keys,
)
from relabel.jobs.run.shards import Helping, ShardLogs, WorkLeft
from relabel.jobs.run.stop import Stop
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import LockHeldError
from relabel.manifests.files import HERE
from relabel.manifests.labels import Pair
from relabel.manifests.manifest import Snapshot
from relabel.manifests.plan import Plan, shard_row_ids
from relabel.manifests.receipts import ChunkFacts, ChunkId, Receipt, commit_chunk
from relabel.manifests.rows import read_chunks
from relabel.manifests.run import Attempts, file_schema
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.specs import JobSpec, price_of
from relabel.manifests.store import Lock, shard_lock, shard_lock_name

# ------------------------------------------------------------------------------
# What the run loop tells a worker that is watched over, so that whoever outlives it knows which rows its engine was at
# when it went down.
#
# A run that nobody watches over has no watch, and pays for none.


class Watch(Protocol):
    """Called by the loop, in its own thread; `commits` alone is called from a commit thread."""

    def begins(self, work: ChunkWork) -> None:
        """A chunk is about to be asked. May set its `apart` and `isolated_rows`."""

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """These rows are about to be asked apart from all others; the engine is proven to work and has nothing else in
        flight.
        """

    def asks(self, work: ChunkWork, index: int) -> None:
        """A row is open: the engine may be at it from now on."""

    def ends(self, work: ChunkWork, index: int) -> None:
        """A row has its outcome."""

    def flush(self) -> None:
        """The engine is about to work: whatever was reported before must reach its reader now."""

    def commits(self, work: ChunkWork, *, was_first: bool) -> None:
        """A chunk is durable, by this worker or by another that was first."""


# ------------------------------------------------------------------------------
# Commits under way: finished chunks made durable by a few threads, so that the loop that fills the engine never waits
# for a disk.


COMMITS_IN_FLIGHT = 8


class CommitThreads:
    """Commits of one execution, a context manager: leaving waits for those under way.

    Args:
        commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
        progress: where finished commits are counted.
        watch: called for each commit, in the thread that made it.
        threads: how many commit at a time.
    """

    def __init__(
        self, commit: Callable[[ChunkWork], bool], progress: Progress, *, watch: Watch | None = None, threads: int = 2
    ) -> None:
        self._commit = commit
        self._progress = progress
        self._watch = watch
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
        self._under_way.add(self._pool.submit(self._make_durable, work))

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

    def _make_durable(self, work: ChunkWork) -> tuple[ChunkWork, bool]:
        was_first = self._commit(work)
        if self._watch is not None:
            self._watch.commits(work, was_first=was_first)
        return work, was_first


# ------------------------------------------------------------------------------
# One worker's pass over some shards: which chunks, under whose lock, committed how.


logger = logging.getLogger(__name__)

MAX_OPEN_SHARDS = 32
"""Shards under way at once. Each holds an open lock file, and what one worker holds no other can take."""
LOOK_EVERY_S = 5.0
"""How often a shard under way is looked at for chunks that others committed or are at, seconds, where a look is a
request to a store.
"""
LOOK_AT_DISK_EVERY_S = 0.2
LOOK_AT_ALL_EVERY_S = 30.0
"""How often such a look is at all shards, seconds for each request that it takes a store: what is said of the progress
counts what others do there.
"""
NAMES_LISTED = 1000
"""Names that a store lists in one request."""
CHOOSE_EVERY_S = 1.0
"""Between two tries to choose chunks to help with, where none was worth it, seconds: each is a few
requests to a store.
"""
WAIT_S = 0.2
"""Between two looks for work while no engine has started, seconds."""


class Session:
    """What one execution does to some shards, first attempts or retries.

    A shard's lock is taken when the shard is reached and let go with its last commit, so that workers side by side
    share a run's shards, and open files do not grow with their number.

    Args:
        shards: the plan's shards to work on, in this order.
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
        retries: chunks of this round of retries and their attempt, by shard, where somebody chose the round already.
        helps: once no shard is free, work on open chunks of shards that others hold.
        execution: what its receipts call the command that it works for; drawn where this is the command itself.
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
        execution: str = "",
    ) -> None:
        self.opened = opened
        self.is_retry = is_retry
        self.helps = helps and not is_retry and _may_help(opened.job.spec)
        self.stop = stop
        self.progress = progress
        self.shards = shards
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.journal = CrashJournal(opened.store)
        self.watch: Watch = self.journal
        self.allowance: Allowance | None = None
        self.worker = f"{HERE}-{os.getpid()}"
        self.execution = execution or secrets.token_hex(8)
        self.keys = label_keys(opened.job, opened.plan)
        self._logs = ShardLogs(opened.store)
        self.left = WorkLeft(opened, shards, is_retry=is_retry, retries=retries)
        self._before = self.left.seen
        self._locks: dict[int, Lock] = {}
        self._given_up: set[int] = set()
        self._chunks_left: dict[int, int] = {}
        self._guard = threading.Lock()
        self._upcoming = iter(shards)
        self._reached: tuple[int, dict[int, int]] | None = None
        self._waits = False
        self._next_choice_s = -math.inf
        self._elsewhere: dict[int, list[int]] = {}
        self._looked_s = -math.inf
        self._looked_at_all_s = time.monotonic()
        self._claim_looks: dict[int, tuple[float, set[int]]] = {}
        self._looks: dict[int, tuple[float, Mapping[int, Sequence[int]]]] = {}

    @functools.cached_property
    def helping(self) -> Helping:
        """Chooses what to ask of shards that others hold."""
        return Helping(self.opened, self.worker)

    @functools.cached_property
    def _look_every_s(self) -> float:
        return LOOK_EVERY_S if self.opened.store.readers > 1 else min(LOOK_EVERY_S, LOOK_AT_DISK_EVERY_S)

    def reach(self) -> bool:
        """Find the next work: lock a shard that has some and is free; when there is none left, help with those that
        others hold, if that is wanted. False when there is nothing to do; `busy` holds the shards that others have and
        that are not done.
        """
        if self._reached is not None or self._waits:
            return True
        for shard in itertools.chain(self._upcoming, self._freed()):
            if not self.left.todo(shard, self.left.seen):
                continue
            lock = shard_lock(self.opened.store, shard)
            try:
                lock.acquire()
            except LockHeldError as exc:
                logger.info("%s", exc)
                if shard not in self.busy:
                    self.busy.append(shard)
                continue
            todo = self.left.todo(shard, {shard: self._attempts(shard)})
            if not todo:  # its last holder finished between the look and the lock
                lock.release()
                continue
            self._locks[shard] = lock
            self.helping.ignore(shard)
            self._chunks_left[shard] = len(todo)
            self.taken.append(shard)
            self._reached = shard, todo
            return True
        return self._help()

    def _freed(self) -> Iterator[int]:
        """Shards that others held when they were reached and hold no more: their workers were killed or stopped. A
        session that helps asks what is open there anyway.
        """
        if self.helps or (self._chunks_left and time.monotonic() < self._next_choice_s):
            return
        self._next_choice_s = time.monotonic() + self._look_every_s
        for shard in [one for one in self.busy if one not in self._locks and one not in self._given_up]:
            if not self.opened.store.is_locked(shard_lock_name(shard)):
                yield shard

    def _help(self) -> bool:
        """Choose open chunks of the shards that others hold, those with most open ones first. First commit wins.

        Before an engine has started: wait until there is anything that could be worth one.
        """
        while self.helps and (still_open := self._open_elsewhere()):
            if self.helping.rows_in_hand and time.monotonic() < self._next_choice_s:
                self._waits = True
                return True
            for shard in sorted(still_open, key=lambda one: -len(still_open[one])):
                if not self.helping.rows_in_hand and not self._is_worth_an_engine(shard, still_open[shard]):
                    continue
                if not self.helping.rows_in_hand:
                    return True
                some = self.helping.choose(shard, still_open[shard])
                now = self.left.todo(shard, {shard: self._attempts(shard)}) if some else {}
                if some := [chunk for chunk in some if chunk in now]:
                    self._reached = shard, dict.fromkeys(some, 1)
                    if shard not in self.taken:
                        self.taken.append(shard)
                    return True
            if self.helping.rows_in_hand:
                self._waits = True
                self._next_choice_s = time.monotonic() + min(self._look_every_s, CHOOSE_EVERY_S)
                return True
            self.stop.mind(0.0)
            if self.stop.reason is not None:
                return False
            time.sleep(WAIT_S)
        return False

    def _open_elsewhere(self) -> dict[int, list[int]]:
        """Open chunks of shards that others hold and that this worker has not at hand."""
        now = time.monotonic()
        if now - self._looked_s >= self._look_every_s or not self._elsewhere:
            seen = self._attempts_of_all() if self.busy else {}
            self._looked_s = now
            self._elsewhere = {shard: found for shard in self.busy if (found := list(self.left.todo(shard, seen)))}
        return self._elsewhere

    def _is_worth_an_engine(self, shard: int, still_open: list[int]) -> bool:
        """One chunk is surely in its holder's hands, as long as there is one."""
        return len(still_open) > 1 or not self.opened.store.is_locked(shard_lock_name(shard))

    def chunks(self) -> Iterator[ChunkWork | None]:
        """Rows to ask, chunk by chunk, shard after shard; None while too many shards are open to begin another, or
        while waiting for other workers' chunks is better than to ask them here.
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
            if self._reached is None:
                self._waits = False
                yield None
                continue
            shard, attempts = self._reached
            self._reached = None
            for folder in ("labels", "quarantine", "answers", "receipts", "lost", "claims"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            planned = opened.plan.shards[shard]
            self._logs.write(shard, f"start: {len(attempts)} of {len(planned.chunks)} chunks, worker {self.worker}")
            row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
            wanted = self.left.quarantined_ids(shard) if self.is_retry else None
            if shard in self._locks and self.watch is self.journal:
                rows_of = functools.partial(self._rows_of, shard, row_ids, wanted)
                self.journal.opens(shard, attempts, rows_of, num_rows=sum(planned.chunks))
            settled = self.left.settled_rows(shard) if self.is_retry else {}
            rows = read_chunks(opened.dataset, planned, row_ids, sorted(attempts), wanted=wanted)
            for chunk, pairs in rows:
                if self._is_lost(shard):
                    self._give_up(shard, [one for one in attempts if one >= chunk])
                    break
                if self._has_it_now(shard, chunk, attempts[chunk]):
                    self._logs.write(shard, f"chunk {chunk}: another worker committed it; not asked")
                    self._leave(shard)
                    continue
                if shard in self._locks and chunk in self._claimed_now(shard):
                    self._logs.write(shard, f"chunk {chunk}: another worker is at it")
                    if shard not in self.busy:
                        self.busy.append(shard)
                    self._leave(shard)
                    continue
                yield self._begin(ChunkId(shard, chunk, attempts[chunk]), pairs, settled)

    def _rows_of(
        self, shard: int, row_ids: np.ndarray | None, wanted: Mapping[int, set[int]] | None, chunk: int
    ) -> list[int]:
        """Ids of the rows that a chunk asks."""
        if wanted is not None and chunk in wanted:
            return sorted(wanted[chunk])
        planned = self.opened.plan.shards[shard]
        start = sum(planned.chunks[:chunk])
        stop = start + planned.chunks[chunk]
        if row_ids is not None:
            return [int(row) for row in row_ids[start:stop]]
        first = planned.first_row or 0
        return list(range(first + start, first + stop))

    def _is_lost(self, shard: int) -> bool:
        """Whether another has the lease by now; once it was given up, the shard is one to help with like any other."""
        lock = self._locks.get(shard)
        return lock is not None and lock.is_lost and shard not in self._given_up

    def _give_up(self, shard: int, chunks: list[int]) -> None:
        """Ask no more of a shard whose lease another worker has by now. What was begun may still be committed, if
        nobody was faster.
        """
        self._logs.write(shard, f"lease lost: {len(chunks)} chunks are left to the worker that took it over")
        self._given_up.add(shard)
        self.journal.forgets(shard)
        self.busy.append(shard)
        self._leave(shard, len(chunks))

    def _has_it_now(self, shard: int, chunk: int, attempt: int) -> bool:
        """Whether somebody else committed a chunk since its shard was reached; looked up now and then."""
        now = time.monotonic()
        looked_s, done = self._looks.setdefault(shard, (now, {}))
        if now - looked_s > self._look_every_s:
            done = self._attempts(shard)
            self._looks[shard] = now, done
        return attempt in done.get(chunk, ())

    def _attempts(self, shard: int) -> Mapping[int, Sequence[int]]:
        """What is committed of a shard, looked up now; what others did of it is counted."""
        is_due = time.monotonic() - self._looked_at_all_s > look_at_all_every_s(self.opened.plan)
        if is_due and len(self.shards) > 1:
            return self._attempts_of_all().get(shard, {})
        done = self.opened.folder.attempts(shard)
        self.progress.others.saw(shard, self.left.done_since(shard, done))
        return done

    def _attempts_of_all(self) -> Attempts:
        """The same of all shards."""
        seen = self.opened.folder.attempts_of_all()
        self._looked_at_all_s = time.monotonic()
        for shard in self.shards:
            self.progress.others.saw(shard, self.left.done_since(shard, seen.get(shard, {})))
        return seen

    def _claimed_now(self, shard: int) -> set[int]:
        """Chunks of a shard of ours that helpers are at; looked up now and then."""
        now = time.monotonic()
        looked_s, claimed = self._claim_looks.get(shard, (-math.inf, set()))
        if now - looked_s > self._look_every_s:
            claimed = self.helping.claimed(shard)
            self._claim_looks[shard] = now, claimed
        return claimed

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
            self.journal.closes(shard)
            self._locks.pop(shard).release()

    def _begin(self, chunk: ChunkId, pairs: list[Pair], settled: Mapping[int, QuarantineRow]) -> ChunkWork:
        self.progress.others.begins(chunk)
        self.helping.begins(chunk.shard, chunk.chunk)
        work = ChunkWork(chunk, pairs, self.keys.keys(pairs))
        work.settled_rows = {index: settled[pair.row_id] for index, pair in enumerate(pairs) if pair.row_id in settled}
        if self.reuse is not None:
            self.progress.reused += self.reuse.fill(work)
        if chunk in self._kept:
            work.known = work.answered = known_answers(
                self.opened.store, self.opened.plan.fingerprint, self.facts, chunk
            )
        return work

    @functools.cached_property
    def _kept(self) -> set[ChunkId]:
        """Chunks of which an execution that was stopped kept answers."""
        return kept_chunks(self.opened.store)

    def keep_answers(self, unfinished: list[ChunkWork]) -> None:
        """Keep the answers of chunks that stay open."""
        keep_answers(self.opened.store, self.opened.plan.fingerprint, self.facts, unfinished)

    @functools.cached_property
    def reuse(self) -> Reuse | None:
        """What earlier outputs know; opened when the first chunk is read, so that a run with
        nothing to do never looks.
        """
        job = self.opened.job
        if self.is_retry or not job.spec.reuse:
            return None
        return Reuse(job, self.opened.plan, earlier_outputs(job))

    @functools.cached_property
    def answer_cache(self) -> AnswerCache:
        """Answers that rows share."""
        return self.reuse.answer_cache if self.reuse is not None else AnswerCache(self.opened.plan, [])

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
            in_budget=self.allowance is not None,
            execution=self.execution,
        )
        receipt = commit_chunk(self.opened.store, facts, labels, quarantine, schema=file_schema(self.opened.plan.parts))
        shard, chunk = work.id.shard, work.id.chunk
        if work.asked:
            self.helping.asked(facts.seconds)
        if receipt is None:
            self._logs.write(shard, f"chunk {chunk}: another worker committed it first; our rows are dropped")
        else:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(receipt.statuses.items()))
            counts += f" ({receipt.rows_reused} reused)" if receipt.reused else ""
            self._logs.write(
                shard,
                f"chunk {chunk} attempt {work.id.attempt}: {counts}, {receipt.seconds:.1f} s",
                *(f"row {row.row_id} quarantined as {row.status}: {row.reason}" for row in quarantine),
            )
        self._leave(shard)
        return receipt is not None

    def own_receipts(self, found: Snapshot, seen: Attempts) -> Iterator[Receipt]:
        """What was committed for this execution, by all its workers, among the receipts that are there now.

        Args:
            seen: the attempts in what was found.
        """
        receipts = self.opened.folder.new_receipts(self._before, seen, found.etags)
        return (receipt for receipt in receipts if receipt.execution == self.execution)

    def close(self, *, is_crash: bool = False) -> None:
        """Let go of every lock; safe to call twice.

        Args:
            is_crash: the engine went down over its work, so that the rows under way are asked apart next time.
        """
        for shard in list(self._locks):
            self.journal.closes(shard, is_crash=is_crash)
            self._locks.pop(shard).release()
        self._logs.close()


def look_at_all_every_s(plan: Plan) -> float:
    """How often all receipts of a run are listed for the sake of what is said of its progress, seconds."""
    return LOOK_AT_ALL_EVERY_S * (1 + plan.num_chunks // NAMES_LISTED)


def _utc(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).isoformat(timespec="milliseconds")


def _may_help(spec: JobSpec) -> bool:
    """What the spec says; by default unless a chunk that two ask is paid twice."""
    if spec.run.help is not None:
        return spec.run.help
    return price_of(spec.engine.args, 1, 1) is None
