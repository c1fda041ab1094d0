"""An engine that goes bad ends the run and takes no row with it; one that only meets bad rows goes on."""

import random
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run.answer_journal import AnswerJournal
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.health import CONTROLS, HOPELESS, Health
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import Answer, Ask, EngineFacts, Message, Request
from relabel.manifests.errors import EngineCrashError, RelabelError, ServerGoneError, UnreadableError, VerdictError
from relabel.manifests.labels import Label, Pair, QuarantineRow
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.store import LocalStore
from tests.jobs.test_loop import Scripted, TwoStage, chunks_of, good

CAPACITY = 16
BEFORE = 60
"""Answers before the engine goes bad."""


class OneAsk(Labeler):
    """One ask for a digit."""

    Options = LabelerOptions

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        text = Message("user", ("query ", pair.query, " document ", pair.document, ""), ("query", "document"))
        verdict = yield Ask("verdict", (text,), None, 8)
        if not verdict.text.isdigit():
            raise VerdictError(status_of(verdict), "no digit")
        return Label(int(verdict.text), None)

    def probe(self) -> list[Ask]:
        return []


class TwoAsks(TwoStage):
    """Two asks a row, the first shared by query; failures have the status that the answer's end says."""

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        inner = super().label(pair)
        ask = next(inner)
        while True:
            answer = yield ask
            if not answer.text or (ask.stage == "verdict" and not answer.text.isdigit()):
                raise VerdictError(status_of(answer), "not to be read")
            try:
                ask = inner.send(answer)
            except StopIteration as end:
                return end.value


def status_of(answer: Answer) -> Any:
    return {"length": "truncated", "refused": "refused", "error": "engine"}.get(answer.finish, "format")


LABELERS = {"one ask": OneAsk, "two asks": TwoAsks}

READABLE: dict[str, Callable[[Request], Answer]] = {
    "empty": lambda request: Answer(request.id, "", "stop"),
    "cut": lambda request: Answer(request.id, "" if request.ask.stage == "intent" else "1!", "length"),
}
"""Answers that came and can't be read."""
ABSENT: dict[str, Callable[[Request], Answer]] = {
    "refused": lambda request: Answer(request.id, "", "refused", detail="HTTP 403: no"),
    "error": lambda request: Answer(request.id, "", "error", detail="HTTP 503: down"),
}
"""Asks that never got one."""


class GoesBad(Scripted):
    """Answers well until some answers are given, then as `bad` says."""

    def __init__(self, bad: Callable[[Request], Answer], before: int = BEFORE, then: Any = None) -> None:
        super().__init__(self._respond, capacity=CAPACITY, batch=4)
        self.bad, self.before, self.then = bad, before, then
        self.given = 0

    def _respond(self, request: Request) -> Answer:
        self.given += 1
        return good(request) if self.given <= self.before else self.bad(request)

    def poll(self) -> list[Answer]:
        answers = super().poll()
        if self.then is not None:
            self.then(self)
        return answers


def run(
    engine: Scripted,
    works: list[ChunkWork],
    labeler: type[Labeler] = OneAsk,
    *,
    stop: Stop | None = None,
    minds_unreadable: bool = True,
    is_late: bool = False,
    answer_journal: AnswerJournal | None = None,
    checks: list[ChunkWork] | None = None,
) -> tuple[list[ChunkWork], RunLoop, RelabelError | None]:
    """What was committed, the loop, and how it ended."""
    committed: list[ChunkWork] = []
    made = labeler(None)

    def commit(work: ChunkWork) -> bool:
        committed.append(work)
        return True

    loop = RunLoop(
        made,
        LabelerOptions(name="scripted"),
        engine,
        seed=7,
        is_late=is_late,
        answer_journal=answer_journal,
        note_health_check=(checks if checks is not None else []).append,
        health=Health(made, minds_unreadable=minds_unreadable, is_late=is_late),
    )
    try:
        loop.label_chunks(iter(works), commit, progress=Progress(), stop=stop or Stop())
    except RelabelError as exc:
        return committed, loop, exc
    return committed, loop, None


def quarantined(works: list[ChunkWork]) -> list[QuarantineRow]:
    return [row for work in works for row in work.rows if isinstance(row, QuarantineRow)]


@pytest.fixture(params=LABELERS)
def labeler(request: pytest.FixtureRequest) -> type[Labeler]:
    return LABELERS[request.param]


@pytest.mark.parametrize("before", [0, BEFORE], ids=["from the start", "later"])
@pytest.mark.parametrize("how", READABLE | ABSENT)
def test_an_engine_gone_bad_ends_the_run_early_and_all_its_rows_stay_open(
    how: str, before: int, labeler: type[Labeler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.jobs.run.answer_journal.APPEND_EVERY_S", 0.0)
    monkeypatch.setattr("relabel.jobs.run.loop.CHECK_EVERY_S", 0.0)
    engine = GoesBad((READABLE | ABSENT)[how], before)
    works = chunks_of(*[4] * 200, queries=160)
    committed, _, error = run(engine, works, labeler, answer_journal=journal_in(tmp_path))
    assert isinstance(error, UnreadableError)
    assert "stop_when_unreadable" in str(error)
    assert "The last one: row" in str(error)
    assert quarantined(committed) == []
    assert len(committed) <= before / 4
    assert len(committed) > 0 or before == 0
    assert engine.given - before < 100 + 3 * CONTROLS
    kept = list[str]()
    again = journal_in(tmp_path)
    for work in works:
        again.begins(work)
        kept += [answer.text for answer in work.known.values()]
    assert set(kept) <= {"1", "wants shoes"}, "a bad answer would come again"


@pytest.mark.parametrize("is_engine", [True, False], ids=["engine", "rows"])
def test_what_shows_whether_an_engine_works_is_counted_once(is_engine: bool) -> None:
    """Every answer is a chunk's, or that of rows that were asked again."""
    given = 0

    def answer(request: Request) -> Answer:
        nonlocal given
        given += 1
        is_bad = given > BEFORE if is_engine else any(row in range(60, 160) for row in numbers(request))
        return Answer(request.id, "" if is_bad else "1", "stop", prompt_tokens=10, output_tokens=1)

    checks: list[ChunkWork] = []
    works = chunks_of(*[4] * 100, queries=80)
    _, loop, error = run(Scripted(answer, CAPACITY, 4), works, checks=checks)
    assert isinstance(error, UnreadableError) == is_engine
    assert checks
    assert all(check.stages["verdict"].answers >= 1 for check in checks)
    stages = [stage for work in (*works, *checks) for stage in work.stages.values()]
    assert sum(stage.answers for stage in stages) == loop.progress.requests
    assert sum(stage.prompt_tokens for stage in stages) == loop.progress.prompt_tokens


def journal_in(folder: Path) -> AnswerJournal:
    facts = EngineFacts("scripted", "1", "none", "0")
    return AnswerJournal(LocalStore(folder), "f", facts, "w", attempts=lambda _: {})


@pytest.mark.parametrize("share", [16, 25])
def test_an_engine_of_which_an_answer_now_and_then_is_good_has_gone_bad(share: int) -> None:
    def rarely(request: Request) -> Answer:
        return good(request) if engine.given % share == 0 else READABLE["empty"](request)

    engine = GoesBad(rarely)
    committed, _, error = run(engine, chunks_of(*[4] * 500, queries=400))
    assert isinstance(error, UnreadableError)
    assert engine.given < BEFORE + 800
    assert len(quarantined(committed)) < 40, "those before two good answers close to each other"


def crash(_: GoesBad) -> None:
    raise EngineCrashError("down")


def gone(_: GoesBad) -> None:
    raise ServerGoneError("gone")


def ends(kind: str, stop: Stop) -> Callable[[GoesBad], None]:
    """Ways in which a run is stopped, some answers after the engine went bad."""
    ways: dict[str, Callable[[GoesBad], None]] = {
        "server gone": gone,
        "crash": crash,
        "drained": lambda _: stop.drain("SIGTERM", 0.05),
        "deadline": lambda _: stop.drain("--until 06:00", 0.0),
        "budget": lambda _: stop.drain("the budget is used up", 0.05),
    }
    return ways[kind]


@pytest.mark.parametrize("bad_answers", [6, 13, 24])
@pytest.mark.parametrize("kind", ["server gone", "crash", "drained", "deadline", "budget"])
@pytest.mark.parametrize("how", ABSENT)
def test_no_stop_quarantines_a_row_that_never_got_an_answer(
    how: str, kind: str, bad_answers: int, labeler: type[Labeler]
) -> None:
    stop = Stop()
    end = ends(kind, stop)

    def then(engine: GoesBad) -> None:
        if engine.given >= BEFORE + bad_answers:
            end(engine)

    engine = GoesBad(ABSENT[how], then=then)
    committed, loop, _ = run(engine, chunks_of(*[2] * 200, queries=100), labeler, stop=stop)
    assert committed
    assert quarantined(committed) == []
    done = {work.id for work in committed}
    assert all(work.id not in done for work in loop.unfinished)


@pytest.mark.parametrize("num_bad", [1, 2, 20])
@pytest.mark.parametrize("how", ABSENT)
def test_an_outage_that_reaches_the_last_row_leaves_its_rows_open(how: str, num_bad: int) -> None:
    committed, _, error = run(GoesBad(ABSENT[how], 200 - num_bad), chunks_of(*[4] * 50, queries=40))
    assert isinstance(error, UnreadableError)
    assert quarantined(committed) == []


def test_a_row_at_which_the_engine_fails_while_others_are_answered_is_quarantined(labeler: type[Labeler]) -> None:
    for row in (0, 77, 199):

        def answer(request: Request, text: str = f"doc {row}") -> Answer:
            texts = [part for message in request.ask.messages for part in message.parts]
            return ABSENT["error"](request) if text in texts else good(request)

        committed, _, error = run(Scripted(answer, CAPACITY, 4), chunks_of(*[4] * 50, queries=40), labeler)
        assert error is None
        assert [(one.row_id, one.status) for one in quarantined(committed)] == [(row, "engine")]
        assert sum(len(work.rows) for work in committed) == 200


def numbers(request: Request) -> Iterator[int]:
    for message in request.ask.messages:
        for part in message.parts:
            if part.startswith("doc "):
                yield int(part.removeprefix("doc "))


@pytest.mark.parametrize("how", READABLE)
@pytest.mark.parametrize("first", [0, 200])
def test_a_long_stretch_of_bad_rows_ends_no_run(how: str, first: int, labeler: type[Labeler]) -> None:
    """At the very start as well, where the made-up pair can be read."""
    bad = range(first, first + HOPELESS - 20)

    def answer(request: Request) -> Answer:
        return READABLE[how](request) if any(row in bad for row in numbers(request)) else good(request)

    committed, _, error = run(Scripted(answer, CAPACITY, 4), chunks_of(*[8] * 100, queries=200), labeler)
    assert error is None
    assert {row.row_id for row in quarantined(committed)} == set(bad)
    assert sum(len(work.rows) for work in committed) == 800


@pytest.mark.parametrize("unreadable", [0.3, 0.6, 0.8])
def test_a_weak_model_ends_no_run(unreadable: float) -> None:
    for seed in range(20):
        chance = random.Random(seed)

        def answer(request: Request, chance: random.Random = chance) -> Answer:
            return READABLE["empty"](request) if chance.random() < unreadable else good(request)

        committed, _, error = run(Scripted(answer, CAPACITY, 4), chunks_of(*[8] * 100, queries=100))
        assert error is None, seed
        assert sum(len(work.rows) for work in committed) == 800


def test_a_set_of_which_nothing_can_be_read_ends_though_the_made_up_pair_can() -> None:
    """As where every document is longer than the room to answer."""
    engine = Scripted(lambda request: (READABLE["cut"] if any(numbers(request)) else good)(request), CAPACITY, 4)
    error = run(engine, chunks_of(*[8] * 500, queries=400))[2]
    assert isinstance(error, UnreadableError)
    assert "of the first" in str(error)
    assert len(engine.seen) < 3 * HOPELESS + 4 * CAPACITY


@pytest.mark.parametrize("how", READABLE)
def test_where_it_is_not_minded_all_is_quarantined(how: str) -> None:
    """At a retry, and where the job says so."""
    committed, _, error = run(GoesBad(READABLE[how]), chunks_of(*[8] * 100), minds_unreadable=False)
    assert error is None
    assert sum(len(work.rows) for work in committed) == 800
    assert len(quarantined(committed)) >= 700


@pytest.mark.parametrize("how", ABSENT)
def test_not_even_then_is_a_row_that_never_got_an_answer(how: str) -> None:
    committed, _, error = run(GoesBad(ABSENT[how]), chunks_of(*[4] * 100), minds_unreadable=False)
    assert isinstance(error, UnreadableError)
    assert quarantined(committed) == []


@pytest.mark.parametrize("how", ABSENT)
def test_a_few_rows_that_a_batch_leaves_out_are_worth_no_batch_of_their_own(how: str) -> None:
    """A batch's answers come hours later, each asked for many times over."""

    def answer(request: Request) -> Answer:
        return ABSENT[how](request) if any(row >= 198 for row in numbers(request)) else good(request)

    engine = Scripted(answer, 1000, 1000)
    committed, _, error = run(engine, chunks_of(*[4] * 50, queries=40), is_late=True)
    assert error is None
    assert [row.row_id for row in quarantined(committed)] == [198, 199]
    assert len(engine.seen) == 200 + 2 * 2


@pytest.mark.parametrize("how", READABLE)
def test_a_batch_of_which_nothing_can_be_read_is_asked_no_second_time(how: str) -> None:
    engine = GoesBad(READABLE[how], 0)
    engine.limit = engine.batch = 500
    committed, _, error = run(engine, chunks_of(*[4] * 50, queries=40), is_late=True)
    assert isinstance(error, UnreadableError)
    assert committed == []
    assert len(engine.seen) <= 200 + 3


def test_finding_out_about_bad_rows_costs_little() -> None:
    def answer(request: Request) -> Answer:
        return READABLE["empty"](request) if any(200 <= row < 1000 for row in numbers(request)) else good(request)

    engine = Scripted(answer, CAPACITY, 4)
    started = time.perf_counter()
    run(engine, chunks_of(*[8] * 200, queries=200))
    assert len(engine.seen) < 1.1 * (800 + 3 * 800)
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize("labelled", [1, 6, CONTROLS, CONTROLS + 5])
def test_pairs_of_one_query_are_asked_again_as_far_as_there_are_any(labelled: int, labeler: type[Labeler]) -> None:
    health = Health(labeler(LabelerOptions(name="own", grades=3)), minds_unreadable=True)
    pairs = [Pair(row, "q", "roses", f"d{row}", "Cut back.") for row in range(labelled)]
    for pair in pairs:
        health.labelled(pair)
    again = list(health.controls())
    of_this_run = [pairs[-1], *pairs[:-1][-(CONTROLS - 1) :]]
    assert again[: len(of_this_run)] == of_this_run
    assert len(again) == min(labelled + 1, CONTROLS)
