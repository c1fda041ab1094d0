"""Tokens find their parts: cases made by hand, and any cut of any text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.teachers.rollouts import NO_PART, token_parts, token_spans
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer
from relabel.manifests.formats import AnswerFormat, Choice, Text
from tests.strategies import texts


def test_a_token_belongs_to_the_part_of_most_of_its_characters_and_to_the_section_of_equals() -> None:
    text = "<think>ab</think><score>2</score>"
    reader = Reader(AnswerFormat((Text("think", 9), Choice("score", ("0", "1", "2")))))
    reader.read(Answer(0, text, "stop"))
    spans = [[span] for span in reader.spans(text).values()]
    pieces = [b"<think", b">ab", b"</think", b"><score", b">2", b"</score>", b""]
    found = token_parts(pieces, dict(enumerate(spans)))
    assert found == [NO_PART, 0, NO_PART, NO_PART, 1, NO_PART, NO_PART]


def test_a_token_within_a_character_goes_with_that_character() -> None:
    euro = "€".encode()
    pieces = [b"<a>", euro[:1], euro[1:2], euro[2:] + b"<", b"/a>"]
    assert token_spans(pieces) == [(0, 3), (3, 3), (3, 3), (3, 5), (5, 8)]
    assert token_parts(pieces, {0: [(3, 4)]}) == [NO_PART, 0, 0, 0, NO_PART]


@given(texts(), st.data())
def test_tokens_cover_the_decoded_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    spans = token_spans(pieces)
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] == len(text)
    assert token_parts(pieces, {7: [(0, len(text))]}) == [7 if piece else NO_PART for piece in pieces]
