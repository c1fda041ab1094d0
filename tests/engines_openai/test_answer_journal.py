"""Answers are kept as they come: what a kill or a stop costs is counted by the server, and the run that goes on ends
with the bytes of one that nobody disturbed.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from .counting_server import FEW_ASKS, LATENCY_S, Counting
from .scripted_server import MODEL, ScriptedServer
from .test_run import relabel

ROWS = 96
CONCURRENCY = 8
DRAIN_S = 4.0
LABELERS = {
    "r1": {"name": "r1"},
    "r3a": {"name": "r3a", "context": "none"},
    "samples": {"name": "r1", "samples": 3, "temperature": 0.7},
}
JOB: dict[str, Any] = {
    "name": "shoes",
    "input": {"path": "pairs.parquet"},
    "engine": {
        "name": "openai",
        "args": {"served_model": MODEL, "mode": "chat", "backoff_s": 0.01, "concurrency": CONCURRENCY},
    },
    "shards": 2,
    "run": {"chunk_rows": 12, "max_failed_fraction": 1.0},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-run-0123456789")
    rows = [
        {
            "query_id": f"q{row // 6}",
            "query": f"shoe {row // 6}",
            "doc_id": f"d{row}",
            "document": f"a red shoe of kind {row}",
        }
        for row in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    return tmp_path


def write_job(server: ScriptedServer, labeler: str, output: str, **run: Any) -> str:
    job = copy.deepcopy(JOB)
    job["labeler"] = LABELERS[labeler]
    job["engine"]["args"]["base_url"] = server.url
    job["output"] = output
    job["run"] |= run
    path = f"{output}.yaml"
    Path(path).write_text(yaml.safe_dump(job))
    return path


def start(job: str, *more: str) -> subprocess.Popen[str]:
    program = f"from relabel.jobs.run import stop; stop.DRAIN_S = {DRAIN_S}\nfrom relabel.jobs.cli import main; main()"
    command = [sys.executable, "-c", program, "run", job, "--output", "json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(job: str, capsys: Any) -> dict[str, Any]:
    """Run to the end, in this process."""
    capsys.readouterr()
    assert relabel("run", job, "--output", "json") == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert relabel("verify", job) == 0
    return result


def committed(output: str) -> dict[str, bytes]:
    """The files of labels and quarantine that the manifest names."""
    manifest = json.loads(Path(output, "manifest.json").read_bytes())
    files = manifest["labels"] + manifest["quarantine"]
    return {file["path"]: Path(output, file["path"]).read_bytes() for file in files}


def journal(output: str) -> list[Path]:
    return sorted(Path(output).glob("journal/*/*"))


def wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("labeler", LABELERS)
def test_a_kill_costs_a_second_of_answers_and_what_was_in_flight(
    labeler: str, serve: Any, place: Path, capsys: Any
) -> None:
    counting = Counting()
    server = serve(counting)
    job = write_job(server, labeler, "killed")
    process = start(job)
    wait_until(lambda: len(counting.answered) >= 70)
    killed_s = time.monotonic()
    process.kill()
    process.communicate()
    time.sleep(2 * LATENCY_S)  # what was in flight is answered to nobody
    first = dict(counting.answered)
    late = counting.num_late(killed_s)
    counting.latency_s = 0.0
    result = finish(job, capsys)
    assert counting.num_twice <= max(late, FEW_ASKS), f"of {len(first)} answered before"
    assert len(first) - counting.num_twice > 20, "nothing was kept"
    undisturbed = finish(write_job(server, labeler, "undisturbed"), capsys)
    assert committed("killed") == committed("undisturbed")
    assert journal("killed") == []
    assert result["stages"] == undisturbed["stages"], "what the labels took is counted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("labeler", ["r1", "r3a"])
def test_a_stop_wastes_no_ask(labeler: str, number: int, serve: Any, place: Path, capsys: Any) -> None:
    """Asks take so long that no chunk can be finished before the stop's end."""
    counting = Counting(latency_s=1.0)
    server = serve(counting)
    job = write_job(server, labeler, "stopped", chunk_rows=48)
    process = start(job)
    wait_until(lambda: len(counting.asked) >= 2 * CONCURRENCY)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    first = json.loads(out)
    assert (process.returncode, first["labelled"]) == (20, 0), err
    assert first["this_run"]["in_vain"]["requests"] == 0
    num_asked = sum(counting.asked.values())
    assert num_asked == len(counting.answered), "nothing was left in flight"
    counting.latency_s = 0.0
    second = finish(job, capsys)
    assert counting.num_twice == 0
    assert sum(counting.asked.values()) > num_asked
    finish(write_job(server, labeler, "undisturbed", chunk_rows=48), capsys)
    assert committed("stopped") == committed("undisturbed")
    assert second["rows_open"] == 0


def test_a_second_worker_uses_what_the_first_one_kept(serve: Any, place: Path, capsys: Any) -> None:
    counting = Counting()
    server = serve(counting)
    job = write_job(server, "r1", "killed")
    process = start(job, "--workers", "2")
    wait_until(lambda: len(counting.answered) >= 60)
    killed_s = time.monotonic()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(2 * LATENCY_S)
    late = counting.num_late(killed_s)
    counting.latency_s = 0.0
    finish(job, capsys)
    assert counting.num_twice <= max(late, 2 * FEW_ASKS)
    finish(write_job(server, "r1", "undisturbed"), capsys)
    assert committed("killed") == committed("undisturbed")
