"""Columns of the input that a labeler names: read where they are there, part of a label's key, and checked."""

from __future__ import annotations

from typing import Any

from relabel.jobs.exits import Exit
from tests.reuse.conftest import Days, Row, rows_of

VARIANTS: Any = {"name": "variants"}


def with_columns(rows: list[Row], **columns: Any) -> list[Row]:
    return [{**row, **columns} for row in rows]


def test_a_changed_aspect_asks_its_query_again_and_no_other(days: Days) -> None:
    rows = with_columns(rows_of(6, 4), aspect="price", previous_queries=["cheap socks", None])
    rows = rows[::2] + rows[1::2]
    days.run("mon", rows, labeler=VARIANTS)
    assert days.asks("mon") == {"variants": 6}
    changed = [{**row, "aspect": "warmth"} if row["query_id"] == "q3" else row for row in rows]
    days.run("tue", changed, labeler=VARIANTS, reuse=["mon"])
    assert days.asks("tue") == {"variants": 1}
    before, after = days.labels("mon"), days.labels("tue")
    assert {row["query_id"] for row in after if not row["reused"]} == {"q3"}
    assert all(len(row["variants"]) >= 2 and row["grade"] is None for row in before + after)


def test_a_column_that_is_not_there_is_one_without_a_value(days: Days) -> None:
    days.run("mon", rows_of(4, 2), labeler=VARIANTS)
    days.run("tue", with_columns(rows_of(4, 2), aspect=None, previous_queries=None), labeler=VARIANTS, reuse=["mon"])
    assert days.asks("tue") == {}


def test_labels_without_a_grade_are_verified_reported_and_merged_but_teach_nothing(days: Days) -> None:
    days.run("mon", rows_of(3, 2), labeler=VARIANTS)
    days.run("tue", rows_of(4, 2)[6:], labeler=VARIANTS)
    for command in (
        ("report", days.out("mon"), "--to", days.folder / "page.html"),
        ("merge", days.out("mon"), days.out("tue"), "--to", days.out("both")),
        ("verify", days.out("both")),
    ):
        code, result = days.call(*command)
        assert code == 0, result
    code, message = days.call("compare", days.out("mon"), days.out("both"))
    assert code == Exit.BAD_INPUT, message
    days.run("wed", with_columns(rows_of(5, 2)[8:], aspect="price"), labeler=VARIANTS)
    code, message = days.call("merge", days.out("mon"), days.out("wed"), "--to", days.out("mixed"))
    assert code == Exit.BAD_INPUT
    assert "has other columns" in message
