"""`evidence-set` from input to labels: its column of chunks is read where rows lie together or scattered, is part of
the query's key, and must be there.
"""

from __future__ import annotations

from typing import Any

import pytest

from relabel.jobs.exits import Exit
from tests.labelers.test_evidence_set import document_of
from tests.reuse.conftest import Days, Row, rows_of

EVIDENCE: Any = {"name": "evidence-set"}


def chunked_rows(queries: int, documents: int) -> list[Row]:
    found = []
    for row in rows_of(queries, documents):
        text, chunks = document_of([f"{row['doc_id']} says {place}" for place in range(3)])
        found.append({**row, "document": text, "chunks": [{**chunk, "type": "text"} for chunk in chunks]})
    return found


@pytest.mark.parametrize("is_scattered", [False, True])
def test_chunks_are_read_and_a_changed_one_asks_its_query_again(days: Days, is_scattered: bool) -> None:
    rows = chunked_rows(5, 4)
    if is_scattered:
        rows = rows[1::2] + rows[::2]
    days.run("mon", rows, labeler=EVIDENCE)
    assert days.asks("mon") == {"select": 5}
    for row, label in zip(rows, days.labels("mon"), strict=True):
        assert (label["num_chunks"], label["shown"]) == (3, 3)
        assert [span["text"] for span in label["evidence"]] == [
            row["chunks"][number - 1]["text"] for number in label["selected"]
        ]
    changed = [{**row, "chunks": row["chunks"][:2]} if row["doc_id"] == "d3-1" else row for row in rows]
    days.run("tue", changed, labeler=EVIDENCE, reuse=["mon"])
    assert days.asks("tue") == {"select": 1}
    assert {row["query_id"] for row in days.labels("tue") if not row["reused"]} == {"q3"}


def test_an_input_without_chunks_is_refused_with_what_makes_them(days: Days) -> None:
    code, message = days.call("run", days.job("mon", rows_of(2, 2), labeler=EVIDENCE))
    assert code == Exit.BAD_INPUT
    assert (
        "no column `chunks` (for the labeler: The document's chunks, as `relabel pairs chunk` writes them.)" in message
    )
    code, message = days.call(
        "run", days.job("mon", [{**row, "chunks": ["a"]} for row in rows_of(2, 2)], labeler=EVIDENCE)
    )
    assert code == Exit.BAD_INPUT
    assert "relabel pairs chunk" in message


def test_a_document_without_chunks_is_graded_and_null_is_none(days: Days) -> None:
    rows = chunked_rows(2, 2)
    rows[0] = {**rows[0], "chunks": None}
    days.run("mon", rows, labeler=EVIDENCE)
    first = days.labels("mon")[0]
    assert (first["grade"], first["num_chunks"], first["evidence"]) == (0, 0, [])
