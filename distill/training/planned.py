"""A trainer that is fed batches as planned."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from relabel.distill.training.batches import BatchPlan
from relabel.distill.training.checkpointed import CheckpointedTrainer


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
