"""`evidence-set`: which chunks are shown, which answers are read, and what each row takes of one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.labelers.evidence_set import TOKENS_PER_CHUNK
from relabel.labelers.query_inputs import chunks_within
from relabel.manifests.asks import Ask
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import JsonIndices
from relabel.manifests.labels import Label, Pair
from relabel.manifests.schemas import LabelRow, QuarantineRow
from tests.labelers.driving import labeler, replay, reply, run_loop


def document_of(pieces: list[str], token_len: int = 10) -> tuple[str, tuple[dict[str, Any], ...]]:
    """A document, and its chunks: the pieces, each in a line under a heading."""
    text, chunks = "", []
    for number, piece in enumerate(pieces, start=1):
        text += "# Part\n"
        start = len(text)
        text += f"{piece}\n"
        chunks.append(
            {
                "n": number,
                "heading_path": ["Guide", "Part"],
                "text": piece,
                "token_len": token_len,
                "start": start,
                "end": start + len(piece),
            }
        )
    return text, tuple(chunks)


def query_of(counts: list[int], token_len: int = 10) -> list[Pair]:
    """The rows of a query whose documents have so many chunks."""
    rows = []
    for number, count in enumerate(counts, start=1):
        text, chunks = document_of([f"piece {number}.{place}" for place in range(1, count + 1)], token_len)
        rows.append(Pair(number - 1, "q1", "pruning roses", f"d{number}", text, (), {"chunks": chunks}))
    return together(rows)


def together(rows: list[Pair]) -> list[Pair]:
    """The rows as those of one query."""
    alone = tuple(row._replace(siblings=()) for row in rows)
    return [row._replace(siblings=alone) for row in alone]


def labels_of(rows: list[Pair], answer: Any, **options: Any) -> list[Label]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    found = [replay(labeler("evidence-set", **options), row, [reply(text)])[0] for row in rows]
    return [label for label in found if label is not None]


def asked(pair: Pair, **options: Any) -> Ask:
    return next(labeler("evidence-set", **options).label(pair))


def test_each_row_takes_its_documents_chunks_as_evidence() -> None:
    rows = query_of([4, 9, 0])
    labels = labels_of(rows, {"Document_1": [2, 1], "Document_2": [3, 4, 5, 3], "Document_3": []})
    assert [label.grade for label in labels] == [1, 1, 0]
    assert [label.columns for label in labels] == [
        {"selected": [2, 1], "shown": 4, "num_chunks": 4, "selected_tokens": 20, "over_budget": 0.0},
        {"selected": [3, 4, 5, 3], "shown": 9, "num_chunks": 9, "selected_tokens": 30, "over_budget": 0.5},
        {"selected": [], "shown": 0, "num_chunks": 0, "selected_tokens": 0, "over_budget": 0.0},
    ]
    assert [span.text for span in labels[0].evidence] == ["piece 1.2", "piece 1.1"]
    assert [len(label.evidence) for label in labels] == [2, 3, 0]
    assert [label.flags for label in labels] == [[], ["chunk_twice"], []]
    for row, label in zip(rows, labels, strict=True):
        assert all(row.document[span.start : span.end] == span.text for span in label.evidence)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "[1]",
        "null",
        '{"Document_1": [1]}',
        '{"Document_2": [1], "Document_1": []}',
        '{"Document_1": [3], "Document_2": []}',
        '{"Document_1": [0], "Document_2": []}',
        '{"Document_1": [1.0], "Document_2": []}',
        '{"Document_1": [true], "Document_2": []}',
        '{"Document_1": ["1"], "Document_2": []}',
        '{"Document_1": 1, "Document_2": []}',
        '{"Document_1": [1], "Document_2": [], "Document_3": []}',
        '{"Document_1": [1], "Document_1": [1], "Document_2": []}',
        '{"Document_1": [1], "Document_2": []} Done.',
        'Sure: {"Document_1": [1], "Document_2": []}',
        '{"Document_1": [[1]], "Document_2": []}',
        '{"Document_1": {"a": 1}, "Document_2": []}',
        '{"Document_1": [NaN], "Document_2": []}',
        '{"Document_1": [1' + "0" * 5000 + '], "Document_2": []}',
        "[" * 100_000,
        "<think>t</think>",
    ],
)
def test_what_is_not_the_object_wanted_is_no_label(answer: str) -> None:
    with pytest.raises(VerdictError) as caught:
        labels_of(query_of([2, 2]), answer)
    assert caught.value.status == "format"


def test_a_query_is_asked_once_over_all_its_rows_and_the_fake_engine_is_read() -> None:
    rows, asks = run_loop("evidence-set", query_of([5] * 12))
    assert asks == 1
    assert len([row for row in rows if isinstance(row, LabelRow)]) == 12
    assert {row.grade for row in rows if isinstance(row, LabelRow)} == {0, 1}


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=6), st.integers(0, 400))
def test_chunks_go_from_the_end_of_the_longest_document_until_they_fit(sizes: list[list[int]], room: int) -> None:
    shown = chunks_within(sizes, room)
    left = [one[:count] for one, count in zip(sizes, shown.counts, strict=True)]
    assert shown.num_tokens == sum(map(sum, left)) <= max(room, 0)
    rest = [list(one) for one in sizes]
    while sum(map(sum, rest)) > room:  # the rule, word for word
        longest = max(range(len(rest)), key=lambda place: (sum(rest[place]), place))
        rest[longest].pop()
    assert left == rest


def test_chunks_that_do_not_fit_are_no_choice_and_their_rows_say_so() -> None:
    rows = query_of([30, 2, 3], token_len=92)  # with their numbers 100 tokens each
    options = {"window_tokens": 800}
    ask = asked(rows[0], **options)
    assert ask.format is not None
    assert ask.format.sections == (JsonIndices(("Document_1", "Document_2", "Document_3"), (3, 2, 3)),)
    assert TOKENS_PER_CHUNK == 8
    labels = labels_of(rows, {"Document_1": [], "Document_2": [1], "Document_3": []}, **options)
    assert [label.flags for label in labels] == [["chunks_left_out"], [], []]
    assert [label.columns["shown"] for label in labels] == [3, 2, 3]
    with pytest.raises(VerdictError):
        labels_of(rows, {"Document_1": [4], "Document_2": [1], "Document_3": []}, **options)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "another text"},
        {"start": 0},
        {"end": 10**6},
        {"n": 3},
        {"token_len": -100_000},
        {"token_len": None},
        {"n": None},
        {"start": None},
        {"end": None},
        {"heading_path": ["Guide", None]},
        dict.fromkeys(("n", "text", "token_len", "start", "end"), None),
    ],
)
def test_chunks_that_are_not_their_documents_are_shown_to_no_row_of_the_query(change: dict[str, Any]) -> None:
    rows = query_of([2, 2, 2])
    first, second = rows[1].columns["chunks"]
    rows[1] = rows[1]._replace(columns={"chunks": (first, {**second, **change})})
    other = together([row._replace(row_id=row.row_id + 3, query_id="q2") for row in query_of([2, 2])])
    found, asks = run_loop("evidence-set", [*together(rows), *other])
    assert asks == 1
    for row in found[:3]:
        assert isinstance(row, QuarantineRow)
        assert row.status == "format"
        assert "document d2: chunk 2" in row.reason
    assert all(isinstance(row, LabelRow) for row in found[3:])
