"""transformers' Trainer with a curve, checkpoints of our own and a stop at the first non-finite value; and a training
from its last checkpoint to its end, with half the batch if memory runs out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import PrinterCallback, TrainerControl

from relabel.distill.teachers.bases import Trained, merged
from relabel.distill.teachers.spec import TeacherSpec
from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoints import StepState, write_checkpoint
from relabel.distill.training.curves import Curve, CurveReporter, Outcome
from relabel.distill.training.locations import WEIGHTS, TrainingPlace, checkpoint_name, damaged
from relabel.distill.training.runtime import halving, is_on_cpu, precision_of
from relabel.distill.training.spec import TrainingSection
from relabel.manifests import failpoints
from relabel.manifests.errors import TrainingError
from relabel.manifests.process import draining, is_stop_wished, usable_cores

STATE_OF_TRAINER = "trainer_state.json"


class CheckpointTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A Trainer whose figures go into a curve, and whose checkpoints are atomic, without pickle, and resumed
    bit for bit. TRL's trainers are Trainers too: put this class before theirs.

    Overridden hooks: `_maybe_log_save_evaluate` and `log` (Trainer's own figures are not kept), `_save_checkpoint` and
    the `_load_*` methods (Trainer's write pickle, and a half-written checkpoint would be taken for whole).

    Args:
        place: where checkpoints go; all other arguments are Trainer's.
    """

    control: TrainerControl
    progress_figures: tuple[str, ...] = ("loss",)
    """Figures of a step that its line of progress shows."""

    def __init__(self, *args: Any, place: TrainingPlace, **kwargs: Any) -> None:
        self.place = place
        self.curve = Curve()
        self.rows_seen = 0
        self.seconds = 0.0
        self._step_began: float | None = None
        self._pending: dict[str, float] = {}
        self._rows_of_step: list[int] = []
        super().__init__(*args, **kwargs)
        services = place.report_to if self.args.process_index == 0 else ()
        self.reporter = CurveReporter(services, place.folder, place.say)
        self.remove_callback(PrinterCallback)

    # figures of a step

    def begin_step(self, num_rows: int) -> None:
        """Start the clock of an optimizer step over so many rows of this process."""
        self._step_began = time.perf_counter()
        self.rows_seen += num_rows

    def note(self, values: dict[str, float], rows: Sequence[int]) -> None:
        """Add a batch's values to those of its optimizer step; `loss` is among them.

        Raises:
            TrainingError: the loss is not finite; the message names the rows.
        """
        if not math.isfinite(values["loss"]):
            parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise self.not_finite(f"the loss is not finite ({parts})", rows)
        self._rows_of_step += rows
        for name, value in values.items():
            if math.isfinite(value):
                self._pending[name] = self._pending.get(name, 0.0) + value

    def not_finite(self, what: str, rows: Sequence[int]) -> TrainingError:
        """The error for a value of these rows that is not finite, in the step under way."""
        return self.place.not_finite(what, rows, step=self.state.global_step + 1)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._step_began is not None:
            self.seconds += time.perf_counter() - self._step_began
            self._step_began = None
        if self._pending:
            self._check_gradient(grad_norm)
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            extra["learning_rate"] = float(kwargs.get("learning_rate") or 0.0)
            self.curve.add(self.state.global_step, "train", {**self._pending, **extra})
            figures = [f"{name} {self._pending[name]:.4f}" for name in self.progress_figures if name in self._pending]
            self._pending = {}
            self.place.say(", ".join([f"step {self.state.global_step} of {self.state.max_steps}", *figures]))
            self.measured()
            failpoints.hit("after_training_step")
            if is_stop_wished() and self.may_stop():
                self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _check_gradient(self, grad_norm: Any) -> None:
        """Stop before the weights of such a gradient are in a checkpoint; with fp16 the scaler checks it.

        Raises:
            TrainingError: it is not finite.
        """
        rows, self._rows_of_step = self._rows_of_step, []
        if grad_norm is not None and self._scaler is None and not math.isfinite(float(grad_norm)):
            what = f"the gradient is not finite (norm {float(grad_norm):.4g}), though the loss is"
            raise self.place.not_finite(what, rows, step=self.state.global_step)

    def measured(self) -> None:
        """Called when a step's figures are in the curve."""
        self.reporter.send(self.curve)

    def may_stop(self) -> bool:
        """Whether a checkpoint after the step just done holds all that training resumes from."""
        return True

    def stopped_by(self) -> str | None:
        """What ended training before its last step, as the state of the last checkpoint says."""
        return None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep Trainer's closing figures; the curve holds the rest."""
        self.state.log_history.append({**logs, "step": self.state.global_step})

    # checkpoints

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    def own_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint in addition: plain values and tensors."""
        return {}

    def load_own_state(self, held: dict[str, Any]) -> None:
        """Take back what `own_state` gave."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        best = self.state.best_global_step
        if best:
            self.state.best_model_checkpoint = str(self.place.folder / checkpoint_name(best))
        if not self.args.should_save:
            return
        state = StepState(
            optimizer=self.optimizer.state_dict(),
            scheduler=self.lr_scheduler.state_dict(),
            scaler=None if self._scaler is None else self._scaler.state_dict(),
            curve=self.curve.points,
            own=self.own_state(),
        )
        write_checkpoint(
            self.place,
            self.state.global_step,
            self.accelerator.unwrap_model(self.model),
            state,
            best=best,
            write_more=lambda folder: self.state.save_to_json(str(folder / STATE_OF_TRAINER)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        module = self.accelerator.unwrap_model(model or self.model)
        checkpoints.load_weights(module, Path(resume_from_checkpoint) / WEIGHTS)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            held = StepState.load(checkpoint)
            self.optimizer.load_state_dict(held.optimizer)
            self.lr_scheduler.load_state_dict(held.scheduler)
            self._take(held)

    def _load_scaler(self, checkpoint: str | None) -> None:
        held = None if checkpoint is None or self._scaler is None else StepState.load(checkpoint).scaler
        if held is not None:
            self._scaler.load_state_dict(held)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            StepState.load(checkpoint).restore_random(checkpoint)

    def _take(self, held: StepState) -> None:
        held.restore_curve(self.curve)
        self.load_own_state(held.own)

    def adopt_if_finished(self, checkpoint: Path) -> bool:
        """Take over a checkpoint after which there is nothing left to train; False if there is. Trainer itself would do
        one step more.

        Raises:
            ManifestError: it is damaged.
        """
        try:
            self.state = TrainerState.load_from_json(str(checkpoint / STATE_OF_TRAINER))
        except (OSError, ValueError, TypeError) as exc:
            raise damaged(checkpoint, f"{STATE_OF_TRAINER} is missing, or can't be read") from exc
        self._take(StepState.load(checkpoint))
        if self.state.global_step < self.state.max_steps and self.stopped_by() is None:
            return False
        self._load_from_checkpoint(str(checkpoint))
        return True


def run_to_end(trainer: CheckpointTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end, and load the best step's weights where evaluations chose one.

    Raises:
        KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        ManifestError: the best step's checkpoint is missing or damaged.
    """
    try:
        if resume_from is None or not trainer.adopt_if_finished(resume_from):
            # one process stops after a step, with a checkpoint; several would stop after different ones
            with draining() if trainer.args.world_size == 1 else nullcontext():
                trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        trainer.reporter.send(trainer.curve)
    finally:
        trainer.reporter.finish()
    state: TrainerState = trainer.state
    best = state.best_global_step if state.best_model_checkpoint else None
    trainer.accelerator.wait_for_everyone()  # the first process may still be writing the best step
    if best is not None:
        kept = checkpoints.best_checkpoint(trainer.place.folder, best)  # by its step: the folder may have moved since
        checkpoints.load_weights(trainer.accelerator.unwrap_model(trainer.model), kept / WEIGHTS)
        trainer.accelerator.wait_for_everyone()  # before the first process removes it
    return Outcome(
        steps=state.global_step,
        epochs=round(float(state.epoch or 0.0), 4),
        best_step=best,
        rows_per_s=round(trainer.rows_seen / trainer.seconds, 2) if trainer.seconds else None,
        curve=trainer.curve,
        device=str(trainer.args.device),
        stopped_by=trainer.stopped_by(),
    )


def train_to_end(
    spec: TeacherSpec,
    folder: Path,
    say: Callable[[str], None],
    build: Callable[[int], CheckpointTrainer],
    *,
    examples: str,
    keys: str = "train.batch_size or train.max_tokens",
    can_halve: bool = True,
) -> Trained:
    """Train a teacher, resuming from the last whole checkpoint.

    Args:
        folder: of the checkpoints.
        build: makes the trainer, whose batch is halved so often.
        examples: what a batch holds, for errors.
        keys: to lower where memory runs out, for errors.
        can_halve: whether half a batch is as good, accumulated twice as often.
    Raises:
        TrainingError: memory runs out with half the batch too, or the loss is not finite.
    """
    checkpoints.refuse_other_sharding(
        instead="Teachers are not sharded: take it out, or set it to plain multi-GPU with `method: sft`; where memory "
        "is short, train adapters alone (`lora: {}`)."
    )
    set_threads(spec.train)

    def attempt(halvings: int) -> tuple[Any, Outcome]:
        trainer = build(halvings)
        outcome = run_to_end(trainer, resume_from=checkpoints.last_checkpoint(folder, say))
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.accelerator.free_memory()
        return model, outcome

    def refusal(words: str) -> TrainingError:
        size = spec.train.batch_size
        tried = f"also with half the batch ({size // 2} {examples})"
        if not can_halve or size < 2:
            tried = f"and the batch ({size} {examples}) can't be halved"
        return TrainingError(
            f"out of memory, {tried}: {words}. Set train.gradient_checkpointing: true, with which --resume goes on, or "
            f"begin again with --restart: lower {keys}, or train adapters alone (lora: {{}})."
        )

    batch_size = spec.train.batch_size if can_halve else None
    (model, outcome), halved = halving(attempt, batch_size=batch_size, say=say, refusal=refusal)
    return Trained(merged(model), outcome, halved)


def set_threads(train: TrainingSection) -> None:
    """One thread fewer than there are cores: a thread that a step waits for must not wait for others. A lower number,
    set from outside, is kept.
    """
    if is_on_cpu(train):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() - 1)))


def argument_values(settings: TrainingSection, folder: Path, *, halvings: int = 0) -> dict[str, Any]:
    """The spec's `train` section as arguments of transformers' TrainingArguments.

    Args:
        halvings: how often the batch was halved because memory ran out; accumulation doubles as often.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    precision = precision_of(settings)
    return {
        "output_dir": str(folder),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "per_device_train_batch_size": max(1, settings.batch_size >> halvings),
        "gradient_accumulation_steps": settings.accumulation << halvings,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        "warmup_steps": settings.warmup,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": is_on_cpu(settings),
        "eval_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "log_level_replica": "error",  # the first process writes the log
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        "accelerator_config": {"even_batches": False},
        "ddp_find_unused_parameters": False,
        "save_strategy": "steps" if settings.save_every else "epoch",
        **({"save_steps": settings.save_every} if settings.save_every else {}),
    }
