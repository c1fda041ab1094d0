"""Jobs for worker pools: a folder with pairs, some of which bring the fake engine down, and the
real command over it.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main

POISON = "POISON"


def write_job(
    folder: Path,
    *,
    rows: int = 36,
    poison: Sequence[int] = (),
    shards: int | None = 3,
    run: dict[str, Any] | None = None,
    **args: Any,
) -> Path:
    """Pairs of six rows a query, and a job whose engine goes down over the poisonous ones in the
    way that `crash` says.
    """
    numbers = range(rows)
    table = {
        "query_id": [f"q{row // 6}" for row in numbers],
        "query": [f"red shoes number {row // 6}" for row in numbers],
        "doc_id": [f"d{row}" for row in numbers],
        "document": [f"Red running shoes, size {row % 7}." + f" {POISON}" * (row in poison) for row in numbers],
    }
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), folder / "pairs.parquet", row_group_size=16)
    job = {
        "name": "pool",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": {"name": "r3a"},
        "engine": {"name": "fake", "seed": 3, "args": {"crash_on": POISON, "capacity": 16, "batch": 4, **args}},
        "output": str(folder / "out"),
        "shards": shards,
        "run": {"chunk_rows": 6, "max_failed_fraction": 1.0, **(run or {})},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def command(job: Path, *more: str, verb: str = "run") -> list[str]:
    return [sys.executable, "-m", "relabel", verb, str(job), "--output", "json", *more]


def relabel(
    job: Path, *more: str, verb: str = "run", variables: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the one JSON object on stdout, and stderr."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command(job, *more, verb=verb), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.count("\n") == 1, f"stdout is not one line of JSON: {done.stdout}\n{done.stderr}"
    return done.returncode, json.loads(done.stdout), done.stderr


def verified(job: Path) -> bool:
    with pytest.raises(SystemExit) as end:
        main(["verify", str(job)])
    return not end.value.code


def files(job: Path, *kinds: str) -> dict[str, str]:
    """Every committed file of these kinds with the digest of its bytes, through the manifest."""
    out = job.parent / "out"
    manifest = json.loads((out / "manifest.json").read_bytes())
    paths = [file["path"] for kind in kinds or ("labels", "quarantine") for file in manifest[kind]]
    return {path: hashlib.sha256((out / path).read_bytes()).hexdigest() for path in paths}


def rows(job: Path, kind: str = "labels") -> dict[int, dict[str, Any]]:
    """Committed rows by row id, through the manifest; each id occurs once."""
    out = job.parent / "out"
    manifest = json.loads((out / "manifest.json").read_bytes())
    found = [row for file in manifest[kind] for row in pq.read_table(out / file["path"]).to_pylist()]
    by_id = {row["row_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id


def workers_of(job: Path) -> list[psutil.Process]:
    """Living workers that the run's crash journals name."""
    found = []
    for path in (job.parent / "out/crashes").glob("*.json"):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = psutil.Process(int(json.loads(path.read_bytes())["worker"].rpartition("-")[2]))
            found += [process] if is_worker(process) else []
    return found


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker; one that is ending has no command line any more."""
    try:
        return "relabel run /dev/stdin" in " ".join(process.cmdline())
    except psutil.Error:
        return False
