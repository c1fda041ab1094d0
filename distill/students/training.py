"""The training loop of students, which is transformers' Trainer; what is ours is what it is fed and what it minimises.

Overridden hooks, and why: `compute_loss` and `_get_num_items_in_batch` (the mean over an optimizer step's rows, not a
mean of means), `evaluate` and `_determine_best_metric` (figures on dev). `distill/training/checkpointed.py` has the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from distill.students.collator import Collator
from distill.students.objective import Objective
from distill.students.specs import EarlyStopping, TrainSection
from distill.training.arguments import training_arguments
from distill.training.batches import BatchPlan, TokenRows
from distill.training.checkpointed import PlannedTrainer, TrainingPlace

LOWER_IS_BETTER = ("loss",)
METRIC_KEYS = {"macro_f1": "f1_macro"}
"""Spec's name of a dev metric → the figure's own."""


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


class StudentTrainer(PlannedTrainer):
    """transformers' Trainer for an objective over heads.

    Args:
        folder: where checkpoints lie.
        say: called with progress, a line each.
    """

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
        self._dev_figures = feed.dev_figures
        self._settings = settings
        rows = TokenRows(len(feed.names))
        super().__init__(
            place=TrainingPlace(folder, settings.keep_checkpoints, say, feed.names),
            plan=feed.plan,
            model=module,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=feed.collator,
        )

    # what it minimises

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> dict[str, torch.Tensor] | None:
        """Σ w by part over all batches of the optimizer step, and over all processes."""
        if not batch_samples:
            return None
        self.begin_step(sum(len(batch["rows"]) for batch in batch_samples))
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
        self.note(dict(zip(("loss", *sums), parts.tolist(), strict=True)), inputs["rows"].tolist())
        return loss

    # looks at dev

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
        self._place.say(
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
            self._place.say(f"no better dev {stopping.metric} for {stopping.patience} looks: stopping")
            self.control.should_training_stop = True
        return is_best

    def _looks_since_best(self, stopping: EarlyStopping) -> int:
        seen = [step for step, _ in self.curve.series("dev", metric_key(stopping))]
        return sum(step > (self.state.best_global_step or 0) for step in seen)

    def has_stopped(self) -> bool:
        """Whether early stopping had ended it."""
        stopping = self._settings.early_stopping
        return stopping is not None and self._looks_since_best(stopping) >= stopping.patience


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping looks at."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)


def student_arguments(settings: TrainSection, folder: Path, *, has_dev: bool, halvings: int) -> TrainingArguments:
    """The spec's `train` section as transformers says it, with its looks at dev.

    Args:
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
    """
    stopping = settings.early_stopping
    rhythm: dict[str, Any] = {}
    if has_dev:
        rhythm["eval_strategy"] = "steps" if settings.eval_every else "epoch"
        if settings.eval_every:
            rhythm["eval_steps"] = settings.eval_every
    if stopping is not None:
        rhythm |= {
            "metric_for_best_model": metric_key(stopping),
            "greater_is_better": stopping.metric not in LOWER_IS_BETTER,
        }
    return training_arguments(settings, folder, halvings=halvings, **rhythm)
