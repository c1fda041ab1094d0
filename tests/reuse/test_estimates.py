"""What `plan` says before a GPU is paid for, against what the run then does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.cli import relabel
from relabel.manifests.costs import PrefixHit, Range, common_prefix, ratio_range
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


@pytest.mark.parametrize("labeler", ["direct", "graph-grpo", "r3a", "complexity", "umbrela"])
def test_exact_counts_equal_what_the_run_then_asks(days: Days, labeler: str) -> None:
    rows = rows_of(8, 5)
    found = plan(days, "monday", rows, "--exact", labeler={"name": labeler})
    days.run("monday", rows, labeler={"name": labeler})
    stages = days.manifest("monday")["stages"]
    assert {name: stage["asks"][1] for name, stage in found["stages"].items()} == {
        name: came["asks"] for name, came in stages.items()
    }
    first = next(iter(found["stages"]))  # later stages hold the answers before them, whose length is not known yet
    assert found["stages"][first]["prompt_tokens"] == [stages[first]["prompt_tokens"]] * 3
    assert found["rows_asked"] == [40, 40, 40]


def test_exact_counts_of_a_reusing_run_equal_what_it_takes_over_and_asks(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    rows = [*changed(rows, 2, 18, 39), {**rows[0], "query": "green hats", "query_id": "new"}]
    found = plan(days, "tuesday", rows, "--exact", reuse=["monday"])
    days.run("tuesday", rows, reuse=["monday"])
    assert found["rows_reused"] == [37] * 3
    assert days.manifest("tuesday")["rows"]["reused"] == 37
    assert (
        {name: stage["asks"][1] for name, stage in found["stages"].items()}
        == days.asks("tuesday")
        == {"intent": 1, "verdict": 4}
    )


def test_asks_that_only_answers_bring_are_a_range(days: Days) -> None:
    """`route`: by footers up to all passages and expansions, counted the passages' own, and again as it was before."""
    rows, options = treed_rows(6, 4), {"labeler": {"name": "route", "expansions": 2}}
    by_footers = plan(days, "monday", rows, **options)["stages"]["route"]
    counted = plan(days, "monday", rows, "--exact", **options)["stages"]["route"]
    assert by_footers["asks"] == [24, pytest.approx(24 * 4 * 1.02, abs=1), pytest.approx(24 * 7 * 1.3, abs=1)]
    assert counted["asks"] == [48, 72, 96]
    low, likely, high = counted["prompt_tokens"]
    assert (likely, high) == (pytest.approx(1.5 * low, abs=1), 2 * low)
    days.run("monday", rows, **options)
    came = days.asks("monday")["route"]
    assert 48 < came <= 96
    more = treed_rows(12, 4)[24:]
    again = plan(days, "tuesday", more, "--exact", reuse=["monday"], **options)["stages"]["route"]
    assert again["asks"] == [48, came, 96]
    without = plan(days, "friday", [{**row, "passages": None} for row in rows], "--exact", **options)
    assert without["stages"]["route"]["asks"] == [24, 48, 72]


def test_samples_are_counted(days: Days) -> None:
    rows = rows_of(4, 3)
    options: dict[str, Any] = {"labeler": {"name": "r3a", "samples": 3, "temperature": 0.8}}
    by_footers = plan(days, "monday", rows, **options)["stages"]
    for name, (low, _, high) in {name: stage["asks"] for name, stage in by_footers.items()}.items():
        assert low <= {"intent": 12, "verdict": 36}[name] <= high
    found = plan(days, "monday", rows, "--exact", **options)
    days.run("monday", rows, **options)
    assert (
        {name: stage["asks"][1] for name, stage in found["stages"].items()}
        == days.asks("monday")
        == {"intent": 12, "verdict": 36}
    )


def test_the_estimate_from_footers_holds_what_the_run_does(days: Days) -> None:
    rows = rows_of(10, 8)
    found = plan(days, "monday", rows)
    assert found["basis"]["output_tokens"].startswith("defaults")
    days.run("monday", rows)
    _holds(found, days.manifest("monday"))


@pytest.mark.parametrize("labeler", ["direct", "graph-grpo", "r3a", "complexity", "umbrela"])
def test_a_sample_of_the_rows_tells_their_prompts_narrowly_and_holds(days: Days, labeler: str) -> None:
    rows = [
        {**row, "document": f"{row['document']} " * (1 + number * 5 % 23)} for number, row in enumerate(rows_of(60, 8))
    ]
    found = plan(days, "monday", rows, labeler={"name": labeler})
    assert found["basis"]["tokens"] == "counted in a sample of the rows"
    assert plan(days, "tuesday", rows, labeler={"name": labeler})["stages"] == found["stages"]
    days.run("monday", rows, labeler={"name": labeler})
    _holds(found, days.manifest("monday"))
    for low, _, high in (stage["prompt_tokens"] for stage in found["stages"].values()):
        assert high <= 3 * low


def test_ratios_of_what_is_done_make_the_intervals_narrow_and_still_hold(days: Days) -> None:
    rows = rows_of(24, 10)
    before = plan(days, "monday", rows)
    job = days.folder / "monday.yaml"
    code, half = days.call("run", job, "--shard", "0/2")
    assert code == 0
    found = plan(days, "monday", rows)
    assert found["rows"] == 240 - half["labelled"]
    assert "this output" in found["basis"]["tokens"]
    for name in ("prompt_tokens", "output_tokens"):
        wide, narrow = before["stages"]["verdict"][name], found["stages"]["verdict"][name]
        assert (narrow[2] - narrow[0]) / narrow[1] < (wide[2] - wide[0]) / wide[1] / 2
    code, whole = days.call("run", job)
    assert code == 0
    rest = {
        name: {key: came[key] - half["stages"][name][key] for key in came} for name, came in whole["stages"].items()
    }
    _holds(found, {"stages": rest})


def test_ratios_of_a_reused_output_count_too(days: Days) -> None:
    rows = rows_of(12, 5)
    days.run("monday", rows[:30])
    found = plan(days, "tuesday", rows[30:], reuse=["monday"])
    assert "monday" in found["basis"]["tokens"]
    assert "monday" in found["basis"]["seconds"]
    days.run("tuesday", rows[30:], reuse=["monday"])
    _holds(found, days.manifest("tuesday"))


def _holds(found: dict[str, Any], manifest: dict[str, Any]) -> None:
    for name, came in manifest["stages"].items():
        for key in ("asks", "prompt_tokens", "output_tokens"):
            low, _, high = found["stages"][name][key]
            assert low <= came[key] <= high, (name, key, found["stages"][name][key], came[key])


def test_a_file_that_did_not_change_is_counted_as_reused_without_reading_it(
    days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(4, 5)
    days.run("monday", rows)
    found = plan(days, "tuesday", rows, reuse=["monday"])
    assert found["rows_reused"] == [20, 20, 20]
    assert found["rows_asked"] == [0, 0, 0]
    assert found["seconds"] == [0, 0, 0]
    found = plan(days, "wednesday", changed(rows, 1), reuse=["monday"])
    assert found["rows_reused"] == [19, 19, 19], "the rows' keys are counted: they are cheap"
    monkeypatch.setattr("relabel.jobs.run.estimate.CHEAP_BYTES", 0)
    low, value, high = plan(days, "thursday", changed(rows, 1), reuse=["monday"])["rows_reused"]
    assert (low, high) == (0, 20)
    assert low < value < high


def test_a_prompt_edit_shows_which_stages_it_invalidates(days: Days) -> None:
    rows = rows_of(3, 4)
    days.run("monday", rows)
    second = days.templates("second", verdict=("judge one document", "weigh one document"))
    first = days.templates("first", intent=("search|query", "question"))
    (remark,) = plan(days, "a", rows, reuse=["monday"], labeler={"templates": second})["reuse"]
    assert "0 rows reused, another templates (verdict.j2)" in remark
    assert remark.endswith("asked again: verdict; kept: intent")
    (remark,) = plan(days, "b", rows, reuse=["monday"], labeler={"templates": first})["reuse"]
    assert remark.endswith("asked again: intent, verdict")
    (remark,) = plan(days, "c", rows, reuse=["monday"], engine={"seed": 9})["reuse"]
    assert "engine (seed)" in remark
    assert remark.endswith("asked again: intent, verdict")
    exact = plan(days, "d", rows, "--exact", reuse=["monday"], labeler={"templates": second})
    assert {name: stage["asks"][1] for name, stage in exact["stages"].items()} == {"intent": 0, "verdict": 12}


def test_cost_is_seconds_times_the_price_and_not_known_without_them(days: Days) -> None:
    rows = rows_of(3, 4)
    found = plan(days, "monday", rows, cost_per_gpu_hour=3.6)
    assert (found["seconds"], found["cost"]) == (None, None)
    text = CliRunner().invoke(relabel, ["plan", str(days.job("monday", rows))], standalone_mode=False).stdout
    assert "seconds      not known (rates of engine fake are not kept; `relabel plan --probe` asks" in text
    assert days.call("run", days.job("monday", rows), "--shard", "0/2")[0] == 0
    found = plan(days, "monday", rows, cost_per_gpu_hour=3.6)
    assert found["cost"] == pytest.approx([second / 1000 for second in found["seconds"]], abs=1e-5)
    days.run("tuesday", rows[:6])
    assert plan(days, "wednesday", rows[6:], reuse=["tuesday"])["cost"] is None


def test_a_probe_of_an_engine_that_keeps_no_rates_tells_its_own_plan(days: Days) -> None:
    rows = rows_of(8, 5)
    found = plan(days, "monday", rows, "--probe")
    assert found["basis"]["output_tokens"].startswith("a probe (16 rows, ")
    assert found["seconds"][1] > 0
    days.run("monday", rows)
    _holds(found, days.manifest("monday"))
    assert plan(days, "tuesday", rows)["seconds"] is None
    (remark,) = plan(days, "friday", [*rows, *changed(rows, 1)], "--probe", reuse=["monday"])["reuse"][1:]
    assert remark == "probe: nothing was asked, since receipts tell more"


def test_status_and_manifest_hold_plan_against_actual(days: Days) -> None:
    rows = rows_of(6, 5)
    days.run("monday", rows)
    days.run("tuesday", changed(rows, 3), reuse=["monday"])
    for held in (
        days.manifest("tuesday")["plan_against_actual"],
        days.call("status", days.out("tuesday"))[1]["plan_against_actual"],
    ):
        lines = {line["figure"]: line for line in held}
        assert lines["rows_reused"]["actual"] == 29
        assert lines["verdict.asks"]["actual"] == 1
        assert lines["worker_seconds"]["actual"] > 0
        assert {"planned", "actual", "is_within"} < set(lines["prefix_hit"])
    without = days.manifest("monday")["plan_against_actual"]  # no rate was known then
    assert "worker_seconds" not in [line["figure"] for line in without]


def test_the_estimate_is_that_of_before_the_first_commit(days: Days) -> None:
    rows = rows_of(6, 5)
    job = days.job("monday", rows)
    assert days.call("plan", job)[0] == 0
    path = days.out("monday") / "estimate.json"
    assert json.loads(path.read_bytes())["is_exact"] is False
    assert days.call("plan", job, "--exact")[0] == 0
    held = path.read_bytes()
    assert json.loads(held)["is_exact"] is True
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    _, result = days.call("plan", job, "--exact")
    assert result["estimate"]["rows"] < 30
    assert path.read_bytes() == held


def test_a_plan_is_the_same_with_an_estimate_beside_it(days: Days) -> None:
    rows = rows_of(6, 5)
    job = days.job("monday", rows)
    assert days.call("plan", job)[0] == 0
    before = (days.out("monday") / "plan.json").read_bytes()
    assert days.call("plan", job, "--exact")[0] == 0
    assert (days.out("monday") / "plan.json").read_bytes() == before


def _share(*prompts: str, block_tokens: int = 16) -> float:
    hit = PrefixHit(block_tokens)
    for prompt in prompts:
        hit.add("s", prompt, len(prompt))
    return hit.share("s")


def test_prefix_hit_by_hand() -> None:
    """Three prompts of 64 tokens (a letter each): the second shares half of the first, the third all of the first but
    its last block.
    """
    first, second, third = "a" * 64, "a" * 32 + "b" * 32, "a" * 32 + "b" * 32
    assert _share(first) == 0.0
    assert _share(first, second) == 32 / 128
    # the last token is always computed, so 63 tokens are shared, of which three blocks are whole
    assert _share(first, second, third) == (32 + 48) / 192
    assert _share(first, second, block_tokens=64) == 0.0
    hit = PrefixHit()
    for prompt in (
        ("intent", "q1" * 16, 32),
        ("verdict", "q1" * 16 + "d" * 32, 64),
        ("verdict", "q1" * 16 + "e" * 32, 64),
    ):
        hit.add(*prompt)
    assert (hit.share("intent"), hit.share("verdict")) == (0.0, 0.5)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_common_prefix_is_the_longest(shared: str, one: str, other: str) -> None:
    length = common_prefix(shared + one, shared + other)
    assert length >= len(shared)
    assert (shared + one)[:length] == (shared + other)[:length]
    assert (shared + one)[length : length + 1] != (shared + other)[length : length + 1] or length == min(
        len(shared + one), len(shared + other)
    )


def test_ratio_by_hand() -> None:
    assert ratio_range([], [], num_to_come=3) is None
    assert ratio_range([0, 0], [1, 2], num_to_come=3) is None
    assert ratio_range([10], [30], num_to_come=3) == Range(1.5, 3.0, 6.0)
    # equal ratios leave no doubt
    assert ratio_range([10, 20, 30], [20, 40, 60], num_to_come=9) == pytest.approx(Range(2.0, 2.0, 2.0))
    # residuals 0, 2, -2 over chunks of 10: s = 2, error = 2 / 10 * sqrt(1/3 + 1/3), t(2) = 4.303
    # of a sample of 3 of 6: error = 2 / 10 * sqrt(1/3 - 1/6); of all there is no doubt
    low, _, high = ratio_range([10, 10, 10], [20, 22, 18], num_to_come=6, is_sample=True) or Range.exact(0)
    assert high - low == pytest.approx(2 * 4.303 * 0.2 * (1 / 6) ** 0.5)
    assert ratio_range([10, 10, 10], [20, 22, 18], num_to_come=3, is_sample=True) == Range.exact(2.0)
    assert ratio_range([10], [30], num_to_come=1, is_sample=True) == Range.exact(3.0)
    low, value, high = ratio_range([10, 10, 10], [20, 22, 18], num_to_come=3) or Range.exact(0)
    assert (value, high - value) == pytest.approx((2.0, 4.303 * 0.2 * (2 / 3) ** 0.5))
    assert value - low == pytest.approx(high - value)


@pytest.mark.parametrize("order", ["together", "scattered"])
def test_exact_counts_go_on_once_shards_are_done(days: Days, order: str) -> None:
    rows = [*rows_of(8, 3), *rows_of(8, 3)]
    if order == "together":
        rows.sort(key=lambda row: str(row["query_id"]))
    counted = [plan(days, "monday", rows, "--exact", shards=2)["rows_asked"][1]]
    for shard in ("0/2", "1/2"):
        assert days.call("run", days.folder / "monday.yaml", "--shard", shard)[0] == 0
        counted.append(plan(days, "monday", rows, "--exact", shards=2)["rows_asked"][1])
    assert counted[0] == 48 > counted[1] > counted[2] == 0
