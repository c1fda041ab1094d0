"""The run loop: one generation for identical shared asks, order restored, no barrier, bounded attempts, votes."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import pytest

from relabel.jobs.run.chunks import AskKeys, ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import merge_samples
from relabel.manifests.asks import Answer, Ask, Decision, Distribution, Engine, EngineFacts, Message, Request
from relabel.manifests.errors import EngineCrashError, InputError, VerdictError
from relabel.manifests.labels import Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import ChunkId
from relabel.manifests.specs import LabelerOptions


class Scripted(Engine):
    """An engine at the edge of the world: answers by a function of the request, last come first served."""

    def __init__(self, answer: Any, capacity: int = 4, batch: int = 2) -> None:
        self.answer = answer
        self.limit = capacity
        self.batch = batch
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.most_waiting = 0

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return []

    @property
    def capacity(self) -> int:
        return self.limit - len(self.waiting)

    def submit(self, request: Request) -> None:
        assert self.capacity > 0, "submitted beyond capacity"
        self.waiting.append(request)
        self.seen.append(request)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def poll(self) -> list[Answer]:
        done = [self.waiting.pop() for _ in range(min(self.batch, len(self.waiting)))]
        return [self.answer(request) for request in done]

    def facts(self) -> EngineFacts:
        return EngineFacts("scripted", "1", "none", "0")

    def close(self) -> None: ...


class TwoStage(Labeler):
    """Stage one is shared by query; stage two wants a digit."""

    Options = LabelerOptions

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        first = Message("user", ("query ", pair.query, ""), ("query",))
        intent = yield Ask("intent", (first,), None, 8, shared_by=pair.query_id)
        if not intent.text:
            raise VerdictError("format", "no intent")
        second = Message("user", ("document ", pair.document, ""), ("document",))
        verdict = yield Ask("verdict", (first, Message("assistant", ("", intent.text, "")), second), None, 8)
        if not verdict.text.isdigit():
            raise VerdictError("truncated" if verdict.finish == "length" else "format", "no digit")
        return Label(int(verdict.text), verdict.distributions.get("score"), intent=intent.text)

    def probe(self) -> list[Ask]:
        return []


def good(request: Request) -> Answer:
    text = "wants shoes" if request.ask.stage == "intent" else "1"
    return Answer(request.id, text, "stop", {"score": Distribution((0.2, 0.5, 0.3), 0.1)}, 10, 2, 5)


def chunks_of(*sizes: int, queries: int = 2) -> list[ChunkWork]:
    works, row = [], 0
    for number, size in enumerate(sizes):
        pairs = [
            Pair(r, f"q{r * queries // sum(sizes)}", f"query {r * queries // sum(sizes)}", f"d{r}", f"doc {r}")
            for r in range(row, row + size)
        ]
        works.append(ChunkWork(ChunkId(0, number), pairs))
        row += size
    return works


def label_chunks(
    engine: Scripted,
    works: Iterable[ChunkWork],
    committed: list[ChunkWork],
    *,
    labeler: Any = None,
    stop: Stop | None = None,
    journal: Any = None,
    ask_timeout_s: float = 600.0,
    **options: Any,
) -> bool:
    """Have chunks labelled by a loop that appends what it commits; whether all were."""

    def commit(work: ChunkWork) -> bool:
        committed.append(work)
        if journal is not None:
            journal.seen.append(("commits", work.id.chunk))
        return True

    settings = LabelerOptions(name="two-stage", **options)
    more = {"journal": journal, "ask_timeout_s": ask_timeout_s}
    found = labeler or TwoStage(None)
    loop = RunLoop(found, settings, engine, seed=7, **more)
    return loop.label_chunks(iter(works), commit, progress=Progress(), stop=stop or Stop())


def work_through(engine: Scripted, works: Iterable[ChunkWork], **options: Any) -> list[ChunkWork]:
    committed: list[ChunkWork] = []
    label_chunks(engine, works, committed, **options)
    return committed


def test_every_pair_gets_a_row_in_its_place_and_capacity_is_filled() -> None:
    works = chunks_of(5, 3, 4)
    engine = Scripted(good, capacity=6)
    committed = work_through(engine, works)
    assert sorted(work.id.chunk for work in committed) == [0, 1, 2]
    assert [row.row_id for work in works for row in work.rows if row] == list(range(12))
    assert engine.most_waiting == 6


def test_a_shared_ask_is_generated_once_per_query() -> None:
    engine = Scripted(good)
    works = chunks_of(10, 10, queries=4)
    work_through(engine, works)
    stages = Counter(request.ask.stage for request in engine.seen)
    assert stages == {"intent": 4, "verdict": 20}
    counted = Counter[str]()
    for work in works:
        counted.update({stage: counts["asks"] for stage, counts in work.stage_counts().items()})
    assert counted == stages


def test_duplicate_rows_are_both_labelled_and_the_same_text_under_two_query_ids_is_not_shared() -> None:
    pairs = [Pair(row, query, "shoes", "d0", "x") for row, query in enumerate("aab")]
    engine = Scripted(good)
    (work,) = work_through(engine, [ChunkWork(ChunkId(0, 0), pairs)])
    assert [row.row_id for row in work.rows if row] == [0, 1, 2]
    assert Counter(request.ask.stage for request in engine.seen) == {"intent": 2, "verdict": 3}


def test_a_slow_answer_holds_back_its_own_chunk_only() -> None:
    """No batch barrier: while one request of the first chunk hangs, later chunks are asked, answered and committed."""

    class Stuck(Scripted):
        def poll(self) -> list[Answer]:
            free = [request for request in self.waiting if "doc 0" not in request.ask.messages[-1].text] or self.waiting
            done = free[: self.batch]
            self.waiting = [request for request in self.waiting if request not in done]
            return [self.answer(request) for request in done]

    committed = work_through(Stuck(good, capacity=4), chunks_of(3, 3, 3, 3))
    assert [work.id.chunk for work in committed][-1] == 0


def test_requests_are_numbered_in_the_order_of_their_pairs_further_asks_too() -> None:
    """So that an engine that heeds it finishes the rows, and so the chunks, that are under way first."""

    def unreadable_at_first(request: Request) -> Answer:
        is_retry = request.ask.sampling.temperature > 0
        return good(request) if is_retry or request.ask.stage == "intent" else Answer(request.id, "?", "stop")

    engine = Scripted(unreadable_at_first, capacity=8, batch=3)
    work_through(engine, chunks_of(5, 5, queries=10))
    by_number = sorted(engine.seen, key=lambda request: request.id)
    queries = [request.ask.messages[0].text for request in by_number]
    assert queries == [f"query query {number}" for number in range(10) for _ in range(3)]


def test_seeds_depend_on_what_is_asked_and_not_on_order_or_capacity() -> None:
    def seeds(capacity: int, batch: int) -> dict[str, int]:
        engine = Scripted(good, capacity, batch)
        work_through(engine, chunks_of(6, 6))
        return {"".join(message.text for message in request.ask.messages): request.seed for request in engine.seen}

    assert seeds(1, 1) == seeds(7, 3)
    assert len(set(seeds(4, 2).values())) == len(seeds(4, 2))


def test_the_key_of_an_ask_is_the_same_whatever_was_asked_before_it() -> None:
    asks = list[Ask]()
    for system in ("Judge.", "Judge well."):
        for shared_by in (None, "", "q1"):
            for text in ("roses", "tulips"):
                messages = (Message("system", (system,)), Message("user", ("", text, ""), ("document",)))
                asks.append(Ask("verdict", messages, None, 0, shared_by=shared_by))
                asks.append(Ask("verdict", messages[1:], None, 0, shared_by=shared_by))
    alone = [AskKeys(7).key(ask, 0, 0, 0) for ask in asks]
    keys = AskKeys(7)
    assert [keys.key(ask, 0, 0, 0) for ask in asks] == alone
    assert [keys.key(ask, 0, 0, 0) for ask in reversed(asks)] == alone[::-1]


@pytest.mark.parametrize("attempts", [1, 3])
def test_an_unreadable_answer_is_asked_again_with_a_new_seed_then_quarantined_with_its_text(attempts: int) -> None:
    def bad(request: Request) -> Answer:
        if request.ask.stage == "verdict" and "doc 1" in request.ask.messages[-1].text:
            return Answer(request.id, "¯\\_(ツ)_/¯", "stop", {}, 10, 2)
        return good(request)

    engine = Scripted(bad)
    (work,) = work_through(engine, chunks_of(3, queries=1), attempts=attempts)
    row = work.rows[1]
    assert isinstance(row, QuarantineRow)
    assert (row.status, row.reason) == ("format", "no digit")
    assert [one["attempt"] for one in row.tries] == list(range(1, attempts + 1))
    assert {one["text"] for one in row.tries} == {"¯\\_(ツ)_/¯"}
    asked = [request for request in engine.seen if "doc 1" in request.ask.messages[-1].text]
    assert len({request.seed for request in asked}) == attempts
    assert [request.ask.sampling.temperature for request in asked] == [0.0, 0.7, 0.7][:attempts]
    assert isinstance(work.rows[0], LabelRow)
    assert isinstance(work.rows[2], LabelRow)


def test_each_stage_has_all_its_attempts_and_a_later_one_keeps_the_earlier_answer() -> None:
    """Two failures of a shared stage are asked again once for all its pairs, and leave the next stage its own three."""
    left = {"intent": 2, "verdict": 2}

    def flaky(request: Request) -> Answer:
        if left[request.ask.stage]:
            left[request.ask.stage] -= 1
            return Answer(request.id, "", "stop", {}, 10, 2)
        return good(request)

    engine = Scripted(flaky, capacity=1)
    (work,) = work_through(engine, chunks_of(4, queries=1), attempts=3)
    assert all(isinstance(row, LabelRow) and row.intent == "wants shoes" for row in work.rows)
    assert Counter(request.ask.stage for request in engine.seen) == {"intent": 3, "verdict": 6}


def test_a_row_that_its_labeler_refuses_is_quarantined_and_not_asked_again() -> None:
    class Refuses(TwoStage):
        def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
            if pair.row_id == 1:
                raise VerdictError("refused", "not this one")
            yield Ask("intent", (Message("user", ("x",)),), None, 8)
            raise VerdictError("overlong", "does not fit")

    engine = Scripted(good)
    (work,) = work_through(engine, chunks_of(3), labeler=Refuses(None))
    assert [row.status for row in work.rows if row] == ["overlong", "refused", "overlong"]
    assert len(engine.seen) == 2


def test_samples_vote_and_their_distributions_are_averaged() -> None:
    spread = [(0.6, 0.3, 0.1), (0.1, 0.3, 0.6), (0.2, 0.2, 0.6)]
    given = iter(zip(["0", "2", "2"], spread, strict=True))

    def drawn(request: Request) -> Answer:
        if request.ask.stage == "intent":
            return good(request)
        text, probs = next(given)
        return Answer(request.id, text, "stop", {"score": Distribution(probs, 0.3)}, 10, 2)

    (work,) = work_through(Scripted(drawn), chunks_of(1, queries=1), samples=3, temperature=1.0)
    (row,) = work.rows
    assert isinstance(row, LabelRow)
    assert row.grade == 2
    assert row.probs == pytest.approx([0.3, 0.8 / 3, 1.3 / 3])
    assert row.expected_grade == pytest.approx(0.8 / 3 + 2.6 / 3)
    assert row.outside_mass == pytest.approx(0.3)
    assert sorted(one["grade"] for one in row.samples) == [0, 2, 2]
    assert (row.prompt_tokens, row.output_tokens) == (60, 12)


@pytest.mark.parametrize(("samples", "bad", "status"), [(3, 1, "ok"), (3, 2, "format"), (2, 1, "format")])
def test_a_label_needs_more_than_half_of_its_samples(samples: int, bad: int, status: str) -> None:
    left = {"bad": bad}

    def some(request: Request) -> Answer:
        if request.ask.stage == "verdict" and left["bad"]:
            left["bad"] -= 1
            return Answer(request.id, "?", "stop", {}, 10, 2)
        return good(request)

    (work,) = work_through(Scripted(some), chunks_of(1, queries=1), samples=samples, temperature=1.0, attempts=1)
    (row,) = work.rows
    assert row.status == status
    assert not isinstance(row, LabelRow) or "samples_missing" in row.flags


def test_a_stop_finishes_begun_chunks_and_begins_no_other() -> None:
    stop = Stop()

    def then_stop(request: Request) -> Answer:
        stop.drain("test")
        return good(request)

    works = chunks_of(5, 5, 5, 5)
    committed = work_through(Scripted(then_stop, capacity=2), works, stop=stop)
    assert 0 < len(committed) < 4
    assert all(None not in work.rows for work in committed)
    assert all(row is None for work in works if work not in committed for row in work.rows)


def test_a_crash_of_the_engine_surfaces_and_committed_chunks_stay() -> None:
    class Dies(Scripted):
        def poll(self) -> list[Answer]:
            if len(self.seen) > 12:
                raise EngineCrashError("gone")
            return super().poll()

    committed: list[ChunkWork] = []
    with pytest.raises(EngineCrashError):
        label_chunks(Dies(good), chunks_of(3, 3, 3, 3), committed)
    assert 0 < len(committed) < 4


def test_input_that_fails_midway_is_reported_after_the_chunks_before_it_are_committed() -> None:
    def broken() -> Iterator[ChunkWork]:
        yield from chunks_of(3, 3)
        raise InputError("page 7 is damaged")

    committed: list[ChunkWork] = []
    with pytest.raises(InputError, match="page 7"):
        label_chunks(Scripted(good), broken(), committed)
    assert sorted(work.id.chunk for work in committed) == [0, 1]


@pytest.mark.parametrize(
    "found",
    [
        Distribution((0.2, 0.5, 0.3), float("nan")),
        Distribution((0.0, 0.0, 0.0), 0.1),
        Distribution((0.5, 0.5), 0.1),
        Distribution((-0.5, 1.0, 0.5), 0.1),
        Distribution((0.2, 0.5, 0.3), 1.5),
    ],
)
def test_numbers_that_are_no_probabilities_never_become_a_grade(found: Distribution) -> None:
    class OneDecision(TwoStage):
        def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
            ask = Ask(
                "score",
                (Message("user", ("x",)),),
                None,
                0,
                (Decision("score", "<score>", ("0", "1", "2")),),
                "<score>",
            )
            answer = yield ask
            if answer.finish == "error":
                raise VerdictError("engine", answer.detail)
            return Label(answer.distributions["score"].argmax, answer.distributions["score"])

    engine = Scripted(lambda request: Answer(request.id, "", "stop", {"score": found}))
    (work,) = work_through(engine, chunks_of(2), labeler=OneDecision(None))
    assert [row.status for row in work.rows if row] == ["engine", "engine"]
    fine = Scripted(lambda request: Answer(request.id, "", "stop", {"score": Distribution((0.2, 0.5, 0.3), 0.0)}))
    (work,) = work_through(fine, chunks_of(2), labeler=OneDecision(None))
    assert [row.status for row in work.rows if row] == ["ok", "ok"]


def test_an_answer_to_nothing_or_a_second_answer_is_a_crash_of_the_engine() -> None:
    class Stutters(Scripted):
        def poll(self) -> list[Answer]:
            return [answer for answer in super().poll() for _ in range(2)]

    with pytest.raises(EngineCrashError, match="never asked or is answered already"):
        work_through(Stutters(good), chunks_of(3))


def test_an_engine_that_lost_its_requests_does_not_hang_the_run() -> None:
    class Forgets(Scripted):
        def poll(self) -> list[Answer]:
            return []

    with pytest.raises(EngineCrashError, match=r"does not answer \d+ requests"):
        work_through(Forgets(good), chunks_of(3))


def test_begun_chunks_that_outlast_the_drain_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 0.0)
    stop = Stop()

    def then_stop(request: Request) -> Answer:
        stop.drain("test")
        return good(request)

    assert work_through(Scripted(then_stop, capacity=1, batch=1), chunks_of(50), stop=stop) == []


def test_open_pairs_are_bounded_however_many_wait_for_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relabel.jobs.run.loop.MAX_OPEN_PAIRS", 7)
    most = 0

    class Counts(TwoStage):
        opened = 0

        def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
            nonlocal most
            Counts.opened += 1
            most = max(most, Counts.opened)
            found = yield from super().label(pair)
            Counts.opened -= 1
            return found

    work_through(Scripted(good, capacity=100), chunks_of(60, queries=1), labeler=Counts(None))
    assert most == 7


def test_a_tied_vote_goes_to_the_larger_mean_probability_then_to_the_lower_grade() -> None:
    def label_of(grade: int, *probs: float) -> Label:
        return Label(grade, Distribution(probs, 0.0))

    assert merge_samples([label_of(0, 0.5, 0.1, 0.4), label_of(2, 0.1, 0.1, 0.8)]).grade == 2
    assert merge_samples([label_of(2, 0.4, 0.2, 0.4), label_of(0, 0.4, 0.2, 0.4)]).grade == 0
    assert merge_samples([Label(2, None), Label(1, None)]).grade == 1
