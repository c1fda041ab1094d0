"""Relabel only what changed: what is reused, what is asked, and what the manifest says of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.manifest import engine_identity
from tests.reuse.conftest import Days, rows_of, said


@pytest.mark.parametrize("labeler", ["r3a", "complexity"])
def test_an_unchanged_day_starts_no_engine_and_says_the_same(
    days: Days, no_engine: Callable[[], None], labeler: str
) -> None:
    rows = rows_of(6, 5)
    days.run("monday", rows, labeler={"name": labeler})
    no_engine()
    days.run("tuesday", rows, labeler={"name": labeler}, reuse=["monday"])
    assert said(days.labels("tuesday")) == said(days.labels("monday"))
    manifest = days.manifest("tuesday")
    assert manifest["rows"] == {"in": 30, "labelled": 0, "reused": 30, "quarantined": 0}
    assert manifest["stages"] == {}
    assert manifest["engines_asked"] == []
    assert manifest["mixed"]["differences"] == []
    (engine,), (first,) = manifest["engines"], days.manifest("monday")["engines"]
    assert engine == engine_identity(first)


def test_one_per_cent_changed_costs_one_per_cent_of_the_asks_also_the_day_after(days: Days) -> None:
    rows = rows_of(20, 20)
    days.run("monday", rows)
    before = sum(days.asks("monday").values())
    assert before == 20 + 400
    for day, earlier, changed in (
        ("tuesday", "monday", (7, 93, 211, 330)),
        ("wednesday", "tuesday", (12, 130, 250, 399)),
    ):
        for row in changed:
            rows[row] = {**rows[row], "document": rows[row]["document"] + f" New on {day}."}
        days.run(day, rows, reuse=[earlier])
        assert days.asks(day) == {"verdict": 4}
        assert sum(days.asks(day).values()) <= 0.012 * before
        labels = days.labels(day)
        assert [row["row_id"] for row in labels if not row["reused"]] == list(changed)
        assert days.manifest(day)["rows"] == {"in": 400, "labelled": 4, "reused": 396, "quarantined": 0}


def test_the_first_run_is_named_through_generations(days: Days) -> None:
    rows = rows_of(3, 4)
    days.run("monday", rows)
    rows[5] = {**rows[5], "document": "Changed on Tuesday."}
    days.run("tuesday", rows, reuse=["monday"])
    days.run("wednesday", rows, reuse=["tuesday"])
    first, second = (days.manifest(day)["fingerprint"] for day in ("monday", "tuesday"))
    origins = [row["origin"] for row in days.labels("wednesday")]
    assert origins == [second if row == 5 else first for row in range(12)]
    (source,) = days.manifest("wednesday")["reused_from"]
    assert (source["fingerprint"], source["rows"]) == (second, 12)
    assert source["manifest_sha256"] == hashlib.sha256((days.out("tuesday") / "manifest.json").read_bytes()).hexdigest()


def test_rows_that_move_or_change_their_ids_keep_their_labels(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(4, 5)
    days.run("monday", rows)
    moved = [{**row, "query_id": "new " + row["query_id"], "doc_id": "new " + row["doc_id"]} for row in reversed(rows)]
    no_engine()
    days.run("tuesday", moved, reuse=["monday"])
    labels = days.labels("tuesday")
    assert said(labels) == said(reversed(days.labels("monday")))
    assert [row["doc_id"] for row in labels] == [row["doc_id"] for row in moved]


def test_of_two_outputs_the_first_named_wins_and_both_are_listed(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(6, 4)
    days.run("left", rows[:16])
    days.run("right", rows[8:])
    no_engine()
    days.run("both", rows, reuse=["right", "left"])
    right, left = (days.manifest(day)["fingerprint"] for day in ("right", "left"))
    assert [row["origin"] for row in days.labels("both")] == [left] * 8 + [right] * 16
    assert {source["fingerprint"]: source["rows"] for source in days.manifest("both")["reused_from"]} == {
        right: 16,
        left: 8,
    }


def test_an_output_that_was_cut_short_gives_what_it_committed(days: Days) -> None:
    rows = rows_of(6, 5)
    job = days.job("monday", rows)
    assert days.call("run", job, "--shard", "1/2")[0] == 0
    done = len(
        [
            1
            for file in (days.out("monday") / "labels").rglob("*.parquet")
            for _ in range(pq.read_metadata(file).num_rows)
        ]
    )
    assert 0 < done < 30
    days.run("tuesday", rows, reuse=["monday"])
    assert days.manifest("tuesday")["rows"] == {"in": 30, "labelled": 30 - done, "reused": done, "quarantined": 0}
    assert days.manifest("tuesday")["reused_from"][0]["manifest_sha256"] is None


def test_a_second_stage_edit_keeps_the_intents(days: Days) -> None:
    rows = rows_of(5, 4)
    days.run("monday", rows)
    templates = days.templates("edited", verdict=("Read|Judge|Now", "Consider and read"))
    days.run("tuesday", rows, labeler={"name": "r3a", "templates": templates}, reuse=["monday"])
    assert days.asks("tuesday") == {"verdict": 20}
    assert [row["intent"] for row in days.labels("tuesday")] == [row["intent"] for row in days.labels("monday")]
    assert days.manifest("tuesday")["rows"]["reused"] == 0
    days.run("alone", rows, labeler={"name": "r3a", "templates": templates})
    assert said(days.labels("tuesday")) == said(days.labels("alone"))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"seed": 8}},
        {"labeler": {"temperature": 0.5}},
        {"input": {"overlong": "quarantine"}},
        {"engine": {"args": {"p_garbage": 0.01}}},
    ],
    ids=str,
)
def test_a_label_made_in_another_way_is_not_taken_over(days: Days, change: dict[str, Any]) -> None:
    rows = rows_of(2, 3)
    days.run("monday", rows)
    days.run("tuesday", rows, reuse=["monday"], **change)
    assert days.manifest("tuesday")["rows"]["reused"] == 0


def test_speed_and_cut_and_attempts_are_no_part_of_a_label(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(2, 6)
    days.run("monday", rows)
    no_engine()
    changes: dict[str, Any] = {
        "shards": 3,
        "run": {"chunk_rows": 4},
        "labeler": {"attempts": 5},
        "engine": {"args": {"batch": 3}},
    }
    days.run("tuesday", rows, reuse=["monday"], **changes)
    assert days.manifest("tuesday")["rows"]["reused"] == 12


def test_rows_that_were_quarantined_are_asked_again(days: Days) -> None:
    rows = rows_of(5, 8)
    changes: dict[str, Any] = {
        "labeler": {"name": "direct", "attempts": 1},
        "engine": {"args": {"p_garbage": 0.3}},
        "run": {"max_failed_fraction": 1.0},
    }
    days.run("monday", rows, **changes)
    failed = days.manifest("monday")["rows"]["quarantined"]
    assert failed > 0
    days.run("tuesday", rows, reuse=["monday"], **changes)
    assert days.manifest("tuesday")["rows"]["reused"] == 40 - failed
    assert days.asks("tuesday") == {"score": failed}


def test_a_changed_file_of_an_earlier_output_is_an_error_and_no_label(days: Days) -> None:
    rows = rows_of(2, 3)
    days.run("monday", rows)
    file = days.manifest("monday")["labels"][0]["path"]
    table = pq.read_table(days.out("monday") / file)
    grades = pa.array([2 - grade for grade in table["grade"].to_pylist()], pa.int8())
    pq.write_table(table.set_column(4, table.schema.field("grade"), grades), days.out("monday") / file)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["monday"]))
    assert code == 3
    assert "sha256" in message


def test_reuse_of_a_folder_that_holds_no_run_and_of_the_own_output_is_refused(days: Days) -> None:
    rows = rows_of(2, 3)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["nowhere"]))
    assert (code, "holds no plan.json" in message) == (3, True)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["tuesday"]))
    assert (code, "own output" in message) == (3, True)
