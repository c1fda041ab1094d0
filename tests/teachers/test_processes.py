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
from relabel.distill.training.loop import make_accelerator
from relabel.distill.training.output import list_checkpoints, step_of
from relabel.distill.training.spec import TrainingSection
from relabel.manifests.errors import ConfigError, InputError, SaidElsewhereError, StaleRunError
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs
from tests.shared import made_once
from tests.teachers.chunked import write_questions
from tests.teachers.conftest import relabel
from tests.teachers.process_runs import go

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "process_runs.py"
METHODS = ("grpo", "graph-grpo", "res-rag")
"""That learn from rewards."""
LEARNED = ("whole", "adapters")
WAYS = [(method, learned) for method in (*METHODS, "sft") for learned in LEARNED]
FEW, MANY = 4, 20
"""Steps of a training."""
BOUND = 1e-6
"""On weights and figures; 1.4e-7 was found in weights after 20 steps, since some sums stay in float32."""

Make = Callable[..., dict[str, Any]]
Seen = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def make(
    base_dir: Path,
    short_templates: str,
    run_of: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Make:
    """Plain values of a spec: twelve rollouts, or answers, a step, in groups of two, whatever the number of
    processes.
    """
    data = tmp_path_factory.mktemp("data")
    rows = [{**row, "query_id": f"q{number}"} for number, row in enumerate(make_pairs()[:12])]
    pq.write_table(pa.Table.from_pylist(rows), data / "pairs.parquet")
    write_questions(data / "questions.parquet", 12)
    of_pairs = {"data": {"gold": {"path": str(data / "pairs.parquet")}}}
    labelers: dict[str, dict[str, Any]] = {
        "grpo": {"name": "r1", "grades": 3, "max_think_tokens": 1, "templates": short_templates},
        "graph-grpo": {"name": "graph-grpo", "max_text_tokens": 1, "templates": short_templates},
        "res-rag": {"name": "evidence-set"},
        "sft": {"name": "umbrela", "templates": short_templates},
    }
    held: dict[str, dict[str, Any]] = {
        "grpo": {**of_pairs, "rollouts": {"group": 2, "beta": 0.05, "temperature": 0.9}},
        "graph-grpo": {**of_pairs, "rollouts": {"group": 2}},
        "res-rag": {
            "data": {"gold": {"path": str(data / "questions.parquet")}},
            "generator": {"name": "fake"},
            "rollouts": {"group": 2, "max_answer_tokens": 64},
        },
        "sft": {"data": {"runs": str(run_of("umbrela", templates=short_templates))}},
    }
    of_rewards = {"eval_every": 4}

    def spec(output: Path, method: str, learned: str = "whole", *, processes: int, **train: Any) -> dict[str, Any]:
        by_rewards = method in METHODS
        split = {"split": {"dev": 0.3}} if by_rewards else {}
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
                **(of_rewards if by_rewards else {}),
                "device": "cpu",
                "precision": "fp32",
                **train,
            },
            "lora": {"r": 4} if learned == "adapters" else None,
            **split,
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


def assert_same_rollouts(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    exact = ("step", "row_id", "sample", "texts", "tokens", "grade", "fault")
    assert [[row[name] for name in exact] for row in one] == [[row[name] for name in exact] for row in other]
    for left, right in zip(one, other, strict=True):
        assert left["reward"] == pytest.approx(right["reward"], abs=BOUND)
        assert left["advantage"] == pytest.approx(right["advantage"], abs=BOUND)
        assert left.get("node_advantages") == pytest.approx(right.get("node_advantages"), abs=BOUND)


def assert_alike(one: Path, other: Path) -> None:
    """Two teachers whose trainings differed in the number of processes alone."""
    if (other / ROLLOUTS_NAME).exists():
        assert_same_rollouts(table(one, ROLLOUTS_NAME), table(other, ROLLOUTS_NAME))
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
    ways = {
        "grpo": ("adapters", "ddp"),
        "graph-grpo": ("whole", "ddp"),
        "res-rag": ("whole", "fsdp"),
        "sft": ("whole", "fsdp"),
    }
    entries: list[dict[str, Any]] = []
    for method, (learned, strategy) in ways.items():
        entries.append({"spec": make(tmp_path / f"both-{method}", method, learned, processes=2, strategy=strategy)})
    entries.append({"spec": make(tmp_path / "drained", "graph-grpo", processes=2), "signal_at": 1})
    first, second = in_processes(2, entries, tmp_path)
    assert [[one["ended"] for one in seen] for seen in (first, second)] == [["whole"] * 4 + ["stopped"]] * 2
    for method, (learned, _) in ways.items():
        alone = tmp_path / f"alone-{method}"
        go({"spec": make(alone, method, learned, processes=1)}, is_first=True)
        assert_alike(tmp_path / f"both-{method}", alone)
        assert learned_something(alone, base_dir)
    kept = list_checkpoints(tmp_path / "drained" / "checkpoints")
    assert [step_of(path) for path in kept] == [2], "after the last update on the same rollouts"
    go({"spec": make(tmp_path / "drained", "graph-grpo", processes=1), "start": "resume"}, is_first=True)
    assert_alike(tmp_path / "drained", tmp_path / "alone-graph-grpo")


def test_processes_that_were_not_started_alike_say_so_and_train_nothing(make: Make, tmp_path: Path) -> None:
    """The first of them reports it; the others end without a word."""
    for number in range(2):
        (tmp_path / f"node-{number}").mkdir()
    alike = make(tmp_path / "alike", "sft", processes=2)
    apart = make(Path("out"), "sft", processes=2)
    entries = [
        {"spec": alike, "second": {"train": {**alike["train"], "learning_rate": 1e-4}}},
        {"spec": alike, "second": {"output": str(tmp_path / "other")}},
        {"spec": apart, "folders": [str(tmp_path / f"node-{number}") for number in range(2)]},
    ]
    first, second = in_processes(2, entries, tmp_path / "plan")
    for one in first[:2]:
        assert one["ended"].startswith("ConfigError: process 2 of 2 was started with another spec than the first"), one
    assert first[2]["ended"].startswith("ConfigError: process 2 of 2 does not see what the first one writes"), first[2]
    assert [one["ended"].partition(":")[0] for one in second] == ["SaidElsewhereError"] * 3
    assert not any(line.startswith("step ") for one in [*first, *second] for line in one["said"])


SHARDS = [("grpo", "adapters"), ("graph-grpo", "whole"), ("sft", "whole"), ("sft", "adapters")]


@pytest.fixture(scope="module")
def worlds(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one, two and three processes left of all ways to train, and what was stopped and went on with others."""
    train = {"max_steps": MANY, "save_every": 4, "eval_every": 10}

    def fill(folder: Path) -> None:
        def entry(name: str, method: str, learned: str = "whole", *, processes: int, **more: Any) -> dict[str, Any]:
            given = {**train, **more.pop("train", {})}
            if method == "sft":  # which judges after the last step alone
                given.pop("eval_every")
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
                    entry(f"{method}-killed", method, processes=3, die_at="after_training_step:7")
                    for method in (*METHODS, "sft")
                ]
                entries += [
                    entry(f"{method}-drained", method, processes=3, signal_at=6, signal_to=rank)
                    for rank, method in enumerate(METHODS)
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
                for method in (*METHODS, "sft")
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
@pytest.mark.parametrize("method", [*METHODS, "sft"])
def test_stopped_with_three_and_resumed_with_fewer_it_ends_where_an_undisturbed_one_does(
    method: str, number: int, worlds: Path
) -> None:
    assert list_checkpoints(worlds / f"{method}-killed" / "checkpoints")
    assert_alike(worlds / f"{method}-resumed-{number}", worlds / f"{method}-whole-1")


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_a_signal_to_any_process_ends_all_three_after_the_same_step_with_a_checkpoint(
    method: str, worlds: Path
) -> None:
    """To the first, the second and the third; a checkpoint was not due at that step."""
    order = [f"{name}-drained" for name in METHODS]
    for rank in range(3):
        seen = json.loads((worlds / "plan-3" / f"seen-{rank}.json").read_text())
        assert [one["ended"] for one in seen[-len(order) :]] == ["stopped"] * len(order)
    kept = list_checkpoints(worlds / f"{method}-drained" / "checkpoints")
    assert [step_of(path) for path in kept] == [4, 6]


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
@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_is_killed_ends_the_other_which_says_so_within_half_a_minute(
    method: str, make: Make, tmp_path: Path
) -> None:
    spec = make(tmp_path / "out", method, processes=2, max_steps=40)
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


TRAIN_SH = ROOT / "docs" / "deploy" / "torchrun" / "train.sh"


def test_the_recipe_for_torchrun_trains_and_everything_is_written_and_said_once(make: Make, tmp_path: Path) -> None:
    """The curve, what a service gets of it, and warnings of the watch, by two processes. The same call again finds the
    teacher.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = tmp_path / "out"
    spec = make(output, "grpo", processes=2, max_steps=6, report_to=["tensorboard"])
    spec["watch"] = {"window": 1, "length": 1.001}
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(spec))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    around = {**os.environ, "PATH": path, "GPUS": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    call = [str(TRAIN_SH), "train", str(tmp_path / "teacher.yaml")]
    ends = [
        subprocess.run(call, env=around, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        for _ in range(2)
    ]
    assert [end.returncode for end in ends] == [0, 0], [end.stderr[-4000:] for end in ends]
    assert [end.stdout.count("teacher is in") for end in ends] == [1, 1]
    assert ends[1].stdout.startswith("Nothing to do")
    said = ends[0].stderr.splitlines()
    assert said.count("waiting for all 2 processes") == 1
    warnings = [line for line in said if line.startswith("watch: ")]
    assert warnings
    assert len(warnings) == len(set(warnings))
    notes = json.loads((output / "manifest.json").read_text())["notes"]
    assert warnings == [note for note in notes if note.startswith("watch: ")]
    points = [(row["step"], row["split"], row["name"]) for row in table(output, "curves.parquet")]
    assert len(points) == len(set(points))
    (events,) = {file.parent for file in (output / ".tensorboard").rglob("events.out.*")}
    held = EventAccumulator(str(events)).Reload()
    sent = [(one.step, tag) for tag in held.Tags()["scalars"] for one in held.Scalars(tag)]
    assert sorted(sent) == sorted((step, f"{split}/{name}") for step, split, name in points)


LEFT_OVER = {
    "a size alone": {"WORLD_SIZE": "4"},
    "a rank alone": {"RANK": "1"},
    "as Kubeflow sets them": {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node", "MASTER_PORT": "29500"},
    "a place on the machine": {"LOCAL_RANK": "0"},
    "MPI": {"OMPI_COMM_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("left", LEFT_OVER)
def test_what_another_tool_left_in_the_environment_is_refused_by_name(
    left: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(make(tmp_path / "out", "sft", processes=1)))
    for name, value in LEFT_OVER[left].items():
        monkeypatch.setenv(name, value)
    assert relabel("train", str(tmp_path / "teacher.yaml")) == 3
    said = capsys.readouterr().err
    assert all(f"{name}={value}" in said for name, value in LEFT_OVER[left].items())
    assert "torchrun" in said
    assert not (tmp_path / "out").exists()


def test_one_process_by_a_launcher_is_one(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(make(tmp_path / "out", "sft", processes=1)))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--dry-run") == 0


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_resumed_with_another_number_of_processes_by_other_steps_is_refused_with_both_numbers(
    method: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go({"spec": make(tmp_path / "out", method, processes=1), "die_at": "after_training_step:3"}, is_first=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    held = read_teacher_spec(make(tmp_path / "out", method, processes=3), where="here")
    with pytest.raises(StaleRunError, match=r"train\.accumulation, of all processes together: was 6, is 4"):
        estimate_teacher(held, Storage(), start="resume")
    held = read_teacher_spec(make(tmp_path / "out", method, processes=2), where="here")
    estimate_teacher(held, Storage(), start="resume")


def test_more_processes_than_gpus_are_refused_by_all_and_the_first_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes on this machine, where torch finds 1 GPU: .*--nproc-per-node"):
        make_accelerator(TrainingSection())
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SaidElsewhereError):
        make_accelerator(TrainingSection())


def test_a_dry_run_by_several_processes_answers_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(make(tmp_path / "out", "grpo", processes=2)))
    launched = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--dry-run") == 0
    assert capsys.readouterr() == ("", "")
