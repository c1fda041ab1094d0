"""The loop's promises: accumulation changes nothing, a killed training resumes bit for bit, NaN and lack of memory are
reported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from relabel.distill.students.networks import EncoderStudent
from relabel.distill.training import checkpoints
from relabel.distill.training.output import WEIGHTS, list_checkpoints, step_of
from relabel.distill.training.runtime import BatchPlan
from relabel.manifests.errors import LockHeldError, StaleRunError, TrainingError
from relabel.manifests.failpoints import TRAINING_FAILPOINTS
from tests.distill.test_distill import assert_no_pickle
from tests.killing import killed_at

ROOT = Path(__file__).parent.parent.parent


def curve(output: Path) -> list[dict[str, Any]]:
    return pq.read_table(output / "curves.parquet").to_pylist()


def command(
    values: dict[str, Any], folder: Path, *flags: str, failpoint: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`relabel distill` in a process of its own."""
    file = folder / "student.yaml"
    file.write_text(yaml.safe_dump(values))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELABEL_")} | {
        "OMP_NUM_THREADS": "1"
    }
    if failpoint:
        environment["RELABEL_FAILPOINT"] = failpoint
    call = [sys.executable, "-m", "relabel", "distill", str(file), "--output", "json", *flags]
    return subprocess.run(call, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def same_weights(one: Path, other: Path) -> bool:
    return all(
        np.array_equal(value, load_file(other / file)[name])
        for file in ("model.safetensors", "heads.safetensors")
        for name, value in load_file(one / file).items()
    )


def test_a_training_killed_with_signal_9_resumes_to_the_same_curve_and_weights_bit_for_bit(
    run: Callable[..., Any], spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    train = {"epochs": 2, "save_every": 3, "eval_every": 4}
    alone = run(train=train, output=str(tmp_path / "alone"))
    values = {"train": train, "output": str(tmp_path / "killed")}
    # in the second epoch, two steps past a checkpoint
    killed = command(spec(**values), tmp_path, failpoint="after_training_step:8")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = list_checkpoints(tmp_path / "killed" / "checkpoints")
    assert [step_of(path) for path in left] == [3, 6]
    assert_no_pickle(tmp_path / "killed")
    with pytest.raises(StaleRunError, match="--resume"):
        run(**values)
    said: list[str] = []
    resumed = run(start="resume", say=said.append, **values)
    assert "resuming from checkpoint-000006" in said
    assert curve(resumed.output) == curve(alone.output)
    assert same_weights(resumed.output, alone.output)
    assert resumed.manifest.metrics == alone.manifest.metrics
    assert not (tmp_path / "killed" / "checkpoints").exists()
    assert run(start="resume", **values).was_done


@pytest.mark.slow
def test_two_processes_train_as_one_that_accumulates(
    run: Callable[..., Any], spec: Callable[..., dict[str, Any]], tmp_path: Path, encoder_dir: Callable[..., Path]
) -> None:
    """DDP over gloo: the same rows a step, the same losses, and only the first process writes and speaks."""
    student = {"model": str(without_dropout(encoder_dir(), tmp_path)), "dropout": 0.0}
    train = {"max_steps": 4, "batch_size": 8, "learning_rate": 1e-3}
    alone = run(student=student, train={**train, "accumulation": 2}, output=str(tmp_path / "alone"))
    file = tmp_path / "student.yaml"
    file.write_text(yaml.safe_dump(spec(student=student, train=train, output=str(tmp_path / "both"))))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += ["--no-python", str(Path(sys.executable).with_name("relabel"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    call = [*launch, "distill", str(file), "--output", "json"]
    done = subprocess.run(call, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["training"]["steps"] == 4
    one, other = (
        [row["value"] for row in curve(output) if row["name"] == "loss"] for output in (alone.output, tmp_path / "both")
    )
    np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("place", TRAINING_FAILPOINTS)
def test_a_death_anywhere_leaves_whole_checkpoints_and_no_finished_student(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    train = {"max_steps": 6, "save_every": 2}
    with killed_at(place, 2 - (place == "before_model")):
        run(train=train)
    report = run(start="resume", train=train)
    assert report.manifest.training.steps == 6
    steps = [row["step"] for row in curve(report.output) if row["name"] == "loss" and row["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_accumulating_small_batches_is_the_loss_of_a_large_one(
    run: Callable[..., Any], tmp_path: Path, encoder_dir: Any
) -> None:
    """Also with masked nodes and row weights, where a mean of means would be another number."""
    whole, halved = (
        run(
            # in plain order four batches of 4 hold what one of 16 holds
            train={
                "max_steps": 4,
                "batch_size": size,
                "accumulation": 16 // size,
                "learning_rate": 1e-3,
                "group_by_length": False,
            },
            loss={"weight_by": ["confidence", "outside_mass"]},
            student={"dropout": 0.0, "model": str(without_dropout(encoder_dir(), tmp_path))},
            output=str(tmp_path / f"out{size}"),
        )
        for size in (16, 4)
    )
    one, other = ([row["value"] for row in curve(report.output) if row["name"] == "loss"] for report in (whole, halved))
    np.testing.assert_allclose(one, other, rtol=2e-4)


def without_dropout(model: Path, folder: Path) -> Path:
    import shutil

    copy = folder / "still"
    if not copy.exists():
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(
            json.dumps({**config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        )
    return copy


def test_a_loss_that_is_no_number_stops_names_the_rows_and_keeps_the_last_good_checkpoint(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, calls = EncoderStudent.forward, []

    def poisoned(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = whole(self, *args, **kwargs)
        calls.append(self.training)
        return {**found, "relevance": found["relevance"] * float("nan")} if sum(calls) == 4 and self.training else found

    monkeypatch.setattr(EncoderStudent, "forward", poisoned)
    with pytest.raises(TrainingError) as caught:
        run(train={"max_steps": 6, "save_every": 2, "batch_size": 8})
    text = str(caught.value)
    assert "step 4: the loss is not finite" in text
    named = [word for word in text.replace(",", " ").split() if "labels.parquet:" in word]
    assert len(named) == 8
    assert all(0 <= int(word.rstrip(".").rpartition(":")[2]) < 144 for word in named)
    (kept,) = list_checkpoints(tmp_path / "out" / "checkpoints")
    assert str(kept) in text
    assert all(np.isfinite(values).all() for values in load_file(kept / WEIGHTS).values())
    assert not (tmp_path / "out" / "manifest.json").exists()


def without_room_for(rows: int) -> Callable[..., Any]:
    whole = EncoderStudent.forward

    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(self, input_ids, *args, **kwargs)

    return forward


def test_out_of_memory_halves_the_batch_once_and_says_so(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(EncoderStudent, "forward", without_room_for(8))
    report = run(say=said.append, train={"max_steps": 3, "batch_size": 16})
    assert report.manifest.training.was_batch_halved
    assert (report.manifest.training.batch_size, report.manifest.training.accumulation) == (8, 2)
    assert any("going on with 8" in line for line in said)
    assert any("out of memory" in note for note in report.manifest.notes)
    monkeypatch.undo()
    monkeypatch.setattr(EncoderStudent, "forward", without_room_for(4))
    with pytest.raises(TrainingError, match=r"also with half the batch \(8 rows\).*train\.batch_size"):
        run(start="restart", train={"max_steps": 3, "batch_size": 16})


def test_two_trainings_never_share_an_output(run: Callable[..., Any], tmp_path: Path) -> None:
    from relabel.manifests.files import FileLock

    lock = FileLock(tmp_path / "out" / "checkpoints" / "distill.lock", "the student")
    lock.acquire()
    try:
        with pytest.raises(LockHeldError):
            run()
    finally:
        lock.release()


def test_weights_that_are_no_numbers_get_into_no_checkpoint(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 1] = float("inf")
    with pytest.raises(TrainingError, match=r"weights are not finite any more \(weight\)"):
        checkpoints.save_weights(module, tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"groups": True}, {"tokens_per_batch": 64}])
def test_every_epoch_takes_each_row_once_in_batches_that_follow_from_seed_and_epoch(options: dict[str, Any]) -> None:
    lengths = np.random.default_rng(0).integers(4, 33, size=100).tolist()
    rows = np.arange(0, 100, 2)
    plans = [BatchPlan(lengths, rows, seed=3, batch_size=8, **options) for _ in range(2)]
    epochs = [plans[0].batches(epoch) for epoch in range(3)]
    assert all(sorted(row for batch in batches for row in batch) == rows.tolist() for batches in epochs)
    assert len({len(batches) for batches in epochs}) == 1
    assert epochs[0] != epochs[1]
    assert plans[1].batches(2) == epochs[2]
    if "tokens_per_batch" in options:
        assert all(len(batch) * max(lengths[row] for row in batch) <= 64 for batches in epochs for batch in batches)


def test_rows_of_like_length_share_a_batch_and_its_company_still_changes_from_epoch_to_epoch() -> None:
    lengths = np.random.default_rng(0).integers(4, 97, size=8_000)
    plan, at_random = (
        BatchPlan(lengths.tolist(), np.arange(8_000), seed=3, batch_size=32, groups=groups) for groups in (True, False)
    )
    assert plan.padding_share() < 0.03 < 0.3 < at_random.padding_share()
    company = [{row: set(batch) for batch in plan.batches(epoch) for row in batch} for epoch in range(2)]
    shared = [len(company[0][row] & company[1][row]) - 1 for row in range(8_000)]
    assert np.mean(shared) < 5.0  # of 31; rows sorted over the whole epoch keep more than 20


def test_the_sampler_draws_rare_grades_as_often_as_common_ones() -> None:
    weight = np.array([1.0] * 90 + [9.0] * 10)
    plan = BatchPlan([4] * 100, np.arange(100), seed=1, batch_size=10, draw_weight=weight)
    drawn = np.concatenate([batch for epoch in range(20) for batch in plan.batches(epoch)])
    assert 0.45 < (drawn >= 90).mean() < 0.55
