"""The objective L = λ_r L_r + λ_s L_s + λ_a L_a + λ_c L_c of a batch: which losses there are, their weights, and their
means.

Each part is kept as (Σ w·l, Σ w) until all batches of an optimizer step are known, so that accumulation over several
batches, or over several devices, gives the loss of one large batch and not the mean of unequal means.

Source: Graph-GRPO, equations 16 to 19; R3A, equation 3, is the part `relevance` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from relabel.distill.students.heads import NODE_HEADS
from relabel.distill.students.loss_section import LossSection
from relabel.distill.students.losses import consistency, cross_entropy, phi_mask, soft_targets, weighted_sum
from relabel.manifests.phi import PhiTable

# B rows, K grades

CONSISTENCY = "consistency"


class Objective:
    """What a student with these heads minimises.

    Args:
        heads: number of grades by head.
    """

    def __init__(self, spec: LossSection, heads: Mapping[str, int], phi: PhiTable) -> None:
        self._spec = spec
        self._mask_KC = phi_mask(phi, heads["relevance"])
        has_nodes = set(NODE_HEADS) <= set(heads)
        self.weights = {name: getattr(spec, name) for name in heads if getattr(spec, name) > 0}
        if has_nodes and spec.consistency > 0:
            self.weights[CONSISTENCY] = spec.consistency
        """λ by part, of those that count."""

    def row_weights(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """w_i by part: float [B]; the consistency needs no label, so every row counts."""
        held = {**batch["weights"], CONSISTENCY: batch["row_weight"]}
        return {name: held[name] for name in self.weights}

    def sums(self, logits: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Σ_i w_i l_i by part, scalars that carry gradients."""
        found = {}
        for name, weight_B in self.row_weights(batch).items():
            if name == CONSISTENCY:
                losses_B = self._consistency(logits)
            else:
                losses_B = self._cross_entropy(logits[name], batch["targets"][name], smoothing=self._smoothing(name))
            found[name] = weighted_sum(losses_B, weight_B)
        return found

    def loss(self, sums: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Tensor:
        """Σ_parts λ · Σ w·l / Σ w.

        Args:
            totals: Σ w by part, over all batches of the optimizer step; a part without a weighted row adds nothing.
        """
        terms = [weight * sums[name] / _positive(totals[name]) for name, weight in self.weights.items()]
        return torch.stack(terms).sum()

    def _smoothing(self, head: str) -> float:
        """ε of a head's target: equation 17 softens the grade, equation 16 takes the node scores as they are."""
        return self._spec.label_smoothing if head == "relevance" else 0.0

    def _cross_entropy(self, logits_BK: Tensor, target_BK: Tensor, *, smoothing: float) -> Tensor:
        temperature = self._spec.temperature
        return cross_entropy(
            logits_BK, soft_targets(target_BK, temperature=temperature, smoothing=smoothing), temperature=temperature
        )

    def _consistency(self, logits: Mapping[str, Tensor]) -> Tensor:
        relevance_BK, subject_BS, attribute_BA = (logits[name] for name in ("relevance", *NODE_HEADS))
        mask_KC = self._mask_KC.to(relevance_BK.device)
        return consistency(relevance_BK, subject_BS, attribute_BA, mask_KC, direction=self._spec.consistency_direction)


def _positive(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, torch.ones_like(total))
