"""`--backend ray` on a real cluster of three nodes: the labels of an undisturbed run, whatever happens to the nodes."""

import json
import os
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

from tests.engines_openai.counting_server import FEW_ASKS, LATENCY_S, Counting
from tests.engines_openai.scripted_server import MODEL, ScriptedServer
from tests.supervise.pool_jobs import command, files, is_worker, relabel, verified, workers_of, write_job

SECRET = "a-secret-that-no-log-may-hold-7f3a"


def receipts(job: Path) -> int:
    return len(list((job.parent / "out" / "receipts").rglob("*.json")))


def wait_for(what: Callable[[], Any], *, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def start(job: Path, cluster: Any, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "AWS_SECRET_ACCESS_KEY": SECRET, "OPENAI_API_KEY": "sk-run-0123456789"}
    line = command(job, "--backend", "ray", "--address", cluster.address, *more)
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_driver_killed_by_kill_9_loses_nothing_and_leaves_no_engine(cluster: Any, tmp_path: Path) -> None:
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.2, capacity=4)
    process = start(job, cluster, "--workers", "2")
    wait_for(lambda: receipts(job) >= 2)
    workers = workers_of(job)
    assert workers
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_worker, workers)))
    write_job(tmp_path)
    code, report, said = relabel(job)
    assert (code, report["labelled"]) == (0, 36), said
    assert verified(job)


def test_workers_killed_on_the_nodes_cost_a_second_of_answers(cluster: Any, tmp_path: Path) -> None:
    """Counted by the server that they ask."""
    counting = Counting()
    server = ScriptedServer(counting)
    try:
        job = job_over(server, tmp_path)
        process = start(job, cluster, "--workers", "2")
        wait_for(lambda: len(counting.answered) >= 60)
        killed_s = time.monotonic()
        for worker in workers_of(job):
            worker.kill()
        time.sleep(2 * LATENCY_S)  # what was in flight is answered to nobody
        num_first = len(counting.answered)
        num_late = counting.num_late(killed_s)
        counting.latency_s = 0.0
        out, said = process.communicate(timeout=120)
    finally:
        server.close()
    assert process.returncode == 0, said
    assert json.loads(out)["rows_open"] == 0
    assert counting.num_twice <= max(num_late, 2 * FEW_ASKS), f"of {num_first} answered before"
    assert num_first - counting.num_twice > 10, "nothing was kept"
    assert verified(job)


def job_over(server: ScriptedServer, folder: Path) -> Path:
    """A job that asks a chat server, 96 rows in two shards."""
    path = write_job(folder, rows=96, shards=2, run={"chunk_rows": 24})
    job = yaml.safe_load(path.read_text())
    rows = [
        {
            "query_id": f"q{row // 6}",
            "query": f"shoe {row // 6}",
            "doc_id": f"d{row}",
            "document": f"a red shoe of kind {row}",
        }
        for row in range(96)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    args = {"served_model": MODEL, "mode": "chat", "base_url": server.url, "concurrency": 8}
    job |= {"labeler": {"name": "r1"}, "engine": {"name": "openai", "args": args}}
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_node_lost_in_the_middle_of_a_job_changes_no_label_and_no_log_holds_a_secret(
    cluster: Any, tmp_path: Path
) -> None:
    undisturbed = write_job(tmp_path / "undisturbed", rows=600)
    assert relabel(undisturbed)[0] == 0
    job = write_job(tmp_path / "disturbed", rows=600, p_slow=0.5, slow_s=0.05, capacity=8)
    process = start(job, cluster)
    wait_for(lambda: receipts(job) >= 5)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    seen = receipts(job)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert seen < 100, "the node was lost after the end; make the job longer"
    report = json.loads(out)
    assert (report["rows"], report["labelled"], report["rows_open"]) == (600, 600, 0)
    assert files(job) == files(undisturbed)
    assert verified(job)
    logs = [path for path in Path(cluster.head_node.get_session_dir_path()).rglob("*") if path.is_file()]
    assert len(logs) > 5
    for path in [*logs, *(tmp_path / "disturbed").rglob("*")]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in out + said


def test_a_node_that_joins_in_the_middle_of_a_job_finds_work(cluster: Any, tmp_path: Path) -> None:
    cluster.wait_for_nodes()  # a node lost in an earlier test may not be missed yet, and would be counted
    job = write_job(tmp_path, rows=480, shards=None, p_slow=1.0, slow_s=1.0, capacity=8)  # 30 s for two workers
    process = start(job, cluster)
    wait_for(lambda: receipts(job) >= 3)
    before = workers_that_committed(job)
    cluster.add_node(num_cpus=2, num_gpus=1)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out)["labelled"]) == (0, 480), said
    assert "the cluster has grown: asked Ray for 1 more actor" in said
    assert len(workers_that_committed(job)) > len(before), said
    assert verified(job)


def workers_that_committed(job: Path) -> set[str]:
    """Processes, by the receipts."""
    paths = (job.parent / "out" / "receipts").rglob("*.json")
    return {json.loads(path.read_bytes())["worker"] for path in paths}


def test_nothing_in_the_drivers_working_directory_is_imported_on_the_nodes(cluster: Any, tmp_path: Path) -> None:
    """Ray itself puts that folder first on the path of its workers."""
    job, marks = write_job(tmp_path), tmp_path / "imported"
    for name in ("jobs", "manifests", "labelers", "numpy", "pyarrow", "pydantic", "yaml", "ray"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(marks)!r}, 'a').write({name!r} + chr(10))\nraise ImportError({name!r})\n"
        )
    line = [str(Path(sys.executable).with_name("relabel")), "run", str(job), "--output", "json"]
    line += ["--backend", "ray", "--address", cluster.address, "--workers", "2"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert not marks.exists(), marks.read_text()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["labelled"] == 36


def test_no_cluster_at_the_address_is_reported_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    job = write_job(tmp_path)
    code, report, _ = relabel(job, "--backend", "ray", "--address", "127.0.0.1:1")
    assert (code, report["error"]) == (4, "MissingExtraError")
    assert "ray start --head" in report["message"]
