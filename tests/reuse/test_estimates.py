"""What `plan` estimates before a GPU is paid for, against what the run then does."""

import json
from typing import Any

import pytest

from relabel.jobs.output import Exit
from relabel.jobs.run.canary import Drawn, compare
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Request
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow
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


def test_a_run_says_of_which_output_it_can_reuse_no_label_and_why(days: Days) -> None:
    rows = rows_of(3, 4)
    days.run("monday", rows)
    done = days.run("tuesday", rows, reuse=["monday"], engine={"seed": 9})
    assert done["reused"] == 0
    (remark,) = [remark for remark in done["remarks"] if "0 rows reused" in remark]
    assert "engine (seed)" in remark


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
    assert "read other columns: the labeler's" in message


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


# The canary, and engines that may not be mixed: what is refused before a label is committed, and what is reported of
# it.


ENGINE = {"family": "fake", "version": "1", "model_digest": "m", "dtype": "", "device": "cpu"}


@pytest.fixture
def other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the engine answers otherwise, under the same name: what an upgrade that nobody
    announced looks like.
    """
    draw = Fake._draw

    def drawn(self: Fake, request: Request) -> int:
        return draw(self, request) ^ 0x5DEECE66D1CE4E5B

    monkeypatch.setattr(Fake, "_draw", drawn)


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on the engine says that it is another version."""
    facts = Fake.facts

    def upgrade() -> None:
        def newer(self: Fake) -> Any:
            found = facts(self)
            found.version = "99"
            return found

        monkeypatch.setattr(Fake, "facts", newer)

    return upgrade


def test_an_engine_that_says_the_same_passes_and_the_manifest_says_so(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"], canary=20)
    canary = result["this_run"]["canary"]
    assert (canary["rows"], canary["flips"], canary["flip_rate"], canary["mean_kl"]) == (20, 0, 0.0, 0.0)
    assert canary["low"] == 0.0 < canary["high"] < 0.2
    assert days.manifest("tuesday")["canary"] == [canary]
    assert days.asks("tuesday") == {"verdict": 1}, "what the canary asked is no label's cost"


def test_a_canary_counts_in_the_budget_and_is_said_to_be_what_it_has_no_room_for(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"], canary=20, run={"max_tokens": 100_000})
    (canary,) = days.manifest("tuesday")["canary"]
    asked = result["this_run"]
    assert canary["prompt_tokens"] > 20 < canary["output_tokens"]
    tokens = sum(one[kind] for one in (canary, asked) for kind in ("prompt_tokens", "output_tokens"))
    assert result["budget"]["spent_tokens"] == tokens
    job = days.job("wednesday", changed(rows, 3), reuse=["monday"], canary=20, run={"max_tokens": 900})
    assert "canary" in days.call("plan", job)[1]
    assert days.call("run", job)[0] == 5


def test_an_engine_that_says_something_else_commits_nothing_and_ends_in_5(
    days: Days, request: pytest.FixtureRequest
) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    request.getfixturevalue("other_answers")
    job = days.job("tuesday", changed(rows, 3), reuse=["monday"], canary=40)
    code, message = days.call("run", job)
    assert (code, "grades flipped" in message) == (5, True)
    assert not (days.out("tuesday") / "receipts").exists()
    assert not (days.out("tuesday") / "labels").exists()
    assert days.call("run", job, "--set", "max_flip_rate=1.0")[0] == 0
    (canary,) = days.manifest("tuesday")["canary"]
    assert canary["flip_rate"] > 0.05
    assert canary["low"] < canary["flip_rate"] < canary["high"]
    assert canary["mean_kl"] > 0


def test_a_resumed_run_is_compared_with_its_own_labels(days: Days, request: pytest.FixtureRequest) -> None:
    rows = rows_of(8, 5)
    job = days.job("monday", rows, canary=10)
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    request.getfixturevalue("other_answers")
    code, message = days.call("run", job)
    assert code == 5, message
    assert days.call("status", job)[1]["chunks_done"] == 2


def test_labels_from_elsewhere_are_asked_before_own_ones_that_would_hide_a_change(
    days: Days, request: pytest.FixtureRequest
) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    request.getfixturevalue("other_answers")
    today = changed(rows, *range(0, 40, 2))
    job = days.job("tuesday", today, reuse=["monday"])
    # 20 rows are there: 10 own ones by today's engine, 10 of Monday's
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    code, message = days.call("run", job, "--set", "canary=20")
    assert code == 5, message
    assert "of 20 grades flipped" in message
    assert days.call("run", job, "--set", "canary=20", "--set", "max_flip_rate=1.0")[0] == 0
    canary = days.manifest("tuesday")["canary"][-1]
    assert (canary["rows"], canary["own"]) == (20, 0)


def test_a_canary_that_was_smaller_than_today_s_is_no_pass(days: Days) -> None:
    """Else one row, asked once, would let any number of labels be mixed."""
    rows = rows_of(8, 5)
    days.run("monday", rows)
    job = days.job("tuesday", changed(rows, 3, 35), reuse=["monday"])
    code, first = days.call("run", job, "--shard", "0/2", "--set", "canary=1")
    assert (code, first["this_run"]["canary"]["rows"]) == (0, 1)
    code, second = days.call("run", job, "--shard", "1/2", "--set", "canary=20")
    assert (code, second["this_run"]["canary"]["rows"]) == (0, 20)


def test_labels_of_another_engine_are_not_taken_over_in_silence(days: Days, upgraded: Any) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    upgraded()
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"])
    (remark,) = [one for one in result["remarks"] if "another engine" in one]
    assert str(days.out("monday")) in remark
    assert "version: " in remark
    assert "`canary: 200` would measure" in remark


def test_another_engine_may_not_go_on_with_an_output(days: Days, upgraded: Any) -> None:
    rows = rows_of(8, 5)
    job = days.job("monday", rows)
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    upgraded()
    code, message = days.call("run", job)
    assert code == 5
    assert "version: " in message
    assert "99" in message
    assert days.call("status", job)[1]["chunks_done"] == 2
    assert days.call("run", job, "--set", "run.allow_mixed=true")[0] == 0
    mixed = days.manifest("monday")["mixed"]
    assert mixed["allowed"] is True
    assert len(mixed["differences"]) == 1
    assert mixed["differences"][0].startswith("version: ")


def label(grade: int, probs: list[float] | None) -> LabelRow:
    return LabelRow(0, "q", "d", "ok", grade, probs, 0.0, None, [], None, None, [], None, 1, 1, False)


def test_the_figures_by_hand() -> None:
    """Four rows: one the same, one that moved without a flip, one flip, one that reads no more."""
    pair = Pair(0, "q", "", "d", "")
    old = [label(1, [0.5, 0.5]), label(1, [0.5, 0.5]), label(0, None), label(1, [0.0, 1.0])]
    now = [
        label(1, [0.5, 0.5]),
        label(1, [0.25, 0.75]),
        label(1, None),
        QuarantineRow(0, "q", "d", "format", "", [], 1, 1),
    ]
    found = compare([Drawn(pair, one, number == 0) for number, one in enumerate(old)], list(now), ENGINE, 0.05)
    assert (found.rows, found.own, found.flips, found.unreadable, found.flip_rate) == (4, 1, 2, 1, 0.5)
    assert found.mean_kl == pytest.approx(0.143841 / 2, abs=1e-6)  # 0.5 ln 2 + 0.5 ln (2/3), and 0, over two rows
    # z = 1.96: (0.5 + 0.4802 ± 0.6861) / 1.9604
    assert (found.low, found.high) == pytest.approx((0.150039, 0.849961), abs=1e-6)
    assert found.flip_rate > found.max_flip_rate
