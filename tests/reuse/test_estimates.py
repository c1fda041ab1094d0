"""What `plan` estimates before a GPU is paid for, against what the run then does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relabel.jobs.exits import Exit
from tests.labelers.test_route import section
from tests.reuse.conftest import Days, Row, rows_of
from tests.trees import tree_of


def changed(rows: list[Row], *numbers: int) -> list[Row]:
    return [{**row, "document": "Something else."} if number in numbers else row for number, row in enumerate(rows)]


def plan(days: Days, day: str, rows: list[Row], *more: str, **changes: Any) -> dict[str, Any]:
    code, result = days.call("plan", days.job(day, rows, **changes), *more)
    assert code == 0, result
    return result["estimate"]


def _holds(found: dict[str, Any], manifest: dict[str, Any]) -> None:
    for key in ("asks", "prompt_tokens", "output_tokens"):
        low, _, high = found[key]
        came = sum(stage[key] for stage in manifest["stages"].values())
        assert low <= came <= high, (key, found[key], came)


@pytest.mark.parametrize("labeler", ["graph-grpo", "r3a"])
def test_a_sample_of_the_rows_gives_narrow_prompts_that_hold(days: Days, labeler: str) -> None:
    rows = [
        {**row, "document": f"{row['document']} " * (1 + number * 5 % 23)} for number, row in enumerate(rows_of(60, 8))
    ]
    found = plan(days, "monday", rows, labeler={"name": labeler})
    assert found["basis"]["output_tokens"] == "2 to 100 % of each stage's cap"
    assert plan(days, "tuesday", rows, labeler={"name": labeler})["prompt_tokens"] == found["prompt_tokens"]
    days.run("monday", rows, labeler={"name": labeler})
    _holds(found, days.manifest("monday"))
    assert found["prompt_tokens"][2] <= 3 * found["prompt_tokens"][0]


@pytest.mark.parametrize(
    "options",
    [{"name": "r3a", "samples": 3, "temperature": 0.8}, {"name": "route", "expansions": 2}],
    ids=["samples", "unfolded"],
)
def test_every_ask_of_a_row_counts(days: Days, options: dict[str, Any]) -> None:
    rows = treed_rows(12, 4) if options["name"] == "route" else rows_of(12, 4)
    found = plan(days, "monday", rows, labeler=options)
    days.run("monday", rows, labeler=options)
    asks = sum(stage["asks"] for stage in days.manifest("monday")["stages"].values())
    assert 0.8 * asks <= found["asks"][1] <= 1.2 * asks


def test_open_rows_alone_are_estimated(days: Days) -> None:
    rows = rows_of(24, 10)
    before = plan(days, "monday", rows)
    code, half = days.call("run", days.folder / "monday.yaml", "--shard", "0/2")
    assert code == 0
    found = plan(days, "monday", rows)
    assert before["rows"] == 240
    assert found["rows"] == found["rows_asked"][1] == 240 - half["labelled"]


def test_reused_rows_are_counted_by_their_keys(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(4, 5)
    days.run("monday", rows)
    found = plan(days, "tuesday", rows, reuse=["monday"])
    assert found["rows_reused"] == [20, 20, 20]
    assert found["rows_asked"] == found["prompt_tokens"] == found["seconds"] == [0, 0, 0]
    assert plan(days, "wednesday", changed(rows, 1), reuse=["monday"])["rows_reused"] == [19, 19, 19]
    monkeypatch.setattr("relabel.jobs.run.estimate.CHEAP_BYTES", 0)
    assert plan(days, "thursday", changed(rows, 1), reuse=["monday"])["rows_reused"] == [0, 20, 20]


def test_a_prompt_edit_shows_which_stages_it_invalidates(days: Days) -> None:
    rows = rows_of(3, 4)
    days.run("monday", rows)
    second = days.templates("second", verdict=("judge one document", "weigh one document"))
    (remark,) = plan(days, "a", rows, reuse=["monday"], labeler={"templates": second})["reuse"]
    assert "0 rows reused, another templates (verdict.j2)" in remark
    assert remark.endswith("asked again: verdict; kept: intent")
    (remark,) = plan(days, "c", rows, reuse=["monday"], engine={"seed": 9})["reuse"]
    assert "engine (seed)" in remark
    assert remark.endswith("asked again: intent, verdict")


def test_cost_is_seconds_times_the_price_and_not_known_without_them(days: Days) -> None:
    rows = rows_of(3, 4)
    found = plan(days, "monday", rows, cost_per_gpu_hour=3.6)
    assert (found["seconds"], found["cost"]) == (None, None)
    found = plan(days, "monday", rows, "--probe", cost_per_gpu_hour=3.6)
    assert found["cost"] == pytest.approx([second / 1000 for second in found["seconds"]], abs=1e-5)
    days.run("monday", rows)
    _holds(found, days.manifest("monday"))


# Columns of the input that a labeler names: read where they are there, part of a label's key, and checked.


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


# `route` from input to labels: its tree and passages are read where rows lie together or scattered, are part of a
# row's key, and the tree must be there and of its document.


ROUTE: Any = {"name": "route"}


def treed_rows(queries: int, documents: int) -> list[Row]:
    found = []
    for row in rows_of(queries, documents):
        id = row["doc_id"]
        first = section("First", f"{id} says one thing.", f"{id} says another.")
        text, tree = tree_of(section(f"Page {id}", first, section("Second", f"{id} says a third thing.")))
        passages = [f"{id} says another.", f"{id} says a third thing."]
        found.append({**row, "document": text, "tree": tree.values(), "passages": passages})
    return found


def test_trees_are_read_and_only_a_changed_row_is_asked_again(days: Days) -> None:
    rows = treed_rows(5, 4)
    rows = rows[1::2] + rows[::2]
    days.run("mon", rows, labeler=ROUTE)
    labels = days.labels("mon")
    asked = days.asks("mon")["route"]
    assert asked == sum(len(label["steps"]) for label in labels) >= 2 * len(rows)
    for row, label in zip(rows, labels, strict=True):
        steps = [json.loads(step) for step in label["steps"]]
        assert [step["lit"] for step in steps if step["expanded"] is None] == [[2, 3], [5]]
        answered = list(dict.fromkeys(id for step in steps for id in step["answers"]))
        assert label["answer_ids"] == answered
        assert [span["text"] for span in label["evidence"]] == [row["tree"][id]["text"] for id in answered]
        assert label["grade"] == (2 if answered else 1 if label["expand_ids"] else 0)
    assert {label["grade"] for label in labels} > {2}
    changed = [{**row, "passages": row["passages"][:1]} if row["doc_id"] == "d3-1" else row for row in rows]
    days.run("tue", changed, labeler=ROUTE, reuse=["mon"])
    assert [row["doc_id"] for row in days.labels("tue") if not row["reused"]] == ["d3-1"]


def test_an_input_without_trees_is_refused_with_what_makes_them(days: Days) -> None:
    for rows in (rows_of(2, 2), [{**row, "tree": ["a"]} for row in rows_of(2, 2)]):
        code, message = days.call("run", days.job("mon", rows, labeler=ROUTE))
        assert code == Exit.BAD_INPUT
        assert "`tree`" in message
        assert "relabel pairs tree" in message
