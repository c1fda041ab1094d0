"""Reading other tools' free-text answers: stated verdicts are read, all else is refused, and on real answers no parser
is gainsaid.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.foreign_answers import read_foreign_answer
from tests.strategies import texts

DATA = Path(os.environ.get("RELABEL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "llm_raw_outputs"
KEYS = ("dataset", "model", "prompt_mode", "query_id", "doc_id", "raw_output")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}: set RELABEL_TEST_DATA")


def grade(text: str, grades: int = 4) -> int | None:
    return read_foreign_answer(text, grades=grades).grade


@pytest.mark.parametrize(
    "text",
    [
        "2",
        " **2**\n",
        "##2",
        '"2"',
        "##final score: 2",
        "## Final Score: **2**",
        "M: 3\nT: 1\nO: 2",
        "Here are the scores:\n\n##M: 3\n##T: 0\n##O: 2",
        "M: 3, T: 1, O: 2",
        "4. Final score: 2",
        "1. Intent: 3\n2. Matching: 3\n3. Trust: 1\n4. Overall: 2",
        "Score: 2 (highly relevant)",
        "* Score: 2 - it names the price",
        "It names 3 of 4.\n\nAnswer: 2",
        "It names 3 of 4.\n\n2",
        "2\n\nIt names 3 of 4.",
        "Therefore, the relevance category is: 2",
        "Therefore, my answer is: 2",
        '{"O": 2}',
        '{"M": 3, "T": 1, "O": "2"}',
        '```json\n{"overall_score": 2}\n```',
        "<score>2</score>",
        "<think>Maybe a 3. Score: 3</think>\n<score> 2 </score>",
        "<answer> 2 </answer>",
        "I would rate it as 2 - it names the price.",
        "I would give it a score of 2.",
        "final score is 2",
        "I'd rate this passage as a 2, as it answers the query.",
        "Based on the passage, I would rate its relevance to the query “x” as 2 (Highly relevant). It does.",
        "##final score: 2\n\n##final score: 2",
    ],
)
def test_a_stated_verdict_is_read(text: str) -> None:
    assert grade(text) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("<think>Hm.</think>\n", "empty"),
        ("<think>Score: 2", "reasoning never ends"),
        ("Score: 0\nIt says </think>\nScore: 3", "verdicts differ"),
        ("Score: 0\nIt says </think></think>\nScore: 3", "think tags out of place"),
        ("<think>It says </think> Score: 3</think>Score: 0", "think tags out of place"),
        ("Score: 0 <think>Hm.</think>\nScore: 3", "think tags out of place"),
        ("The passage is relevant.", "no verdict"),
        ("no numeric label present", "no verdict"),
        ("The passage lists 3 prices and 2 shops", "no verdict"),
        ("It came out in 2", "no verdict"),
        ("2.", "no verdict"),
        ("2. The passage", "no verdict"),
        ("0: 0", "no verdict"),
        ("1. The intent is to\n\n2", "no verdict"),
        ("M: 2\nT: 2", "no verdict"),
        ("Score: two", "no verdict"),
        ("²", "no verdict"),
        ("٢", "no verdict"),
        ("passage: the final score is 2.", "no verdict"),
        ("If it named the price, I would rate it as a 3.", "no verdict"),
        ("I don't think I would rate this a 3.", "no verdict"),
        ("I would give it a 2 page summary", "no verdict"),
        ("##final score: 2\n##final score: 1", "verdicts differ"),
        ("M: 1\nT: 1\nO: 1\n##final score: 2", "verdicts differ"),
        ('{"O": 1, "O": 2}', "verdicts differ"),
        ('{"O": 1, "score": 2}', "verdicts differ"),
        ("1\n\n2", "verdicts differ"),
        ("13\n13\n\n2", "verdicts differ"),
        ("Score: 1\nI would rate it as a 2.", "verdicts differ"),
        ("1. Score: 0 - no\n2. Score: 0 - no", "several items judged"),
        ("Score: 4", "off the scale"),
        ("7", "off the scale"),
        ('{"score": 95}', "off the scale"),
        ("Score: 2/3", "no single number"),
        ("Score: 2 out of 3", "no single number"),
        ("Score: 2-3", "no single number"),
        ("Score: 2.5", "no single number"),
        ("Score: 2 or 3", "no single number"),
        ("Score: 1 or maybe 2", "no single number"),
        ("Score: -1", "no single number"),
        ("Score: 02", "no single number"),
        ("Score: 20%", "no single number"),
        ("I would rate it a 2 or 3.", "no single number"),
        ("I'd rate this passage a 0 out of 3. The end", "no single number"),
        ("<answer>yes</answer>", "no single number"),
        ('{"score": 2.0}', "no single number"),
        ('{"score": null}', "no single number"),
        ('{"score": true}', "no single number"),
    ],
)
def test_anything_else_is_refused_and_says_why(text: str, why: str) -> None:
    reading = read_foreign_answer(text, grades=4)
    assert (reading.grade, reading.why) == (None, why), reading


pieces = st.sampled_from(
    (
        "score",
        "Final",
        ":",
        "2",
        "1",
        "9",
        " ",
        "\n",
        "\n\n",
        "is",
        "I would rate",
        " as ",
        " of ",
        "a",
        "##",
        "**",
        "{",
        '"O"',
        "}",
        ".",
        "/",
        "-",
        "O",
        "M",
        ",",
        "<score>",
        "</score>",
        "<think>",
        "</think>",
        "```",
        "1. ",
        "passage:",
        "or",
        "Answer",
        "(",
    )
)


chatter = st.one_of(texts(6), st.lists(pieces, max_size=14).map("".join))


@settings(max_examples=400, deadline=None)
@given(text=chatter, grades=st.integers(2, 10))
def test_any_text_is_read_or_refused_and_what_is_read_is_there(text: str, grades: int) -> None:
    reading = read_foreign_answer(text, grades=grades)
    assert (reading.grade is None) == (reading.why != "read")
    if reading.grade is not None:
        assert 0 <= reading.grade < grades
        assert re.search(rf"(?<![0-9]){reading.grade}(?![0-9])", text)
        assert set(reading.verdicts) == {str(reading.grade)}


@settings(max_examples=200, deadline=None)
@given(before=chatter, after=chatter, said=st.integers(0, 3), second=st.integers(0, 3))
def test_nothing_around_a_stated_verdict_turns_it_into_another(before: str, after: str, said: int, second: int) -> None:
    """A document that speaks through the answer can spoil a verdict, not change it; two that differ are refused."""
    text = f"{before.replace('<think>', '')}\n\n##final score: {said}"
    assert grade(f"{text}\n\n{after}") in (None, said)
    if second != said:
        assert grade(f"{text}\n##final score: {second}") is None


@pytest.mark.parametrize(
    "piece", ["\n", "2", "score: ", "I would rate a ", "I rate it a 2 or ", "{", "<think>", "M: 1, ", "1. "]
)
def test_reading_takes_linear_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    for hostile in (text, f"##final score: {text}", f"I would rate it{text}2", f"M: 1{text}"):
        start = time.process_time()
        read_foreign_answer(hostile, grades=4)
        assert time.process_time() - start < 2.0  # a quadratic reader takes minutes


def rows_of(file: str) -> list[dict[str, Any]]:
    return pq.read_table(DATA / f"{file}.parquet").to_pylist()


@needs_data
def test_where_all_known_parsers_agree_ours_agrees_or_refuses() -> None:
    disputed = {tuple(row[key] for key in KEYS) for row in rows_of("parser_disputes")}
    equal = refused = 0
    for row in rows_of("raw_outputs"):
        if tuple(row[key] for key in KEYS) in disputed:
            continue
        reading = read_foreign_answer(row["raw_output"], grades=4)
        assert reading.grade is None or str(reading.grade) == row["parsed_label"], (reading, row["raw_output"])
        equal += reading.grade is not None
        refused += reading.grade is None
    assert (equal, refused) == (63_388, 410), "benchmarks/foreign_answers.md holds these figures too"


@needs_data
def test_docs_hold_the_figures_that_the_script_prints() -> None:
    docs = (Path(__file__).parents[2] / "benchmarks" / "foreign_answers.md").read_text(encoding="utf-8")
    for file in ("parser_disputes", "degenerate_outputs"):
        rows = rows_of(file)
        read = sum(grade(row["raw_output"] or "") is not None for row in rows)
        assert f"| {len(rows):,} | {read:,} | {len(rows) - read:,} |" in docs, (
            f"run python -m benchmarks.read_foreign_answers: {file} {read}"
        )
