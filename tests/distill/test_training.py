"""The loop's promises: accumulation changes nothing, a killed training resumes bit for bit, NaN and lack of memory are
reported.
"""

import contextlib
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

from relabel.distill.students.model import load_student
from relabel.distill.students.networks import EncoderStudent
from relabel.distill.training import checkpoints
from relabel.distill.training.loop import BatchPlan
from relabel.distill.training.output import WEIGHTS, checkpoint_name, list_checkpoints, step_of
from relabel.jobs.trained import StudentResult
from relabel.manifests.errors import ConfigError, LockHeldError, StaleRunError, TrainingError
from relabel.manifests.failpoints import TRAINING_FAILPOINTS
from tests.distill.conftest import make_pairs
from tests.distill.sharded_runs import in_double
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


@pytest.mark.parametrize("place", TRAINING_FAILPOINTS)
def test_a_death_anywhere_leaves_whole_checkpoints_and_no_finished_student(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    train = {"max_steps": 4, "save_every": 2}
    with killed_at(place, 2 - (place == "before_model")):
        run(train=train)
    report = run(start="resume", train=train)
    assert report.manifest.training.steps == 4
    steps = [row["step"] for row in curve(report.output) if row["name"] == "loss" and row["split"] == "train"]
    assert steps == [1, 2, 3, 4]


def test_a_resume_that_has_no_step_left_says_so_and_names_no_speed(run: Callable[..., Any]) -> None:
    train = {"max_steps": 4, "save_every": 2}
    with killed_at("before_model", 1):
        run(train=train)
    report = run(start="resume", train=train)
    printed = "\n".join(StudentResult(**vars(report)).lines())
    assert "4 steps, on cpu; no step was left when it was resumed" in printed
    assert "rows/s" not in printed


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
    padded = [sum(len(batch) * lengths[batch].max() for batch in one.batches(0)) for one in (plan, at_random)]
    assert 1 - lengths.sum() / padded[0] < 0.03 < 0.3 < 1 - lengths.sum() / padded[1]
    company = [{row: set(batch) for batch in plan.batches(epoch) for row in batch} for epoch in range(2)]
    # of 31; rows sorted over the whole epoch keep more than 20
    assert np.mean([len(company[0][row] & company[1][row]) - 1 for row in range(8_000)]) < 5.0


# `train.strategy: fsdp`: two processes with half of the weights each train the student that one process trains, and
# write its files.


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
IN_DOUBLE = ("decoder", "best")

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

    entries = {kind: entry(kind, kind, disagrees=kind == "best", in_double=kind in IN_DOUBLE) for kind in KINDS} | {
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
    with in_double() if kind in IN_DOUBLE else contextlib.nullcontext():
        alone = run(**{**changes[kind], "train": train}, output=str(tmp_path / "alone"))
    bound = 1e-12 if kind in IN_DOUBLE else 1e-3 if kind == "adapters" else 1e-4
    np.testing.assert_allclose(points(folder / kind), points(alone.output), rtol=bound)
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
    for file in (WEIGHTS, checkpoints.OPTIMIZER):
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
