"""A labeler that looks at all documents of a query: asked once for each, over chunks, shards and runs; a changed
sibling asks its query again, and nothing else does.
"""

from __future__ import annotations

from typing import Any

from tests.reuse.conftest import Days, rows_of, said

REVIEW: Any = {"name": "review"}


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
