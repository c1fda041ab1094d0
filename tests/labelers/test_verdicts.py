"""The reading rules: what is a verdict, what is not, and how long it takes to see."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import AnswerFormat, Choice, Fragment, Text
from tests.labelers.driving import reply
from tests.strategies import answer_formats, contents_of, mutated, texts, written

ROOT = Path(__file__).parents[2]
R3A = AnswerFormat((Text("think", 100), Fragment("extract", 50), Choice("score", ("0", "1", "2"))))
GOOD = "<think>Why.</think>\n<extract>none</extract>\n<score>2</score>"
FINISHES = st.sampled_from(("stop", "length", "refused", "overlong", "error"))


def status_of(text: str, finish: str = "stop", format: AnswerFormat = R3A) -> str:
    with pytest.raises(VerdictError) as caught:
        Reader(format).read(Answer(0, text, finish))
    return caught.value.status


def test_a_valid_answer_is_read_with_white_space_stripped() -> None:
    assert Reader(R3A).read(reply("\n <think> a\nb </think><extract>\tx y </extract>\n\n<score> 2\n</score> ")) == {
        "think": "a\nb",
        "extract": "x y",
        "score": "2",
    }


@pytest.mark.parametrize("finish", ["length", "refused"])
def test_a_valid_answer_is_valid_however_it_ended(finish: str) -> None:
    assert Reader(R3A).read(reply(GOOD, finish=finish))["score"] == "2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "2",
        "<score>2</score>",
        GOOD.replace("2", "1."),
        GOOD.replace("2", "2/2"),
        GOOD.replace("2", "3"),
        GOOD.replace("2", "-1"),
        GOOD.replace("2", "²"),
        GOOD.replace("2", "٢"),
        GOOD.replace("2", "0|1|2"),
        GOOD.replace("2", "1, 2"),
        GOOD.replace("2", ""),
        GOOD + "<score>2</score>",
        GOOD + "<score>1</score>",
        GOOD + "</score>",
        GOOD + " So 2.",
        "Sure! " + GOOD,
        GOOD.replace("Why.", "first <score>2</score> then"),
        GOOD.replace("Why.", "<score>"),
        GOOD.replace("Why.", "</score>"),
        GOOD.replace("Why.", "a</think>b"),
        GOOD.replace("Why.", "<think>"),
        GOOD.replace("</think>", "</think> so"),
        GOOD.replace("</extract>", ""),
        GOOD.replace("<extract>", ""),
        GOOD.replace("none", ""),
        GOOD.replace("none", "a</think>"),
        GOOD.replace("none", "a<think>b</think>"),
        GOOD.upper(),
        GOOD.replace("<score>", "<score >"),
        GOOD[:-1],
        "<score>2</score><extract>none</extract><think>Why.</think>",
        "<extract>none</extract><think>Why.</think><score>2</score>",
        '{"score": 2}',
        "<think><extract>none</extract><score>2</score></think>",
        "<think>a<extract>b</think>c</extract><score>2</score>",
        GOOD + "\0",
        "```xml\n" + GOOD + "\n```",
    ],
)
def test_whatever_is_out_of_format_is_a_format_failure(text: str) -> None:
    assert status_of(text) == "format"


def test_the_finish_and_the_words_name_the_other_failures() -> None:
    assert status_of(GOOD[:-1], "length") == "truncated"
    assert status_of("", "refused") == "refused"
    assert status_of("I'm sorry, I can't rate this document.") == "refused"
    assert status_of("  I’m sorry, but no.") == "refused"
    assert status_of("I cannot help with that.") == "refused"
    assert status_of("I can see that the score is 2.") == "format"
    assert status_of(GOOD, "overlong") == "overlong"
    assert status_of(GOOD, "error") == "engine"


def test_the_prefill_is_read_as_the_beginning() -> None:
    rest = GOOD.removeprefix("<think>")
    assert Reader(R3A, "<think>").read(reply(rest))["score"] == "2"
    with pytest.raises(VerdictError):
        Reader(R3A, "<think>").read(reply(GOOD))


def test_a_text_that_may_not_be_empty_is_not() -> None:
    format = AnswerFormat((Text("intent", 9, may_be_empty=False), Text("think", 9)))
    assert Reader(format).read(reply("<intent>x</intent><think> </think>")) == {"intent": "x", "think": ""}
    assert status_of("<intent> </intent><think>x</think>", format=format) == "format"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_well_formed_answer_reads_to_what_was_written(data: st.DataObject) -> None:
    format = data.draw(answer_formats())
    contents = data.draw(contents_of(format))
    assert Reader(format).read(reply(data.draw(written(format, contents)))) == contents


@settings(max_examples=150, deadline=None)
@given(data=st.data(), grade=st.sampled_from(("0", "1", "2")))
def test_a_well_formed_verdict_reads_to_its_grade_under_any_chatter_within_its_reasoning(
    data: st.DataObject, grade: str
) -> None:
    chatter = data.draw(texts()).replace("<", "‹")
    assert (
        Reader(R3A).read(reply(f"<think>{chatter}</think><extract>none</extract><score>{grade}</score>"))["score"]
        == grade
    )


@settings(max_examples=250, deadline=None)
@given(data=st.data(), finish=FINISHES)
def test_any_text_is_read_or_raises_verdict_error_and_nothing_else(data: st.DataObject, finish) -> None:
    format = data.draw(answer_formats())
    valid = data.draw(written(format, data.draw(contents_of(format))))
    text = data.draw(st.one_of(texts(), mutated(valid), st.just(valid)))
    try:
        sections = Reader(format).read(Answer(0, text, finish))
    except VerdictError:
        return
    check_valid(format, text, sections)


def check_valid(format: AnswerFormat, text: str, sections: dict[str, str]) -> None:
    """The rules once more, written another way: take each section off the front of the text."""
    rest = text
    for section in format.sections:
        assert text.count(f"<{section.tag}>") == text.count(f"</{section.tag}>") == 1
        rest = rest.lstrip()
        assert rest.startswith(f"<{section.tag}>")
        content, _, rest = rest.removeprefix(f"<{section.tag}>").partition(f"</{section.tag}>")
        assert content.strip() == sections[section.tag]
        if isinstance(section, Choice):
            assert sections[section.tag] in section.options
    assert not rest.strip()


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 150_000,
        "<" * 1_000_000,
        " " * 1_000_000,
        "</score>" * 125_000,
        "<think>" + "a" * 1_000_000,
        "<scor" * 200_000,
        "I'm so" * 170_000,
    ],
    ids=lambda text: text[:8],
)
def test_a_megabyte_of_anything_is_read_in_linear_time(text: str) -> None:
    reader = Reader(R3A)
    start = time.process_time()
    with pytest.raises(VerdictError):
        reader.read(reply(text))
    assert time.process_time() - start < 0.5  # takes about 2 ms; a quadratic reader takes minutes
