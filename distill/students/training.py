"""The training loop, which is transformers' Trainer; what is ours is what it is fed, what it minimises, and how it
writes checkpoints.

Overridden hooks, and why: `compute_loss` and `_get_num_items_in_batch` (the mean over an optimizer step's rows, not a
mean of means, and a stop at the first loss that is not finite), `get_train_dataloader` (batches planned by epoch),
`evaluate` (figures on dev), `_save_checkpoint` and the `_load_*` methods (Trainer's own write pickle),
`create_accelerator_and_postprocess` (no DDP around shards).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl

from distill.students import checkpoints, sharding
from distill.students.batches import BatchPlan, Collator, TokenRows
from distill.students.curves import Curve
from distill.students.disk_errors import writing
from distill.students.objective import Objective
from distill.students.specs import EarlyStopping, TrainSection
from manifests import failpoints
from manifests.errors import ConfigError, TrainingError

LOWER_IS_BETTER = ("loss",)
METRIC_KEYS = {"macro_f1": "f1_macro"}
"""Spec's name of a dev metric → the figure's own."""
ROWS_NAMED = 20


@dataclass
class Feed:
    """What a training consumes.

    Args:
        plan: the batches.
        collator: row numbers to tensors.
        dev_figures: figures of the module on dev, by name; None without a dev split.
        names: where each row comes from, `(source, row_id)`.
    """

    plan: BatchPlan
    collator: Collator
    dev_figures: Callable[[Any], dict[str, float]] | None
    names: Sequence[tuple[str, int]]


@dataclass
class Outcome:
    """How a training ended.

    Args:
        best_step: the step that was kept, where early stopping chose one.
        rows_per_s: rows trained in a second of this process's own steps, looks at dev and checkpoints left out.
    """

    steps: int
    epochs: float
    best_step: int | None
    rows_per_s: float | None
    curve: Curve
    device: str
    notes: list[str] = field(default_factory=list)


class StudentTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """transformers' Trainer for an objective over heads.

    Args:
        folder: where checkpoints lie.
        say: called with progress, a line each.
    """

    control: TrainerControl

    def __init__(
        self,
        module: Any,
        arguments: TrainingArguments,
        objective: Objective,
        feed: Feed,
        settings: TrainSection,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._objective = objective
        self._feed = feed
        self._settings = settings
        self._folder = folder
        self._say = say
        self.curve = Curve()
        self.rows_seen = 0
        self.seconds = 0.0
        self._step_began: float | None = None
        self._pending: dict[str, float] = {}
        self._is_sharded = sharding.is_sharded(module)
        rows = TokenRows(len(feed.names))
        super().__init__(
            model=module, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=feed.collator
        )
        self.loss_is_scaled_for_ga = (
            True  # `compute_loss` divides by the whole step's weights, so Trainer must not divide again
        )
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

    # what it is fed

    def get_train_dataloader(self) -> Any:
        """Batches as planned. The loader has a generator of its own, so that iterating draws nothing from the one
        behind dropout.
        """
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self._feed.plan,
            collate_fn=self._feed.collator,
            generator=torch.Generator().manual_seed(self.args.seed),
            pin_memory=torch.cuda.is_available() and not self.args.use_cpu,
        )
        return self.accelerator.prepare(loader)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self._feed.plan.set_epoch(kwargs["epoch"])
        return super()._run_epoch(*args, **kwargs)

    # what it minimises

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> dict[str, torch.Tensor] | None:
        """Σ w by part over all batches of the optimizer step, and over all processes."""
        if not batch_samples:
            return None
        self._step_began = time.perf_counter()
        self.rows_seen += sum(len(batch["rows"]) for batch in batch_samples)
        held = [self._objective.row_weights(batch) for batch in batch_samples]
        totals = torch.stack(
            [sum((one[name].sum() for one in held), torch.zeros(())).to(device) for name in self._objective.weights]
        )
        if self.args.world_size > 1:
            totals = self.accelerator.reduce(totals, reduction="sum")
        return dict(zip(self._objective.weights, totals, strict=True))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This batch's share of the optimizer step's loss.

        Raises:
            TrainingError: it is not finite; the message names the batch's rows.
        """
        assert num_items_in_batch is not None
        assert not return_outputs
        logits = model(**inputs["tokens"])
        sums = self._objective.sums(logits, inputs)
        # devices average their gradients, so each one's share is multiplied by their number
        loss = self._objective.loss(sums, num_items_in_batch) * self.args.world_size
        parts = torch.stack(
            [loss.detach() / self.args.world_size, *(sums[name].detach() / num_items_in_batch[name] for name in sums)]
        )
        if self.args.world_size > 1:
            parts = self.accelerator.reduce(parts, reduction="sum")  # each process holds its share of the step's loss
        # one wait for the device a batch
        self._note(dict(zip(("loss", *sums), parts.tolist(), strict=True)), inputs["rows"])
        return loss

    def _note(self, values: dict[str, float], rows: torch.Tensor) -> None:
        if not math.isfinite(values["loss"]):
            raise TrainingError(self._not_finite(values, rows.tolist()))
        for name, value in values.items():
            if math.isfinite(value):  # 0/0: no row of this step has the label
                self._pending[name] = self._pending.get(name, 0.0) + value

    def _not_finite(self, values: dict[str, float], rows: list[int]) -> str:
        named = ", ".join(
            f"{source}:{row_id}" for source, row_id in (self._feed.names[row] for row in rows[:ROWS_NAMED])
        )
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        kept = checkpoints.list_checkpoints(self._folder)
        good = f"The last good checkpoint is {kept[-1]}" if kept else "No checkpoint was written yet"
        parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        return (
            f"step {self.state.global_step + 1}: the loss is not finite ({parts}). Rows of the batch, as "
            f"source:row_id: {named}{more}. "
            f"{good}. Look at these rows; if they are fine, lower train.learning_rate or set train.precision to fp32."
        )

    # what is written down

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._step_began is not None:
            self.seconds += time.perf_counter() - self._step_began
            self._step_began = None
        if self._pending:
            rate = kwargs.get("learning_rate")
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            self.curve.add(
                self.state.global_step, "train", {**self._pending, **extra, "learning_rate": float(rate or 0.0)}
            )
            loss = self._pending["loss"]
            self._pending = {}
            self._say(f"step {self.state.global_step} of {self.state.max_steps}, loss {loss:.4f}")
            failpoints.hit("after_training_step")
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Figures on dev, noted in the curve."""
        assert self._feed.dev_figures is not None
        self.model.eval()
        found = self._feed.dev_figures(self.model)
        self.model.train()
        if self.args.world_size > 1:
            # the first process's: all of them must stop at the same step, however their devices round
            (found,) = broadcast_object_list([found])
        self.curve.add(self.state.global_step, "dev", found)
        self._say(
            f"step {self.state.global_step}, dev: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        stopping = self._settings.early_stopping
        if stopping is None:
            return False
        is_best: bool = super()._determine_best_metric(metrics=metrics, trial=trial)
        if is_best:
            self.control.should_save = True
        elif self._looks_since_best(stopping) >= stopping.patience:
            self._say(f"no better dev {stopping.metric} for {stopping.patience} looks: stopping")
            self.control.should_training_stop = True
        return is_best

    def _looks_since_best(self, stopping: EarlyStopping) -> int:
        seen = [step for step, _ in self.curve.series("dev", metric_key(stopping))]
        return sum(step > (self.state.best_global_step or 0) for step in seen)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep Trainer's closing figures; the curve holds the rest."""
        self.state.log_history.append({**logs, "step": self.state.global_step})

    # checkpoints without pickle

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(
                self._folder / checkpoints.checkpoint_name(self.state.best_global_step)
            )
        is_writer = self.args.should_save
        if not is_writer and not self._is_sharded:
            return
        final = self._folder / checkpoints.checkpoint_name(self.state.global_step)
        scratch = self._folder / f".part-{final.name}"
        with writing(self._folder):
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
            },
        )
        self.state.save_to_json(str(scratch / "trainer_state.json"))
        failpoints.hit("before_checkpoint")
        checkpoints.commit(scratch, final)
        failpoints.hit("after_checkpoint")
        best = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        checkpoints.drop_old(self._folder, keep=self._settings.keep_checkpoints, best=best)

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
        self.curve.points = [(int(step), split, name, value) for step, split, name, value in held["curve"]]

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

    def adopt_if_finished(self, checkpoint: Path) -> bool:
        """Take over a checkpoint after which there is nothing left to train; False if there is. Trainer itself would do
        one step more.
        """
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        points = checkpoints.load_state(checkpoint)["curve"]
        stopping = self._settings.early_stopping
        self.curve.points = [(int(step), split, name, value) for step, split, name, value in points]
        self.state = state
        has_stopped = stopping is not None and self._looks_since_best(stopping) >= stopping.patience
        if state.global_step < state.max_steps and not has_stopped:
            return False
        self._load_from_checkpoint(str(checkpoint))
        return True


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping looks at."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)


def training_arguments(settings: TrainSection, folder: Path, *, has_dev: bool, halvings: int) -> TrainingArguments:
    """The spec's `train` section as transformers says it.

    Args:
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
    """
    stopping = settings.early_stopping
    is_bf16, is_fp16 = _precision(settings)
    rhythm: dict[str, Any] = {"save_strategy": "steps" if settings.save_every else "epoch", "eval_strategy": "no"}
    if settings.save_every:
        rhythm["save_steps"] = settings.save_every
    if has_dev:
        rhythm["eval_strategy"] = "steps" if settings.eval_every else "epoch"
        if settings.eval_every:
            rhythm["eval_steps"] = settings.eval_every
    if stopping is not None:
        rhythm |= {
            "metric_for_best_model": metric_key(stopping),
            "greater_is_better": stopping.metric not in LOWER_IS_BETTER,
        }
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        per_device_train_batch_size=max(1, settings.batch_size >> halvings),
        gradient_accumulation_steps=settings.accumulation << halvings,
        learning_rate=settings.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        bf16=is_bf16,
        fp16=is_fp16,
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        logging_strategy="no",
        logging_nan_inf_filter=False,
        log_level_replica="error",  # the first process is the one that speaks
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        average_tokens_across_devices=False,
        accelerator_config={"even_batches": False},
        ddp_find_unused_parameters=False,
        **rhythm,
    )


def _precision(settings: TrainSection) -> tuple[bool, bool]:
    on_gpu = settings.device == "auto" and torch.cuda.is_available()
    if settings.precision == "auto":
        return on_gpu and torch.cuda.is_bf16_supported(), False
    if settings.precision == "fp16" and not on_gpu:  # Trainer would compute in float32 and say nothing
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return settings.precision == "bf16", settings.precision == "fp16"


def train(trainer: StudentTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end and keep the best step's weights where early stopping chose one."""
    if resume_from is None or not trainer.adopt_if_finished(resume_from):
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
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
    )
