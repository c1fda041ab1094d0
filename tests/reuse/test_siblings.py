"""A labeler that looks at all documents of a query: asked once for each, over chunks, shards and runs; a changed
sibling asks its query again, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reuse.conftest import Days, Row, rows_of, said

REVIEW: Any = {"name": "review"}
Change = Callable[[list[Row]], list[Row]]


def changed(**values: Any) -> Change:
    """One row of query 3 with other values."""
    return lambda rows: [{**row, **values} if row["doc_id"] == "d3-1" else row for row in rows]


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "a text": (changed(document="other"), {"q3"}),
    "an id": (changed(doc_id="d3-9"), {"q3"}),
    "a row less": (lambda rows: [row for row in rows if row["doc_id"] != "d3-1"], {"q3"}),
    "a row more": (lambda rows: [*rows, {**rows[0], "doc_id": "d0-9"}], {"q0"}),
    "another order of rows": (lambda rows: sorted(rows, key=lambda row: row["doc_id"] == "d3-1"), {"q3"}),
    "another order of queries": (lambda rows: sorted(rows, key=lambda row: row["query_id"], reverse=True), set()),
    "a context": (changed(context=["x"]), set()),
}


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_query_larger_than_a_chunk_is_asked_once_and_its_rows_agree(days: Days, is_scattered: bool) -> None:
    rows = [*rows_of(3, 4), *[{**row, "query_id": "big"} for row in rows_of(1, 37)], *rows_of(6, 4)[12:]]
    if is_scattered:
        rows = rows[1::2] + rows[::2]
    days.run("mon", rows, labeler=REVIEW, run={"chunk_rows": 5}, shards=3)
    assert days.asks("mon") == {"review": 7}
    labels = days.labels("mon")
    assert len(labels) == len(rows)
    for query_id in {row["query_id"] for row in rows}:
        found = [row for row in labels if row["query_id"] == query_id]
        assert len({repr((row["useful"], row["summary"], row["new_query"])) for row in found}) == 1
        assert {row["doc_id"] for row in found if row["grade"]} == set(found[0]["useful"])


def test_answers_of_an_earlier_run_are_taken_for_rows_that_had_no_label(days: Days) -> None:
    """Rows beyond the prompt's room are tried again each day, and nothing is generated for them."""
    rows = [{**row, "document": row["document"] * (1 if row["query_id"] == "q0" else 60)} for row in rows_of(3, 6)]
    limits = {"engine": {"max_prompt_tokens": 2500}, "run": {"max_failed_fraction": 1.0}}
    days.job("mon", rows, labeler=REVIEW, **limits)
    assert days.call("run", days.folder / "mon.yaml")[0] == 0
    held = len(days.labels("mon"))
    assert 0 < held < len(rows)
    job = days.job("tue", rows, labeler=REVIEW, reuse=["mon"], **limits)
    assert days.call("run", job)[0] == 0
    assert said(days.labels("tue")) == said(days.labels("mon"))
    manifest = days.manifest("tue")
    assert manifest["rows"]["quarantined"] == len(rows) - held
    assert manifest["rows"]["reused"] == 6, "rows of a query are reused all together"
    assert days.manifest("mon")["stages"]["review"]["output_tokens"] > 0
    assert manifest["stages"]["review"]["output_tokens"] == 0
