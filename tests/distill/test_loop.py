"""The loop is plain PyTorch, goes on from any step as if nothing had happened, and ends on all processes alike."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.students.networks import EncoderStudent, load_backbone
from relabel.distill.students.spec import TrainSection
from relabel.distill.training import checkpoints
from relabel.distill.training.loop import BatchPlan, make_optimizer, precision_of
from relabel.distill.training.output import list_checkpoints, step_of
from relabel.manifests.process import forget_interruptions, on_signal
from tests.distill.test_training import ROOT, curve, without_dropout
from tests.killing import killed_at

GOLDENS = Path(__file__).parent.parent / "golden" / "student_curves.json"
SHORT = {"max_steps": 5, "save_every": 1, "batch_size": 32, "eval_every": 3}
LORA = {"kind": "decoder", "lora": {"r": 4, "dropout": 0.1}}
WAYS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "accumulated": {
        "train": {"accumulation": 2, "batch_size": 8, "schedule": "cosine", "weight_decay": 0.1},
        "loss": {"weight_by": ["confidence", "outside_mass"]},
    },
    "token budget": {"train": {"tokens_per_batch": 200, "schedule": "constant", "max_grad_norm": 0.0}},
    "softened": {"loss": {"targets": {"subject": "hard"}, "label_smoothing": 0.1, "temperature": 2.0}},
    "bf16": {"train": {"precision": "bf16"}},
    "decoder": {"student": {"kind": "decoder"}, "train": {"max_tokens": 400}},
    "adapters": {"student": LORA, "train": {"max_tokens": 400, "gradient_checkpointing": True}},
}


@pytest.fixture
def train(run: Callable[..., Any], decoder_dir: Callable[..., Path]) -> Callable[..., Any]:
    """Run a way with changes of `train`; `model` of a decoder is filled in."""

    def go(way: str, changes: dict[str, Any], **others: Any) -> Any:
        found = WAYS[way]
        student = found.get("student", {})
        if "kind" in student:
            student = {**student, "model": str(decoder_dir())}
        return run(**{**found, "student": student, "train": {**found.get("train", {}), **changes}}, **others)

    return go


@pytest.mark.parametrize("way", WAYS)
def test_curves_are_those_of_transformers_trainer(way: str, train: Callable[..., Any]) -> None:
    """The numbers were written by the loop that was transformers' Trainer; other processors round otherwise. In fp32
    where the way says nothing, also on a CPU with AMX.
    """
    precision = WAYS[way].get("train", {}).get("precision", "fp32")
    found = curve(train(way, {"max_steps": 6, "precision": precision}).output)
    golden = json.loads(GOLDENS.read_text())[way]
    assert [[row["step"], row["name"]] for row in found] == [point[:2] for point in golden]
    rtol = 2e-2 if precision == "bf16" else 1e-3
    np.testing.assert_allclose([row["value"] for row in found], [point[2] for point in golden], rtol=rtol, atol=1e-6)


def files_of(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("*.safetensors")}


@pytest.mark.parametrize("way", ["encoder", pytest.param("adapters", marks=pytest.mark.full)])
def test_it_goes_on_from_any_step_to_the_same_bytes(way: str, train: Callable[..., Any], tmp_path: Path) -> None:
    settings = {**SHORT, "keep_checkpoints": 9}
    with killed_at("before_model"):
        train(way, settings, output=str(tmp_path / "whole"))
    kept = list_checkpoints(tmp_path / "whole" / "checkpoints")
    assert [step_of(path) for path in kept] == list(range(1, 6))
    alone = train(way, {**settings, "save_every": 5}, output=str(tmp_path / "alone"))
    for last in (1, 3, 5):  # dev is evaluated after the third, and after the fifth there is only to write
        folder = tmp_path / f"from-{last}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in list_checkpoints(folder / "checkpoints")[last:]:
            shutil.rmtree(later)
        resumed = train(way, settings, start="resume", output=str(folder))
        assert curve(folder) == curve(alone.output), last
        assert files_of(folder) == files_of(alone.output), last
        assert resumed.manifest.metrics == alone.manifest.metrics


def test_a_signal_ends_it_after_the_step_with_a_checkpoint_that_changes_nothing(
    run: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dev is evaluated once an epoch, and not at the steps where the signals come: one amid the training, the other at
    its end.
    """
    settings = {"train": {"max_steps": 8, "batch_size": 16}}
    alone = run(**settings, output=str(tmp_path / "alone"))
    starts: dict[int, Any] = {4: "new", 8: "resume"}
    for step, start in starts.items():

        def say(line: str, step: int = step) -> None:
            if line.startswith(f"step {step} of"):
                on_signal(signal.SIGTERM, None)

        try:
            with pytest.raises(KeyboardInterrupt):
                run(**settings, start=start, say=say)
        finally:
            forget_interruptions()
        kept = list_checkpoints(tmp_path / "out" / "checkpoints")
        assert step_of(kept[-1]) == step
        assert capfd.readouterr().err.count("Stopping after this step, with a checkpoint.") == 1
    resumed = run(**settings, start="resume")
    assert curve(resumed.output) == curve(alone.output)
    assert files_of(resumed.output) == files_of(alone.output)


def test_heads_have_a_peak_rate_of_their_own(encoder_dir: Callable[..., Path]) -> None:
    module = EncoderStudent(load_backbone(encoder_dir()), {"relevance": 3, "subject": 5})
    groups = make_optimizer(module, TrainSection(learning_rate=1e-4, head_learning_rate=5e-3)).param_groups
    rates = {id(parameter): group["initial_lr"] for group in groups for parameter in group["params"]}
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        assert rates[id(parameter)] == (5e-3 if name.startswith("heads.") else 1e-4), name
        assert decays[id(parameter)] == (0.0 if "bias" in name or "LayerNorm" in name else 0.01), name


@pytest.mark.parametrize(
    ("flags", "wished", "found"),
    [
        ({"amx_bf16", "avx512_bf16"}, "auto", "bf16"),
        ({"avx512_bf16"}, "auto", "no"),
        (set(), "auto", "no"),
        ({"amx_bf16"}, "fp32", "no"),
        (set(), "bf16", "bf16"),
    ],
)
def test_auto_is_bf16_on_a_cpu_with_amx(flags: set[str], wished: Any, found: str) -> None:
    assert precision_of(TrainSection(precision=wished, device="cpu"), flags) == found


@st.composite
def plans(draw: st.DrawFn) -> list[BatchPlan]:
    """The plans of all processes of one training."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=60))
    shards = draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "seed": draw(st.integers(0, 9)),
        "batch_size": draw(st.integers(1, 9)),
        "tokens_per_batch": draw(st.none() | st.integers(1, 90)),
        "groups": draw(st.booleans()),
        "accumulation": draw(st.integers(1, 4)),
        "num_processes": shards,
    }
    return [BatchPlan(lengths, np.arange(len(lengths)), process=process, **options) for process in range(shards)]


@given(plans(), st.integers(0, 30), st.integers(0, 30))
def test_processes_share_all_batches_and_a_resumed_one_meets_those_that_were_left(
    found: list[BatchPlan], first: int, more: int
) -> None:
    plan, shards = found[0], len(found)
    steps = plan.epoch_steps
    seen = [batch for one in found for step in range(steps, 2 * steps) for batch in one.rows_of_step(step)]
    wanted = plan.batches(1)
    count = -(-len(wanted) // shards) * shards
    assert sorted(seen) == sorted((wanted * shards)[:count])
    whole = [plan.rows_of_step(step) for step in range(first + more)]
    assert [plan.rows_of_step(step) for step in range(first, first + more)] == whole[first:]


KILLED = """
import contextlib, os, signal, sys, time
from pathlib import Path
from relabel.jobs.cli import main
from relabel.manifests import failpoints
who, is_draining, whole, killed = int(sys.argv[1]), sys.argv[2] == "drain", *sys.argv[3:]
with contextlib.suppress(SystemExit):
    main(["distill", whole, "--output", "json"])
steps = []

def hit(name):
    steps.append(name)
    if steps.count("after_training_step") == 4 and int(os.environ["RANK"]) == who:
        if is_draining:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

failpoints.hit = hit
try:
    main(["distill", killed])
except SystemExit as end:
    Path("code").write_text(str(end.code))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "when"),
    [
        (1, "drain"),
        pytest.param(0, "training", marks=pytest.mark.full),
    ],
)
def test_two_processes_train_as_one_that_accumulates_and_one_that_is_killed_ends_the_other_which_says_so(
    who: int,
    when: str,
    run: Callable[..., Any],
    spec: Callable[..., dict[str, Any]],
    encoder_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """DDP over gloo: the same rows a step, the same losses, and only the first process writes and speaks."""
    student = {"model": str(without_dropout(encoder_dir(), tmp_path)), "dropout": 0.0}
    train = {"max_steps": 4, "batch_size": 8, "learning_rate": 1e-3}
    alone = run(student=student, train={**train, "accumulation": 2}, output=str(tmp_path / "alone"))
    both = spec(student=student, train=train, output=str(tmp_path / "both"))
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(both))
    (tmp_path / "student.yaml").write_text(
        yaml.safe_dump(spec(train={"max_steps": 40, "batch_size": 8, "save_every": 2}))
    )
    (tmp_path / "killed.py").write_text(KILLED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    specs = [str(tmp_path / "whole.yaml"), str(tmp_path / "student.yaml")]
    call = [*launch, str(tmp_path / "killed.py"), str(who), when, *specs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert json.loads(done.stdout)["training"]["steps"] == 4, done.stderr
    one, other = (
        [row["value"] for row in curve(output) if row["name"] == "loss"] for output in (alone.output, tmp_path / "both")
    )
    np.testing.assert_allclose(one, other, rtol=1e-4)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("relabel:")]
    assert "another of the 2 processes that train together ended" in said, done.stderr
    assert said.endswith("checkpoint-000002 is kept: --resume goes on from it."), said
    assert (tmp_path / "code").read_text() == "20"
    assert "Traceback" not in done.stderr.partition(said)[0]
    kept = checkpoints.last_checkpoint(tmp_path / "out" / "checkpoints", lambda _: None)
    assert kept.name == "checkpoint-000002"
