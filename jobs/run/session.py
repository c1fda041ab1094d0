"""A worker's session over its shards: locks, budget, open chunks, the rows that cheap judges label, and commits in
background threads."""

import functools
import itertools
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Self

import numpy as np

from relabel.jobs.job import OpenRun, other_rounds
from relabel.jobs.run.chunks import ChunkWork, Reuse, earlier_outputs, known_answers, listed
from relabel.jobs.run.crashes import CrashJournal
from relabel.jobs.run.progress import Progress, asked_for
from relabel.jobs.run.stop import Stop
from relabel.manifests.asks import (
    Answer,
    Ask,
    Charge,
    Engine,
    EngineFacts,
    Request,
    most_output_tokens,
    most_prompt_tokens,
)
from relabel.manifests.budgets import BudgetState, Limits
from relabel.manifests.cascade import Cascade
from relabel.manifests.errors import LockHeldError, StoreUnreachableError, UsageError
from relabel.manifests.files import HERE
from relabel.manifests.label_keys import LabelKeys
from relabel.manifests.labels import LABELS, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import (
    ChunkId,
    FinishedRows,
    Plan,
    Receipt,
    ReusedWork,
    WorkFacts,
    chunk_row_ids,
    commit_chunk,
)
from relabel.manifests.run_folder import Attempts, Tally
from relabel.manifests.run_labels import file_schema
from relabel.manifests.specs import EngineArgs, EngineSpec, PaidByToken, price_of
from relabel.manifests.store import Lock, shard_lock_name

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# Which shards a worker takes, and what is left to do of them.

SHARD_COUNT_VARIABLE = "RELABEL_SHARD_COUNT"
"""Number of workers, for schedulers that give an index and no count (a Kubernetes Indexed Job)."""


def choose_shards(text: str | None, num_shards: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Shards of the plan that a worker takes: those j with j mod count = index.

    Args:
        text: `index/count` (0-based), `auto`, or None for all.
        num_shards: shards in the plan.
    Raises:
        UsageError: not of that form, an index outside 0..count-1, or `auto` without a scheduler.
    """
    if text is None:
        return list(range(num_shards))
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None and text != "auto":
        raise UsageError(f"--shard {text}: want INDEX/COUNT, counted from 0 (the first of four is 0/4), or auto.")
    index, count = map(int, match.groups()) if match else _from_scheduler(environment)
    if not 0 <= index < count:
        named = text if match else f"auto, here {index}/{count}"
        raise UsageError(f"--shard {named}: the index must be below the count (the last of four is 3/4).")
    return list(range(index, num_shards, count))


_INDEXES = {
    "SLURM_ARRAY_TASK_ID": "",
    "AWS_BATCH_JOB_ARRAY_INDEX": "AWS_BATCH_JOB_ARRAY_SIZE",
    "JOB_COMPLETION_INDEX": "",
}
"""A scheduler's variable that holds a worker's index, and the one that holds their count, if there is one."""


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int]:
    name = next((one for one in _INDEXES if one in environment), None)
    if name is None:
        raise UsageError(f"--shard auto: no scheduler's variable is set ({', '.join(_INDEXES)}). Give INDEX/COUNT.")
    # a task of Slurm that failed and is submitted again is an array of its own; the count says what it was part of
    for count_name in (SHARD_COUNT_VARIABLE, _INDEXES[name]):
        if count_name in environment:
            return _number(environment, name), _number(environment, count_name)
    if name != "SLURM_ARRAY_TASK_ID":
        raise UsageError(
            f"--shard auto: {name} gives an index but no count. Set {SHARD_COUNT_VARIABLE} to the number of workers."
        )
    first = _number(environment, "SLURM_ARRAY_TASK_MIN", "0")
    last = _number(environment, "SLURM_ARRAY_TASK_MAX")
    step = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", "1"))
    count = (last - first) // step + 1
    if _number(environment, "SLURM_ARRAY_TASK_COUNT", str(count)) != count:
        raise UsageError(
            f"--shard auto: Slurm's array {first}-{last}:{step} has gaps, so that some shards would fall to no task. "
            f"Submit the whole array 0-{count - 1}, or give INDEX/COUNT."
        )
    return (_number(environment, name) - first) // step, count


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        held = "not set" if text is None else repr(text)
        raise UsageError(f"--shard auto: the variable {name} is {held}. Give INDEX/COUNT, say --shard 3/64.")
    return int(text)


class WorkLeft:
    """What is left to do of some shards: chunks without a receipt, or, at a retry, chunks of its round that still hold
    quarantined rows. Read from the receipts at each call, since others work too.

    Args:
        is_retry: quarantined rows of committed chunks are the work, instead of chunks without a receipt.
        execution: whose receipts show the round of retries that its workers are in.

    Attributes:
        whole: the listing of `seen` if it left nothing to do, so that a run need not list again to report that.
    """

    def __init__(self, opened: OpenRun, shards: list[int], *, is_retry: bool, execution: str = "") -> None:
        self.opened = opened
        self.shards = shards
        self.is_retry = is_retry
        self.whole: Mapping[str, str] | None = None
        self.retries = self._retry_round(execution) if is_retry else {}

    @functools.cached_property
    def seen(self) -> dict[int, dict[int, list[int]]]:
        """What was committed at the first listing. Receipts stay, so what is done here is done."""
        etags = self.opened.folder.listing()
        found = self.opened.folder.attempts_of_all(etags)
        if not self.is_retry and sum(map(len, found.values())) == self.opened.plan.num_chunks:
            self.whole = etags
        return found

    def rows_since(self, shard: int, now: Mapping[int, Sequence[int]]) -> int:
        """Rows of the chunks of a shard that were open at the first listing and are committed now; none at a retry.

        Args:
            now: attempts by chunk, from a recent listing.
        """
        before = self.seen.get(shard, {})
        rows = self.opened.plan.shards[shard].chunks
        return 0 if self.is_retry else sum(rows[chunk] for chunk in now if chunk not in before)

    def rows_to_ask(self) -> int:
        """Rows of the chunks to work on, as of the first listing."""
        planned = self.opened.plan.shards
        folder = self.opened.folder
        if not self.is_retry:
            return sum(planned[shard].chunks[chunk] for shard in self.shards for chunk in self.todo(shard, self.seen))
        return sum(
            receipts[-1].quarantine.rows
            for shard in self.shards
            for receipts in folder.chunk_receipts(shard)
            if receipts[-1].quarantine is not None and receipts[-1].chunk in self.retries.get(shard, {})
        )

    def todo(self, shard: int, seen: Attempts | None = None) -> dict[int, int]:
        """Chunks of a shard that should still be worked on, and the attempt that it would be.

        Args:
            seen: attempts by shard and chunk, from a recent listing; by default the shard is listed now.
        Raises:
            StoreUnreachableError: at a retry, a listing lacks receipts that were seen before.
        """
        done = self.opened.folder.attempts(shard) if seen is None else seen.get(shard, {})
        if not self.is_retry:
            return {chunk: 1 for chunk in range(len(self.opened.plan.shards[shard].chunks)) if chunk not in done}
        attempts = self.retries.get(shard, {})
        self._refuse_lost(shard, attempts.keys() - done.keys())
        return {chunk: attempt for chunk, attempt in attempts.items() if len(done[chunk]) == attempt - 1}

    def open_shards(self) -> list[int]:
        """Those of the shards that still have work in them, for this worker or another; from one listing."""
        seen = None if len(self.shards) == 1 else self.opened.folder.attempts_of_all()
        return [shard for shard in self.shards if self.todo(shard, seen)]

    def _retry_round(self, execution: str) -> dict[int, dict[int, int]]:
        """Chunks to retry and their attempt, by shard.

        Retries go in rounds: where a round was cut short (some chunks of the run are an attempt ahead of others that
        still hold quarantined rows), only the ones that lag are asked, so that a retry that was killed and called again
        ends where an undisturbed one ends. Workers of one execution begin one round: one that starts late finds the
        receipts of the others, and does not begin the next.
        """
        own = 0
        found = dict[int, dict[int, int]]()
        level = max((len(attempts) for done in self.seen.values() for attempts in done.values()), default=1)
        for shard in self.shards:
            for receipts in self.opened.folder.chunk_receipts(shard):
                own = max([own, *(one.attempt for one in receipts if one.execution == execution)])
                # whether any quarantined row of a chunk may be asked again
                file = receipts[-1].quarantine
                if file is not None and len(self._settled(receipts)) < file.rows:
                    found.setdefault(shard, {})[receipts[0].chunk] = receipts[-1].attempt + 1
        lagging = {
            shard: late
            for shard, asked in found.items()
            if (late := {chunk: attempt for chunk, attempt in asked.items() if attempt <= (own or level)})
        }
        return lagging if own else lagging or found

    def settled_rows(self, shard: int) -> dict[int, QuarantineRow]:
        """Quarantined rows of a shard that this round leaves as they are, by row id: those of queries that have labels,
        where all rows of a query take theirs from one answer.
        """
        attempts = self.retries.get(shard, {})
        return {
            row.row_id: row
            for receipts in self.opened.folder.chunk_receipts(shard)
            for row in self._settled([one for one in receipts if one.attempt < attempts.get(one.chunk, 0)])
        }

    def num_settled(self) -> int:
        """Quarantined rows of the whole run that no retry would ask, as `settled_rows` has it."""
        shards = range(len(self.opened.plan.shards) if self.opened.job.reads.whole_query else 0)
        chunks = itertools.chain.from_iterable(map(self.opened.folder.chunk_receipts, shards))
        return sum(len(self._settled(receipts)) for receipts in chunks)

    def _settled(self, receipts: list[Receipt]) -> list[QuarantineRow]:
        folder = self.opened.folder
        if not receipts or not self.opened.job.reads.whole_query:
            return []
        labels = [folder.table(one.labels, LABELS, ["query_id"]) for one in receipts if one.labels is not None]
        labelled = {query_id for table in labels for query_id in table["query_id"].to_pylist()}
        return [QuarantineRow(**row) for row in folder.quarantined_rows(receipts[-1]) if row["query_id"] in labelled]

    def quarantined_ids(self, shard: int) -> dict[int, set[int]]:
        """Row ids to ask again, by chunk of a shard: what the attempt before this round's left in quarantine, whatever
        came since.

        Raises:
            StoreUnreachableError: a listing lacks receipts that were seen before.
        """
        folder = self.opened.folder
        attempts = self.retries.get(shard, {})
        found = {
            receipt.chunk: {row["row_id"] for row in folder.quarantined_rows(receipt)}
            for receipts in folder.chunk_receipts(shard)
            for receipt in receipts
            if receipt.attempt + 1 == attempts.get(receipt.chunk)
        }
        self._refuse_lost(shard, attempts.keys() - found.keys())
        return found

    def _refuse_lost(self, shard: int, missing: set[int]) -> None:
        if missing:
            raise StoreUnreachableError(
                f"{self.opened.store.root}/receipts: a listing lacks what was there a moment ago (shard {shard}, "
                f"chunks {sorted(missing)[:5]}). Run the same command again."
            )


# ------------------------------------------------------------------------------
# A run's budget: what all workers have committed, and what this one has in flight, against the limits of the job.

AT_BUDGET = "the budget is used up"
"""Why a run is drained."""
TRIALS = 2
"""Times a labeler's made-up asks are paid for at most when an engine starts that tries them at its server; the second
is for what else it finds out there.
"""
READ_EVERY_S = 10.0
"""Seconds between two listings of what other workers have committed; 20 times as long as a listing takes, if longer."""


class Allowance:
    """What one worker may still ask: the limits, less what was committed, what this worker was charged, and the most
    that its asks in flight may be charged. What others have in flight is not known here: docs/jobs.md says how far that
    may overshoot.

    Args:
        worker: its name in receipts.
        stop: drained once the budget is spent.
    """

    def __init__(self, opened: OpenRun, limits: Limits, worker: str, stop: Stop) -> None:
        self._opened = opened
        self._limits = limits
        self._worker = worker
        self._stop = stop
        self._engine: Engine | None = None
        self._spec = opened.job.spec.engine
        self._probe = opened.job.labeler.probe()
        self._seen = opened.folder.attempts_of_all()
        tallies = _tallies(opened)
        self._rows_asked = sum(tally.rows - tally.reused for tally in tallies)
        self._others = spent_so_far(opened, tallies)
        """By all receipts but this worker's own."""
        self._next_read_s = time.perf_counter() + READ_EVERY_S
        self._answered = self._trials = self._gone = self._held = self._largest = Charge()
        self._flying: dict[int, Charge] = {}
        self.is_spent = False
        """Whether it ended for want of more."""

    def begin(self) -> bool:
        """Whether there is room to start an engine and to ask what is typical of an open chunk."""
        bounds = [most_charge(self._spec, ask) for ask in self._probe]
        sizes = [
            rows
            for shard, planned in enumerate(self._opened.plan.shards)
            for chunk, rows in enumerate(planned.chunks)
            if chunk not in self._seen.get(shard, {})
        ]
        # without any it is a retry, which may ask a single row
        need, smallest = (max(bounds), min(sizes)) if sizes else (min(bounds), 1)
        typical = self._others.times(smallest / self._rows_asked) if self._rows_asked else Charge()
        if isinstance(self._spec.args, PaidByToken):
            self._trials = _sum(bounds).times(TRIALS)  # until the engine is there and counts them
        if not self._has_room(typical.plus(need)):
            self._end()
        return not self.is_spent

    def uses(self, engine: Engine) -> None:
        """The engine that is asked, from its start on."""
        self._trials = Charge()
        self._engine = engine

    def takes(self, request: Request, *, is_idle: bool) -> bool:
        """Hold the most that a request may be charged, if there is room for it.

        Args:
            is_idle: nothing is in flight, so that no answer can make room: False then means that the budget is spent.
        """
        if time.perf_counter() >= self._next_read_s:
            self._read_others()
        most = self._most(request.ask)
        if not self._has_room(self._held.plus(most)):
            if is_idle:
                self._end()
            return False
        if request.id in self._flying:  # of a loop before this one, that was ended; its answer will not come
            self._gone = self._gone.plus(self._flying[request.id])
        self._flying[request.id] = most
        self._largest = max(self._largest, most)
        self._held = self._held.plus(most)
        return True

    def answered(self, answers: Sequence[Answer]) -> None:
        """Count what answers were charged, instead of the most that they might have been."""
        for answer in answers:
            most = self._flying.pop(answer.request_id, None)
            if most is not None:
                self._held = self._held.minus(most) if self._flying else self._gone
                charge = charge_of(self._spec.args, answer.prompt_tokens, answer.output_tokens)
                self._answered = self._answered.plus(charge)

    def may_begin(self, rows: int, rows_begun: int, rows_done: int) -> bool:
        """Whether what is left is likely to finish a chunk, by what the rows before it took.

        Args:
            rows: of it that have to be asked; rows_begun: likewise of chunks under way; rows_done: by this worker.
        """
        if not rows_begun and not rows_done:
            return True
        if rows_done:
            # the last of them is asked by what it may be charged at most
            need = self._charged().times((rows + rows_begun) / rows_done).plus(self._largest)
        else:
            need = _sum(self._most(ask) for ask in self._probe).times(
                self._opened.job.spec.labeler.samples * (rows + rows_begun)
            )
        has_room = self._has_room(need)
        if not has_room and not rows_begun:
            self._end()
        return has_room

    def _end(self) -> None:
        self.is_spent = True
        self._stop.drain(AT_BUDGET)

    def _read_others(self) -> None:
        """Add what other workers have committed since."""
        folder = self._opened.folder
        started_s = time.perf_counter()
        etags = folder.listing()
        now = folder.attempts_of_all(etags)
        new = (one for one in folder.new_receipts(self._seen, now, etags) if one.worker != self._worker)
        self._others = self._others.plus(charge_of_receipts(self._spec.args, new))
        self._seen = now
        took_s = time.perf_counter() - started_s
        self._next_read_s = started_s + took_s + max(READ_EVERY_S, 20 * took_s)

    def _has_room(self, need: Charge) -> bool:
        return self._limits.hold(self._others.plus(self._charged()).plus(need))

    def _charged(self) -> Charge:
        return (None if self._engine is None else self._engine.charged()) or self._answered.plus(self._trials)

    def _most(self, ask: Ask) -> Charge:
        return (None if self._engine is None else self._engine.most(ask)) or most_charge(self._spec, ask)


def open_allowance(opened: OpenRun, worker: str, stop: Stop) -> Allowance | None:
    """A worker's part of the job's budget; None where it has none."""
    limits = Limits(opened.job.spec.run.max_tokens, opened.job.spec.run.max_cost)
    return Allowance(opened, limits, worker, stop) if limits.is_set else None


def budget_so_far(opened: OpenRun, tally: Tally | None = None) -> BudgetState | None:
    """How much of the job's budget is gone; None where it has none.

    Args:
        tally: of the receipts, where they were read a moment ago.
    """
    limits = Limits(opened.job.spec.run.max_tokens, opened.job.spec.run.max_cost)
    return BudgetState(*limits, *spent_so_far(opened, _tallies(opened, tally))) if limits.is_set else None


def spent_so_far(opened: OpenRun, tallies: Sequence[Tally]) -> Charge:
    """What receipts hold, those of work that another worker committed first included; of all rounds of a search.

    Args:
        tallies: of these rounds.
    """
    spec = opened.job.spec.engine
    folders = [opened.folder, *other_rounds(opened.job)]
    lost = (charge_of_receipts(spec.args, folder.lost_receipts()) for folder in folders)
    return _sum([*(charge_of(spec.args, *one.tokens) for one in tallies), *lost])


def _tallies(opened: OpenRun, own: Tally | None = None) -> list[Tally]:
    """Of this run, `own` where it is known, and of the other rounds of its search."""
    return [
        own or opened.folder.snapshot().tally,
        *(folder.snapshot().tally for folder in other_rounds(opened.job)),
    ]


def charge_of_receipts(args: EngineArgs | None, receipts: Iterable[Receipt]) -> Charge:
    """What the work of some receipts took."""
    counts = asked_for(receipts)
    return charge_of(args, counts["prompt_tokens"], counts["output_tokens"])


def most_charge(spec: EngineSpec, ask: Ask) -> Charge:
    """What an ask takes at most, of an engine that does not know better: one that cuts a prompt by its own tokens."""
    prompt = min(most_prompt_tokens(ask), spec.max_prompt_tokens)
    output = most_output_tokens(ask)
    return charge_of(spec.args, prompt, output)


def charge_of(args: EngineArgs | None, prompt_tokens: int, output_tokens: int) -> Charge:
    """Tokens as limits count them; without options that name a price they cost nothing."""
    cost = 0.0 if args is None else price_of(args, prompt_tokens, output_tokens) or 0.0
    return Charge(prompt_tokens + output_tokens, round(cost, 9))


def _sum(charges: Iterable[Charge]) -> Charge:
    return functools.reduce(Charge.plus, charges, Charge())


# ------------------------------------------------------------------------------
# A worker's session.

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
        self.shards = shards
        self.is_retry = is_retry
        self.stop = stop
        self.progress = progress
        self.busy: list[int] = []
        self.taken: list[int] = []
        self.facts: EngineFacts | None = None
        self.worker = f"{HERE}-{os.getpid()}"
        self.journal = CrashJournal(opened.store, self.worker)
        self.is_part = part_of is not None
        self.execution = part_of or secrets.token_hex(8)
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
                self.busy += [] if shard in self.busy else [shard]
                continue
            todo = self.left.todo(shard)
            if not todo:  # its last holder finished between the listing and the lock
                lock.release()
                continue
            self._locks[shard], self._chunks_left[shard], self._reached = lock, len(todo), (shard, todo)
            self.taken.append(shard)
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
            (shard, attempts), self._reached = self._reached, None
            for folder in ("labels", "quarantine", "answers", "receipts", "lost"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            wanted = self.left.quarantined_ids(shard) if self.is_retry else None
            rows_of = self._rows_of(shard, wanted or {})
            num_rows = sum(opened.plan.shards[shard].chunks)
            self.journal.opens(shard, attempts, rows_of, num_rows=num_rows)
            settled = self.left.settled_rows(shard) if self.is_retry else {}
            for chunk, pairs in opened.read(shard, sorted(attempts), wanted=wanted):
                # whether another worker has the lease by now
                lock = self._locks.get(shard)
                if lock and lock.is_lost and shard not in self._given_up:
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
        if time.monotonic() >= self._next_listing_s and len(self.shards) > 1:
            seen = self.opened.folder.attempts_of_all()
            theirs = set(self.shards) - set(self.taken)
            self._next_listing_s = time.monotonic() + list_every_s(self.opened.plan)
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
        self.progress.reused += self.reuse.fill(work)
        cascade = self.opened.cascade
        if cascade is not None and not self.is_retry:
            self.progress.reused += take_cheap(cascade, work)
        if chunk in self._kept:
            store = self.opened.store
            fingerprint = self.opened.plan.fingerprint
            work.known = work.answered = known_answers(store, fingerprint, self.facts, chunk)
        return work

    @functools.cached_property
    def _kept(self) -> set[ChunkId]:
        """Chunks of which an execution that was stopped kept answers."""
        return {chunk for _, chunk in listed(self.opened.store)}

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

    def _finished_rows(self, work: ChunkWork) -> FinishedRows:
        cascade = self.opened.cascade
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        answers = {row["key"]: row for row in work.answers}
        return FinishedRows(
            labels=labels if cascade is None else with_sources(cascade, work),
            quarantine=[row for row in work.rows if isinstance(row, QuarantineRow)],
            answers=sorted(answers.values(), key=lambda row: bytes(row["key"])),
            schema=self._schema,
        )

    def _facts_of(self, work: ChunkWork) -> WorkFacts:
        lock = self._locks.get(work.id.shard)
        return WorkFacts(
            fingerprint=self.opened.plan.fingerprint,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=asdict(self.facts) if self.facts and work.asked else {},
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
        if work.rows[index] is not None or work.pairs[index].broken_text:
            continue
        pair = work.pairs[index]
        probs_K = cheap.probs_PK[place_N[index]]
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
