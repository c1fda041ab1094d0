"""A job over a table labels the rows of one snapshot, and stays with it."""

import functools
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs import job as opening
from relabel.jobs.job import JobSource, load_job
from relabel.jobs.labeling import RunOptions, open_session
from relabel.jobs.output import Exit
from relabel.jobs.run.label import label
from relabel.jobs.run.workers import Supervisor, WorkerProcess
from relabel.labelers.prompts import BUILT_IN
from relabel.manifests import plan as plans
from relabel.manifests.files import Storage
from relabel.manifests.secrets import forget_secrets
from relabel.manifests.store import open_run_store
from tests import real_tables
from tests.jobs.conftest import Outcome
from tests.real_tables import RealTable, pairs
from tests.vault import Vault

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
    relabel("plan", job).refused(3, gone, "no such file")
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


# A file is known by its size, its footer and its stamp (ETag or time of change): one that was written over goes on
# if its labels are of the texts that are there, and is named otherwise.


ROWS, GROUP = 24, 8


def write(
    path: str | Path = "pairs.parquet",
    *,
    old: str = "a",
    new: str = "",
    scattered: bool = False,
    groups: tuple[int, ...] = (),
) -> None:
    """Pairs of six queries in three row groups, whose texts are spelled with another letter in some of them. In place:
    size, footer, and the file itself stay.
    """
    path = Path(path)
    letters = [new if row // GROUP in groups else "a" for row in range(ROWS)]
    numbers = [row % 6 if scattered else row // 4 for row in range(ROWS)]
    table = pa.table(
        {
            "query_id": [f"q{number}" for number in numbers],
            "query": [f"{letter} shoe" for letter in letters],
            "doc_id": [f"d{row:02d}" for row in range(ROWS)],
            "title": [f"{letter * 20} {row:02d}" for row, letter in enumerate(letters)],
            "body": ["a red shoe"] * ROWS,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, compression="none", use_dictionary=False, write_statistics=False)
    with path.open("r+b" if path.exists() else "wb") as file:
        before = os.fstat(file.fileno()).st_size
        assert before in (0, file.write(sink.getvalue()))


@pytest.fixture
def half_done(relabel: Cli, write_job: WriteJob, folder: Path) -> str:
    """A job whose first of four shards is labelled."""
    write()
    job = write_job()
    assert relabel("run", job, "--shard", "0/4").code == 0
    return job


def labels(output: str = "out/ecom") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(output, "labels").rglob("*.parquet"))}


def test_a_file_with_another_footer_is_refused(half_done: str, relabel: Cli) -> None:
    before = labels()
    pq.write_table(pq.read_table("pairs.parquet"), "pairs.parquet", row_group_size=GROUP - 1)
    relabel("run", half_done).refused(3, "pairs.parquet: changed since the plan", "Restore the files")
    assert labels() == before


@pytest.mark.parametrize("how", ["copied", "touched", "moved"])
def test_a_copy_of_equal_bytes_is_the_same_file_whatever_its_stamp(
    half_done: str, relabel: Cli, write_job: WriteJob, how: str
) -> None:
    if how == "touched":
        os.utime("pairs.parquet", (0, 0))
    else:
        shutil.copy("pairs.parquet", "copy.parquet")
        Path("copy.parquet").rename("pairs.parquet" if how == "copied" else "elsewhere.parquet")
    job = write_job({"input": {"path": "elsewhere.parquet"}}) if how == "moved" else half_done
    done = relabel("run", job)
    assert done.code == 0, done
    assert "still there" in done.err, "who changed a file on purpose reads that it was seen"
    assert relabel("verify", job).code == 0
    assert "still there" not in relabel("run", job).err, "a file that was compared is not compared again"


def rewrite(**how: Any) -> None:
    """Write the pairs over in place, a second later: disks count time in steps."""
    before_ns = Path("pairs.parquet").stat().st_mtime_ns
    write(**how)
    os.utime("pairs.parquet", ns=(before_ns + 10**9, before_ns + 10**9))


@pytest.mark.parametrize("scattered", [False, True])
def test_other_texts_under_an_equal_footer_are_refused_with_file_and_row(
    relabel: Cli, write_job: WriteJob, folder: Path, scattered: bool
) -> None:
    write(scattered=scattered)
    job = write_job()
    assert relabel("run", job, "--shard", "0/4").code == 0
    size = Path("pairs.parquet").stat().st_size
    before = labels()
    rewrite(scattered=scattered, new="b", groups=(0, 1, 2))
    assert Path("pairs.parquet").stat().st_size == size
    for command in (["run", job], ["run", job, "--dry-run"], ["plan", job], ["retry", job]):
        relabel(*command).refused(3, "pairs.parquet: written again", "its row 0 ", "reuse: [out/ecom]")
    assert labels() == before
    rewrite(scattered=scattered)
    assert relabel("run", job).code == 0, "the file was restored"


def test_one_label_of_another_text_is_enough(half_done: str, relabel: Cli) -> None:
    """Texts that no label was made of yet may be others: all labels are of one state of the file then."""
    rewrite(new="b", groups=(1, 2))
    assert relabel("run", half_done).code == 0
    rewrite()
    relabel("run", half_done).refused(3, "its row 8 ", "another text")


def test_a_file_that_went_back_to_its_planned_state_is_compared_too(relabel: Cli, write_job: WriteJob) -> None:
    """The stamp is that of the plan, and the labels are of what was there between."""
    write()
    planned = Path("pairs.parquet").stat()
    job = write_job()
    assert relabel("plan", job).code == 0
    rewrite(new="b", groups=(0, 1, 2))
    assert relabel("run", job, "--shard", "0/4").code == 0
    write()
    os.utime("pairs.parquet", ns=(planned.st_atime_ns, planned.st_mtime_ns))
    relabel("run", job).refused(3, "its row 0 ", "another text")


def test_a_plan_of_an_earlier_relabel_has_no_stamps_and_goes_on(half_done: str, relabel: Cli) -> None:
    place = Path("out/ecom/plan.json")
    plan = json.loads(place.read_text())
    for file in plan["files"]:
        assert file.pop("stamp")
    place.write_text(json.dumps(plan))
    rewrite(new="b", groups=(0,))
    assert relabel("run", half_done).code == 0


@pytest.mark.parametrize("to", ["qrels", "parquet"])
def test_a_conversion_of_a_run_reads_none_of_its_input(half_done: str, relabel: Cli, to: str) -> None:
    Path("pairs.parquet").unlink()
    ended = relabel("convert", "out/ecom", f"labels.{to}", "--to", to, "--allow-partial")
    assert ended.code == 0, ended


# Two jobs in one process that differ in nothing but their storage options: each reads and writes with its own.


KEYS = {"red": "key-of-red", "blue": "key-of-blue"}
STORED_ROWS = {"red": 6, "blue": 9}


def storage_of(name: str) -> Storage:
    return Storage.of({"vault": {"key": KEYS[name]}})


@pytest.fixture
def write_stored(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`write_stored("red", run={…})`: pairs and a template in red's room, and a job file that says the same as
    blue's, but for the key.
    """
    with Vault.installed():

        def make(name: str, **changes: Any) -> str:
            store = open_run_store("vault://data", storage_of(name), single_writer=True)
            rows = [
                {"query_id": f"q{row // 3}", "query": "wool", "doc_id": f"d{row}", "document": f"{name} socks {row}"}
                for row in range(STORED_ROWS[name])
            ]
            data = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows), data)
            store.put("pairs.parquet", data.getvalue())
            template = next((BUILT_IN / "direct").glob("*.j2"))
            store.put(f"templates/{template.name}", f"Of {name}. ".encode() + template.read_bytes())
            spec = {
                "name": "socks",
                "input": {"path": "vault://data/pairs.parquet"},
                "labeler": {"name": "direct", "templates": "vault://data/templates"},
                "engine": {"name": "fake"},
                "output": "vault://data/out",
                "run": {"single_writer": True, "chunk_rows": 3},
                "storage_options": {"vault": {"key": KEYS[name]}},
            }
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump({**spec, **changes}))
            return str(file)

        yield make
    forget_secrets()


def test_two_jobs_of_one_process_do_not_see_each_others_storage(write_stored: Callable[..., str]) -> None:
    sessions = {name: open_session(JobSource(write_stored(name)), RunOptions()) for name in KEYS}
    reports = {name: label(session) for name, session in sessions.items()}
    assert {name: report.rows for name, report in reports.items()} == STORED_ROWS
    assert {report.exit for report in reports.values()} == {Exit.DONE}
    digests = {session.opened.plan.fingerprint for session in sessions.values()}
    assert len(digests) == 2
    templates = [session.opened.plan.parts["templates"] for session in sessions.values()]
    assert templates[0] != templates[1]
    for name in KEYS:
        store = open_run_store("vault://data/out", storage_of(name))
        held = b"".join(store.read(one) for one in store.etags(""))
        assert len(held) > 1000
        assert not any(key.encode() in held for key in KEYS.values())
    assert Vault.rooms.keys() == {*KEYS.values()}  # nobody asked without a key


def test_workers_get_the_options_of_their_job_by_a_pipe_and_show_none(write_stored: Callable[..., str]) -> None:
    for name in KEYS:
        session = open_session(JobSource(write_stored(name)), RunOptions())
        supervisor = Supervisor(session, write=lambda _: None, on_progress=lambda: None)
        supervisor.add("w0", functools.partial(WorkerProcess, environment={}))
        assert KEYS[name] not in str(supervisor.words())
        there = load_job(yaml.safe_load(supervisor.job()))
        assert there.storage.options_of("vault") == {"key": KEYS[name]}
        assert there.open_dataset().rows == STORED_ROWS[name]
        assert KEYS[name] not in repr(there)
