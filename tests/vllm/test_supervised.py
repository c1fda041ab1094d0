"""Worker processes with the real engine, one of which is killed: nothing lost, nobody left, and started again."""

import json
import os
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.supervise.pool_jobs import is_worker

from .conftest import KV_CACHE_GIB

ROWS = 36


def test_a_real_engine_that_is_killed_is_started_again_and_every_row_is_accounted_for(model_dir, running, tmp_path):
    running.close()
    rows = range(ROWS)
    table = {
        "query_id": [f"q{row // 6}" for row in rows],
        "query": [f"red shoes {row // 6}" for row in rows],
        "doc_id": [f"d{row}" for row in rows],
        "document": [f"a shoe of size {row}, " * 4 for row in rows],
    }
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    job = {
        "name": "killed",
        "input": {"path": str(tmp_path / "pairs.parquet")},
        "labeler": {"name": "r3a", "max_think_tokens": 48, "max_text_tokens": 8},
        "engine": {
            "name": "vllm",
            "model": str(model_dir()),
            "max_prompt_tokens": 3500,
            "args": {
                "dtype": "float32",
                "max_num_seqs": 2,
                "kv_cache_space_gib": KV_CACHE_GIB,
                "cache_dir": str(tmp_path / "cache"),
            },
        },
        "output": str(tmp_path / "out"),
        "shards": 2,
        # random weights write nothing that can be read
        "run": {"chunk_rows": 3, "max_failed_fraction": 1.0, "stop_when_unreadable": False},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "relabel", "run", str(path), "--workers", "1", "--output", "json"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        until = time.monotonic() + 120
        while len(list((tmp_path / "out" / "receipts").rglob("*.json"))) < 2:
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        (worker,) = [child for child in psutil.Process(process.pid).children() if is_worker(child)]
        family = [worker, *worker.children(recursive=True)]
        worker.kill()
        out, _ = process.communicate(timeout=200)
    said = (tmp_path / "stderr").read_text()
    assert process.returncode == 0, said
    assert "killed by signal 9" in said, "the engine was killed after its last commit; make the job longer"
    report = json.loads(out)
    assert report["engine_restarts"] == 1
    assert report["quarantined_by_status"].get("engine", 0) == 0
    assert report["labelled"] + report["quarantined"] == ROWS
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    verified = subprocess.run(
        [sys.executable, "-m", "relabel", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stderr
