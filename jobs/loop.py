"""The run loop: thousands of open pairs over one engine, no barrier between chunks or shards, order restored at commit.

Pairs are opened in shard order, so asks go out query by query; answers come back in any order. Identical asks with the same `shared_by` are
answered once. A chunk whose last row is in goes to the committer thread at once.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from typing import NamedTuple

from jobs.trajectories import OpenPair, Trajectory, row_of
from labelers.registry import Labeler
from manifests.asks import POLL_S, Answer, Ask, Engine, Request
from manifests.errors import EngineCrashError, InputError
from manifests.labels import Pair
from manifests.receipts import ChunkId
from manifests.schemas import LabelRow, QuarantineRow
from manifests.specs import LabelerOptions

MAX_OPEN_PAIRS = 4096
"""Pairs open at once: enough to fill any engine, few enough that their text stays in tens of megabytes."""
SHARED_ANSWERS_KEPT = 4096
"""Answers kept for pairs still to come; rows of a query lie together, so a few would do."""
COMMITS_IN_FLIGHT = 8
HASTY_POLLS = 10_000
"""Polls in a row that came back at once with nothing, though requests are in flight: an engine that lost them would be asked forever."""
DRAIN_S = 20.0
"""How long begun chunks may take to finish once a stop was asked for."""


class ChunkWork:
    """A chunk under way: its pairs, the rows that are in, and what its asks cost."""

    __slots__ = ("id", "left", "pairs", "round", "rows", "stages", "started_clock", "started_s")

    def __init__(self, chunk: ChunkId, pairs: list[Pair]) -> None:
        self.id = chunk
        self.round = chunk.attempt - 1  # mixed into the seeds, so that a retried row draws other answers than it did in the run
        self.pairs = pairs
        self.rows: list[LabelRow | QuarantineRow | None] = [None] * len(pairs)
        self.left = len(pairs)
        self.stages: dict[str, list[int]] = {}
        self.started_s = time.perf_counter()
        self.started_clock = time.time()

    def stage_counts(self) -> dict[str, dict[str, int]]:
        names = ("asks", "prompt_tokens", "cached_tokens", "output_tokens")
        return {stage: dict(zip(names, counts, strict=True)) for stage, counts in sorted(self.stages.items())}


class Progress:
    """Counts since the start, for whoever shows them; written by the loop alone."""

    def __init__(self) -> None:
        self.pairs = 0
        self.statuses: Counter[str] = Counter()
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.chunks_committed = 0
        self.chunks_lost = 0
        self.started_s = time.perf_counter()


class Stop:
    """Whether the run was asked to end: `drain` finishes begun chunks, `now` drops them."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.deadline_s = 0.0
        self.is_now = False

    def drain(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.deadline_s = time.perf_counter() + DRAIN_S

    def now(self) -> None:
        self.is_now = True
        self.drain("stopped by hand")


NOT_NOW: tuple[ChunkWork, int] = (ChunkWork(ChunkId(-1, -1), []), -1)
"""Stands for a pair while no chunk can be begun."""


class _Shared:
    """A shared ask: who waits for it, then its answer."""

    __slots__ = ("answer", "waiters")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.waiters: list[Trajectory] = []


class _InFlight(NamedTuple):
    work: ChunkWork
    stage: str
    trajectory: Trajectory | None
    key: bytes | None


class RunLoop:
    """Feeds one engine until the chunks run out or a stop is asked for.

    Args:
        commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
        seed: root of all request seeds.
        tick: called often, for progress display.
    """

    def __init__(
        self,
        labeler: Labeler,
        options: LabelerOptions,
        engine: Engine,
        commit: Callable[[ChunkWork], bool],
        *,
        seed: int,
        progress: Progress,
        stop: Stop,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.labeler = labeler
        self.options = options
        self.engine = engine
        self.commit = commit
        self.progress = progress
        self.stop = stop
        self.tick = tick
        self._seed = seed
        self._static: dict[object, bytes] = {}
        self._ready: deque[Request] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._shared: OrderedDict[bytes, _Shared] = OrderedDict()
        self._runnable: deque[tuple[Trajectory, Answer]] = deque()
        self._open_pairs = 0
        self._next_id = 0
        self._input_error: InputError | None = None
        self._commits: set[Future[bool]] = set()

    def run(self, chunks: Iterator[ChunkWork | None]) -> bool:
        """Work through the chunks.

        Args:
            chunks: what to ask; None means "nothing just now", and is asked again once others were committed.
        Returns:
            True if all of them were committed, False if a stop left some undone.
        Raises:
            InputError: rows can't be read; raised once the chunks before them are committed.
            EngineCrashError, StoreError, DiskFullError: as they come; chunks that were complete are committed.
        """
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="commit") as pool:  # leaving waits for commits under way
            is_done = self._feed(chunks, pool)
            self._settle(wait_for_all=True)
        if self._input_error is not None:
            raise self._input_error
        return is_done

    def _feed(self, chunks: Iterator[ChunkWork | None], pool: ThreadPoolExecutor) -> bool:
        engine, ready = self.engine, self._ready
        pairs = self._pairs(chunks)
        exhausted = False
        hasty_polls = 0
        while True:
            if self.stop.reason is not None and (self.stop.is_now or time.perf_counter() > self.stop.deadline_s):
                return False
            room = engine.capacity
            while room > 0:
                if ready:
                    engine.submit(ready.popleft())
                    room -= 1
                    continue
                if exhausted or self._open_pairs >= MAX_OPEN_PAIRS:
                    break
                opened = next(pairs, None)
                if opened is None:
                    exhausted = True
                    break
                if opened is NOT_NOW:
                    break
                self._open(*opened, pool)
            polled_s = time.perf_counter()
            answers = engine.poll()
            if answers or time.perf_counter() - polled_s > POLL_S / 100:
                hasty_polls = 0
            else:
                hasty_polls += 1
                if hasty_polls > HASTY_POLLS and self._in_flight:
                    raise EngineCrashError(f"the engine says nothing of {len(self._in_flight)} requests, and does not work on them either.")
            if not answers and not ready and not self._in_flight and (exhausted or self._open_pairs == 0):
                if exhausted:
                    return self.stop.reason is None
                self._settle(wait_for_all=True)  # all is answered; the next chunk waits for commits
                continue
            for answer in answers:
                self._deliver(answer, pool)
            self._settle(wait_for_all=False)
            self.tick()

    def _pairs(self, chunks: Iterator[ChunkWork | None]) -> Iterator[tuple[ChunkWork, int]]:
        while self.stop.reason is None:
            try:
                work = next(chunks)
            except InputError as exc:
                self._input_error = exc
                return
            except StopIteration:
                return
            if work is None:
                yield NOT_NOW
                continue
            for index in range(len(work.pairs)):
                yield work, index

    def _open(self, work: ChunkWork, index: int, pool: ThreadPoolExecutor) -> None:
        open_pair = OpenPair(work, index, work.pairs[index])
        self._open_pairs += 1
        for sample in range(self.options.samples):
            trajectory = Trajectory(open_pair, sample)
            if trajectory.begin(self.labeler):
                self._dispatch(trajectory)
            else:
                self._end(trajectory, pool)
        if self._runnable:
            self._run_answered(pool)

    def _dispatch(self, trajectory: Trajectory) -> None:
        ask = trajectory.ask
        assert ask is not None
        work: ChunkWork = trajectory.open.work
        key = self._key(ask, work.round, trajectory.sample, trajectory.attempt)
        if ask.shared_by is None:
            self._enqueue(ask, key, _InFlight(work, ask.stage, trajectory, None))
            return
        shared = self._shared.get(key)
        if shared is None:
            self._shared[key] = shared = _Shared()
            shared.waiters.append(trajectory)
            self._enqueue(ask, key, _InFlight(work, ask.stage, None, key))
        elif shared.answer is None:
            shared.waiters.append(trajectory)
        else:
            self._runnable.append((trajectory, shared.answer))

    def _enqueue(self, ask: Ask, key: bytes, flight: _InFlight) -> None:
        number = self._next_id
        self._next_id = number + 1
        self._in_flight[number] = flight
        self._ready.append(Request(number, ask, int.from_bytes(key[:8], "little") >> 1))

    def _key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """Identity of an ask, 16 bytes: what is asked, for which sample and attempt, under which seed. The seed is its first 63 bits.

        The answer's format is left out: it follows from the stage's name, the decisions and the labeler, which the fingerprint names.
        """
        static = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, round_number, sample, attempt)
        head = self._static.get(static)
        if head is None:
            head = self._static[static] = f"{self._seed}|{static!r}".encode()
        digest = blake2b(head, digest_size=16)
        if ask.shared_by is not None:
            digest.update(ask.shared_by.encode("utf-8", "surrogatepass"))
        for message in ask.messages:
            text = "\x1f".join(message.parts)
            digest.update(f"\x1e{message.role}{len(text)}".encode())
            digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def _deliver(self, answer: Answer, pool: ThreadPoolExecutor) -> None:
        flight = self._in_flight.pop(answer.request_id, None)
        if flight is None:
            raise EngineCrashError(f"the engine answered request {answer.request_id}, which was never asked or is answered already.")
        counts = flight.work.stages.get(flight.stage)
        if counts is None:
            counts = flight.work.stages[flight.stage] = [0, 0, 0, 0]
        counts[0] += 1
        counts[1] += answer.prompt_tokens
        counts[2] += answer.cached_tokens
        counts[3] += answer.output_tokens
        progress = self.progress
        progress.requests += 1
        progress.prompt_tokens += answer.prompt_tokens
        progress.cached_tokens += answer.cached_tokens
        progress.output_tokens += answer.output_tokens
        if flight.trajectory is not None:
            self._runnable.append((flight.trajectory, answer))
        else:
            assert flight.key is not None
            shared = self._shared[flight.key]
            shared.answer = answer
            self._runnable.extend((waiter, answer) for waiter in shared.waiters)
            shared.waiters = []
            self._shared.move_to_end(flight.key)
            self._forget_old_answers()
        self._run_answered(pool)

    def _forget_old_answers(self) -> None:
        while len(self._shared) > SHARED_ANSWERS_KEPT:
            key, oldest = next(iter(self._shared.items()))
            if oldest.answer is None:  # still in flight: it moves to the end once answered, and the next answer sweeps again
                return
            del self._shared[key]

    def _run_answered(self, pool: ThreadPoolExecutor) -> None:
        runnable = self._runnable
        while runnable:
            trajectory, answer = runnable.popleft()
            if trajectory.take(answer, self.labeler, self.options):
                self._dispatch(trajectory)
            else:
                self._end(trajectory, pool)

    def _end(self, trajectory: Trajectory, pool: ThreadPoolExecutor) -> None:
        open_pair = trajectory.open
        open_pair.outcomes.append(trajectory)
        if len(open_pair.outcomes) < self.options.samples:
            return
        row = row_of(open_pair)
        open_pair.outcomes.clear()  # breaks the one cycle there is, so that a pair is freed here and not by the collector
        work: ChunkWork = open_pair.work
        work.rows[open_pair.index] = row
        work.left -= 1
        self._open_pairs -= 1
        self.progress.pairs += 1
        self.progress.statuses[row.status] += 1
        if work.left == 0:
            self._commits.add(pool.submit(self.commit, work))

    def _settle(self, *, wait_for_all: bool) -> None:
        """Take note of finished commits; a failed one raises here."""
        while self._commits:
            must_wait = wait_for_all or len(self._commits) >= COMMITS_IN_FLIGHT
            done, self._commits = wait(self._commits, timeout=None if must_wait else 0, return_when=FIRST_COMPLETED)
            for future in done:
                if future.result():
                    self.progress.chunks_committed += 1
                else:
                    self.progress.chunks_lost += 1
            if not wait_for_all:
                return
