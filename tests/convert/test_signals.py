"""A conversion that is asked to end leaves no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars


def test_a_conversion_that_a_signal_ends_leaves_no_scratch_files_and_no_target(tmp_path: Path) -> None:
    rows = 9_000_000
    polars.select(
        query_id=polars.format("q{}", polars.int_range(rows) // 10),
        doc_id=polars.format("d{}", polars.int_range(rows)),
        grade=polars.int_range(rows) % 3,
    ).write_parquet(tmp_path / "labels.parquet")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    call = [
        sys.executable,
        "-m",
        "relabel",
        "convert",
        str(tmp_path / "labels.parquet"),
        str(tmp_path / "labels.qrels"),
    ]
    process = subprocess.Popen(call, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60.0
    while not any(scratch.iterdir()):
        assert process.poll() is None, "it ended before the signal"
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)  # a signal within Polars' very first call makes it panic
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "Asked to stop by SIGTERM."
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.parquet", "scratch"]
