"""The reading rules: what is a verdict, what is not, and how long it takes to see."""

import itertools
import random
import re
import sys
import time
import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relabel.labelers.alignment import PassagePlace, align, content_at
from relabel.labelers.evidence import _continues, _Index, read_evidence
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, AnswerFormat, Choice, Fragment, Text
from relabel.manifests.errors import MissingExtraError, VerdictError
from relabel.manifests.labels import Span
from tests.labelers.driving import reply
from tests.strategies import answer_formats, contents_of, mutated, texts, written
from tests.trees import Sketch, sketches, tree_of

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


# Evidence is verbatim: every span of a document is found, nothing else is, and the span is the original's.


def find_fragment(fragment: str, document: str) -> Span | None:
    """Where a fragment first occurs, without white space at its ends; None if it does not occur or is blank."""
    return _Index(document).find(fragment.strip())


def normal_form(text: str) -> str:
    """The text as it is compared: NFC, white space folded and stripped."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@st.composite
def documents_and_spans(draw: st.DrawFn) -> tuple[str, int, int]:
    document = draw(texts(20))
    start = draw(st.integers(0, len(document)))
    return document, start, draw(st.integers(start, len(document)))


@settings(max_examples=200, deadline=None)
@given(documents_and_spans())
def test_every_span_of_a_document_is_found_verbatim(drawn: tuple[str, int, int]) -> None:
    document, start, end = drawn
    fragment = document[start:end]
    assume(fragment.strip() and fragment.strip().lower() != "none")
    (span,) = read_evidence(fragment, document)
    assert document[span.start : span.end] == span.text == fragment.strip()


def at_cluster_edges(document: str, start: int, end: int) -> bool:
    return all(at in (0, len(document)) or not _continues(document[at]) for at in (start, end))


@settings(max_examples=250, deadline=None)
@given(drawn=documents_and_spans(), form=st.sampled_from(("NFC", "NFD")), data=st.data())
def test_a_fragment_with_other_white_space_or_another_unicode_form_is_found(
    drawn: tuple[str, int, int], form, data: st.DataObject
) -> None:
    document, start, end = drawn
    assume(at_cluster_edges(document, start, end))
    # A span may not part a mark from the space before it either: the mark would be at the fragment's begin.
    fragment = document[start:end].strip()
    assume(fragment and not _continues(fragment[0]))
    mangled = unicodedata.normalize(
        form, re.sub(r"\s+", lambda _: data.draw(st.sampled_from((" ", "\n", " \t\u00a0"))), fragment)
    )
    assume(mangled.lower() != "none")
    spans = read_evidence(mangled, document)
    assert len(spans) == 1
    assert normal_form(document[spans[0].start : spans[0].end]) == normal_form(mangled)
    assert document[spans[0].start : spans[0].end] == spans[0].text


@settings(max_examples=200, deadline=None)
@given(document=texts(), fragment=texts(5))
def test_what_is_found_is_there_and_what_is_not_found_is_not(document: str, fragment: str) -> None:
    span = find_fragment(fragment, document)
    if span is None:
        assert not fragment.strip() or fragment.strip() not in document
    else:
        assert document[span.start : span.end] == span.text
        assert normal_form(span.text) == normal_form(fragment)


@pytest.mark.parametrize("content", ["none", "None", " NONE\n"])
def test_none_is_no_evidence_even_where_the_document_says_none(content: str) -> None:
    assert read_evidence(content, "none of it") == ()


@pytest.mark.parametrize("document", ["", "  ", "some text"])
@pytest.mark.parametrize("content", ["", " ", "other", "some  texts", "nonee"])
def test_what_the_document_does_not_hold_is_a_format_failure(content: str, document: str) -> None:
    with pytest.raises(VerdictError) as caught:
        read_evidence(content, document)
    assert caught.value.status == "format"


def test_several_fragments_are_one_a_line_and_keep_their_order() -> None:
    document = "One two.  Three four.\nFive."
    assert read_evidence("Five.\n\n Three four. ", document) == (Span(22, 27, "Five."), Span(10, 21, "Three four."))
    with pytest.raises(VerdictError, match="Six"):
        read_evidence("Five.\nSix.", document)


def test_adjacent_lines_are_one_fragment() -> None:
    assert read_evidence("four.\nFive.", "Three four.\n \nFive.") == (Span(6, 19, "four.\n \nFive."),)


def test_an_accent_is_never_parted_from_its_letter() -> None:
    assert find_fragment("caf\u00e9", "a cafe\u0301!") == Span(2, 7, "cafe\u0301")
    assert find_fragment("x cafe", "x  cafe\u0301") is None
    assert find_fragment("\uac01", "\u1100\u1161\u11a8") == Span(0, 3, "\u1100\u1161\u11a8")
    assert find_fragment("x \uac00", "x  \u1100\u1161\u11a8") is None
    assert find_fragment("q\u0323\u0307", "q\u0307\u0323") == Span(0, 3, "q\u0307\u0323")


@pytest.mark.parametrize(
    ("document", "fragment"),
    [
        ("x\u0301" * 300_000, "x\u0301" * 5_000 + "x"),
        ("a " * 500_000, "a  " * 100_000 + "b"),
        ("\u0301" * 1_000_000, "\u0301\u0300" * 50_000),
        ("a\u0301\u0301" * 300_000, "\u0301a" * 100_000),
        ("é" * 1_000_000, "e\u0301" * 200_000),
    ],
    ids=["cut accents", "white space", "marks alone", "mid-cluster", "decomposed"],
)
def test_a_megabyte_is_searched_in_linear_time(document: str, fragment: str) -> None:
    start = time.process_time()
    find_fragment(fragment, document)
    assert time.process_time() - start < 5.0  # about half a second; a quadratic search takes minutes


# A passage is found where it occurs verbatim, else where the document is most similar to it; the nodes found do not
# change with a character more or less.


LETTERS = st.text("ab ", min_size=1, max_size=24)


def distance(first: str, second: str) -> int:
    """Levenshtein's, by the table that defines it."""
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, start=1):
        before, row = row, [place]
        for other, (kept, added) in enumerate(itertools.pairwise(before)):
            row.append(min(kept + (letter != second[other]), added + 1, row[-1] + 1))
    return row[-1]


@given(passage=LETTERS, document=st.text("ab ", max_size=60))
def test_the_place_is_the_first_window_at_the_least_distance(passage: str, document: str) -> None:
    pytest.importorskip("rapidfuzz")
    assume(len(passage) < len(document))
    starts = range(len(document) - len(passage) + 1)
    found = [distance(passage, document[at : at + len(passage)]) for at in starts]
    least = min(found)
    wanted = PassagePlace(found.index(least), found.index(least) + len(passage), least)
    assert align(passage, document) == (wanted if least <= len(passage) // 2 else None)


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(count))


def test_a_passage_that_was_cleaned_otherwise_is_found_in_a_long_document_in_time() -> None:
    """The limit is ten times what it takes."""
    pytest.importorskip("rapidfuzz")
    document = words(70_000, 1)[:450_000]
    passage = document[300_000:300_600].replace("e", "", 9).replace("sh", "s h")
    started = time.process_time()
    found = align(passage, document)
    assert abs(found.start - 300_000) <= found.distance < 60
    assert align(words(100, 2), document) is None
    assert align("a" * 500 + "b" * 500, "a" * 450_000) == PassagePlace(0, 1000, 500)
    assert time.process_time() - started < 10.0


def test_verbatim_text_needs_no_package_and_other_text_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert align("b a", "a b a b a b") == PassagePlace(2, 5, 0)
    assert align("longer than it", "a document") == PassagePlace(0, 10, 0)
    with pytest.raises(MissingExtraError, match=r"pip install 'relabel-ir\[pairs\]'"):
        align("a c a b", "a b a b a b")


@given(sketch=sketches(), data=st.data())
def test_a_node_is_found_by_its_text_and_a_character_to_either_side(sketch: Sketch, data: st.DataObject) -> None:
    document, tree = tree_of(sketch)
    long = [node for node in tree.nodes if node.is_content and len(node.text) > 3]
    assume(long)
    node = data.draw(st.sampled_from(long))
    shift = data.draw(st.sampled_from([-1, 0, 1]))
    start, end = max(0, node.start + shift), min(len(document), node.end + shift)
    assert content_at(tree, PassagePlace(start, end, 0)) == [node.id]


def test_all_content_is_found_by_the_whole_document_and_none_by_a_heading() -> None:
    document, tree = tree_of(Sketch("T", [Sketch("History", [Sketch("One.", []), Sketch("Two.", [])])]))
    place = align(document, document)
    assert place is not None
    assert content_at(tree, place) == [2, 3]
    assert content_at(tree, PassagePlace(0, 7, 0)) == []
    assert content_at(tree, PassagePlace(8, 12, 9)) == [2], "the one of which most lies there"
