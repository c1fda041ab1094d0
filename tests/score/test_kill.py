"""kill -9 or SIGTERM amid a score run, then the same command again: the bytes of an undisturbed run, nothing lost,
nothing doubled.

Every killed process is a real `relabel score` in a fresh interpreter. What a kill does at each failpoint, tests/faults
shows for the machinery that both share; here it is what is scoring's own: batches that follow from a chunk alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 400
CHUNK = 25


def write_scattered_pairs(folder: Path) -> Path:
    """Pairs of forty queries that lie scattered, documents of very different length, so that batches mix rows."""
    rows = range(ROWS)
    table = {
        "query_id": [f"q{row % 40}" for row in rows],
        "query": [f"red shoe {row % 30}" for row in rows],
        "doc_id": [f"d{row}" for row in rows],
        "title": [f"shoe {row % 7}" for row in rows],
        "body": [" ".join(["running", "blue", "size", str(row % 30)] * (row % 4)) for row in rows],
    }
    pq.write_table(pa.table(table), folder / "pairs.parquet", row_group_size=64)
    return folder / "pairs.parquet"


def command(student: Path, pairs: Path, to: Path) -> list[str]:
    options = [
        "--shards",
        "2",
        "--chunk-rows",
        str(CHUNK),
        "--batch-tokens",
        "96",
        "--device",
        "cpu",
        "--output",
        "json",
    ]
    return [sys.executable, "-m", "relabel", "score", str(student), "--input", str(pairs), "--to", str(to), *options]


def environment(failpoint: str = "") -> dict[str, str]:
    return {**os.environ, "RELABEL_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}


def run(line: list[str], failpoint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, env=environment(failpoint), capture_output=True, text=True, timeout=120, check=False)


def committed(to: Path) -> dict[str, str]:
    """Every label file that the manifest names, with the digest of its bytes."""
    manifest = json.loads((to / "manifest.json").read_bytes())
    assert manifest["rows"] == {"in": ROWS, "labelled": ROWS, "reused": 0, "quarantined": 0}
    return {file["path"]: file["sha256"] for file in manifest["labels"]}


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The pairs, and the files of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    pairs = write_scattered_pairs(folder)
    done = run(command(tiny, pairs, folder / "out"))
    assert done.returncode == 0, done.stderr
    return pairs, committed(folder / "out")


@pytest.mark.full
@pytest.mark.parametrize("failpoint", ["after_labels", "after_receipt:5"])
def test_a_killed_run_ends_with_the_bytes_of_one_left_alone(
    undisturbed: tuple[Path, dict[str, str]], tiny: Path, tmp_path: Path, failpoint: str
) -> None:
    pairs, files = undisturbed
    line = command(tiny, pairs, tmp_path / "out")
    killed = run(line, failpoint)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out/manifest.json").exists()
    assert run(line).returncode == 0
    assert committed(tmp_path / "out") == files
    assert run(line).returncode == 10
