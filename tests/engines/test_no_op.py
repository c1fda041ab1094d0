"""A run with nothing to do: no engine, no torch, a few times the start of the libraries that any run needs."""

from __future__ import annotations

import json
import resource
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


LIBRARIES = "import click, jinja2, pyarrow.dataset, pyarrow.parquet, pydantic, yaml"


def called(*words: str) -> tuple[str, str, float]:
    """Stdout, stderr and processor seconds of a process: not of the clock, since the machine may be busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, check=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, done.stderr, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_nothing_to_do_imports_no_torch_and_takes_four_times_the_libraries_start_at_most(
    tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    finished = write_job(tmp_path, model_dir(), rows=4, shards=1)
    with pytest.raises(SystemExit) as end:
        main(["run", finished])
    assert end.value.code == 0
    metrics = tmp_path / "m.prom"
    words = ("run", finished, "--until", "06:00", "--metrics", str(metrics), "--log-format", "json")
    stdout, stderr, busy_s = called(PROGRAM, *words)
    found = json.loads(stdout.splitlines()[-1])
    assert found["code"] == 10, stderr
    assert not set(HEAVY) & set(found["modules"])
    assert busy_s < 4 * called(LIBRARIES)[2]
    assert 'relabel_run_engine_starts{job="tiny",shard="all"} 0.0' in metrics.read_text()


def test_a_model_is_loaded_without_the_parts_of_transformers_that_nothing_here_uses(
    tmp_path: Path, model_dir: Callable[..., Path]
) -> None:
    """scikit-learn and SciPy are two fifths of its start."""
    job = write_job(tmp_path, model_dir(), rows=4, shards=1)
    stdout, stderr, _ = called(PROGRAM.replace("main(sys.argv[1:])", "main()"), "run", job)
    found = json.loads(stdout.splitlines()[-1])
    assert found["code"] == 0, stderr
    assert {"transformers", "pyarrow"} <= set(found["modules"])
    assert not {"sklearn", "scipy", "pandas"} & set(found["modules"])


def test_what_is_not_ours_finds_pandas_in_a_command_s_process() -> None:
    """Even after pyarrow has asked for it without success."""
    pytest.importorskip("pandas")
    program = "{}\nimport pyarrow as pa\npa.array([1])\n__name__ = {!r}\n{}"
    ours = "from relabel.manifests.process import own_process; own_process(); __name__ = 'relabel.x'"
    called(program.format(ours, "plugin", "assert pa.table({'a': [1]}).to_pandas()['a'][0] == 1"))
    called(program.format(ours, "plugin", "import pandas"))
