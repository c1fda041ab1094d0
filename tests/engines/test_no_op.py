"""A run with nothing to do: no engine, no torch, a few times the start of the libraries that any run needs."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.cli import main
from tests.engines.conftest import write_job
from tests.jobs.conftest import Outcome, no_scheduler, relabel  # noqa: F401
from tests.labelers.driving import caps

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
    assert not {*HEAVY, "rich"} & set(found["modules"])
    assert busy_s < 4 * called(LIBRARIES)[2]
    assert 'relabel_run_engine_starts{job="tiny",shard="all"} 0.0' in metrics.read_text()
    looked = json.loads(called(PROGRAM, "status", finished)[0].splitlines()[-1])
    assert looked["code"] == 0
    assert not {*HEAVY, "asyncio", "fsspec", "rich"} & set(looked["modules"])


# First estimates: how fast a model answers here, and how long its answers are, is known from its last run or a
# probe, or is reported as unknown. Nothing but estimates depends on that.


class Home:
    """Jobs in one folder, with a cache of their own."""

    def __init__(self, folder: Path, model: Path, relabel: Callable[..., Outcome]) -> None:  # noqa: F811
        self.folder, self.model, self.relabel = folder, model, relabel
        self.cache = folder / "cache"

    def job(self, name: str, *, labeler: str = "umbrela", dtype: str = "float32") -> str:
        """A job over 24 rows, of which others have other texts."""
        args = {"cache_dir": str(self.cache), "device": "cpu", "dtype": dtype, "num_threads": 1}
        place = self.folder / name
        place.mkdir(exist_ok=True)
        labels = {"name": labeler, **caps(labeler, think=6, text=4)}
        engine = {"name": "transformers", "model": str(self.model), "args": args}
        return write_job(place, self.model, rows=24, labeler=labels, engine=engine, run={"max_failed_fraction": 1.0})

    def call(self, *arguments: str) -> dict[str, Any]:
        done = self.relabel(*arguments, "--output", "json")
        assert done.code == 0, done
        return done.json

    def estimate(self, job: str, *more: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("plan", job, *more)["estimate"]
        return found

    @property
    def kept(self) -> list[Path]:
        return sorted((self.cache / "rates").glob("*"))


@pytest.fixture
def home(tmp_path: Path, model_dir: Callable[..., Path], relabel: Callable[..., Outcome]) -> Home:  # noqa: F811
    return Home(tmp_path, model_dir(), relabel)


def test_the_next_plan_with_a_model_and_labeler_knows_the_rate_of_their_last_run(home: Home) -> None:
    first = home.job("first")
    before = home.estimate(first)
    assert before["seconds"] is None
    assert before["basis"]["seconds"].startswith("no run of this model on this device is known")
    ran = home.call("run", first)
    (kept,) = home.kept
    held = json.loads(kept.read_bytes())
    for stage, seen in held["stages"].items():
        tokens = {name: seen[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
        assert {"asks": seen["answers"], **tokens} == ran["stages"][stage]
    assert (held["source"], held["rows"]) == ("run", 24)
    home.cache = home.folder / "other"
    second = home.job("second")
    assert home.estimate(second)["seconds"] is None
    plan = (home.folder / "second/out/plan.json").read_bytes()
    home.cache = home.folder / "cache"
    after = home.estimate(home.job("second"))
    assert (home.folder / "second/out/plan.json").read_bytes() == plan, "a plan depends on what the cache holds"
    assert after["basis"]["seconds"].startswith("this model's last run on this device (24 rows, 2")
    assert after["basis"]["output_tokens"] == after["basis"]["seconds"]
    assert after["seconds"][0] > 0
    came = home.call("run", second)["stages"]
    for name in ("asks", "prompt_tokens", "output_tokens"):
        low, _, high = after[name]
        assert low <= sum(stage[name] for stage in came.values()) <= high < 4 * low
    assert home.estimate(home.job("third", labeler="r1"))["seconds"] is None
    kept.write_text("{")
    assert f"{kept} can't be used" in home.estimate(home.job("fourth"))["basis"]["seconds"]


def test_a_probe_measures_and_leaves_the_output_with_a_plan_alone(home: Home) -> None:
    """Of whole queries where the labeler sees them."""
    path = home.job("probed", labeler="review")
    found = home.estimate(path, "--probe")
    assert found["basis"]["seconds"].startswith("a probe (")
    assert json.loads(home.kept[0].read_bytes())["rows"] % 2 == 0
    assert found["seconds"][0] > 0
    there = {one.name for one in (home.folder / "probed/out").rglob("*") if one.suffix == ".json"}
    assert there == {"plan.json"}
    assert home.estimate(path)["seconds"] == found["seconds"]
    home.call("run", path)
    assert home.call("plan", path, "--probe")["estimate"]["seconds"] == [0, 0, 0]
