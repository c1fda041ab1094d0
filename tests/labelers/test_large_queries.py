"""Queries of thousands of documents, and of one that is a book: the prompt stays within its limit, each row says what
of it was left out, and memory grows with the input and no faster.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest

from relabel.manifests.labels import Pair
from relabel.manifests.schemas import LabelRow, QuarantineRow
from tests.faults.shared_jobs import SIBLINGS, chunks_of
from tests.labelers.driving import labeler, run_loop

MAX_PROMPT_TOKENS = 2000
BOOK = "A rose wants light. " * 22_500
"""450,000 characters."""
OF_A_ROW = 8_000
"""Bytes that a row may take in all: the pair, its labels, what waits for an answer."""


def query_of(name: str, *documents: str) -> list[Pair]:
    """The rows of one query, with the columns that the labeler reads."""
    has_chunks = any(column.name == "chunks" for column in labeler(name).reads.columns)
    rows = tuple(
        Pair(number, "q1", "pruning roses", f"d{number}", text, (), {"chunks": chunks_of(text)} if has_chunks else {})
        for number, text in enumerate(documents)
    )
    return [row._replace(siblings=rows) for row in rows]


def labelled(name: str, rows: list[Pair]) -> tuple[list[LabelRow | QuarantineRow], int]:
    """The rows that come of it, and the most memory that took, in bytes."""
    tracemalloc.start()
    try:
        found, asks = run_loop(name, rows, max_prompt_tokens=MAX_PROMPT_TOKENS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert asks < 60, "each answer that it was too long left a fifth away"
    assert [row.row_id for row in found] == [row.row_id for row in rows]
    return found, peak


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_thousand_documents_take_a_prompt_of_some_and_memory_in_proportion(name: str) -> None:
    documents = [f"Document {number} is about roses and their thorns." for number in range(1200)]
    peaks = []
    for count in (400, 1200):
        rows, peak = labelled(name, query_of(name, *documents[:count]))
        peaks.append(peak)
        states = Counter(row.status for row in rows)
        assert states.keys() == {"ok", "overlong"}
        assert states["ok"] < 200
        for row in rows:
            if isinstance(row, QuarantineRow):
                assert "had" in row.reason
                assert "room for" in row.reason
    assert peaks[1] < 5 * peaks[0], (
        "three times the rows, some fixed parts less or more; 9 where it grows with the square"
    )
    assert peaks[1] < OF_A_ROW * 1200


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("place", [0, 2])
def test_a_book_among_short_documents_is_cut_or_left_out_and_says_so(name: str, place: int) -> None:
    documents = ["Prune in spring.", "Prune in autumn.", "Do not prune."]
    documents[place] = BOOK
    rows, peak = labelled(name, query_of(name, *documents))
    row = rows[place]
    if isinstance(row, LabelRow):
        assert {"document_truncated", "chunks_left_out"} & set(row.flags)
    else:
        assert (row.status, "room for" in row.reason) == ("overlong", True)
    assert any(isinstance(one, LabelRow) for one in rows)
    assert peak < 12 * len(BOOK)
