"""A run with nothing to do: no engine, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.jobs.cli import main
from tests.engines.conftest import write_job

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


def test_nothing_to_do_imports_no_torch(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    finished = write_job(tmp_path, model_dir(), rows=4, shards=1)
    with pytest.raises(SystemExit) as end:
        main(["run", finished])
    assert end.value.code == 0
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
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 10, done.stderr
    assert not set(HEAVY) & set(found["modules"])
    assert 'relabel_run_engine_starts{job="tiny",shard="all"} 0.0' in (tmp_path / "m.prom").read_text()
