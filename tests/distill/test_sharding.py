"""`train.strategy: fsdp`: two processes with half of the weights each train the student that one process trains, and
write its files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from relabel.distill.students.model import load_student
from relabel.distill.training.output import OPTIMIZER, WEIGHTS, checkpoint_name, list_checkpoints, step_of
from relabel.manifests.errors import ConfigError
from tests.distill.conftest import make_pairs
from tests.distill.test_distill import assert_no_pickle
from tests.distill.test_training import curve, same_weights, without_dropout

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "sharded_runs.py"
TEXTS = [(pair["query"], pair["document"]) for pair in make_pairs()[:24]]
STEPS = {"max_steps": 6, "batch_size": 8, "learning_rate": 1e-3, "save_every": 2, "eval_every": 2}
TOO_FAST = {
    "learning_rate": 0.3,
    "early_stopping": {"metric": "loss", "patience": 1},
    "max_steps": 12,
    "save_every": 12,
}
"""Dev gets worse while it trains, so that an earlier step is kept: on both processes, although the second sees the
opposite.
"""
KINDS = ("encoder", "decoder", "adapters", "best")

Seen = dict[str, list[dict[str, Any]]]


def in_processes(number: int, entries: dict[str, dict[str, Any]], folder: Path, **environment: str) -> Seen:
    """What each process saw of these trainings."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(entries.values())))
    call = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(number),
        str(SCRIPT),
        str(plan),
    ]
    around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(call, env=around, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    both = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(number)]
    return {name: [one[place] for one in both] for place, name in enumerate(entries)}


@pytest.fixture(scope="module")
def changes(
    encoder_dir: Callable[..., Path], decoder_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What is trained, by name; without dropout, whose draws differ from process to process."""
    encoder = {"model": str(without_dropout(encoder_dir(), tmp_path_factory.mktemp("still"))), "dropout": 0.0}
    decoder = {"kind": "decoder", "model": str(decoder_dir())}
    lean = {"max_tokens": 400, "gradient_checkpointing": True, "precision": "bf16"}
    return {
        "encoder": {"student": encoder, "train": STEPS},
        "decoder": {"student": decoder, "train": {**STEPS, "max_tokens": 400, "max_steps": 4}},
        "adapters": {"student": {**decoder, "lora": {"r": 4}}, "train": {**STEPS, **lean, "max_steps": 2}},
        "best": {"student": encoder, "train": {**STEPS, **TOO_FAST}},
    }


@pytest.fixture(scope="module")
def both(
    small_spec: Callable[..., Any], changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Seen]:
    """Everything that two processes do in this file; they import torch once."""
    folder = tmp_path_factory.mktemp("both")

    def entry(output: str, kind: str = "encoder", strategy: str = "fsdp", **others: Any) -> dict[str, Any]:
        train = {**changes[kind]["train"], "strategy": strategy}
        return {"spec": small_spec(**{**changes[kind], "train": train}, output=str(folder / output)), **others}

    entries = {kind: entry(kind, kind, disagrees=kind == "best") for kind in KINDS} | {
        "killed": entry("killed", die_at="after_training_step:5"),
        "killed ddp": entry("killed ddp", strategy="ddp", die_at="after_training_step:5"),
        "resumed": entry("resumed", start="resume", copies=str(folder / "killed")),
        "resumed by ddp": entry("resumed by ddp", strategy="ddp", start="resume", copies=str(folder / "killed")),
        "signalled": entry("signalled", signal_at=3),
        "gone on": entry("gone on", start="resume", copies=str(folder / "signalled")),
    }
    return folder, in_processes(2, entries, folder, CUDA_VISIBLE_DEVICES="")


def points(output: Path) -> list[float]:
    return [row["value"] for row in curve(output) if row["name"] in ("loss", "grad_norm")]


def assert_same_answers(one: Path, other: Path, **tolerance: float) -> None:
    found, wanted = (load_student(path).logits(TEXTS) for path in (one, other))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], **tolerance)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_with_half_the_weights_each_train_as_one_that_accumulates(
    both: tuple[Path, Seen], changes: dict[str, Any], run: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    folder, seen = both
    train = {**changes[kind]["train"], "accumulation": 2}
    alone = run(**{**changes[kind], "train": train}, output=str(tmp_path / "alone"))
    np.testing.assert_allclose(points(folder / kind), points(alone.output), rtol=1e-3 if kind == "adapters" else 1e-4)
    assert_same_answers(folder / kind, alone.output, rtol=1e-3, atol=1e-3)
    first, second = seen[kind]
    assert first["metrics"] == second["metrics"]
    assert first["best_step"] == second["best_step"] == alone.manifest.training.best_step
    assert_no_pickle(folder / kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_holds_half_of_the_weights_and_of_the_moments(both: tuple[Path, Seen], kind: str) -> None:
    _, seen = both
    for what in ("weights", "moments"):
        shares = [own for own, _ in (one[what] for one in seen[kind])]
        (in_all,) = {in_all for _, in_all in (one[what] for one in seen[kind])}
        assert in_all > 1_000
        assert sum(shares) == in_all
        assert all(0.49 < share / in_all < 0.51 for share in shares)
    own, in_all = seen["killed ddp"][0].get("weights", (0, 0))
    assert own == in_all


@pytest.mark.full
def test_a_killed_training_with_shards_resumes_to_the_same_curve_and_weights_bit_for_bit(
    both: tuple[Path, Seen],
) -> None:
    folder, seen = both
    assert all(one["died"] for one in seen["killed"])
    assert [step_of(path) for path in list_checkpoints(folder / "killed" / "checkpoints")] == [
        2,
        4,
    ]
    assert_no_pickle(folder / "killed")
    assert "resuming from checkpoint-000004" in seen["resumed"][0]["said"]
    assert curve(folder / "resumed") == curve(folder / "encoder")
    assert same_weights(folder / "resumed", folder / "encoder")
    assert not (folder / "resumed" / "checkpoints").exists()


@pytest.mark.full
def test_a_signal_to_one_process_ends_all_after_the_same_step_with_a_checkpoint(both: tuple[Path, Seen]) -> None:
    """At a step where none was due."""
    folder, seen = both
    assert all(one.get("stopped") for one in seen["signalled"]), seen["signalled"]
    assert [step_of(path) for path in list_checkpoints(folder / "signalled" / "checkpoints")] == [2, 3]
    assert "resuming from checkpoint-000003" in seen["gone on"][0]["said"]
    assert curve(folder / "gone on") == curve(folder / "encoder")
    assert same_weights(folder / "gone on", folder / "encoder")


@pytest.mark.full
def test_a_checkpoint_from_shards_is_the_one_that_ddp_writes_and_resumes_from(both: tuple[Path, Seen]) -> None:
    folder, _ = both
    one, other = (folder / name / "checkpoints" / checkpoint_name(4) for name in ("killed", "killed ddp"))
    for file in (WEIGHTS, OPTIMIZER):
        found, wanted = load_file(one / file), load_file(other / file)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(found[name], tensor, rtol=1e-3, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(points(folder / "resumed by ddp"), points(folder / "encoder"), rtol=1e-4)
    assert_same_answers(folder / "resumed by ddp", folder / "encoder", rtol=1e-3, atol=1e-4)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("kind", "precision"), [("encoder", "bf16"), ("decoder", "fp32")])
def test_two_gpus_with_half_the_weights_each_train_as_one_that_accumulates(
    small_spec: Callable[..., Any], changes: dict[str, Any], tmp_path: Path, kind: str, precision: str
) -> None:
    """Under NCCL, with the layers compiled."""
    train = {**changes[kind]["train"], "precision": precision}
    ways = {"alone": (1, {"accumulation": 2}), "both": (2, {"strategy": "fsdp"})}
    seen = {}
    for name, (number, change) in ways.items():
        spec = small_spec(**{**changes[kind], "train": {**train, **change}}, output=str(tmp_path / name))
        seen |= in_processes(number, {name: {"spec": spec}}, tmp_path, CUDA_VISIBLE_DEVICES="0,1"[: 2 * number - 1])
    np.testing.assert_allclose(
        points(tmp_path / "both"), points(tmp_path / "alone"), rtol=2e-2 if precision == "bf16" else 1e-3
    )
    assert all(0.49 < own / in_all < 0.51 for own, in_all in (one["weights"] for one in seen["both"]))
    assert seen["both"][0]["metrics"] == seen["both"][1]["metrics"]


def test_shards_that_accelerates_config_asks_for_are_refused_with_the_key_that_does_it(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_FSDP.*train\.strategy: fsdp"):
        run(train={"max_steps": 1})
