"""Evidence is verbatim: every span of a document is found, nothing else is, and the span is the original's."""

from __future__ import annotations

import re
import time
import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relabel.labelers.evidence import _continues, _Index, read_evidence
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Span
from tests.strategies import texts


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


def test_many_lines_that_are_not_there_cost_one_search() -> None:
    start = time.process_time()
    with pytest.raises(VerdictError):
        read_evidence("\n".join(f"line  {i}" for i in range(100_000)), "some é text " * 50_000)
    assert time.process_time() - start < 3.0
