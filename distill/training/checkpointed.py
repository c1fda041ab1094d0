"""transformers' Trainer with checkpoints of our own: whole or not there, without pickle, and gone on with bit for bit.

Overridden hooks, and why: `_save_checkpoint` and the `_load_*` methods (Trainer's own write pickle, and a half-written
one would be taken for whole), `_maybe_log_save_evaluate` (the curve, and a stop at the first loss that is not finite),
`create_accelerator_and_postprocess` (no DDP around shards). TRL's trainers are Trainers too: put this class before
theirs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerState
from transformers.trainer_callback import PrinterCallback, TrainerControl

from distill.training import checkpoints, sharding
from distill.training.curves import Curve
from distill.training.disk_errors import writing
from distill.training.reporting import CurveReporter
from distill.training.step_clock import StepClock
from manifests import failpoints
from manifests.errors import TrainingError
from manifests.interruptions import draining, is_stop_wished

ROWS_NAMED = 20


@dataclass
class TrainingPlace:
    """Where a training keeps its checkpoints, and whom it talks to.

    Args:
        folder: of the checkpoints.
        keep: how many of them stay, the best one beside them.
        say: called with progress, a line each.
        names: where each row comes from, `(source, row_id)`.
        report_to: services that the curve is sent to.
    """

    folder: Path
    keep: int
    say: Callable[[str], None]
    names: Sequence[tuple[str, int]]
    report_to: Sequence[str] = ()


@dataclass
class Outcome:
    """How a training ended.

    Args:
        best_step: the step that was kept, where looks at dev chose one.
        stopped_by: what ended it before its last step, `early_stopping` or `watch`.
        rows_per_s: rows trained in a second of this process's own steps, looks at dev and checkpoints left out.
        clock: what the seconds of those steps were spent on, where the trainer tells.
    """

    steps: int
    epochs: float
    best_step: int | None
    rows_per_s: float | None
    curve: Curve
    device: str
    notes: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    clock: StepClock | None = None


class CheckpointedTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A Trainer that writes, finds and names things as this project does. Arguments beside `place` are Trainer's."""

    control: TrainerControl
    clock: StepClock | None = None
    """Of trainers that tell what their seconds were spent on."""
    progress_figures: tuple[str, ...] = ("loss",)
    """Those of a step that its line of progress says, where it has them."""

    def __init__(self, *args: Any, place: TrainingPlace, **kwargs: Any) -> None:
        self._place = place
        self.curve = Curve()
        self.rows_seen = 0
        self.seconds = 0.0
        self._step_began: float | None = None
        self._pending: dict[str, float] = {}
        self._rows_of_step: list[int] = []
        self._is_sharded = sharding.is_sharded(kwargs.get("model"))
        super().__init__(*args, **kwargs)
        is_first = self.args.process_index == 0
        self.reporter = CurveReporter(place.report_to if is_first else (), place.folder, place.say)
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        """Shards reduce their own gradients: accelerate must put autocast around the module and no DDP, as it does for
        evaluation.
        """
        super().create_accelerator_and_postprocess()
        if self._is_sharded:
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = lambda module, **_: prepare(
                module, device_placement=False, evaluation_mode=True
            )

    # what is written down

    def note(self, values: dict[str, float], rows: Sequence[int]) -> None:
        """Add a batch's values to those of its optimizer step; `loss` is among them.

        Args:
            rows: of the batch.
        Raises:
            TrainingError: the loss is not finite; the message names the rows.
        """
        if not math.isfinite(values["loss"]):
            parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise self.not_finite(f"the loss is not finite ({parts})", rows)
        self._rows_of_step += rows
        for name, value in values.items():
            if math.isfinite(value):  # 0/0: no row of this step has the label
                self._pending[name] = self._pending.get(name, 0.0) + value

    def not_finite(self, what: str, rows: Sequence[int], *, step: int | None = None) -> TrainingError:
        """The error for a number that is none.

        Args:
            rows: that it came of.
            step: default: the one under way.
        """
        rows = list(dict.fromkeys(rows))
        named = ", ".join(
            f"{source}:{row_id}" for source, row_id in (self._place.names[row] for row in rows[:ROWS_NAMED])
        )
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        kept = checkpoints.list_checkpoints(self._place.folder)
        good = f"The last good checkpoint is {kept[-1]}" if kept else "No checkpoint was written yet"
        return TrainingError(
            f"step {self.state.global_step + 1 if step is None else step}: {what}. Rows of the batch, as "
            f"source:row_id: {named}{more}. "
            f"{good}. Look at these rows; if they are fine, lower train.learning_rate or set train.precision to fp32."
        )

    def begin_step(self, num_rows: int) -> None:
        """Start the clock of an optimizer step over so many rows of this process."""
        self._step_began = time.perf_counter()
        self.rows_seen += num_rows

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._step_began is not None:
            self.seconds += time.perf_counter() - self._step_began
            self._step_began = None
        if self._pending:
            self._check_gradient(grad_norm)
            rate = kwargs.get("learning_rate")
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            self.curve.add(
                self.state.global_step, "train", {**self._pending, **extra, "learning_rate": float(rate or 0.0)}
            )
            figures = [f"{name} {self._pending[name]:.4f}" for name in self.progress_figures if name in self._pending]
            self._pending = {}
            self._place.say(", ".join([f"step {self.state.global_step} of {self.state.max_steps}", *figures]))
            self.measured()
            failpoints.hit("after_training_step")
            if is_stop_wished() and self.may_stop():
                self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _check_gradient(self, grad_norm: Any) -> None:
        """Stop before what such a gradient makes of the weights is in a checkpoint; with fp16 the scaler looks itself.

        Raises:
            TrainingError: it is not finite.
        """
        rows, self._rows_of_step = self._rows_of_step, []
        scaler = getattr(self.accelerator, "scaler", None)
        if grad_norm is not None and scaler is None and not math.isfinite(float(grad_norm)):
            what = f"the gradient is not finite (norm {float(grad_norm):.4g}), though the loss is"
            raise self.not_finite(what, rows, step=self.state.global_step)

    def measured(self) -> None:
        """A step's figures are in the curve."""
        self.reporter.send(self.curve)

    def may_stop(self) -> bool:
        """Whether a checkpoint behind the step just done holds all that training goes on from."""
        return True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep Trainer's closing figures; the curve holds the rest."""
        self.state.log_history.append({**logs, "step": self.state.global_step})

    # checkpoints without pickle

    def own_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint beside model, optimizer and generators: plain values and tensors."""
        return {}

    def load_own_state(self, held: dict[str, Any]) -> None:
        """Take back what `own_state` gave."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._place.folder
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(folder / checkpoints.checkpoint_name(self.state.best_global_step))
        is_writer = self.args.should_save
        if not is_writer and not self._is_sharded:
            return
        final = folder / checkpoints.checkpoint_name(self.state.global_step)
        scratch = folder / f".part-{final.name}"
        with writing(folder):
            if is_writer:
                scratch.mkdir(parents=True, exist_ok=True)
            checkpoints.save_weights(
                self.accelerator.unwrap_model(self.model), scratch / checkpoints.WEIGHTS if is_writer else None
            )
            optimizer = sharding.whole_moments(self.optimizer.state_dict(), keep=is_writer)
            if is_writer:
                self._finish_checkpoint(scratch, final, optimizer)

    def _finish_checkpoint(self, scratch: Path, final: Path, optimizer: dict[str, Any]) -> None:
        """Write what is beside the weights, and commit."""
        tensors, plain = checkpoints.random_states()
        save_file(tensors, scratch / checkpoints.RANDOM)
        scaler = getattr(self.accelerator, "scaler", None)
        checkpoints.save_state(
            scratch,
            {
                "optimizer": optimizer,
                "scheduler": self.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "random": plain,
                "curve": [list(point) for point in self.curve.points],
                "own": self.own_state(),
            },
        )
        self.state.save_to_json(str(scratch / "trainer_state.json"))
        failpoints.hit("before_checkpoint")
        checkpoints.commit(scratch, final)
        failpoints.hit("after_checkpoint")
        best = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        checkpoints.drop_old(self._place.folder, keep=self._place.keep, best=best)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_weights(
            self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint) / checkpoints.WEIGHTS
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        held = checkpoints.load_state(Path(checkpoint))
        self.optimizer.load_state_dict(sharding.cut_moments(held["optimizer"], self.optimizer))
        self.lr_scheduler.load_state_dict(held["scheduler"])
        self._take(held)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            state = checkpoints.load_state(Path(checkpoint))["scaler"]
            if state is not None:
                scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint)
            checkpoints.restore_random(load_file(folder / checkpoints.RANDOM), checkpoints.load_state(folder)["random"])

    def _take(self, held: dict[str, Any]) -> None:
        self.curve.points = [(int(step), split, name, value) for step, split, name, value in held["curve"]]
        self.load_own_state(held.get("own", {}))

    def stopped_by(self) -> str | None:
        """What ended training before its last step, as the state of the last checkpoint says."""
        return None

    def adopt_if_finished(self, checkpoint: Path) -> bool:
        """Take over a checkpoint after which there is nothing left to train; False if there is. Trainer itself would do
        one step more.
        """
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self._take(checkpoints.load_state(checkpoint))
        if self.state.global_step < self.state.max_steps and self.stopped_by() is None:
            return False
        self._load_from_checkpoint(str(checkpoint))
        return True


def run_to_end(trainer: CheckpointedTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end and keep the best step's weights where early stopping chose one.

    Raises:
        KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
    """
    try:
        if resume_from is None or not trainer.adopt_if_finished(resume_from):
            # one process stops behind a step, with a checkpoint; several would stop behind different ones
            with draining() if trainer.args.world_size == 1 else nullcontext():
                trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        trainer.reporter.send(trainer.curve)
    finally:
        trainer.reporter.finish()
    state: TrainerState = trainer.state
    best = None
    trainer.accelerator.wait_for_everyone()  # the first process may still be writing the best step
    if state.best_model_checkpoint and Path(state.best_model_checkpoint).is_dir():
        best = state.best_global_step
        module = trainer.accelerator.unwrap_model(trainer.model)
        checkpoints.load_weights(module, Path(state.best_model_checkpoint) / checkpoints.WEIGHTS)
        trainer.accelerator.wait_for_everyone()  # the first process removes it soon
    return Outcome(
        steps=state.global_step,
        epochs=round(float(state.epoch or 0.0), 4),
        best_step=best,
        rows_per_s=round(trainer.rows_seen / trainer.seconds, 2) if trainer.seconds else None,
        curve=trainer.curve,
        device=str(trainer.args.device),
        stopped_by=trainer.stopped_by(),
        clock=trainer.clock,
    )
