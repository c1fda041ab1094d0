"""A run with nothing to do: no engine, no torch, two seconds."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "vllm",
    "llguidance",
    "ray",
    "s3fs",
    "botocore",
    "polars",
    "onnxruntime",
)
PROGRAM = """
import json, sys
from relabel.jobs.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


@pytest.fixture
def finished(tmp_path: Path, model_dir: Callable[..., Path]) -> str:
    """A job of four pairs that the transformers engine has labelled."""
    numbers = range(4)
    pairs = {
        "query_id": [f"q{n // 2}" for n in numbers],
        "query": [f"red shoe {n // 2}" for n in numbers],
        "doc_id": [f"d{n}" for n in numbers],
        "document": [f"a shoe, kind {n}" for n in numbers],
    }
    pq.write_table(pa.table(pairs), tmp_path / "pairs.parquet")
    job: dict[str, Any] = {
        "name": "tiny",
        "input": {"path": str(tmp_path / "pairs.parquet")},
        "labeler": {"name": "direct"},
        "engine": {
            "name": "transformers",
            "model": str(model_dir()),
            "max_prompt_tokens": 2048,
            "args": {"device": "cpu"},
        },
        "output": str(tmp_path / "out"),
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(SystemExit) as end:
        main(["run", str(path)])
    assert end.value.code == 0
    return str(path)


def test_nothing_to_do_imports_no_torch_and_takes_under_two_seconds(finished: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "run",
            finished,
            "--until",
            "06:00",
            "--metrics",
            str(tmp_path / "m.prom"),
            "--log-format",
            "json",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 10, done.stderr
    assert not set(HEAVY) & set(found["modules"])
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert busy_s < 2.0  # of the processor, not of the clock: the machine that runs the tests may be busy
    assert 'relabel_run_engine_starts{job="tiny",shard="all"} 0.0' in (tmp_path / "m.prom").read_text()


@pytest.mark.full
def test_work_to_do_does_import_torch(finished: str) -> None:
    """The other test's way of looking can see it."""
    call = [sys.executable, "-c", PROGRAM, "run", finished, "--set", f"output={finished}-other"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0
    assert "torch" in found["modules"]
