"""The fake engine: the same ask and seed give the same answer, faults come as often as asked, and what it writes can be
read.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.labelers.evidence import read_evidence
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Choice, Decision, Engine, Fragment, Message, Request
from relabel.manifests.errors import VerdictError
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=100, deadline=None)
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


def test_an_answer_does_not_depend_on_order_batch_or_slowness() -> None:
    asked = requests(200)
    faults = {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.1}
    plain = drain(fake(**faults), asked)
    shuffled = list(asked)
    random.Random(1).shuffle(shuffled)
    assert drain(fake(**faults, batch=3, capacity=7, p_slow=0.3, slow_s=0.001), shuffled) == plain
    assert len({answer.text for answer in plain.values()}) > 50


@pytest.mark.parametrize(
    ("fault", "finishes"), [("p_garbage", {"stop"}), ("p_truncated", {"length"}), ("p_refused", {"stop", "refused"})]
)
def test_faults_come_about_as_often_as_asked(fault: str, finishes: set[str]) -> None:
    ask = requests(1)[0].ask
    engine = fake(**{fault: 0.2}, capacity=10_000)
    answers = drain(engine, [Request(i, ask, i) for i in range(3_000)])
    failed = []
    for answer in answers.values():
        try:
            Reader(ask.format).read(answer)
        except VerdictError:
            failed.append(answer)
    assert 0.165 < len(failed) / len(answers) < 0.235
    assert {answer.finish for answer in failed} == finishes
