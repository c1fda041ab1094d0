"""kill -9 in the middle of a run that takes labels over; run again; labels byte for byte those of
an undisturbed one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reuse.conftest import Days, rows_of


def killed(job: Path, failpoint: str) -> int:
    environment = {**os.environ, "RELABEL_FAILPOINT": failpoint}
    return subprocess.run(
        [sys.executable, "-m", "relabel", "run", str(job)],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    ).returncode


def committed(days: Days, day: str) -> dict[str, str]:
    files = [file["path"] for kind in ("labels", "quarantine") for file in days.manifest(day)[kind]]
    return {path: hashlib.sha256((days.out(day) / path).read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "failpoint", ["after_labels:2", "after_answers:3", "before_receipt:4", "after_receipt:1", "after_receipt:5"]
)
def test_killed_while_taking_over_and_asking_ends_like_an_undisturbed_run(days: Days, failpoint: str) -> None:
    rows = rows_of(12, 5)
    faults = {"engine": {"args": {"p_garbage": 0.2}}, "labeler": {"attempts": 2}, "run": {"max_failed_fraction": 1.0}}
    days.run("monday", rows, **faults)
    for row in (2, 17, 31, 32, 48):
        rows[row] = {**rows[row], "document": "Red shoes."}
    days.run("undisturbed", rows, reuse=["monday"], **faults)
    job = days.job("tuesday", rows, reuse=["monday"], **faults)
    assert killed(job, failpoint) == -signal.SIGKILL
    days.run("tuesday", rows, reuse=["monday"], **faults)
    assert committed(days, "tuesday") == committed(days, "undisturbed")
    assert days.manifest("tuesday")["rows"] == days.manifest("undisturbed")["rows"]
    assert days.manifest("tuesday")["rows"]["reused"] > 0
