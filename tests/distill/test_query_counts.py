"""The nineteen counts of a query, by hand."""

from __future__ import annotations

import time

import pytest

from relabel.distill.students.query_counts import COUNT_NAMES, query_counts

EXAMPLES = {
    "": {},
    "   \n": {"characters": 4},
    "How tall is Mount Everest?": {
        "characters": 26,
        "words": 5,
        "sentences": 1,
        "capitalized": 2,
        "question_marks": 1,
        "question_words": 1,
        "auxiliaries": 1,
    },
    "Compare the impact of EU and U.S. laws, and explain why they don't agree in 2024!": {
        "characters": 81,
        "words": 17,
        "sentences": 2,  # the one after U.S., too: no list of abbreviations is kept
        "capitalized": 3,
        "numbers": 1,
        "separators": 1,
        "question_words": 1,
        "open_words": 2,
        "relation_words": 1,
        "comparisons": 1,
        "pronouns": 1,
        "determiners": 1,
        "prepositions": 2,
        "coordinators": 2,
        "negations": 1,
    },
    "If it’s a state-of-the-art réseau…  is the ΩMEGA ³ better?": {
        "characters": 58,
        "words": 10,
        "sentences": 2,
        "long_words": 1,
        "capitalized": 1,
        "numbers": 1,
        "question_marks": 1,
        "comparisons": 1,
        "auxiliaries": 1,
        "determiners": 2,
        "subordinators": 1,
    },
    "日本の首都はどこですか？ 教えて、": {
        "characters": 17,
        "words": 2,
        "sentences": 1,
        "long_words": 1,
        "question_marks": 1,
        "separators": 1,
    },
    "a_b \udcff👟 [SEP]": {"characters": 12, "words": 3, "capitalized": 1, "determiners": 1},
}


@pytest.mark.parametrize("text", list(EXAMPLES))
def test_counts_are_those_counted_by_hand(text: str) -> None:
    found = dict(zip(COUNT_NAMES, query_counts(text), strict=True))
    assert {name: count for name, count in found.items() if count} == EXAMPLES[text]


@pytest.mark.parametrize("piece", ["why not? ", "a-"])
def test_a_very_long_text_takes_time_in_proportion(piece: str) -> None:
    text = piece * (400_000 // len(piece)) + "x"
    began = time.process_time()
    assert query_counts(text)[0] == len(text)
    assert time.process_time() - began < 10.0
