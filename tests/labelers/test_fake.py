"""The fake engine: the same ask and seed give the same answer, faults come as often as asked, and what it writes can be
read.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.labelers.engines.fake import Fake
from relabel.labelers.engines.registry import engine_class
from relabel.labelers.evidence import read_evidence
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, Ask, Decision, Engine, Message, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError, VerdictError
from relabel.manifests.formats import AnswerFormat, Choice, Fragment
from relabel.manifests.specs import EngineSpec, validate_spec
from tests.labelers.driving import ROSES, answer_of, fake, labeler, walk
from tests.strategies import answer_formats, texts


def ask_for(
    format: AnswerFormat | None, query: str = "climbing roses", document: str = ROSES.document, **fields
) -> Ask:
    decisions = (
        tuple(Decision(s.tag, f"<{s.tag}>", s.options) for s in format.sections if isinstance(s, Choice))
        if format
        else ()
    )
    messages = (Message("user", ("Q ", query, " D ", document, ""), ("query", "document")),)
    return Ask("s", messages, format, fields.pop("max_tokens", 10_000), decisions, fragment_source=document, **fields)


def drain(engine: Engine, requests: list[Request]) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    waiting = list(requests)
    while len(answers) < len(requests):
        while waiting and engine.capacity:
            engine.submit(waiting.pop(0))
        for answer in engine.poll():
            assert answer.request_id not in answers
            answers[answer.request_id] = answer
    assert engine.poll() == []
    return answers


def requests(count: int, name: str = "r3a") -> list[Request]:
    subject = labeler(name)
    made = []
    for i in range(count):
        pair = ROSES._replace(
            row_id=i,
            query=("roses", "pruning late climbing", "cats")[i % 3],
            document=f"Document {i}. {ROSES.document}",
        )
        made.append(Request(i, walk(subject, pair, fake())[1][-1], i * 7919))
    return made


def test_it_is_an_engine_and_registered() -> None:
    assert isinstance(fake(), Engine)
    assert engine_class("fake") is Fake
    assert len(Fake.model_digest(EngineSpec(name="fake"))) == 64
    assert fake().facts().model_digest == Fake.model_digest(EngineSpec(name="fake"))
    with pytest.raises(ModelError, match="takes no model"):
        Fake.model_digest(EngineSpec(name="fake", model="hf:a/b"))
    with pytest.raises(ConfigError, match="did you mean `p_garbage`"):
        validate_spec(Fake.Args, {"p_garbge": 0.1}, where="engine.args")
    with pytest.raises(ConfigError, match="sum to 1 at most"):
        validate_spec(Fake.Args, {"p_garbage": 0.6, "p_refused": 0.6}, where="engine.args")
    engine = fake()
    engine.close()
    engine.close()


@settings(max_examples=300, deadline=None)
@given(format=answer_formats(), query=texts(4), document=texts(), seed=st.integers(0, 2**63 - 1))
def test_it_answers_any_format_so_that_it_can_be_read(
    format: AnswerFormat, query: str, document: str, seed: int
) -> None:
    ask = ask_for(format, query, document)
    answer = answer_of(fake(), ask, seed)
    sections = Reader(format).read(answer)
    for section in format.sections:
        content = sections[section.tag]
        if isinstance(section, Choice):
            assert section.options[answer.distributions[section.tag].argmax] == content
        else:
            assert len(content) <= section.max_tokens * 4
        if isinstance(section, Fragment):
            read_evidence(content, document)


@settings(max_examples=200, deadline=None)
@given(
    format=answer_formats(),
    document=texts(),
    seed=st.integers(0, 2**63 - 1),
    fault=st.sampled_from(("p_garbage", "p_truncated", "p_refused")),
)
def test_no_fault_can_be_read(format: AnswerFormat, document: str, seed: int, fault: str) -> None:
    answer = answer_of(fake(**{fault: 1.0}), ask_for(format, document=document), seed)
    with pytest.raises(VerdictError) as caught:
        Reader(format).read(answer)
    wanted = {"p_garbage": {"format", "refused"}, "p_truncated": {"truncated"}, "p_refused": {"refused"}}[fault]
    assert caught.value.status in wanted  # garbage may echo a document that says it is sorry


def test_the_prefill_is_not_repeated() -> None:
    format = labeler("r3a").probe()[1].format
    assert format is not None
    answer = answer_of(fake(), ask_for(format, prefill="<think>"))
    assert not answer.text.startswith("<think>")
    assert Reader(format, "<think>").read(answer)


def test_an_answer_does_not_depend_on_order_batch_or_slowness() -> None:
    asked = requests(200)
    faults = {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.1}
    plain = drain(fake(**faults), asked)
    shuffled = list(asked)
    random.Random(1).shuffle(shuffled)
    assert drain(fake(**faults, batch=3, capacity=7, p_slow=0.3, slow_s=0.001), shuffled) == plain
    assert len({answer.text for answer in plain.values()}) > 50


def test_an_answer_does_not_depend_on_the_process() -> None:
    code = (
        "from tests.labelers.test_fake import *\n"
        "import hashlib; print(hashlib.sha256(repr(sorted(drain(fake(p_garbage=0.3), "
        "requests(40)).items())).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    digests = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        digests.add(
            subprocess.run([sys.executable, "-c", code], env=env, cwd=root, check=True, capture_output=True).stdout
        )
    assert len(digests) == 1


def test_the_seed_and_the_text_both_change_the_answer() -> None:
    ask = requests(1)[0].ask
    assert len({answer_of(fake(), ask, seed).text for seed in range(50)}) > 10
    assert len({answer_of(fake(), request.ask, 0).text for request in requests(50)}) > 10


@pytest.mark.parametrize(
    ("fault", "finishes"), [("p_garbage", {"stop"}), ("p_truncated", {"length"}), ("p_refused", {"stop", "refused"})]
)
def test_faults_come_about_as_often_as_asked(fault: str, finishes: set[str]) -> None:
    ask = requests(1)[0].ask
    assert ask.format is not None
    engine = fake(**{fault: 0.2}, capacity=10_000)
    answers = drain(engine, [Request(i, ask, i) for i in range(5_000)])
    failed = []
    for answer in answers.values():
        try:
            Reader(ask.format).read(answer)
        except VerdictError:
            failed.append(answer)
    assert 0.17 < len(failed) / len(answers) < 0.23
    assert {answer.finish for answer in failed} == finishes


def test_decisions_alone_fail_by_having_no_distribution() -> None:
    ask = labeler("direct").probe()[0]
    answers = drain(fake(p_garbage=0.3, p_refused=0.1), [Request(i, ask, i) for i in range(1_000)]).values()
    assert 0.24 < sum(not a.distributions and a.finish != "refused" for a in answers) / 1_000 < 0.36
    assert 0.05 < sum(a.finish == "refused" for a in answers) / 1_000 < 0.15


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_slow_answer_comes_even_if_the_clock_is_put_back_or_on(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    true_clock, begun = time.monotonic, time.monotonic()
    engine = fake(p_slow=1.0, slow_s=1.3)
    asked = requests(3)
    for request in asked:
        engine.submit(request)
    answers = engine.poll()
    monkeypatch.setattr(time, "monotonic", lambda: true_clock() + jump_s)
    while len(answers) < len(asked) and true_clock() - begun < 20.0:
        answers += engine.poll()
    assert {answer.request_id for answer in answers} == {request.id for request in asked}


def test_slow_answers_are_overtaken_and_take_their_time() -> None:
    asked = requests(40)
    engine = fake(p_slow=0.3, slow_s=0.05)
    start = time.perf_counter()
    order = list(drain(engine, asked))
    assert time.perf_counter() - start >= 0.05
    assert order != sorted(order)


def test_a_crash_takes_all_in_flight_and_a_new_life_gets_past_it() -> None:
    asked = requests(120)  # crashes are drawn again in each process: the chance that none of so many crashes is 2e-12
    done: dict[int, Answer] = {}
    lives = 0
    while len(done) < len(asked) and lives < 500:
        engine = fake(p_crash=0.2, batch=1)
        lives += 1
        for request in asked:
            if request.id not in done:
                engine.submit(request)
        try:
            while answers := engine.poll():
                done |= {answer.request_id: answer for answer in answers}
        except EngineCrashError:
            with pytest.raises(EngineCrashError):
                engine.poll()
    assert lives > 1
    assert done == drain(fake(), asked)


def test_capacity_counts_what_is_in_flight() -> None:
    engine = fake(capacity=3)
    for request in requests(3):
        engine.submit(request)
    assert engine.capacity == 0
    assert len(engine.poll()) == 3
    assert engine.capacity == 3
    assert engine.poll() == []


def test_a_long_document_is_cut_and_flagged_or_refused_as_overlong() -> None:
    ask = ask_for(labeler("r3a").probe()[1].format, document="word " * 400 + "the end")
    cut = answer_of(fake(max_prompt_tokens=100), ask)
    assert cut.flags == ("document_truncated",)
    assert cut.prompt_tokens <= 101
    for seed in range(50):
        assert "the end" not in answer_of(fake(max_prompt_tokens=100), ask, seed).text
    kept = answer_of(fake(max_prompt_tokens=100, overlong="quarantine"), ask)
    assert (kept.finish, kept.text) == ("overlong", "")
    assert "engine.max_prompt_tokens is 100" in kept.detail
    query_too_long = ask_for(None, query="q" * 1000, document="d")
    assert answer_of(fake(max_prompt_tokens=100), query_too_long).finish == "overlong"


def test_an_answer_over_its_limit_breaks_off() -> None:
    answer = answer_of(fake(), ask_for(labeler("r3a").probe()[1].format, max_tokens=5))
    assert answer.finish == "length"
    assert answer.output_tokens == 6  # rounded up


def test_grades_follow_the_words_in_common() -> None:
    subject = labeler("r3a")
    means = []
    for words in ("", "pruning", "pruning climbing", "pruning climbing roses"):
        grades = []
        for seed in range(200):
            pair = ROSES._replace(document=f"A text about {words} and so on.")
            distribution = walk(subject, pair, fake(), seed)[0].distribution
            assert distribution is not None
            grades.append(distribution.expected)
        means.append(sum(grades) / len(grades))
    assert means == sorted(means)
    assert means[-1] - means[0] > 1.0


def test_a_pair_is_cheap() -> None:
    """A tripwire for a hot path that grew tenfold; the figures themselves belong to the benchmarks."""
    engine, subject = fake(), labeler("direct")
    pair = ROSES._replace(document=ROSES.document * 12)
    start = time.perf_counter()
    for i in range(2_000):
        walk(subject, pair, engine, i)
    assert (time.perf_counter() - start) / 2_000 < 150e-6
