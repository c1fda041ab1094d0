"""`--workers` and `--gpus`: engines that go down are started again, rows to blame are set aside, nothing is lost,
no process is left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.supervise.pool_jobs import command, files, is_worker, relabel, rows, verified, write_job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Labels of one process and an engine that stays up."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    assert relabel(job)[0] == 0
    return files(job)


def wait_for(what: Any, *, within_s: float = 20.0) -> Any:
    until = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)
    return found


def ended_at_once(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_three_workers_give_the_labels_and_the_report_of_one_process(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    jobs = {name: write_job(tmp_path / name) for name in ("alone", "crew")}
    alone, pool = relabel(jobs["alone"])[1], relabel(jobs["crew"], "--workers", "3")[1]
    assert files(jobs["crew"]) == undisturbed
    assert pool.pop("engine_restarts") == 0
    assert pool.keys() == alone.keys()
    for same in (
        "exit_code",
        "shards",
        "busy_shards",
        "rows",
        "labelled",
        "quarantined",
        "rows_open",
        "stopped",
        "stages",
        "remarks",
    ):
        assert pool[same] == alone[same], same
    for same in ("pairs", "statuses", "requests", "prompt_tokens", "output_tokens", "chunks_committed"):
        assert pool["this_run"][same] == alone["this_run"][same], same
    code, again, _ = relabel(jobs["crew"], "--workers", "3")
    assert (code, again["engine_restarts"]) == (10, 0)


@pytest.mark.parametrize("crash", ["silence", pytest.param("hang", marks=pytest.mark.full)])
def test_a_row_that_the_engine_never_answers_is_found_too(tmp_path: Path, crash: str) -> None:
    job = write_job(tmp_path, rows=12, poison=(3,), crash=crash, run={"ask_timeout_s": 1.0})
    code, report, said = relabel(job, "--workers", "1")
    assert (code, report["quarantined_by_status"]) == (0, {"engine": 1}), said
    assert "ask_timeout_s" in rows(job, "quarantine")[3]["reason"]
    assert verified(job)


def test_three_crashes_at_the_start_fail_the_run_with_the_last_words_and_the_log(tmp_path: Path) -> None:
    job = write_job(tmp_path, crash="start")
    code, report, _ = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert "crashed 3 times without a commit" in report["message"]
    assert "killed by signal 9" in report["message"]
    log = tmp_path / report["message"].partition("See ")[2].partition(";")[0]
    assert log.read_text().count("the engine crashed") == 3


@pytest.mark.full
def test_an_engine_that_hangs_while_it_starts_is_given_up(tmp_path: Path) -> None:
    job = write_job(tmp_path, crash="hang_start", run={"start_timeout_s": 3.0})
    code, report, _ = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert "the engine has not started for" in report["message"]
    assert "(run.start_timeout_s is 3)" in report["message"]


@pytest.mark.full
def test_where_every_row_brings_the_engine_down_the_run_fails_and_does_not_quarantine_the_input(tmp_path: Path) -> None:
    job = write_job(tmp_path, rows=30, poison=range(30), crash="kill")
    code, report, said = relabel(job, "--workers", "2")
    assert (code, report["error"]) == (4, "EngineLostError"), said
    assert "it is not the rows" in report["message"]
    assert said.count("the engine crashed") < 60


def test_an_engine_that_fails_at_anything_blames_no_row(tmp_path: Path) -> None:
    """Each worker ends at the first request, a made-up pair's included: three of them, and no row is isolated."""
    job = write_job(tmp_path, p_crash=1.0)
    code, report, said = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert said.count("the engine crashed") == 3
    assert "quarantine as `engine`" not in said
    assert not (tmp_path / "out" / "quarantine").exists()


@pytest.mark.parametrize("failpoint", ["after_labels:3", pytest.param("after_receipt:1", marks=pytest.mark.full)])
def test_a_worker_killed_in_every_commit_still_gets_on_and_loses_nothing(
    tmp_path: Path, undisturbed: dict[str, str], failpoint: str
) -> None:
    """After a receipt it dies before it can report; the supervisor finds the receipt, and counts it as progress."""
    job = write_job(tmp_path)
    assert relabel(job, verb="plan")[0] == 0
    code, report, said = relabel(job, "--workers", "1", variables={"RELABEL_FAILPOINT": failpoint})
    assert code == 0, said
    assert report["engine_restarts"] >= (2 if failpoint.endswith(":1") else 1)  # two commits may be under way
    assert files(job) == undisturbed
    assert verified(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_drains_all_workers_and_leaves_none(
    tmp_path: Path, undisturbed: dict[str, str], number: signal.Signals
) -> None:
    # few chunks are begun at a time, or all would be by the signal
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.2, capacity=1)
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4, "two workers and a guard of each"
    sent = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - sent < 25
    assert process.returncode == 20
    assert json.loads(out)["stopped"] == ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
    assert ended_at_once(family)
    write_job(tmp_path)
    assert relabel(job, "--workers", "2")[0] == 0
    assert files(job) == undisturbed


@pytest.mark.parametrize("crash", [pytest.param("raise", marks=pytest.mark.full), "hang"])
def test_a_supervisor_killed_by_kill_9_leaves_no_process(
    tmp_path: Path, undisturbed: dict[str, str], crash: str
) -> None:
    """Also where the engines hang and would never read a pipe again."""
    job = write_job(tmp_path, p_slow=1.0, slow_s=5.0, crash=crash, **({"crash_on": "Red"} if crash == "hang" else {}))
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "makes its answers up" not in (line := process.stderr.readline()) and line:
        pass
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4
    process.kill()
    process.wait()
    process.stderr.close()
    assert ended_at_once(family)
    write_job(tmp_path)
    assert relabel(job, "--workers", "2")[0] == 0
    assert files(job) == undisturbed


def test_one_process_alone_whose_engine_never_comes_back_ends_in_20(tmp_path: Path) -> None:
    job = write_job(tmp_path, poison=(40,), crash="hang", capacity=4, run={"ask_timeout_s": 1.0})
    done = subprocess.run(command(job), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (20, ""), done.stderr
    assert "has not come back from its work" in done.stderr
    assert list((tmp_path / "out" / "receipts").rglob("*.json"))


def test_each_worker_sees_its_own_gpu_and_no_other(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.1, capacity=4)
    environment_of = {}
    process = subprocess.Popen(
        command(job, "--gpus", "all"),
        env={**psutil.Process().environ(), "CUDA_VISIBLE_DEVICES": "3,5"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")))
    for child in psutil.Process(process.pid).children():
        if is_worker(child):
            environment_of[child.pid] = child.environ()["CUDA_VISIBLE_DEVICES"]
    assert sorted(environment_of.values()) == ["3", "5"]
    assert process.wait(60) == 0
    assert files(job) == undisturbed
