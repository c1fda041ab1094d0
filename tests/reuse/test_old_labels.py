"""Label files of version 2, with `nodes` in one struct: what was written with them goes on, and all that reads labels
reads them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.students.label_tables import load_labels
from distill.students.sources import LabelSource
from labelers.graph_grpo import GraphGrpo
from manifests.older_schemas import LABELS_2, NODES
from manifests.schemas import LABELS
from manifests.storage.context import Storage
from tests.reuse.conftest import Days, Row, said
from tests.reuse.old_labels import COMMON, JOBS, ROWS, unpack

COLUMNS = {column.name: column.kind for column in GraphGrpo.columns}


@pytest.fixture
def old(tmp_path: Path) -> Days:
    return unpack(tmp_path)


def as_now(rows: list[Row]) -> list[Row]:
    """Rows of version 2 as this version has them."""
    return [{name: row[name] for name in LABELS.names} | (row["nodes"] or dict.fromkeys(COLUMNS)) for row in rows]


def files_of(days: Days, day: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (days.out(day) / "labels").rglob("*.parquet")}


def test_the_columns_of_graph_grpo_are_what_its_nodes_were(old: Days) -> None:
    assert COLUMNS == NODES
    for data in files_of(old, "monday").values():
        found = pq.read_schema(pa.BufferReader(data))
        assert (found, found.metadata) == (LABELS_2, LABELS_2.metadata)


@pytest.mark.parametrize("day", ROWS)
def test_an_old_output_is_verified_and_known_as_done(old: Days, day: str) -> None:
    plan = (old.out(day) / "plan.json").read_bytes()
    assert old.call("verify", old.out(day))[0] == 0
    assert old.call("status", old.out(day))[1]["is_finished"]
    assert old.call("run", old.folder / f"{day}.yaml")[0] == 10
    assert (old.out(day) / "plan.json").read_bytes() == plan


@pytest.mark.parametrize("day", ROWS)
def test_a_run_that_was_begun_with_them_writes_the_very_same_bytes_to_its_end(old: Days, day: str) -> None:
    before = files_of(old, day)
    shutil.rmtree(old.out(day) / "labels")
    shutil.rmtree(old.out(day) / "receipts")
    (old.out(day) / "manifest.json").unlink()
    code, result = old.call("run", old.folder / f"{day}.yaml")
    assert code == 0, result
    assert files_of(old, day) == before
    assert old.call("verify", old.out(day))[0] == 0


def test_a_job_that_differs_is_distinguished_from_an_old_plan_by_what_differs_alone(old: Days) -> None:
    job = old.job(
        "monday", ROWS["monday"], **COMMON, labeler={"name": "graph-grpo"}, engine={"args": {"p_garbage": 0.4}}
    )
    code, message = old.call("run", job)
    assert code != 0
    assert "labeler.attempts" in message
    assert "schema" not in message
    assert "label_columns" not in message


def test_retry_goes_on_in_an_old_output(old: Days) -> None:
    left = old.manifest("monday")["rows"]["quarantined"]
    for _ in range(4):  # each draws other answers, and each may be spoilt again
        assert old.call("retry", old.folder / "monday.yaml")[0] in (0, 10)
    assert old.manifest("monday")["rows"]["quarantined"] < left
    assert old.call("verify", old.out("monday"))[0] == 0
    assert all("nodes" in row for row in old.labels("monday"))


@pytest.mark.parametrize("day", ["monday", "plain"])
def test_old_labels_are_taken_over_in_the_columns_of_today(old: Days, day: str) -> None:
    before = {row["row_id"]: row for row in as_now(old.labels(day))}
    old.run("today", ROWS[day], reuse=[day], **COMMON, **JOBS[day])
    now = [row for row in old.labels("today") if row["reused"]]
    assert [row["row_id"] for row in now] == list(before)
    own = COLUMNS if day == "monday" else {}
    assert {tuple(row) for row in old.labels("today")} == {(*LABELS.names, *own)}
    for row in now:
        assert all(row[name] == before[row["row_id"]][name] for name in row if name not in ("reused", "origin"))


def test_the_canary_asks_rows_of_an_old_output_again(old: Days) -> None:
    old.run("today", ROWS["monday"], reuse=["monday"], canary=2, **COMMON, **JOBS["monday"])
    assert old.manifest("today")["canary"][0]["rows"] == 2


def test_old_outputs_merge_into_one_like_them_and_with_new_ones_into_one_of_today(old: Days) -> None:
    labels = {day: old.labels(day) for day in ("monday", "tuesday")}
    assert old.call("merge", old.out("monday"), old.out("tuesday"), "--to", old.out("week"))[0] == 0
    assert all("nodes" in row for row in old.labels("week"))
    new = [{**row, "document": row["document"] + " New."} for row in ROWS["plain"]]
    old.run("wednesday", new, **COMMON, **JOBS["monday"])
    for paths in (("week", "wednesday"), ("wednesday", "monday", "tuesday")):
        to = old.out(f"all from {paths[0]}")
        code, result = old.call("merge", *map(old.out, paths), "--to", to)
        assert code == 0, result
        assert old.call("verify", to)[0] == 0
        merged = sorted(said(old.labels(to.name)), key=lambda row: row["key"])
        apart = [*as_now(labels["monday"]), *as_now(labels["tuesday"]), *old.labels("wednesday")]
        assert merged == sorted(said(apart), key=lambda row: row["key"])


def test_old_labels_convert_as_they_lie(old: Days) -> None:
    to = old.folder / "labels.parquet"
    assert old.call("convert", old.out("monday"), to)[0] == 0
    assert pq.read_table(to).to_pylist() == old.labels("monday")


def test_old_labels_teach_what_they_taught(old: Days) -> None:
    """From the output, and from the file that it was converted to; and labels of today teach the same."""
    to, today = old.folder / "labels.parquet", old.folder / "labels of today.parquet"
    assert old.call("convert", old.out("monday"), to)[0] == 0
    old.run("today", ROWS["monday"], reuse=["monday"], **COMMON, **JOBS["monday"])
    assert old.call("convert", old.out("today"), today)[0] == 0
    rows = {row["row_id"]: row["nodes"] for row in old.labels("monday")}
    texts = {"path": str(old.folder / "monday.parquet")}
    for source in (
        {"path": str(old.out("monday"))},
        {"path": str(to), "pairs": texts},
        {"path": str(today), "pairs": texts},
    ):
        found = load_labels(LabelSource.model_validate(source), Storage(), allow_over_limit=True)
        for name in ("subject", "attribute"):
            taught = {pair.row_id: target for pair, target in zip(found.pairs, found.targets[name], strict=True)}
            assert {row: taught[row] for row in rows} == {
                row: (nodes[name], nodes[f"{name}_probs"]) for row, nodes in rows.items()
            }


def test_a_page_shows_old_labels_with_their_nodes(old: Days) -> None:
    to = old.folder / "report.html"
    assert old.call("report", old.out("monday"), "--to", to)[0] == 0
    held: Any = to.read_text().partition('<script type="application/json" id="rows">')[2].partition("</script>")[0]
    shown = [row for row in json.loads(held)["rows"] if row["status"] == "ok"]
    assert {row["row"]: row["own"]["subject"] for row in shown} == {
        row["row_id"]: row["nodes"]["subject"] for row in old.labels("monday")
    }
