"""The training loop of students, which is transformers' Trainer; what is ours is what it is fed and what it minimises.

Overridden hooks, and why: `compute_loss` and `_get_num_items_in_batch` (the mean over an optimizer step's rows, not a
mean of means). `checkpointed.py`, `measured.py` and `looks.py` of distill/training have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from distill.students.collator import Collator
from distill.students.objective import Objective
from distill.students.specs import EarlyStopping, TrainSection
from distill.training.arguments import training_arguments
from distill.training.batches import BatchPlan, TokenRows
from distill.training.looks import DevFigures, LookingTrainer, Looks
from distill.training.planned import PlannedTrainer
from distill.training.training_place import TrainingPlace

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
    dev_figures: DevFigures | None
    names: Sequence[tuple[str, int]]


class StudentTrainer(LookingTrainer, PlannedTrainer):
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
        rows = TokenRows(len(feed.names))
        super().__init__(
            place=TrainingPlace(folder, settings.keep_checkpoints, say, feed.names, settings.report_to),
            plan=feed.plan,
            looks=student_looks(settings) if feed.dev_figures is not None else None,
            dev_figures=feed.dev_figures,
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


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping looks at."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)


def student_looks(settings: TrainSection) -> Looks:
    """How the spec's `train` section has a student looked at on dev."""
    stopping = settings.early_stopping
    if stopping is None:
        return Looks(settings.eval_every)
    return Looks(settings.eval_every, metric_key(stopping), stopping.patience, stopping.metric in LOWER_IS_BETTER)


def student_arguments(settings: TrainSection, folder: Path, *, has_dev: bool, halvings: int) -> TrainingArguments:
    """The spec's `train` section as transformers says it, with its looks at dev.

    Args:
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
    """
    rhythm = student_looks(settings).arguments() if has_dev else {}
    return training_arguments(settings, folder, halvings=halvings, **rhythm)
