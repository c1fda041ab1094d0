"""kill -9 anywhere, run again: nothing lost, nothing doubled, labels and quarantine byte for byte those of an undisturbed run.

Every killed process is a real `relabel run` in a fresh interpreter. The loop over `FAILPOINTS` covers a new failpoint at birth.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from manifests.failpoints import FAILPOINTS

ROWS = 60
ATTEMPTS_TO_FINISH = 40


def write_job(folder: Path, *, labeler: str = "r3a", samples: int = 1, slow: bool = False, slow_s: float = 0.01) -> Path:
    """Sixty pairs of ten scattered queries, legal duplicates among them, and an engine that also fails a few."""
    rows = range(ROWS)
    table = {
        "query_id": [f"q{row % 10}" for row in rows],
        "query": [f"red shoes number {row % 10}" for row in rows],
        "doc_id": [f"d{row % 55}" for row in rows],
        "document": [f"Red running shoes, size {row % 7}, for number {row % 10}." * (row % 3) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / "pairs.parquet", row_group_size=16)
    args = {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.05}
    if slow:
        args |= {"p_slow": 0.5, "slow_s": slow_s, "capacity": 8}
    job = {
        "name": "faults",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": {"name": labeler, "attempts": 2, "samples": samples, "temperature": 0.0 if samples == 1 else 0.8},
        "engine": {"name": "fake", "seed": 3, "args": args},
        "output": str(folder / "out"),
        "shards": 3,
        "run": {"chunk_rows": 6, "max_failed_fraction": 1.0},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def command(job: Path, *more: str, verb: str = "run") -> list[str]:
    return [sys.executable, "-m", "jobs", verb, str(job), "--output", "json", *more]


def run(job: Path, failpoint: str = "", *, verb: str = "run") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RELABEL_FAILPOINT": failpoint}
    return subprocess.run(command(job, verb=verb), env=environment, capture_output=True, text=True, timeout=60, check=False)


def committed(job: Path) -> dict[str, str]:
    """What a reader sees: every label and quarantine file that the manifest names, with the digest of its bytes."""
    out = job.parent / "out"
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert manifest["rows"]["in"] == ROWS
    assert manifest["rows"]["labelled"] + manifest["rows"]["quarantined"] == ROWS
    assert manifest["rows"]["quarantined"] > 0, "the faults of the engine should leave something in quarantine"
    return {
        file["path"]: hashlib.sha256((out / file["path"]).read_bytes()).hexdigest() for file in manifest["labels"] + manifest["quarantine"]
    }


def verified(job: Path) -> bool:
    found = subprocess.run([sys.executable, "-m", "jobs", "verify", str(job)], capture_output=True, text=True, timeout=60, check=False)
    print(found.stderr)  # shown by pytest where the verdict was not the one wanted
    return found.returncode == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    done = run(job)
    assert done.returncode == 0, done.stderr
    return committed(job)


@pytest.mark.parametrize("hits", [1, 5])
@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_at_a_failpoint_and_run_again_equals_an_undisturbed_run(
    tmp_path: Path, undisturbed: dict[str, str], failpoint: str, hits: int
) -> None:
    job = write_job(tmp_path)
    killed = run(job, f"{failpoint}:{hits}")
    happens_once = failpoint.endswith(("plan", "plan_rows", "manifest"))
    assert killed.returncode == (0 if happens_once and hits > 1 else -signal.SIGKILL), killed.stderr
    again = run(job)
    assert again.returncode in (0, 10), again.stderr
    assert committed(job) == undisturbed
    assert verified(job)


def test_killed_at_every_write_in_turn_still_ends_whole(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """A machine that can do no more than one commit before it dies: forty deaths later the job is done."""
    job = write_job(tmp_path)
    deaths = 0
    for _ in range(ATTEMPTS_TO_FINISH):
        if run(job, "after_receipt:2").returncode != -signal.SIGKILL:
            break
        deaths += 1
    assert deaths >= 3
    assert run(job).returncode in (0, 10)
    assert committed(job) == undisturbed
    assert verified(job)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_a_random_instant_and_run_again_equals_an_undisturbed_run(
    tmp_path: Path, undisturbed: dict[str, str], seed: int, number: signal.Signals
) -> None:
    job = write_job(tmp_path, slow=True)
    process = subprocess.Popen(command(job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(random.Random(seed).uniform(0.2, 1.5))
    process.send_signal(number)
    code = process.wait(30)
    assert code in (-number, 0, 20)
    assert run(job).returncode in (0, 10)
    assert committed(job) == undisturbed
    assert verified(job)


def test_many_workers_at_once_lose_and_double_nothing(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    job = write_job(tmp_path, slow=True)
    workers = [subprocess.Popen(command(job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(4)]
    codes = [worker.wait(60) for worker in workers]
    assert set(codes) <= {0, 10, 20, 75}
    assert run(job).returncode in (0, 10)
    assert committed(job) == undisturbed
    assert verified(job)


def test_shards_run_apart_in_any_order_equal_one_run_of_all(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    job = write_job(tmp_path)
    for shard in (2, 0, 1):
        done = subprocess.run(command(job, "--shard", f"{shard}/3"), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert committed(job) == undisturbed


@pytest.mark.parametrize("failpoint", ["after_labels:2", "before_receipt:1", "after_receipt:1", "after_receipt:3", "before_manifest:1"])
def test_a_killed_retry_called_again_equals_an_undisturbed_retry(tmp_path: Path, failpoint: str) -> None:
    jobs = [write_job(tmp_path / name) for name in ("undisturbed", "killed")]
    for job in jobs:
        assert run(job).returncode == 0
    assert run(jobs[0], verb="retry").returncode == 0
    assert run(jobs[1], failpoint, verb="retry").returncode == -signal.SIGKILL
    assert run(jobs[1], verb="run" if failpoint.startswith("before_manifest") else "retry").returncode == 0
    assert committed(jobs[1]) == committed(jobs[0])
    assert verified(jobs[1])


@pytest.mark.parametrize(("labeler", "samples"), [("direct", 1), ("graph-grpo", 1), ("r3a", 3)])
def test_every_labeler_and_many_samples_survive_a_kill(tmp_path: Path, labeler: str, samples: int) -> None:
    jobs = [write_job(tmp_path / name, labeler=labeler, samples=samples) for name in ("undisturbed", "killed")]
    assert run(jobs[0]).returncode == 0
    assert run(jobs[1], "after_receipt:4").returncode == -signal.SIGKILL
    assert run(jobs[1]).returncode == 0
    assert committed(jobs[1]) == committed(jobs[0])
    assert verified(jobs[1])


def test_a_chunk_that_is_done_again_with_other_bytes_leaves_a_true_manifest(tmp_path: Path) -> None:
    """As our own errors advise: the receipt is moved away and the job run again, on an engine that answers otherwise now."""
    job = write_job(tmp_path)
    assert run(job).returncode == 0
    out = tmp_path / "out"
    receipt = out / "receipts" / "shard-00000" / "chunk-000000.json"
    held = json.loads(receipt.read_bytes())
    rows = pq.read_table(out / held["labels"]["path"])
    receipt.unlink()
    changed = rows.set_column(rows.schema.get_field_index("output_tokens"), "output_tokens", pa.array([9] * len(rows), pa.int32()))
    path = out / "labels" / "shard-00000" / "chunk-000000-0000000000000000.parquet"
    pq.write_table(changed, path)
    held["labels"] = {"path": str(path.relative_to(out)), "rows": len(rows), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    receipt.write_text(json.dumps(held))
    assert not verified(job)
    assert run(job).returncode == 0
    assert str(path.relative_to(out)) in committed(job)
    assert verified(job)


def test_two_retries_that_end_together_leave_a_true_manifest(tmp_path: Path) -> None:
    job = write_job(tmp_path, slow=True)
    assert run(job).returncode == 0
    workers = [subprocess.Popen(command(job, "--shard", f"{n}/3", verb="retry"), stdout=subprocess.DEVNULL) for n in range(3)]
    assert {worker.wait(60) for worker in workers} <= {0, 10}
    assert verified(job)


def test_a_second_ctrl_c_stops_at_once_with_130_and_what_was_committed_stays(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    job = write_job(tmp_path, slow=True, slow_s=30.0)
    process = subprocess.Popen(command(job), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "makes its answers up" not in (line := process.stderr.readline()) and line:
        pass  # the engine's own remark: the run has begun
    process.send_signal(signal.SIGINT)
    while "Ctrl-C" not in (line := process.stderr.readline()) and line:
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    process.stderr.close()
    write_job(tmp_path)
    assert run(job).returncode in (0, 10)
    assert committed(job) == undisturbed


def test_more_shards_than_files_may_be_open_can_be_run(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    rows = range(300)
    table = {"query_id": [f"q{row}" for row in rows], "query": ["socks"] * 300, "doc_id": ["d"] * 300, "document": ["wool socks"] * 300}
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    spec = yaml.safe_load(job.read_text())
    job.write_text(yaml.safe_dump({**spec, "shards": 300}))
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *command(job)]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert verified(job)
