"""A job over a table labels the rows of one snapshot, and stays with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs import job as opening
from relabel.manifests import plan as plans
from tests import real_tables
from tests.jobs.conftest import Outcome
from tests.real_tables import RealTable, pairs

Cli = Callable[..., Outcome]
WriteJob = Callable[..., str]
Committed = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture(params=real_tables.FORMATS)
def table(request: pytest.FixtureRequest, folder: Path) -> RealTable:
    """A table of three appends of eight rows."""
    made = real_tables.make(request.param, folder)
    for first in (0, 8, 16):
        made.append(pairs(first, first + 8))
    return made


@pytest.fixture
def over(table: RealTable, write_job: WriteJob) -> Callable[..., str]:
    """`over(snapshot=3, output="out/b")`: a job over the table."""

    def write(output: str = "out/ecom", **read: Any) -> str:
        read = {"path": table.path, "table": table.format, "limit": None, **read}
        return write_job({"input": read, "output": output})

    return write


def by_document(rows: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["doc_id"]: {key: value for key, value in row.items() if key != "row_id"} for row in rows.values()}


def documents(first: int, stop: int) -> set[str]:
    return set(pairs(first, stop).column("doc_id").to_pylist())


def snapshots(table: RealTable) -> list[int]:
    if isinstance(table, real_tables.Iceberg):
        return [one.snapshot_id for one in table.table().snapshots()]
    return [0, 1, 2]


def test_a_whole_run_has_the_labels_of_the_same_rows_as_plain_parquet(
    table: RealTable, over: Callable[..., str], write_job: WriteJob, relabel: Cli, committed: Committed
) -> None:
    last = snapshots(table)[-1]
    planned = relabel("plan", over(), "--output", "json").json
    shown = planned["table"]
    assert (shown["format"], shown["snapshot"], shown["since"]) == (table.format, str(last), None)
    assert shown["path"] == table.path
    assert shown["committed"][:2] == "20"
    assert planned["rows"] == 24
    text = relabel("plan", "job.yaml").out
    assert f"{table.format}, {table.path}, snapshot {last} of 20" in text
    assert relabel("run", "job.yaml").code == 0
    assert relabel("verify", "job.yaml").code == 0
    assert relabel("run", "job.yaml").code == 10
    Path("plain").mkdir()
    for number, path in enumerate(table.files(last)):
        Path("plain", f"{number}.parquet").symlink_to(path)
    assert relabel("run", write_job({"input": {"path": "plain", "limit": None}, "output": "out/plain"})).code == 0
    assert committed() == committed(output="out/plain")
    assert set(by_document(committed())) == documents(0, 24)


def test_increments_have_their_own_rows_and_the_labels_of_the_whole_and_merge(
    table: RealTable, over: Callable[..., str], relabel: Cli, committed: Committed
) -> None:
    first, second, last = snapshots(table)
    table.overwrite(pairs(40, 44))
    for output, read, rows in (
        ("out/a", {"snapshot": first}, documents(0, 8)),
        ("out/b", {"since": first, "snapshot": last}, documents(8, 24)),
        ("out/c", {"since": first, "snapshot": second}, documents(8, 16)),
        ("out/ecom", {"snapshot": last}, documents(0, 24)),
    ):
        assert relabel("run", over(output=output, **read)).code == 0
        assert set(by_document(committed(output=output))) == rows
    plan = json.loads(Path("out/a/plan.json").read_text())
    assert plan["parts"]["table"]["snapshot"] == str(first)
    assert relabel("verify", "out/c").code == 0
    assert relabel("merge", "out/a", "out/b", "--to", "out/merged").code == 0
    merged, whole = by_document(committed(output="out/merged")), by_document(committed())
    assert {doc: (row["grade"], row["probs"]) for doc, row in merged.items()} == {
        doc: (row["grade"], row["probs"]) for doc, row in whole.items()
    }
    assert "table" not in json.loads(Path("out/merged/plan.json").read_text())["parts"]


def test_nothing_added_since_is_nothing_to_do(table: RealTable, over: Callable[..., str], relabel: Cli) -> None:
    last = snapshots(table)[-1]
    job = over(since=last)
    for arguments, code in ((["run", job], 10), (["run", job, "--done-ok"], 0), (["plan", job], 10)):
        done = relabel(*arguments)
        assert done.code == code, done
        assert f"no rows were added since snapshot {last}" in done.out + done.err
    assert relabel("run", job, "--output", "json").json["exit_code"] == 10
    assert not Path("out").exists()


def test_since_over_an_overwrite_is_refused_by_name(table: RealTable, over: Callable[..., str], relabel: Cli) -> None:
    first = snapshots(table)[0]
    changed = table.overwrite(pairs(0, 24))
    table.append(pairs(24, 28))
    relabel("plan", over(since=first)).refused(3, "input.since", "which rows are new can't be determined", "label the")
    assert relabel("plan", over(since=changed)).code == 0


def test_since_that_is_newer_than_the_snapshot_and_snapshots_that_do_not_exist_are_refused(
    table: RealTable, over: Callable[..., str], relabel: Cli
) -> None:
    first, second, _ = snapshots(table)
    relabel("plan", over(snapshot=first, since=second)).refused(3, str(first), f"input.since {second}", "newer")
    relabel("plan", over(snapshot=77)).refused(3, f"{table.path}: no snapshot 77 in this table; it has", str(first))
    if table.format == "iceberg":
        relabel("plan", over(since=77)).refused(3, "input.since 77 does not come before snapshot")


def test_a_table_that_moves_on_between_two_shards_is_labelled_as_it_was_planned(
    table: RealTable, over: Callable[..., str], relabel: Cli, committed: Committed
) -> None:
    last = snapshots(table)[-1]
    job = over()
    assert relabel("run", job, "--shard", "0/4").code == 0
    now = table.overwrite(pairs(24, 48))
    done = relabel("run", job)
    assert done.code == 0, done
    assert f"the table is at snapshot {now} now, and this output keeps snapshot {last}" in done.err
    assert set(by_document(committed())) == documents(0, 24)
    assert relabel("verify", job).code == 0
    assert f"(the table is at {now} now)" in relabel("plan", job).out
    relabel("run", over(snapshot=now)).refused(
        3, f"was planned for snapshot {last} of the table", f"names snapshot {now}", "name another `output`"
    )
    relabel("run", over(since=last)).refused(3, f"planned for snapshot {last} of", f"snapshot {last} since {last}")
    assert relabel("run", over(snapshot=last)).code == 10
    assert relabel("run", over(snapshot=now, output="out/b")).code == 0
    assert set(by_document(committed(output="out/b"))) == documents(24, 48)


def test_a_worker_that_looked_before_the_table_moved_takes_the_plan_of_the_one_who_was_first(
    table: RealTable, over: Callable[..., str], relabel: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = over()
    calls = []

    def planned_meanwhile(store: Any, plan: plans.Plan, plan_files: dict[str, bytes]) -> bool:
        calls.append(plan.fingerprint)
        if len(calls) == 1:
            table.append(pairs(24, 28))
            assert relabel("plan", job).code == 0
        return plans.write_plan(store, plan, plan_files)

    monkeypatch.setattr(opening, "write_plan", planned_meanwhile)
    done = relabel("run", job)
    assert done.code == 0, done
    assert len(set(calls)) == 2
    assert json.loads(Path("out/ecom/manifest.json").read_text())["rows"]["in"] == 28


def test_a_data_file_that_vanished_is_named(table: RealTable, over: Callable[..., str], relabel: Cli) -> None:
    job = over()
    gone = table.files(snapshots(table)[-1])[1]
    Path(gone).rename("kept")
    relabel("plan", job).refused(3, gone, "no such file, and snapshot", "Were old snapshots expired")
    Path("kept").rename(gone)
    assert relabel("run", job, "--shard", "0/4").code == 0
    Path(gone).unlink()
    relabel("run", job).refused(3, gone)


def test_a_data_file_that_was_written_over_is_refused(
    table: RealTable, over: Callable[..., str], relabel: Cli, committed: Committed
) -> None:
    """The plan knows its size by the table's metadata; later calls know the footer."""
    job = over()
    path = table.files(snapshots(table)[-1])[0]
    whole = Path(path).read_bytes()
    held = pq.read_table(path)
    pq.write_table(held.append_column("more", [["x" * 40] * len(held)]), path)
    relabel("plan", job).refused(3, path, "It was written over: restore it")
    Path(path).write_bytes(whole)
    assert relabel("run", job, "--shard", "0/4").code == 0
    pq.write_table(pa.concat_tables([held, held]), path)
    relabel("run", job).refused(3, path)
    Path(path).write_bytes(whole)
    assert relabel("run", job).code == 0
    assert set(by_document(committed())) == documents(0, 24)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        ({"table": None, "snapshot": 3}, "snapshot and since are of a table; set table"),
        ({"path": ["a", "b"]}, "a table has one path, not 2"),
        ({"table": "hudi"}, "input.table"),
    ],
)
def test_a_spec_that_means_no_one_snapshot_is_refused(
    read: dict[str, Any], says: str, write_job: WriteJob, relabel: Cli
) -> None:
    job = write_job({"input": {"path": "t", "table": "delta", **read}})
    relabel("plan", job).refused(3, says)
