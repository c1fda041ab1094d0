"""Conservation: a lost, doubled or foreign row is found, whatever the counts say; so is a changed byte."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import relabel
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.labels import LABELS, parquet_bytes
from relabel.manifests.plan import Fates, RunRows, load_plan
from relabel.manifests.records import unsealed
from relabel.manifests.run_folder import RunFolder, build_manifest
from relabel.manifests.run_manifest import RunManifest, load_manifest, write_manifest
from relabel.manifests.store import open_run_store
from tests.manifests.small_runs import commit, label, planned_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return planned_run(tmp_path)


def proved(folder: RunFolder) -> Fates:
    return folder.prove(folder.snapshot(), check_bytes=True)


def manifest(folder: RunFolder, limit: float = 0.05) -> RunManifest:
    return build_manifest(folder, folder.snapshot(), spec={}, max_failed_fraction=limit, relabel_version="0")


def test_rows_in_equal_labelled_plus_quarantined(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1, 2, 3])
    commit(folder, 1, [4, 6, 7], [5])
    found = manifest(folder)
    assert found.rows == RunRows(in_=8, labelled=7, reused=0, quarantined=1)
    assert found.over_limit
    assert not manifest(folder, limit=0.2).over_limit
    write_manifest(folder.store, found)
    assert load_manifest(folder.store) == found


def test_first_commit_wins_and_the_loser_harms_nobody(folder: RunFolder) -> None:
    assert commit(folder, 0, [0, 1, 2, 3]) is not None
    assert commit(folder, 0, [0, 1, 2], [3]) is None
    assert commit(folder, 0, [0, 1, 2, 3]) is None
    commit(folder, 1, [4, 5, 6, 7])
    assert proved(folder) == Fates(8, 0, {})
    assert folder.snapshot().tally.labelled == 8


def test_a_row_has_the_state_of_its_highest_attempt(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1], [2, 3])
    commit(folder, 1, [4, 5, 6, 7])
    commit(folder, 0, [2], [3], attempt=2)
    found = manifest(folder, limit=0.5)
    assert found.rows == RunRows(in_=8, labelled=7, reused=0, quarantined=1)
    assert len(found.labels) == 3
    assert len(found.quarantine) == 1
    commit(folder, 0, [3], attempt=3)
    assert manifest(folder).rows.quarantined == 0
    assert proved(folder) == Fates(8, 0, {})


def test_a_start_learns_of_an_output_s_engine_without_reading_every_receipt(folder: RunFolder) -> None:
    """Of 20 million rows there are 20,000 receipts, and a worker that was killed starts often."""
    first = commit(folder, 0, [0, 1, 2, 3])
    last = commit(folder, 1, [4, 5, 6, 7])
    folder.store.path(first.id.receipt_name).write_bytes(b"damaged: it would be refused")
    assert folder.engines_asked() == [last.engine]


def test_a_missing_label_file_is_found(folder: RunFolder) -> None:
    receipt = commit(folder, 0, [0, 1, 2, 3])
    commit(folder, 1, [4, 5, 6, 7])
    folder.store.path(receipt.labels.path).unlink()
    with pytest.raises(ManifestError, match="committed, but missing"):
        manifest(folder)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"version": 99}', b'{"version": 1, "labels": {"path": "x"}}']
)
def test_a_damaged_receipt_is_reported(folder: RunFolder, body: bytes) -> None:
    folder.store.put("receipts/shard-00000/chunk-000000.json", body)
    with pytest.raises(ManifestError, match=r"chunk-000000\.json"):
        folder.snapshot()


def test_a_receipt_of_another_job_or_of_no_chunk_is_refused(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1, 2, 3])
    name = "receipts/shard-00000/chunk-000000.json"
    held = unsealed(folder.store.read(name))
    folder.store.put(name, json.dumps({**held, "fingerprint": "f" * 64}).encode())
    with pytest.raises(ManifestError, match="belongs to another job"):
        folder.snapshot()
    folder.store.put("receipts/shard-00000/chunk-000007.json", b"{}")
    with pytest.raises(ManifestError, match="no such chunk"):
        folder.pending(0)


def test_the_same_rows_give_the_same_bytes_and_read_back_equal() -> None:
    rows = [label(row)._replace(evidence=[{"start": 0, "end": 2, "text": "ab"}], flags=["x"]) for row in range(5)]
    data = parquet_bytes(rows, LABELS)
    assert data == parquet_bytes(rows, LABELS)
    table = pq.read_table(pa.BufferReader(data))
    assert table.schema.equals(LABELS)
    assert [row["row_id"] for row in table.to_pylist()] == list(range(5))
    assert table.to_pylist()[0]["evidence"] == [{"start": 0, "end": 2, "text": "ab"}]


def test_a_lone_surrogate_is_stored_as_a_question_mark_and_stops_nothing() -> None:
    rows = [label(0)._replace(intent="bad \ud800 end"), label(1)]
    assert pq.read_table(pa.BufferReader(parquet_bytes(rows, LABELS)))["intent"].to_pylist() == ["bad ? end", None]


# What a hand, a bug or a bad disk may make of a finished run's receipts and files, with every digest put right:
# `verify` refuses it.


# ruff: noqa: E501 (a table, a forgery a line)


FIRST, RETRY, SECOND = (f"receipts/shard-00000/chunk-00000{name}.json" for name in ("0", "0.2", "1"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Chunk 0: rows 0 and 1 labelled, 2 at the second attempt, 3 in quarantine. Chunk 1: rows 4 and 5 reused, 6
    labelled, 7 not."""
    folder = planned_run(tmp_path)
    commit(folder, 0, [0, 1], [2, 3])
    commit(folder, 0, [2], [3], attempt=2)
    commit(folder, 1, [6], [7], reused=[4, 5])
    write_manifest(
        folder.store, build_manifest(folder, folder.snapshot(), spec={}, max_failed_fraction=1.0, relabel_version="0")
    )
    assert run_verify(tmp_path / "out") == 0
    return tmp_path / "out"


def run_verify(out: Path) -> Any:
    return relabel.main(["verify", str(out)], standalone_mode=False)


def load(out: Path, name: str) -> Any:
    """A record without its own digest: a forger leaves it out."""
    return unsealed((out / name).read_bytes())


def keep(out: Path, name: str, held: Any) -> None:
    (out / name).write_text(json.dumps(held))


def change_file(out: Path, name: str, kind: str, change: Callable[[pa.Table], pa.Table], *, says: int = 3) -> None:
    """Change a data file, and what its receipt says of it: its sha256, its rows, the rows of the whole, as `says` goes
    from 1 to 3."""
    held = load(out, name)
    path = out / held[kind]["path"]
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    held[kind]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if says > 1:
        held[kind]["rows"] = len(table)
    if says > 2:
        rows = {one: pq.read_table(out / held[one]["path"]) for one in ("labels", "quarantine") if held[one]}
        held["rows"] = sum(map(len, rows.values()))
        statuses = [status for one in rows.values() for status in one["status"].to_pylist()]
        held["statuses"] = {status: statuses.count(status) for status in statuses}
    keep(out, name, held)


def without(row: int) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.filter(pc.not_equal(table["row_id"], row))


def with_rows(*rows: int) -> Callable[[pa.Table], pa.Table]:
    def add(table: pa.Table) -> pa.Table:
        return pa.concat_tables(
            [table, pa.Table.from_pylist([label(row)._asdict() for row in rows], schema=table.schema)]
        )

    return add


def with_column(name: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


def swap(out: Path, *parts: str, ids: bool = False) -> None:
    """Exchange two chunks' receipts, or parts of them."""
    one, other = load(out, FIRST), load(out, SECOND)
    for part in parts or [part for part in one if ids is False or part not in ("shard", "chunk", "attempt")]:
        one[part], other[part] = other[part], one[part]
    keep(out, FIRST, one)
    keep(out, SECOND, other)


def copy(out: Path, name: str, to: str, **changes: Any) -> None:
    keep(out, to, {**load(out, name), **changes})


def set_parts(out: Path, name: str, **changes: Any) -> None:
    copy(out, name, name, **changes)


THIRD = FIRST.replace("0.json", "0.3.json")
FORGERIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a label dropped": (lambda out: change_file(out, FIRST, "labels", without(1), says=1), r"1 rows, committed were 2"),
    "a label dropped, and not counted": (lambda out: change_file(out, FIRST, "labels", without(1), says=2), r"lost \(row ids \[1\]\)"),
    "a label dropped without a trace": (lambda out: change_file(out, FIRST, "labels", without(1)), r"0\.json: 1 rows lost .*\[1\]\)"),
    "a retried label dropped": (lambda out: change_file(out, RETRY, "labels", without(2)), r"0\.2\.json: 1 rows lost \(row ids \[2\]\)"),
    "a quarantined row dropped": (lambda out: change_file(out, RETRY, "quarantine", without(3)), r"1 rows lost \(row ids \[3\]\)"),
    "a label twice in a file": (lambda out: change_file(out, FIRST, "labels", with_rows(1)), r"1 doubled or foreign \(\[1\]\), by labels/"),
    "a row labelled twice": (lambda out: change_file(out, RETRY, "labels", with_rows(1)), r"not in quarantine: \[1\], by labels/\S+0\.2-"),
    "a row labelled and in quarantine": (lambda out: change_file(out, SECOND, "labels", with_rows(7)), r"1 doubled or foreign \(\[7\]\)"),
    "a row labelled again and in quarantine": (lambda out: change_file(out, RETRY, "labels", with_rows(3)), r"in quarantine: \[3\]"),
    "a foreign row": (lambda out: change_file(out, SECOND, "labels", with_rows(99)), r"1 doubled or foreign \(\[99\]\)"),
    "a row in another's place": (lambda out: change_file(out, SECOND, "labels", with_column("row_id", [4, 5, 5])), r"lost \(.*\[6\]\)"),
    "a label of no status": (lambda out: change_file(out, FIRST, "labels", with_column("status", ["ok", "format"])), r"0\.json"),
    "a failure that passes for a label": (lambda out: change_file(out, RETRY, "quarantine", with_column("status", ["ok"])), r"0\.2\.json"),
    "another reason": (lambda out: change_file(out, RETRY, "quarantine", with_column("status", ["refused"]), says=2), r"'refused': 1"),
    "reused rows that do not say so": (lambda out: change_file(out, SECOND, "labels", with_column("reused", [False] * 3)), r"2 reused.* 0 reused"),
    "asked rows that say reused": (lambda out: change_file(out, FIRST, "labels", with_column("reused", [True] * 2)), r"0 reused.* 2 reused"),
    "a receipt that counts one reused row more": (
        lambda out: set_parts(out, SECOND, reused=[{**load(out, SECOND)["reused"][0], "rows": 3}]),
        r"3 reused; .* 2 reused",
    ),
    "a receipt that counts more reused rows than rows": (
        lambda out: set_parts(out, SECOND, reused=[{**load(out, SECOND)["reused"][0], "rows": 9}]),
        r"9 reused; .* 2 reused",
    ),
    "a receipt that says more rows": (lambda out: set_parts(out, SECOND, rows=5), r"says 5 rows, .* hold 4, "),
    "a receipt of other statuses": (lambda out: set_parts(out, SECOND, statuses={"ok": 4}), r"says 4 rows, \{'ok': 4\}"),
    "two receipts swapped": (swap, r"0\.json: holds the receipt receipts/shard-00000/chunk-000001\.json"),
    "two receipts swapped, each under the other's name": (lambda out: swap(out, ids=True), r"lost \(row ids \[0, 1, 2, 3\]\)"),
    "two chunks' labels swapped": (lambda out: swap(out, "labels", "rows", "statuses", "reused"), r"rows lost \(row ids \["),
    "two chunks' quarantine swapped": (lambda out: swap(out, "quarantine"), r"rows lost \(row ids \["),
    "a receipt again as a later attempt": (lambda out: copy(out, RETRY, THIRD), r"0\.3\.json: holds the receipt receipts/\S+0\.2\.json"),
    "a retry again as a later attempt of that name": (lambda out: copy(out, RETRY, THIRD, attempt=3), r"not in quarantine: \[2\]"),
    "a run again as its own retry": (lambda out: copy(out, SECOND, SECOND.replace("1.json", "1.2.json"), attempt=2), r"\[4, 5, 6\]"),
    "a retry that is gone": (lambda out: (out / RETRY).unlink(), r"manifest\.json: does not say what the files hold"),
    "a first attempt that is gone": (lambda out: (out / FIRST).unlink(), r"attempts \[2\]"),
    "a chunk that is gone": (lambda out: (out / SECOND).unlink(), r"1 of 2 chunks have no receipt"),
    "a receipt without its labels": (lambda out: set_parts(out, FIRST, labels=None), r"lost \(row ids \[0, 1\]\)"),
    "a retry of nothing": (lambda out: set_parts(out, RETRY, labels=None, quarantine=None, rows=0, statuses={}), r"\[2, 3\]\)"),
    "a manifest of other sums": (
        lambda out: set_parts(out, "manifest.json", rows={"in": 8, "labelled": 3, "reused": 3, "quarantined": 2}),
        r"manifest\.json: does not say",
    ),
    "a manifest whose sums are none": (
        lambda out: set_parts(out, "manifest.json", rows={"in": 8, "labelled": 2, "reused": 2, "quarantined": 2}),
        r"manifest\.json: not a manifest \(its rows .* do not add up",
    ),
    "a manifest of other reasons": (lambda out: set_parts(out, "manifest.json", quarantined_by_status={"refused": 2}), r"json: does not"),
    "a manifest without a file": (
        lambda out: set_parts(out, "manifest.json", labels=load(out, "manifest.json")["labels"][1:]),
        r"manifest\.json: not a manifest \(its rows",
    ),
}  # fmt: skip
BEFORE_THE_MANIFEST = [name for name in FORGERIES if "manifest" not in name and name != "a retry that is gone"]


@pytest.mark.parametrize("name", FORGERIES)
def test_verify_refuses_it_and_says_where(out: Path, name: str) -> None:
    forge, message = FORGERIES[name]
    forge(out)
    with pytest.raises(ManifestError, match=message):
        run_verify(out)


@pytest.mark.parametrize("name", BEFORE_THE_MANIFEST)
def test_no_manifest_is_made_of_it(out: Path, name: str) -> None:
    forge, message = FORGERIES[name]
    (out / "manifest.json").unlink()
    forge(out)
    store = open_run_store(out, Storage())
    plan = load_plan(store)
    folder = RunFolder(store, plan)
    with pytest.raises(ManifestError, match=message):
        build_manifest(folder, folder.snapshot(), spec={}, max_failed_fraction=1.0, relabel_version="0")


def test_a_retry_that_is_gone_is_a_run_without_that_retry(out: Path) -> None:
    (out / RETRY).unlink()
    store = open_run_store(out, Storage())
    plan = load_plan(store)
    folder = RunFolder(store, plan)
    found = build_manifest(folder, folder.snapshot(), spec={}, max_failed_fraction=1.0, relabel_version="0")
    assert found.rows == RunRows(in_=8, labelled=3, reused=2, quarantined=3)
