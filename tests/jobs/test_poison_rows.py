"""A row that brings the engine down is found by the plain command alone, called again by whatever scheduler, and by
several commands at once: no supervisor outlives any of them.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.jobs.run import label
from relabel.jobs.run.loop import RunLoop
from relabel.manifests.store import LocalStore
from tests.supervise.pool_jobs import POISON, command, relabel, verified, write_job

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


def test_what_is_known_of_a_row_outlives_a_stop_in_order(tmp_path: Path) -> None:
    """A drain between two crashes must not begin the search again."""
    job = write_job(tmp_path, poison=[3], crash="kill")
    while not _knows(job, '"caught": {"3": 1}'):
        assert called(job) != 0
    assert relabel(job, "--for", "3s")[0] in (0, 20)
    assert called(job) in (0, 10)
    assert [row["row_id"] for row in rows_in(job, "quarantine")] == [3]


def _knows(job: Path, said: str) -> bool:
    text = "".join(path.read_text() for path in (job.parent / "out").glob("crashes/*.json"))
    return said.replace(" ", "") in "".join(text.split())


def test_kills_from_outside_make_no_row_a_suspect_for_good(tmp_path: Path) -> None:
    """After a SIGKILL by a scheduler, rows are asked apart once, and labelled."""
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.3, batch=1)
    for _ in range(3):
        process = subprocess.Popen(command(job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list((job.parent / "out").glob("crashes/*.json")):
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert called(job) == 0
    assert rows_in(job, "quarantine") == []
    assert POISON not in str(rows_in(job, "labels"))


# Answers of chunks that a stop left unfinished: kept, not asked again, and shown where they were refused; the run
# that continues ends with the bytes of one that nobody stopped.


STOP_AFTER = 30
"""Answers: amid the first attempts of several chunks."""
GARBAGE: dict[str, Any] = {
    "labeler": {"name": "umbrela"},
    "engine": {"args": {"p_garbage": 0.6, "batch": 3}},
    "run": {"chunk_rows": 8, "max_failed_fraction": 1.0},
    "shards": 1,
}


def rows_of(folder: Path, output: str) -> dict[str, bytes]:
    """Labels and quarantine, by place and digest."""
    found = sorted(folder.glob(f"{output}/labels/*/*")) + sorted(folder.glob(f"{output}/quarantine/*/*"))
    return {str(path.relative_to(folder / output)): path.read_bytes() for path in found}


@pytest.fixture
def stopped(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Starts a run whose every other answer is refused, and stops it amid its chunks as a second Ctrl-C would."""
    write_pairs()
    write_job(GARBAGE)

    def run(*options: str) -> Any:
        class Stopped(RunLoop):
            def _poll(self) -> Any:
                if self.progress.requests >= STOP_AFTER:
                    self.stop.now()
                return super()._poll()

        with monkeypatch.context() as patch:
            patch.setattr(label, "RunLoop", Stopped)
            return relabel("run", "job.yaml", *options)

    return run


def refused_in(folder: Path) -> list[Any]:
    return [one for file in folder.glob("out/ecom/refused/*/*") for one in json.loads(file.read_bytes())["refused"]]


def test_a_stop_keeps_refused_answers_and_says_what_was_open(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    done = stopped()
    assert done.code == 20
    assert " of 3 chunks; " in done.out
    assert " begun here, " in done.out
    assert "listed in out/ecom/refused" in done.err
    shown = refused_in(folder)
    assert shown
    assert {one["status"] for one in shown} <= {"format", "truncated", "refused"}
    assert relabel("status", "job.yaml").code == 0


def test_the_run_that_continues_asks_none_of_them_again_and_ends_as_if_never_stopped(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    first = stopped("--output", "json").json
    shown = refused_in(folder)
    kept = [json.loads(file.read_bytes())["answered"] for file in folder.glob("out/ecom/refused/*/*")]
    second = relabel("run", "job.yaml", "--output", "json").json
    assert second["rows_open"] == 0
    assert list(folder.glob("out/ecom/refused/*/*")) == []
    assert relabel("verify", "out/ecom").code == 0
    alone = relabel("run", "job.yaml", "--set", "output=out/alone", "--output", "json").json
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")
    saved = sum(map(len, kept))
    assert saved > len(shown) > 0, "answers that were accepted are kept too"
    in_vain = first["this_run"]["in_vain"]["requests"]
    assert in_vain - saved == sum(one["finish"] not in ("stop", "length") for one in shown)
    asked = [one["this_run"]["requests"] for one in (first, second)]
    assert alone["this_run"]["requests"] == sum(asked) + saved


def test_damaged_and_others_files_are_asked_again(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    stopped()
    files = sorted(folder.glob("out/ecom/refused/*/*"))
    files[0].write_bytes(b'{"version": 1, "finger')
    for file in files[1:]:
        file.write_bytes(file.read_bytes().replace(b'"fingerprint": "', b'"fingerprint": "0'))
    foreign = [files[0].parent.parent / "README.txt", files[0].with_name("chunk-one.json"), files[0].with_name("x")]
    for file in foreign:
        file.write_text("somebody's")
    assert relabel("run", "job.yaml").code == 0
    assert relabel("verify", "out/ecom").code == 0
    assert all(file.read_text() == "somebody's" for file in foreign)


def test_answers_of_another_engine_are_asked_again(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    stopped()
    for file in folder.glob("out/ecom/refused/*/*"):
        held = json.loads(file.read_bytes())
        assert held["answered"]
        held["engine"]["version"] = "another"
        for answer in held["answered"].values():
            answer["text"] = "of another engine"
        file.write_text(json.dumps(held))
    assert relabel("run", "job.yaml").code == 0
    relabel("run", "job.yaml", "--set", "output=out/alone")
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")
