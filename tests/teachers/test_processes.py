"""Teachers that learn from rewards in several processes: the same rollouts, token for token, the same rewards and
advantages, and the same weights, whatever the number of processes, also where it changes on the way.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

pytest.importorskip("trl")
pytest.importorskip("peft")

from relabel.distill.teachers.spec import EDGES_NAME, ROLLOUTS_NAME, read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher
from relabel.distill.training.output import list_checkpoints, step_of
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs
from tests.shared import made_once
from tests.teachers.chunked import write_questions
from tests.teachers.process_runs import go

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "process_runs.py"
METHODS = ("grpo", "graph-grpo", "res-rag")
LEARNED = ("whole", "adapters")
WAYS = [(method, learned) for method in METHODS for learned in LEARNED]
FEW, MANY = 4, 20
"""Steps of a training."""
BOUND = 1e-6
"""On weights and figures; 1.4e-7 was found in weights after 20 steps, since some sums stay in float32."""

Make = Callable[..., dict[str, Any]]
Seen = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def make(base_dir: Path, short_templates: str, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Plain values of a spec: twelve rollouts a step, in groups of two, whatever the number of processes."""
    data = tmp_path_factory.mktemp("data")
    rows = [{**row, "query_id": f"q{number}"} for number, row in enumerate(make_pairs()[:12])]
    pq.write_table(pa.Table.from_pylist(rows), data / "pairs.parquet")
    write_questions(data / "questions.parquet", 12)
    of_pairs = {"data": {"gold": {"path": str(data / "pairs.parquet")}}}
    labelers: dict[str, dict[str, Any]] = {
        "grpo": {"name": "r1", "grades": 3, "max_think_tokens": 1, "templates": short_templates},
        "graph-grpo": {"name": "graph-grpo", "max_text_tokens": 1, "templates": short_templates},
        "res-rag": {"name": "evidence-set"},
    }
    held: dict[str, dict[str, Any]] = {
        "grpo": {**of_pairs, "rollouts": {"group": 2, "beta": 0.05, "temperature": 0.9}},
        "graph-grpo": {**of_pairs, "rollouts": {"group": 2}},
        "res-rag": {
            "data": {"gold": {"path": str(data / "questions.parquet")}},
            "generator": {"name": "fake"},
            "rollouts": {"group": 2, "max_answer_tokens": 64},
        },
    }

    def spec(output: Path, method: str, learned: str = "whole", *, processes: int, **train: Any) -> dict[str, Any]:
        return {
            "name": "tiny",
            "method": method,
            "init": str(base_dir),
            "labeler": labelers[method],
            **held[method],
            "train": {
                "max_steps": FEW,
                "batch_size": 2,
                "accumulation": 6 // processes,
                "learning_rate": 1e-3,
                "max_tokens": 4000,
                "seed": 7,
                "save_every": 2,
                "eval_every": 4,
                "device": "cpu",
                "precision": "fp32",
                **train,
            },
            "lora": {"r": 4} if learned == "adapters" else None,
            "split": {"dev": 0.3},
            "output": str(output),
        }

    return spec


def in_processes(number: int, entries: list[dict[str, Any]], folder: Path) -> Seen:
    """What each process saw of these trainings."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(entries))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
    around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    call = [*launch, str(SCRIPT), str(plan)]
    done = subprocess.run(call, env=around, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(number)]


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / name).to_pylist()
    return rows


OWN_BATCHES = ("kl", "entropy", "clip_share")
"""Of the curve: TRL takes their mean over batches, whose rollouts are others with another number of processes."""


def assert_alike(one: Path, other: Path) -> None:
    """Two teachers whose trainings differed in the number of processes alone."""
    of_one, of_other = table(one, ROLLOUTS_NAME), table(other, ROLLOUTS_NAME)
    exact = ("step", "row_id", "sample", "texts", "tokens", "grade", "fault")
    assert [[row[name] for name in exact] for row in of_one] == [[row[name] for name in exact] for row in of_other]
    for left, right in zip(of_one, of_other, strict=True):
        assert left["reward"] == pytest.approx(right["reward"], abs=BOUND)
        assert left["advantage"] == pytest.approx(right["advantage"], abs=BOUND)
        assert left.get("node_advantages") == pytest.approx(right.get("node_advantages"), abs=BOUND)
    names = ["curves.parquet"]
    if (other / EDGES_NAME).exists():
        names.append(EDGES_NAME)
    for name in names:
        left, right = (
            {tuple(row.values())[:3]: row for row in table(folder, name) if row.get("name") not in OWN_BATCHES}
            for folder in (one, other)
        )
        assert left.keys() == right.keys()
        for key, row in left.items():
            figures = [value for value in row.values() if isinstance(value, float)]
            wanted = [value for value in right[key].values() if isinstance(value, float)]
            assert figures == pytest.approx(wanted, abs=BOUND), (key, figures, wanted)
    found, wanted = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name].double(), tensor.double(), rtol=0, atol=BOUND, err_msg=name)


def learned_something(folder: Path, base: Path) -> bool:
    now, was = (load_file(one / "model.safetensors") for one in (folder, base))
    return any(float((now[name] - was[name]).abs().max()) > 1e-3 for name in was)


def test_two_processes_learn_what_one_does_from_the_same_rollouts(make: Make, base_dir: Path, tmp_path: Path) -> None:
    """Each method once; the others in `make full`. A signal to the second process drains both, and one goes on."""
    ways = {"grpo": ("adapters", "ddp"), "graph-grpo": ("whole", "ddp"), "res-rag": ("whole", "fsdp")}
    entries: list[dict[str, Any]] = []
    for method, (learned, strategy) in ways.items():
        entries.append({"spec": make(tmp_path / f"both-{method}", method, learned, processes=2, strategy=strategy)})
    entries.append({"spec": make(tmp_path / "drained", "graph-grpo", processes=2), "signal_at": 1})
    first, second = in_processes(2, entries, tmp_path)
    assert [[one["ended"] for one in seen] for seen in (first, second)] == [["whole"] * 3 + ["stopped"]] * 2
    for method, (learned, _) in ways.items():
        alone = tmp_path / f"alone-{method}"
        go({"spec": make(alone, method, learned, processes=1)}, is_first=True)
        assert_alike(tmp_path / f"both-{method}", alone)
        assert learned_something(alone, base_dir)
    kept = list_checkpoints(tmp_path / "drained" / "checkpoints")
    assert [step_of(path) for path in kept] == [2], "after the last update on the same rollouts"
    go({"spec": make(tmp_path / "drained", "graph-grpo", processes=1), "start": "resume"}, is_first=True)
    assert_alike(tmp_path / "drained", tmp_path / "alone-graph-grpo")


SHARDS = [("grpo", "adapters"), ("graph-grpo", "whole")]


@pytest.fixture(scope="module")
def worlds(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one, two and three processes left of all ways to train, and what was stopped and went on with others."""
    train = {"max_steps": MANY, "save_every": 4, "eval_every": 10}

    def fill(folder: Path) -> None:
        def entry(name: str, method: str, learned: str = "whole", *, processes: int, **more: Any) -> dict[str, Any]:
            given = {**train, **more.pop("train", {})}
            return {"spec": make(folder / name, method, learned, processes=processes, **given), **more}

        for number in (1, 2, 3):
            entries = [
                entry(f"{method}-{learned}-{number}", method, learned, processes=number) for method, learned in WAYS
            ]
            if number == 2:
                entries += [
                    entry(f"{method}-{learned}-shards", method, learned, processes=2, train={"strategy": "fsdp"})
                    for method, learned in SHARDS
                ]
            if number == 3:
                entries += [
                    entry(f"{method}-killed", method, processes=3, die_at="after_training_step:7") for method in METHODS
                ]
            in_processes(number, entries, folder / f"plan-{number}")
        for number in (2, 1):
            entries = [
                entry(
                    f"{method}-resumed-{number}",
                    method,
                    processes=number,
                    copies=str(folder / f"{method}-killed"),
                    start="resume",
                )
                for method in METHODS
            ]
            in_processes(number, entries, folder / f"resumed-{number}")

    return made_once(tmp_path_factory, "worlds", fill)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "learned", "number"),
    [*((*way, number) for way in WAYS for number in ("2", "3")), *((*way, "shards") for way in SHARDS)],
)
def test_after_20_steps_weights_and_rollouts_are_those_of_one_process(
    method: str, learned: str, number: str, worlds: Path, base_dir: Path
) -> None:
    assert_alike(worlds / f"{method}-{learned}-{number}", worlds / f"{method}-{learned}-1")
    assert learned_something(worlds / f"{method}-{learned}-1", base_dir)


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 1])
@pytest.mark.parametrize("method", METHODS)
def test_stopped_with_three_and_resumed_with_fewer_it_ends_where_an_undisturbed_one_does(
    method: str, number: int, worlds: Path
) -> None:
    assert list_checkpoints(worlds / f"{method}-killed" / "checkpoints")
    assert_alike(worlds / f"{method}-resumed-{number}", worlds / f"{method}-whole-1")


TEACHERS = Path(__file__).parents[2] / "docs" / "teachers"


@pytest.mark.full
def test_the_docs_third_stage_in_two_processes_killed_twice_ends_with_the_bytes_of_an_undisturbed_one(
    make: Make, tmp_path: Path
) -> None:
    """With a tiny model, short answers and few rollouts; all other keys as they are."""
    held = yaml.safe_load((TEACHERS / "graph-grpo-3-rl.yaml").read_text())
    small = make(tmp_path, "graph-grpo", processes=2)
    held |= {key: small[key] for key in ("init", "data", "split")}
    held["labeler"] |= small["labeler"]
    held["rollouts"] |= {"group": 2}
    held["train"] |= {"max_steps": 8, "batch_size": 2, "accumulation": 1, "max_tokens": 4000, "save_every": 2}
    held["train"] |= {"learning_rate": 1e-3, "device": "cpu", "precision": "fp32"}

    def entry(name: str, **others: Any) -> dict[str, Any]:
        return {"spec": {**held, "output": str(tmp_path / name)}, **others}

    entries = [
        entry("undisturbed"),
        entry("once", die_at="after_training_step:3"),
        entry("twice", die_at="after_training_step:4", copies=str(tmp_path / "once"), start="resume"),
        entry("whole", copies=str(tmp_path / "twice"), start="resume"),
    ]
    seen = in_processes(2, entries, tmp_path / "plan")
    assert [[one["ended"] for one in of_rank] for of_rank in seen] == [["whole", "killed", "killed", "whole"]] * 2
    assert [step_of(path) for path in list_checkpoints(tmp_path / "twice" / "checkpoints")] == [2, 4]
    for name in ("model.safetensors", ROLLOUTS_NAME, EDGES_NAME, "curves.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


KILLED = """
import os, signal, sys, time
from pathlib import Path
from relabel.jobs.cli import main
from relabel.manifests import failpoints

steps = []

def hit(name):
    steps.append(name)
    if steps.count("after_training_step") == 3 and os.environ["RANK"] == "1":
        Path("killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

failpoints.hit = hit
try:
    main(["train", sys.argv[1]])
except SystemExit as end:
    Path("code").write_text(str(end.code))
    Path("ended").write_text(str(time.time()))
"""


@pytest.mark.full
def test_a_process_that_is_killed_ends_the_other_which_says_so_within_half_a_minute(make: Make, tmp_path: Path) -> None:
    spec = make(tmp_path / "out", "grpo", processes=2, max_steps=40)
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "killed.py").write_text(KILLED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    call = [*launch, str(tmp_path / "killed.py"), str(tmp_path / "teacher.yaml")]
    done = subprocess.run(call, env=around, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("relabel:")]
    assert "another of the 2 processes that train together ended" in said, done.stderr
    assert said.endswith("checkpoint-000002 is kept: --resume goes on from it."), said
    assert (tmp_path / "code").read_text() == "20"
    assert float((tmp_path / "ended").read_text()) - float((tmp_path / "killed").read_text()) < 30


def test_a_step_of_all_processes_wants_as_many_prompts_and_each_takes_whole_groups(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    held = make(tmp_path / "out", "grpo", processes=1)
    with pytest.raises(InputError, match=r"a step takes 24 .*rollouts\.group · 4 processes"):
        estimate_teacher(read_teacher_spec(held, where="here"), Storage())
    held["rollouts"] = {"group": 5}
    with pytest.raises(ConfigError, match=r"is 12 rollouts a step of one process, .*no multiple of rollouts\.group"):
        read_teacher_spec(held, where="here")
