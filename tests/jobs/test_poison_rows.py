"""A row that brings the engine down is found by the plain command alone, called again by whatever scheduler, and by
several commands at once: no supervisor outlives any of them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import main
from relabel.manifests.store import LocalStore
from tests.supervise.pool_jobs import POISON, command, relabel, rows, verified, write_job

MOST_CALLS = 12
ALONE = "the engine went down 2 times while it was asked this row and nothing else"


def called(job: Path) -> int:
    return subprocess.run(command(job), capture_output=True, timeout=120, check=False).returncode


def calls_until_done(job: Path) -> int:
    """How many calls it takes."""
    return next((calls for calls in range(1, MOST_CALLS + 1) if called(job) == 0), MOST_CALLS + 1)


def rows_in(job: Path, folder: str) -> list[dict[str, Any]]:
    found = sorted((job.parent / "out" / folder).rglob("*.parquet"))
    return sorted((row for path in found for row in pq.read_table(path).to_pylist()), key=lambda row: row["row_id"])


@pytest.mark.parametrize("crash", ["kill", pytest.param("memory", marks=pytest.mark.full)])
def test_a_poison_row_alone_goes_to_quarantine_and_every_other_is_labelled_as_without_it(
    tmp_path: Path, crash: str
) -> None:
    job = write_job(tmp_path / "poisoned", poison=[13], crash=crash)
    undisturbed = write_job(tmp_path / "undisturbed", poison=[13], crash=crash, crash_on="never")
    assert calls_until_done(job) <= 7
    assert called(undisturbed) == 0
    assert verified(job)
    assert [(row["row_id"], row["status"]) for row in rows_in(job, "quarantine")] == [(13, "engine")]
    assert ALONE in rows_in(job, "quarantine")[0]["reason"]
    assert rows_in(job, "labels") == [row for row in rows_in(undisturbed, "labels") if row["row_id"] != 13]
    assert LocalStore(job.parent / "out").names("crashes") == []


def test_where_a_query_itself_is_poison_its_rows_do_not_each_cost_two_engines(tmp_path: Path) -> None:
    job = write_job(tmp_path, crash="kill", crash_on="red shoes number 3")
    assert calls_until_done(job) <= 9
    assert [row["row_id"] for row in rows_in(job, "quarantine")] == list(range(18, 24))


def in_process_calls(job: Path, verb: str, *more: str) -> int:
    """How many calls of a command in this process it takes, with an engine that reports its crashes."""
    for number in range(1, MOST_CALLS + 1):
        with pytest.raises(SystemExit) as end:
            main([verb, str(job), *more])
        if not end.value.code:
            return number
        assert end.value.code == 20
    return MOST_CALLS + 1


def test_a_retry_asks_an_isolated_row_alone_and_labels_it_once_it_is_answered(tmp_path: Path) -> None:
    """One crash sends it back into quarantine; an engine that can do it labels it."""
    job = write_job(tmp_path, poison=[13])
    assert in_process_calls(job, "run") <= 5
    made_up = [json.loads(path.read_bytes()) for path in (tmp_path / "out/lost/health").iterdir()]
    assert sum(stage["asks"] for receipt in made_up for stage in receipt["stages"].values()) > 0, "they are paid for"
    assert verified(job)
    assert in_process_calls(job, "retry") == 2
    assert set(rows(job, "quarantine")) == {13}
    assert in_process_calls(job, "retry", "--set", "engine.args.crash_on=NOTHING") == 1
    assert set(rows(job)) == set(range(36))
    assert verified(job)


def test_a_document_that_crashes_the_engine_takes_no_more_than_its_own_query_along(tmp_path: Path) -> None:
    """Where all rows of a query share one ask, that is asked apart once a try, whatever row it is asked for."""
    job = write_job(tmp_path, poison=[14])
    job.write_text(job.read_text().replace("name: r3a", "name: review"))
    assert in_process_calls(job, "run") <= 5
    assert set(rows(job, "quarantine")) == set(range(12, 18))
    for row in rows_in(job, "quarantine"):
        assert re.match(f"row 1[2-7]: {ALONE}", row["reason"])
        assert "rows 12, 13, 14, 15, 16, 17 of this query" in row["reason"]
    assert in_process_calls(job, "retry") == 2
    assert in_process_calls(job, "retry", "--set", "engine.args.crash_on=NOTHING") == 1
    assert set(rows(job)) == set(range(36))


def test_the_reason_of_a_query_leads_to_labels_of_its_other_rows(tmp_path: Path) -> None:
    """The document is found by a labeler that asks about one at a time; an input without it takes all other labels
    over, and asks about the rest of its query alone.
    """
    job = write_job(tmp_path, poison=[14])
    job.write_text(job.read_text().replace("name: r3a", "name: review"))
    assert in_process_calls(job, "run") <= 5
    assert "labeler={name: pointwise}" in rows_in(job, "quarantine")[0]["reason"]
    crashed = []
    for row in range(12, 18):
        with pytest.raises(SystemExit) as end:
            main(["ask", str(job), "--set", "labeler={name: pointwise}", "--row", str(row)])
        if end.value.code:
            crashed.append(row)
    assert crashed == [14]
    table = pq.read_table(tmp_path / "pairs.parquet")
    without = table.filter(pc.not_equal(pa.array(range(table.num_rows)), 14))
    pq.write_table(without, tmp_path / "without.parquet")
    changes = [
        f"input.path={tmp_path / 'without.parquet'}",
        f"output={tmp_path / 'next'}",
        f"reuse=[{tmp_path / 'out'}]",
    ]
    settings = [part for change in changes for part in ("--set", change)]
    assert in_process_calls(job, "run", *settings) == 1
    labels = [row for path in (tmp_path / "next/labels").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(labels) == 35
    assert {row["doc_id"] for row in labels if not row["reused"]} == {f"d{row}" for row in (12, 13, 15, 16, 17)}


def test_what_is_known_of_a_row_outlives_a_stop_in_order(tmp_path: Path) -> None:
    """A drain between two crashes must not begin the search again."""
    job = write_job(tmp_path, poison=[3], crash="kill")
    while not _knows(job, '"num_apart": 1'):
        assert called(job) != 0
    assert relabel(job, "--for", "3s")[0] in (0, 20)
    assert called(job) in (0, 10)
    assert [row["row_id"] for row in rows_in(job, "quarantine")] == [3]


def _knows(job: Path, said: str) -> bool:
    text = "".join(path.read_text() for path in (job.parent / "out").glob("crashes/*.json"))
    return said.replace(" ", "") in "".join(text.split())


def _journals(job: Path) -> dict[str, bytes]:
    found = dict[str, bytes]()
    for path in (job.parent / "out").glob("crashes/*.json"):
        with contextlib.suppress(FileNotFoundError):  # its shard was done meanwhile
            found[path.name] = path.read_bytes()
    return found


@pytest.mark.parametrize("kills", [3, pytest.param(24, marks=pytest.mark.full)])
def test_kills_from_outside_make_no_row_a_suspect_for_good(tmp_path: Path, kills: int) -> None:
    """Each comes as soon as the worker asks, be it over a row that is asked alone."""
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.3, batch=1)
    for number in range(kills):
        before = _journals(job)
        process = subprocess.Popen(command(job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and _journals(job) == before:
            time.sleep(0.01)
        time.sleep(0.1 * (number % 4))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert called(job) == 0
    assert rows_in(job, "quarantine") == []
    assert POISON not in str(rows_in(job, "labels"))
