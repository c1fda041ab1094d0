"""A transformers Trainer with atomic checkpoints, planned batches, dev evaluation with early stopping, and a stop at
the first non-finite value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl

from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoints import StepState, write_checkpoint
from relabel.distill.training.curves import Curve, CurveReporter, Outcome, StepClock
from relabel.distill.training.locations import WEIGHTS, TrainingPlace, checkpoint_name, damaged
from relabel.distill.training.runtime import BatchPlan, is_on_cpu, precision_of
from relabel.distill.training.spec import TrainingSection
from relabel.manifests import failpoints
from relabel.manifests.errors import TrainingError
from relabel.manifests.process import draining, is_stop_wished

# ------------------------------------------------------------------------------
# transformers' Trainer whose every step is measured: figures into the curve, seconds on the clock, a line of progress,
# and an end at the first number that is none.
#
# Overridden hooks: `_maybe_log_save_evaluate` and `log`, which would print Trainer's own figures. TRL's trainers are
# Trainers too: put this class before theirs.


class MeasuredTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Arguments beside `place` are Trainer's."""

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
        super().__init__(*args, **kwargs)
        is_first = self.args.process_index == 0
        self.reporter = CurveReporter(place.report_to if is_first else (), place.folder, place.say)
        self.remove_callback(PrinterCallback)

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
        """The error for a number that came of these rows.

        Args:
            step: default: the one under way.
        """
        return self._place.not_finite(what, rows, step=self.state.global_step + 1 if step is None else step)

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


# ------------------------------------------------------------------------------
# A trainer with checkpoints of our own: whole or not there, without pickle, and gone on with bit for bit.
#
# Overridden hooks of transformers' Trainer, and why: `_save_checkpoint` and the `_load_*` methods (Trainer's own write
# pickle, and a half-written one would be taken for whole), `create_accelerator_and_postprocess` (no DDP around shards).


STATE_OF_TRAINER = "trainer_state.json"


class CheckpointedTrainer(MeasuredTrainer):
    """A Trainer that writes, finds and names things as this project does. Arguments are MeasuredTrainer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_sharded = checkpoints.is_sharded(kwargs.get("model"))
        super().__init__(*args, **kwargs)

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

    @property
    def checkpoints_folder(self) -> Path:
        return self._place.folder

    def own_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint beside model, optimizer and generators: plain values and tensors."""
        return {}

    def load_own_state(self, held: dict[str, Any]) -> None:
        """Take back what `own_state` gave."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        best, is_writer = self.state.best_global_step, self.args.should_save
        if best:
            self.state.best_model_checkpoint = str(self._place.folder / checkpoint_name(best))
        if not is_writer and not self._is_sharded:
            return
        scaler = getattr(self.accelerator, "scaler", None)
        state = StepState(
            optimizer=checkpoints.whole_moments(self.optimizer.state_dict(), keep=is_writer),
            scheduler=self.lr_scheduler.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            curve=self.curve.points,
            own=self.own_state(),
        )
        write_checkpoint(
            self._place,
            self.state.global_step,
            self.accelerator.unwrap_model(self.model),
            state,
            is_writer=is_writer,
            best=best,
            write_more=lambda folder: self.state.save_to_json(str(folder / STATE_OF_TRAINER)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_weights(
            self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint) / WEIGHTS
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        held = StepState.load(checkpoint)
        self.optimizer.load_state_dict(checkpoints.cut_moments(held.optimizer, self.optimizer))
        self.lr_scheduler.load_state_dict(held.scheduler)
        self._take(held)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            state = StepState.load(checkpoint).scaler
            if state is not None:
                scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            StepState.load(checkpoint).restore_random(checkpoint)

    def _take(self, held: StepState) -> None:
        held.restore_curve(self.curve)
        self.load_own_state(held.own)

    def stopped_by(self) -> str | None:
        """What ended training before its last step, as the state of the last checkpoint says."""
        return None

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


def run_to_end(trainer: CheckpointedTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end and keep the best step's weights where early stopping chose one.

    Raises:
        KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        ManifestError: the best step's checkpoint is missing or damaged.
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
    if state.best_model_checkpoint:
        best = state.best_global_step
        # by its step, since the path that the state holds is that of a folder which may have moved
        kept = checkpoints.best_checkpoint(trainer.checkpoints_folder, best)
        module = trainer.accelerator.unwrap_model(trainer.model)
        checkpoints.load_weights(module, kept / WEIGHTS)
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


# ------------------------------------------------------------------------------
# A training that is looked at on the dev split: figures into the curve, the best step kept, an end when it gets no
# better.
#
# Overridden hooks of transformers' Trainer: `evaluate` and `_determine_best_metric`.


EARLY_STOPPING = "early_stopping"

DevFigures = Callable[[Any], dict[str, float]]
"""Figures of a model on dev, by name."""


@dataclass(frozen=True)
class Looks:
    """What is made of looks at dev.

    Args:
        every: steps between looks; None for once an epoch.
        metric: the figure by which the best step is kept; None keeps the last one.
        patience: looks without a new best before training stops; None trains to the end.
        lower_is_better: of the metric.
        at_the_end: look once more behind the last step, wherever the rhythm has it.
    """

    every: int | None = None
    metric: str | None = None
    patience: int | None = None
    lower_is_better: bool = False
    at_the_end: bool = False

    def arguments(self) -> dict[str, Any]:
        """Further arguments of transformers."""
        found: dict[str, Any] = {"eval_strategy": "epoch"}
        if self.every:
            found = {"eval_strategy": "steps", "eval_steps": self.every}
        if self.metric is not None:
            found |= {"metric_for_best_model": self.metric, "greater_is_better": not self.lower_is_better}
        return found


class LookingTrainer(CheckpointedTrainer):
    """Arguments beside these are CheckpointedTrainer's.

    Args:
        looks: None without a dev split.
        dev_figures: figures of the model on dev, by name.
    """

    def __init__(self, *args: Any, looks: Looks | None, dev_figures: DevFigures | None, **kwargs: Any) -> None:
        self._looks, self._dev_figures = looks or Looks(), dev_figures
        super().__init__(*args, **kwargs)

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Figures on dev, noted in the curve."""
        assert self._dev_figures is not None
        self.model.eval()
        found = self._dev_figures(self.model)
        self.model.train()
        if self.args.world_size > 1:
            # the first process's: all of them must stop at the same step, however their devices round
            (found,) = broadcast_object_list([found])
        self.curve.add(self.state.global_step, "dev", found)
        self.reporter.send(self.curve)
        self._place.say(
            f"step {self.state.global_step}, dev: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_last = self.state.global_step >= self.state.max_steps
        if self._looks.at_the_end and is_last:
            self.control.should_evaluate = not self._has_looked()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _has_looked(self) -> bool:
        """Whether there was a look behind this very step."""
        return any(step == self.state.global_step for step, split, _, _ in self.curve.points if split == "dev")

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        metric, patience = self._looks.metric, self._looks.patience
        if metric is None:
            return False
        is_best: bool = self.may_be_best() and super()._determine_best_metric(metrics=metrics, trial=trial)
        if is_best:
            self.control.should_save = True
        reason = self.stopped_by()
        if reason is not None:
            why = f"no better dev {metric} for {patience} looks" if reason == EARLY_STOPPING else f"ended by {reason}"
            self._place.say(f"{why}: stopping")
            self.control.should_training_stop = True
        return is_best

    def may_be_best(self) -> bool:
        """Whether the step of this look may be kept."""
        return True

    def _looks_since_best(self) -> int:
        assert self._looks.metric is not None
        seen = [step for step, _ in self.curve.series("dev", self._looks.metric)]
        return sum(step > (self.state.best_global_step or 0) for step in seen)

    def stopped_by(self) -> str | None:
        patience = self._looks.patience
        return EARLY_STOPPING if patience is not None and self._looks_since_best() >= patience else None


# ------------------------------------------------------------------------------
# A trainer that is fed batches as planned.


class PlannedTrainer(CheckpointedTrainer):
    """One that is fed batches as planned, epoch by epoch.

    Args:
        plan: the batches.
    """

    def __init__(self, *args: Any, plan: BatchPlan, **kwargs: Any) -> None:
        self._plan = plan
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = True  # `compute_loss` divides by the whole step, so Trainer must not divide again

    def get_train_dataloader(self) -> Any:
        """Batches as planned. The loader has a generator of its own, so that iterating draws nothing from the one
        behind dropout.
        """
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self._plan,
            collate_fn=self.data_collator,
            generator=torch.Generator().manual_seed(self.args.seed),
            pin_memory=torch.cuda.is_available() and not self.args.use_cpu,
        )
        return self.accelerator.prepare(loader)

    def set_epoch(self, epoch: int) -> None:
        """Said before an epoch's first batch."""
        self._plan.set_epoch(epoch)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self.set_epoch(kwargs["epoch"])
        return super()._run_epoch(*args, **kwargs)


# ------------------------------------------------------------------------------
# The spec's `train` section as transformers' Trainer has it.


def training_arguments(
    settings: TrainingSection, folder: Path, *, halvings: int = 0, **changes: Any
) -> TrainingArguments:
    """The spec's `train` section as transformers says it.

    Args:
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
        changes: further arguments of transformers.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    return TrainingArguments(**argument_values(settings, folder, halvings=halvings) | changes)


def argument_values(settings: TrainingSection, folder: Path, *, halvings: int = 0) -> dict[str, Any]:
    """What `training_arguments` is made of, for trainers with arguments of their own."""
    precision = precision_of(settings)
    rhythm = {"save_strategy": "steps", "save_steps": settings.save_every} if settings.save_every else {}
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
        "log_level_replica": "error",  # the first process is the one that speaks
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        "accelerator_config": {"even_batches": False},
        "ddp_find_unused_parameters": False,
        **({"save_strategy": "epoch"} | rhythm),
    }
