"""One optimizer step of a student: gradients of all its batches, clipped, and what they make of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from relabel.distill.students.objective import Objective
from relabel.distill.students.optimizing import make_optimizer
from relabel.distill.students.specs import TrainSection
from relabel.distill.training import sharding
from relabel.manifests.errors import TrainingError

NotFinite = Callable[[str, Sequence[int]], TrainingError]
"""The error for what is not finite, and the rows that it came of."""


class OptimizerSteps:
    """Takes the steps of a training.

    Args:
        module: a student's, sharded or not; trained in place.
        not_finite: makes the error for a loss or a gradient that is none.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: Any,
        objective: Objective,
        settings: TrainSection,
        not_finite: NotFinite,
    ) -> None:
        self._accelerator, self._objective, self._not_finite = accelerator, objective, not_finite
        self._max_norm = settings.max_grad_norm or math.inf
        # shards reduce their own gradients: they get autocast as for evaluation, and no DDP around them
        is_sharded = sharding.is_sharded(module)
        self._model = accelerator.prepare_model(
            module, device_placement=False if is_sharded else None, evaluation_mode=is_sharded
        )
        self.optimizer = accelerator.prepare_optimizer(make_optimizer(module, settings))

    def take(self, batches: Sequence[dict[str, Any]], *, rate_share: float) -> dict[str, float]:
        """Train on the batches that this process has in one step.

        Args:
            rate_share: of the peak learning rates.
        Returns:
            The loss and its parts over all batches and processes, the gradient's norm, the first learning rate.
        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate_share
        batches = send_to_device(list(batches), self._accelerator.device)
        totals = self._totals(batches)
        self._model.train()
        shares = []
        for batch in batches:
            # gradients travel with the last batch
            with nullcontext() if batch is batches[-1] else self._accelerator.no_sync(self._model):
                shares.append(self._backward(batch, totals))
        figures = self._figures(torch.stack(shares), batches) | {"grad_norm": self._clipped(batches)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return figures | {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}

    def _totals(self, batches: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Σ w by part over all batches of the step and over all processes: the loss is the mean over the step's rows,
        and not a mean of means.
        """
        weights = [self._objective.row_weights(batch) for batch in batches]
        sums = torch.stack([sum(one[name].sum() for one in weights) for name in self._objective.weights])
        return dict(zip(self._objective.weights, self._accelerator.reduce(sums), strict=True))

    def _backward(self, batch: dict[str, Any], totals: dict[str, torch.Tensor]) -> torch.Tensor:
        """Gradients of a batch's share of the step's loss; that share, and those of its parts."""
        sums = self._objective.sums(self._model(**batch["tokens"]), batch)
        loss = self._objective.loss(sums, totals)
        # processes average their gradients, so each one's share is multiplied by their number
        self._accelerator.backward(loss * self._accelerator.num_processes)
        return torch.stack([loss.detach(), *(sums[name].detach() / totals[name] for name in sums)])

    def _figures(self, shares: torch.Tensor, batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Loss and parts of the step; one wait for the device."""
        names = ("loss", *self._objective.weights)
        found: dict[str, float] = {}
        for batch, values in zip(batches, self._accelerator.reduce(shares).tolist(), strict=True):
            if not math.isfinite(values[0]):
                listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))
                raise self._not_finite(f"the loss is not finite ({listed})", batch["rows"].tolist())
            for name, value in zip(names, values, strict=True):
                if math.isfinite(value):  # 0/0: no row of this step has the label
                    found[name] = found.get(name, 0.0) + value
        return found

    def _clipped(self, batches: Sequence[dict[str, Any]]) -> float:
        """The gradient's norm before it is clipped; one that is not finite is for fp16's scaler to leave out."""
        norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_norm))
        if self._accelerator.scaler is None and not math.isfinite(norm):
            rows = torch.cat([batch["rows"] for batch in batches]).tolist()
            raise self._not_finite(f"the gradient is not finite (norm {norm:.4g}), though the loss is", rows)
        return norm
