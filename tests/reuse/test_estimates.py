"""What `plan` estimates before a GPU is paid for, against what the run then does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reuse.conftest import Days, Row, rows_of
from tests.reuse.test_tree_column import treed_rows


def changed(rows: list[Row], *numbers: int) -> list[Row]:
    return [{**row, "document": "Something else."} if number in numbers else row for number, row in enumerate(rows)]


def plan(days: Days, day: str, rows: list[Row], *more: str, **changes: Any) -> dict[str, Any]:
    code, result = days.call("plan", days.job(day, rows, **changes), *more)
    assert code == 0, result
    found = result["estimate"]
    assert isinstance(found, dict)
    return found


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
