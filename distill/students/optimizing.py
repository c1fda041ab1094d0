"""What turns gradients into a student's next weights: AdamW by groups of parameters, and the schedule of its rate."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from distill.students.specs import TrainSection

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters that weight decay leaves alone, by name; those of `nn.LayerNorm` beside them."""


def make_optimizer(module: Any, settings: TrainSection) -> torch.optim.AdamW:
    """AdamW over what training changes; each group has its peak rate as `initial_lr`."""
    norms = {id(held) for part in module.modules() if isinstance(part, nn.LayerNorm) for held in part.parameters()}
    decayed: list[Any] = []
    others: list[Any] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_other = id(parameter) in norms or NOT_DECAYED.search(name.lower())
            (others if is_other else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    peak = settings.learning_rate
    return torch.optim.AdamW([{**group, "initial_lr": peak} for group in groups], lr=peak, fused=True)


def rate_share(settings: TrainSection, step: int, steps: int) -> float:
    """Share of the peak rate that a step has.

    Args:
        step: those done before it.
        steps: of the whole training.
    """
    warmup = math.ceil(steps * settings.warmup)
    if step < warmup:
        return step / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "linear":
        return (steps - step) / max(1, steps - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup))))
