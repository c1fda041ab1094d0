"""Worker processes over object storage: one that is killed leaves its lease, and its
supervisor starts it again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.s3.conftest import ROWS, Outcome, call

POISON = "size 0, for number 7"


def test_one_writer_is_no_crew(write_job: Callable[..., Path]) -> None:
    job = write_job({"run": {"chunk_rows": 6, "single_writer": True}})
    done = call("run", job, "--workers", "2")
    assert done.returncode == 2, done.stderr
    assert "single_writer" in done.stderr


@pytest.mark.full
def test_a_row_that_kills_plain_commands_on_s3_is_set_aside_by_those_that_follow(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    """No supervisor: each command takes over the leases of the dead, and asks apart what these were at."""
    calm = {"p_garbage": 0.0, "p_truncated": 0.0, "p_refused": 0.0}
    job = write_job(
        {"run": {"chunk_rows": 6, "max_failed_fraction": 1.0, "lease_s": 3.0}},
        args={"crash": "kill", "crash_on": POISON, **calm},
    )
    codes = []
    while not codes or codes[-1] != 0:
        codes.append(call("run", job).returncode)
        assert len(codes) <= 12, codes
        time.sleep(3.5)
    report = json.loads(call("status", job).stdout)
    assert report["quarantined_by_status"] == {"engine": 1}, report
    assert report["labelled"] == ROWS - 1
    assert relabel("verify", job).returncode == 0


@pytest.mark.full
def test_a_worker_that_is_paused_for_longer_than_its_lease_makes_no_row_a_suspect_for_good(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    calm = {"p_garbage": 0.0, "p_truncated": 0.0, "p_refused": 0.0, "p_slow": 1.0, "slow_s": 0.5, "batch": 1}
    job = write_job({"run": {"chunk_rows": 6, "lease_s": 3.0}, "shards": 1}, args=calm)
    paused = subprocess.Popen([sys.executable, "-m", "relabel", "run", str(job)], stdout=subprocess.DEVNULL)
    time.sleep(4.0)
    os.kill(paused.pid, signal.SIGSTOP)
    time.sleep(4.0)
    assert call("run", job).returncode == 0
    os.kill(paused.pid, signal.SIGCONT)
    assert paused.wait(timeout=60) in (0, 10)
    report = json.loads(call("status", job).stdout)
    assert report["labelled"] == ROWS
    assert relabel("verify", job).returncode == 0
