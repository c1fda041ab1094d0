"""Worker processes over object storage: one that is killed leaves a lease behind, and its
supervisor starts it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.s3.conftest import ROWS, Outcome, call, labels

POISON = "size 0, for number 7"


@pytest.mark.full
def test_a_row_that_kills_workers_on_s3_is_set_aside_and_the_leases_of_the_dead_hold_nobody_up(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    """The row's document holds the text; the dead workers' leases outlive them by three seconds."""
    # so that each document is asked
    args = {
        "crash": "kill",
        "crash_on": POISON,
        "p_garbage": 0.0,
        "p_truncated": 0.0,
        "p_refused": 0.0,
    }
    job = write_job({"run": {"chunk_rows": 6, "max_failed_fraction": 1.0, "lease_s": 3.0}}, args=args)
    done = call("run", job, "--workers", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["engine_restarts"] >= 3
    assert report["quarantined_by_status"].get("engine", 0) >= 1, report
    assert report["labelled"] + report["quarantined"] == ROWS
    assert len(labels(f"{s3}/out")) >= 10
    assert relabel("verify", job).returncode == 0


def test_one_writer_is_no_crew(write_job: Callable[..., Path]) -> None:
    job = write_job({"run": {"chunk_rows": 6, "single_writer": True}})
    done = call("run", job, "--workers", "2")
    assert done.returncode == 2, done.stderr
    assert "single_writer" in done.stderr
