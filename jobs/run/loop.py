"""The run loop: thousands of open pairs over one engine, without a barrier between chunks or shards."""

import itertools
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from relabel.jobs.job import Job
from relabel.jobs.run.allowance import Allowance
from relabel.jobs.run.answer_journal import AnswerJournal
from relabel.jobs.run.chunks import (
    AskKeys,
    ChunkLabeler,
    ChunkWork,
    OpenPair,
    SharedAsk,
    SharedAsks,
    Trajectory,
    check_columns,
    row_of,
)
from relabel.jobs.run.crashes import CrashJournal
from relabel.jobs.run.health import CONTROL_ROUND, MOST_HELD, Health
from relabel.jobs.run.notices import Graded, GradeWatch, OutsideMass
from relabel.jobs.run.progress import Progress, RefusedAnswer
from relabel.jobs.run.reuse import AnswerCache
from relabel.jobs.run.session import CommitThreads
from relabel.jobs.run.stop import DRAIN_S, Stop
from relabel.jobs.run.watchdog import WatchedEngine, ends_hanging
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.manifests.asks import Answer, Ask, Engine, Request
from relabel.manifests.errors import EngineCrashError, InputError, StoreUnreachableError
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import NO_CHUNK, ChunkId
from relabel.manifests.reuse import answer_of, answer_row
from relabel.manifests.specs import LabelerOptions

logger = logging.getLogger(__name__)

MAX_OPEN_PAIRS = 4096
"""Pairs open at once: enough to fill any engine, few enough that their text stays in tens of megabytes."""
MOST_ASKS = 1 << 20
"""More asks than a pair has, for numbers of requests in the order of their pairs."""
CHUNKS_PASSED = 16
"""Chunks without an ask that may go by before the engine is polled again, while it has work."""
CHECK_EVERY_S = 0.25
"""How often the deadline is compared with what begun chunks need, seconds."""
IDLE_S = 0.02
"""Pause between two tries to find work while there is nothing to ask, seconds."""
MOST_TOKENS = 100_000_000
"""More than any model reads or writes at once; a count beyond it is a slip of the server's, and no reason to end a run.
"""
SPANS_KEPT = 32
"""Chunks whose time is remembered."""
MARGIN = 1.25
"""A drain's expected time over the longest chunk seen: the last answers come from an engine that is no longer full."""

MADE_UP = 8
"""How many asks about a made-up pair are answered before rows are asked apart, at most."""
MADE_UP_S = 1.0
"""How long these may take, seconds; then no more are asked than `Isolation.num_made_up`."""

NOT_NOW: tuple[ChunkWork, int] = (ChunkWork(ChunkId(-1, -1), []), -1)
"""In place of a pair while no chunk can be begun."""


InFlight = tuple[ChunkWork, str, Trajectory | None, bytes, bool]
"""Of a request: its chunk, its stage, who waits for it (None where rows share the ask: they are found by its key), its
key, and whether it is a first attempt.
"""


def _with_possible_counts(answer: Answer) -> Answer:
    """The answer, without token counts that can't be: negative ones, and such as no label file can hold."""
    counts = (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens)
    if min(counts) >= 0 and max(counts) <= MOST_TOKENS:
        return answer
    prompt, cached, output = (count if 0 <= count <= MOST_TOKENS else 0 for count in counts)
    return replace(answer, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


class RunLoop(ChunkLabeler):
    """Feeds one engine until the chunks run out or a stop is asked for.

    Args:
        seed: root of all request seeds.
        ask_timeout_s: a request without an answer for this long, in seconds of the engine's work, is a crash of the
            engine.
        is_late: answers come hours later, so that no request waits too long, and none is waited for at a stop.
        journal: where it is written down which rows the engine may be at.
        answer_journal: where answers are kept until their chunks are committed.
        note_health_check: counts what was asked, of no chunk, to see whether the engine works.
        answer_cache: answers that rows share, from earlier runs and for later ones.
        allowance: what may still be asked, where there is a budget.
        health: who finds out whether the engine has gone bad; without one each row is believed.
        watch: who looks at the grades.
    """

    def __init__(
        self,
        labeler: Labeler,
        options: LabelerOptions,
        engine: Engine,
        *,
        seed: int,
        ask_timeout_s: float = math.inf,
        is_late: bool = False,
        journal: CrashJournal | None = None,
        answer_journal: AnswerJournal | None = None,
        note_health_check: Callable[[ChunkWork], None] = lambda _: None,
        answer_cache: AnswerCache | None = None,
        allowance: Allowance | None = None,
        health: Health | None = None,
        watch: GradeWatch | None = None,
    ) -> None:
        self.labeler = labeler
        self.options = options
        self.answer_cache = answer_cache
        self.engine = WatchedEngine(engine, math.inf if is_late else ask_timeout_s)
        self._columns = {column.name: column.kind for column in labeler.columns}
        self._journal = journal
        self._answer_journal = answer_journal
        self._note_health_check = note_health_check
        self._allowance = allowance
        self._health = health
        self._watch = watch
        self._ask_timeout_s = ask_timeout_s
        self._is_late = is_late
        self._seed = seed
        self._keys = AskKeys(seed)
        self._ready: deque[Request] = deque()
        self._in_flight: dict[int, InFlight] = {}
        self._shared = SharedAsks()
        self._runnable: deque[tuple[Trajectory, Answer]] = deque()
        self._open_pairs = 0
        self._next_pair = 0
        self._input_error: InputError | None = None
        self._begun: dict[ChunkId, ChunkWork] = {}
        self._outside = defaultdict[ChunkId, OutsideMass](OutsideMass)
        self._spans: deque[float] = deque(maxlen=SPANS_KEPT)
        self._next_check_s = 0.0
        self._held: list[ChunkWork] = []
        self._controls: ChunkWork | None = None
        self._num_checks = 0
        self._is_at_end = False
        self._control_asks: deque[Request] = deque()

    def label_chunks(
        self,
        chunks: Iterator[ChunkWork | None],
        commit: Callable[[ChunkWork], bool],
        *,
        progress: Progress,
        stop: Stop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        """Have the engine asked about all rows of the chunks, see `ChunkLabeler`. Called once.

        Raises:
            InputError: rows can't be read; raised once the chunks before them are committed.
            EngineCrashError, StoreError, DiskFullError: as they come; chunks that were complete are committed, but for
                those with rows that failed with no sign since that the engine still worked.
            UnreadableError: likewise; the engine has gone bad.
        """
        self.progress = progress
        self.stop = stop
        self.on_progress = on_progress
        self._commits = CommitThreads(self._noting(commit), progress)
        watchdog = ends_hanging(
            lambda: self.engine.polling_since_s,
            self._ask_timeout_s,
            on_end=lambda reason: None if self._journal is None else self._journal.hangs(reason),
        )
        try:
            with watchdog, self._commits:
                try:
                    is_done = self._feed(chunks)
                except StoreUnreachableError:  # there is nowhere to keep them
                    raise
                except BaseException:
                    self._keep_answers()
                    raise
                else:
                    self._keep_answers()
                finally:
                    if self._controls is not None:
                        self._note_health_check(self._controls)
                    self._show_live()
                    self.progress.live.in_flight = 0
        finally:
            if self._answer_journal is not None:
                self._answer_journal.close()
        if self._input_error is not None:
            raise self._input_error
        return is_done

    def _feed(self, chunks: Iterator[ChunkWork | None]) -> bool:
        pairs = self._pairs(chunks)
        while True:
            if time.perf_counter() >= self._next_check_s:
                self._check()
            if self.stop.reason is not None and self._may_end():
                self._commit_held(at_stop=True)
                return False
            has_more = self._fill(pairs)
            answers = self._poll()
            for answer in answers:
                self._deliver(answer)
            self._mind_health()
            self._commits.settle()
            self.on_progress()
            is_waiting = self._ready or self._control_asks or self._in_flight or (has_more and self._open_pairs)
            if answers or is_waiting:
                continue
            if self._held:
                self._commit_held(at_stop=False)
                if self._held:
                    self._ask_controls(at_end=True)
            elif not has_more:
                return self.stop.reason is None
            else:  # all is answered; the next chunk waits for commits, or for other workers
                self._commits.settle(wait_for_all=True)
                time.sleep(IDLE_S)

    def _may_end(self) -> bool:
        """Whether a stop that was asked for waits for no answer any more."""
        if self.stop.is_now or time.perf_counter() > self.stop.deadline_s:
            return True
        if self._allowance is not None and self._allowance.is_spent:
            return True
        if self._is_late or not self._begun:
            return True
        return not self.engine.num_in_flight and not self._has_time()

    def _has_time(self) -> bool:
        """Whether a request that is made now is likely to be answered before the end of a stop that was asked for; else
        it would be paid for and its answer lost.
        """
        if self.stop.reason is None:
            return True
        return time.perf_counter() + MARGIN * self.engine.longest_s < self.stop.deadline_s

    def _fill(self, pairs: Iterator[tuple[ChunkWork, int]]) -> bool:
        """Hand requests to the engine while it has room, opening pairs for more of them; False if no pair is left."""
        if not self._has_time():
            return True
        room = self.engine.capacity
        waiting = self._ready if self._controls is None else self._control_asks
        while room > 0:
            if waiting:
                if not self._may_ask(waiting[0]):
                    break
                self.engine.submit(waiting.popleft())
                room -= 1
            elif self._controls is not None or self._open_pairs >= MAX_OPEN_PAIRS:
                break
            else:
                pair = next(pairs, None)
                if pair is None:
                    return False
                if pair is NOT_NOW:
                    break
                work, index = pair
                self._open(work, index)
        return True

    def _poll(self) -> list[Answer]:
        answers = self.engine.poll()
        if self._allowance is not None:
            self._allowance.answered(answers)
        return answers

    def _may_ask(self, request: Request) -> bool:
        """Whether the budget has room for a request. Where it has none and no answer can make any, the run is
        drained.
        """
        return self._allowance is None or self._allowance.takes(request, is_idle=not self.engine.num_in_flight)

    def _has_budget(self, work: ChunkWork) -> Generator[tuple[ChunkWork, int], None, bool]:
        """Wait until the budget has room for one more chunk; False if a stop came first."""
        while self._allowance is not None and work.left:
            begun = sum(other.left for other in self._begun.values())
            if self._allowance.may_begin(work.left, begun, self.progress.pairs):
                break
            if self.stop.reason is not None:
                return False
            yield NOT_NOW
        return True

    def _ask_made_up(self, work: ChunkWork) -> None:
        """Have the engine answer asks about a made-up pair, alone, before rows are asked apart: a process that ends at
        these was killed, or its engine is itself to blame, and no row of the input.
        """
        check = self._health_check([EXAMPLE])
        try:
            self._answer_made_up(work, check)
        finally:
            self._note_health_check(check)

    def _answer_made_up(self, work: ChunkWork, check: ChunkWork) -> None:
        assert self._journal is not None
        began_s = time.perf_counter()
        self._journal.tries(work, [])
        least = self._journal.num_made_up(work)
        asks = itertools.chain.from_iterable(itertools.repeat(self.labeler.probe(), MADE_UP))
        for number, ask in enumerate(asks, 1):
            request = Request(self._next_pair * MOST_ASKS, ask, self._seed)
            self._next_pair += 1
            if not self._may_ask(request):
                return
            self.engine.submit(request)
            answers = list[Answer]()
            while not answers:
                answers = [answer for answer in self._poll() if answer.request_id == request.id]
                if not answers and self.stop.reason is not None:
                    return
            answer = _with_possible_counts(answers[0])
            check.stages[ask.stage].add(answer, is_first=True)
            self.progress.answered(answer)
            seconds = time.perf_counter() - began_s
            if number == 1:  # with the journal's write, as long as one row takes
                self._journal.took(work, seconds)
            if seconds > MADE_UP_S and number >= least:
                return

    def _check(self) -> None:
        """Begin to drain if the deadline is as near as the begun chunks need: as long as recent ones took, each being
        begun while others ran, and one request more, since none is made that may outlast the drain.
        """
        self._next_check_s = time.perf_counter() + CHECK_EVERY_S
        self._show_live()
        if self._answer_journal is not None:
            self._answer_journal.update(self._is_believed)
        ages = (time.perf_counter() - work.started_s for work in self._begun.values())
        span_s = max([next(ages, 0.0), *self._spans])
        self.stop.mind(max(DRAIN_S, MARGIN * (span_s + self.engine.longest_s)))

    def _keep_answers(self) -> None:
        """Write down the answers of chunks that stay open. Where the engine was going badly, what could not be read is
        asked again.
        """
        if self._answer_journal is None or not self.unfinished:
            return
        is_going_badly = self._health is not None and self._health.is_going_badly
        self._answer_journal.flush(self._is_believed if is_going_badly else lambda *_: True)
        for work in self.unfinished:
            self.progress.kept.subtract(work.kept_counts())

    def _is_believed(self, stage: str, number: int) -> bool:
        """Whether the engine was seen to work after so many asks of a stage, so that an answer until then that could
        not be read is the row's doing.
        """
        return self._health is None or self._health.is_believed(stage, number)

    def _noting(self, commit: Callable[[ChunkWork], bool]) -> Callable[[ChunkWork], bool]:
        """A commit after which the chunk's answers need not be kept."""
        journal = self._answer_journal
        if journal is None:
            return commit

        def noted(work: ChunkWork) -> bool:
            is_first = commit(work)
            journal.commits(work)
            return is_first

        return noted

    def _show_live(self) -> None:
        live = self.progress.live
        unfinished = self.unfinished
        live.in_flight = self.engine.num_in_flight
        live.begun_chunks = len(unfinished)
        live.begun_rows = sum(len(work.pairs) for work in unfinished)
        live.rows_in = live.begun_rows - sum(work.left for work in unfinished)

    @property
    def unfinished(self) -> list[ChunkWork]:
        """Chunks that were begun and are not done, and those held back; at the end those that a stop or an error left
        open.
        """
        return [*self._begun.values(), *self._held]

    def _pairs(self, chunks: Iterator[ChunkWork | None]) -> Iterator[tuple[ChunkWork, int]]:
        passed = 0
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
            if not (yield from self._has_budget(work)):
                return
            if self._journal is not None:
                self._journal.begins(work)
                if self.labeler.reads.whole_query and work.isolated_rows:
                    work.isolate_queries(has_documents=self.labeler.reads.siblings)
            if self._answer_journal is not None and work.left:
                self._answer_journal.begins(work)
            if work.left == 0:  # every row was reused
                if time.perf_counter() >= self._next_check_s:
                    self._check()
                self._commits.add(work)
                self._commits.settle()
                passed += 1
                if passed % CHUNKS_PASSED == 0 and self._in_flight:
                    yield NOT_NOW
                continue
            if not (yield from self._apart(work)):
                return
            done = set(itertools.chain.from_iterable(work.apart))
            for index in range(len(work.pairs)):
                if index not in done and work.rows[index] is None:
                    yield work, index

    def _apart(self, work: ChunkWork) -> Generator[tuple[ChunkWork, int], None, bool]:
        """A chunk's groups of suspects, one after the other, with nothing else in flight and everything before them
        committed; False if a stop came first.
        """
        # what an earlier run knew, or what is not asked any more, is settled, whatever was in flight with it
        left = (
            [index for index in group if work.rows[index] is None and work.row_without_asking(index) is None]
            for group in work.apart
        )
        work.apart = [group for group in left if group]
        if self.labeler.reads.whole_query:
            work.try_queries()
        for group in work.apart:
            while not self._is_quiet:
                yield NOT_NOW
            assert self._journal is not None
            self._ask_made_up(work)
            if self.stop.reason is not None:
                self._begun.pop(work.id, None)
                return False
            began_s = time.perf_counter()
            num_answered = self.progress.requests
            self._journal.tries(work, group)
            for index in group:
                yield work, index
            while self._open_pairs:
                yield NOT_NOW
            if self.progress.requests > num_answered:  # not all answers were known
                self._journal.took(work, time.perf_counter() - began_s)
        if work.apart and work.left > 0:
            assert self._journal is not None
            self._journal.goes_on(work)
        return True

    @property
    def _is_quiet(self) -> bool:
        """Whether all that was asked is answered and committed."""
        return not (self._open_pairs or self._held or len(self._commits))

    def _open(self, work: ChunkWork, index: int) -> None:
        self._begun[work.id] = work
        row = work.row_without_asking(index)
        if row is None:
            self._walk(work, index)
        else:
            self._keep(work, index, row)

    def _walk(self, work: ChunkWork, index: int) -> None:
        open_pair = OpenPair(work, index, work.pairs[index], self._next_pair)
        self._next_pair += 1
        self._open_pairs += 1
        for sample in range(self.options.samples):
            trajectory = Trajectory(open_pair, sample)
            if trajectory.begin(self.labeler):
                self._dispatch(trajectory)
            else:
                self._end(trajectory)
        if self._runnable:
            self._run_answered()

    def _dispatch(self, trajectory: Trajectory) -> None:
        """Have a trajectory's ask answered: by what is known, or by the engine."""
        ask = trajectory.ask
        assert ask is not None
        work = trajectory.open.work
        key = self._keys.key(ask, work.round, trajectory.sample, trajectory.attempt)
        if ask.shared_by is not None:
            self._dispatch_shared(trajectory, ask, key)
            return
        known = self._known(trajectory, key)
        if known is not None:
            self._runnable.append((trajectory, known))
        else:
            self._enqueue(trajectory.open, ask, (work, ask.stage, trajectory, key, trajectory.attempt == 0))

    def _known(self, trajectory: Trajectory, key: bytes) -> Answer | None:
        """The answer that an earlier execution kept. It counts as the chunk's, as it would have there."""
        work = trajectory.open.work
        answer = work.known.get(key)
        if answer is not None and trajectory.ask is not None:
            work.stages[trajectory.ask.stage].add(answer, is_first=trajectory.attempt == 0)
            self.progress.takes_kept(answer)
            if self._allowance is not None:
                self._allowance.kept(answer)
        return answer

    def _dispatch_shared(self, trajectory: Trajectory, ask: Ask, key: bytes) -> None:
        """Likewise where rows share the ask: the first of them asks, and the others wait."""
        work = trajectory.open.work
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = SharedAsk()
            self._look_up(shared, trajectory, ask)
            if shared.answer is None:
                self._take_kept(shared, trajectory, key)
            if shared.answer is None:
                self._enqueue(trajectory.open, ask, (work, ask.stage, None, key, trajectory.attempt == 0))
        if shared.answer is None:
            shared.waiters.append(trajectory)
            return
        self._runnable.append((trajectory, shared.answer))
        if shared.kept_for is not None and shared.kept_for != work.id:  # its chunk may be committed before this one
            shared.kept_for = work.id
            work.fresh.append((key, shared.answer, None))

    def _take_kept(self, shared: SharedAsk, trajectory: Trajectory, key: bytes) -> None:
        """Take a shared ask's answer from an execution that was stopped or killed."""
        work = trajectory.open.work
        shared.answer = self._known(trajectory, key)
        if shared.answer is None or trajectory.ask is None:
            return
        shared.kept_for = work.id
        if shared.kept_as is not None:
            work.answers.append(answer_row(shared.kept_as, trajectory.ask.stage, shared.answer))
        self._shared.forget_old()

    def _look_up(self, shared: SharedAsk, trajectory: Trajectory, ask: Ask) -> None:
        """Take a shared ask's answer from an earlier run that has it."""
        if self.answer_cache is None:
            return
        work = trajectory.open.work
        shared.kept_as = self.answer_cache.key(ask, work.round, trajectory.sample, trajectory.attempt)
        row = self.answer_cache.known.get(shared.kept_as)
        if row is not None:
            shared.answer = answer_of(row)
            work.answers.append(row)
            work.reused_answers += 1
            self._shared.forget_old()

    def _enqueue(self, open_pair: OpenPair, ask: Ask, flight: InFlight) -> None:
        """Have a pair's next ask wait for room in the engine. Its number is below those of pairs opened later, so that
        what is under way comes first there, and chunks are finished in order.
        """
        work, _, _, key, _ = flight
        number = open_pair.number * MOST_ASKS + open_pair.num_asks
        open_pair.num_asks += 1
        self._in_flight[number] = flight
        request = Request(number, ask, int.from_bytes(key[:8], "little") >> 1)
        if work is self._controls:
            self._control_asks.append(request)
        else:
            self._ready.append(request)

    def _deliver(self, answer: Answer) -> None:
        """Give an answer to who waits for it, and take these rows on."""
        flight = self._in_flight.pop(answer.request_id, None)
        if flight is None:
            raise EngineCrashError(
                f"the engine answered request {answer.request_id}, which was never asked or is answered already."
            )
        work, stage, trajectory, key, is_first = flight
        answer = _with_possible_counts(answer)
        self._count(answer, work, stage, is_first=is_first)
        is_kept = answer.finish in ("stop", "length")  # at what the engine failed it is asked again
        if not is_kept:
            work.failed.add(answer, is_first=is_first)
        works = [work]
        if trajectory is not None:
            self._runnable.append((trajectory, answer))
        else:
            waiting_works = {waiter.open.work.id: waiter.open.work for waiter in self._shared[key].waiters}
            works = list(({work.id: work} | waiting_works).values())
            self._deliver_shared(answer, work, stage, key, is_kept=is_kept)
        pair = self._runnable[0][0].open.pair if self._runnable else None
        read_as = self._run_answered(answer)
        if work is self._controls or pair is None or not read_as:
            return
        self.progress.live.count(read_as)
        refused = None if None in read_as else read_as[0]  # one row that could read it is enough
        if self._health is not None and is_first:
            self._health.saw(stage, pair, answer, refused)
        if is_kept and self._answer_journal is not None:
            doubt = None if refused is None or self._health is None else (stage, self._health.num_seen(stage))
            for waiting in works:
                waiting.fresh.append((key, answer, doubt))
            if trajectory is None and refused is None:
                self._shared[key].kept_for = work.id

    def _count(self, answer: Answer, work: ChunkWork, stage: str, *, is_first: bool) -> None:
        work.stages[stage].add(answer, is_first=is_first)
        if work is not self._controls:
            self.progress.stages_seen[stage].add(answer, is_first=is_first)
        self.progress.answered(answer)

    def _deliver_shared(self, answer: Answer, work: ChunkWork, stage: str, key: bytes, *, is_kept: bool) -> None:
        shared = self._shared[key]
        shared.answer = answer
        if shared.kept_as is not None and is_kept:
            work.answers.append(answer_row(shared.kept_as, stage, answer))
        self._runnable.extend((waiter, answer) for waiter in shared.waiters)
        shared.waiters = []
        self._shared.move_to_end(key)
        self._shared.forget_old()

    def _run_answered(self, delivered: Answer | None = None) -> list[RefusedAnswer | None]:
        """Take rows on with the answers that they waited for.

        Args:
            delivered: the one that has just come.
        Returns:
            How each row that it is for read it; None where it could.
        """
        runnable = self._runnable
        read_as = list[RefusedAnswer | None]()
        while runnable:
            trajectory, answer = runnable.popleft()
            is_going_on = trajectory.take(answer, self.labeler, self.options)
            refused = None
            if trajectory.refused_as is not None:
                refused = RefusedAnswer(
                    trajectory.open.pair.row_id, status=trajectory.refused_as, **trajectory.tries[-1]
                )
                trajectory.open.work.refused.append(refused)
            if answer is delivered:
                read_as.append(refused)
            if is_going_on:
                self._dispatch(trajectory)
            else:
                self._end(trajectory)
        return read_as

    def _end(self, trajectory: Trajectory) -> None:
        open_pair = trajectory.open
        if trajectory.label is not None:
            check_columns(trajectory.label, self._columns, labeler=self.options.name)
        open_pair.outcomes.append(trajectory)
        if len(open_pair.outcomes) < self.options.samples:
            return
        row = row_of(open_pair)
        if self._health is not None and open_pair.work is not self._controls:
            if isinstance(row, LabelRow):
                self._health.labelled(open_pair.pair)
            else:
                failed = [outcome for outcome in open_pair.outcomes if outcome.failure is not None]
                self._health.failed(open_pair.work, failed)
        open_pair.outcomes.clear()  # breaks the one cycle there is: a pair is freed here and not by the collector
        self._open_pairs -= 1
        if self._journal is not None:
            self._journal.ends(open_pair.work, open_pair.index)
        self._keep(open_pair.work, open_pair.index, row)

    def _keep(self, work: ChunkWork, index: int, row: LabelRow | QuarantineRow) -> None:
        work.rows[index] = row
        work.left -= 1
        if work is self._controls:
            return
        self.progress.pairs += 1
        self.progress.statuses[row.status] += 1
        if isinstance(row, LabelRow) and row.outside_mass is not None:
            of_chunk = self._outside[work.id]
            of_chunk.rows += 1
            of_chunk.total += row.outside_mass
        if work.left > 0:
            return
        self._begun.pop(work.id, None)
        # of whole chunks alone: the answers of others are counted by the execution that ends them
        self.progress.outside.add(self._outside.pop(work.id, OutsideMass()))
        self._watch_grades(work)
        self._spans.append(time.perf_counter() - work.started_s)
        if self._health is None or not self._health.is_in_doubt(work):
            self._commits.add(work)
            return
        self._held.append(work)
        if self._journal is not None:
            self._journal.rests(work)

    def _watch_grades(self, work: ChunkWork) -> None:
        if self._watch is None:
            return
        graded = list[Graded]()
        for row in work.rows:
            if isinstance(row, LabelRow) and row.grade is not None and not row.reused:
                graded.append(Graded(row.row_id, row.query_id, row.grade))
        jump = self._watch.add(graded)
        if jump is not None:
            self.progress.jumps.append(jump)
            logger.warning("the grades have changed abruptly: %s", jump.text)

    def _mind_health(self) -> None:
        """Commit what is no longer in doubt, and find out whether the engine has gone bad where it looks so.

        Raises:
            UnreadableError: it has.
        """
        health = self._health
        controls = self._controls
        if health is None:
            return
        if controls is not None and controls.left == 0:
            self._controls = None
            self._note_health_check(controls)
            health.judge(controls, at_end=self._is_at_end)
        health.refuse_hopeless()
        for work in list(self._held):
            if not health.is_in_doubt(work):
                self._held.remove(work)
                self._commits.add(work)
        if self._controls is None and (health.is_suspect or len(self._held) > MOST_HELD):
            self._ask_controls(at_end=False)

    def _ask_controls(self, *, at_end: bool) -> None:
        """Have good rows asked again, and nothing else until they are answered.

        Args:
            at_end: there is nothing else to ask.
        """
        assert self._health is not None
        pairs = list(self._health.controls())
        if not pairs:
            self._health.settle()
            return
        self._is_at_end = at_end
        self._controls = self._health_check(pairs)
        self._controls.round = CONTROL_ROUND + self._num_checks
        for index in range(len(pairs)):
            self._walk(self._controls, index)

    def _health_check(self, pairs: list[Pair]) -> ChunkWork:
        """Work of no chunk."""
        self._num_checks += 1
        return ChunkWork(ChunkId(NO_CHUNK, self._num_checks), pairs)

    def _commit_held(self, *, at_stop: bool) -> None:
        """Commit chunks that wait for a sign of the engine's health where there will be none and none is needed."""
        for work in list(self._held):
            assert self._health is not None
            if not self._health.is_dubious(work, at_stop=at_stop):
                self._held.remove(work)
                self._commits.add(work)


def ask_unwritten(
    job: Job,
    engine: Engine,
    pairs: list[Pair],
    progress: Progress,
    *,
    stop: Stop | None = None,
    on_progress: Callable[[], None] = lambda: None,
    allowance: Allowance | None = None,
) -> ChunkWork:
    """Put pairs to an engine as a run does, with the same seeds, and commit nothing. Rows are missing where a stop
    came.
    """
    asked = ChunkWork(ChunkId(-1, 0), pairs)
    loop = RunLoop(
        job.labeler,
        job.spec.labeler,
        engine,
        seed=job.spec.engine.seed,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=job.spec.engine.args.sends_batches,
        allowance=allowance,
    )
    loop.label_chunks(
        iter([asked]),
        lambda _: True,
        progress=progress,
        stop=stop or Stop(),
        on_progress=on_progress,
    )
    return asked
