"""What turns gradients into a student's next weights: AdamW by groups of parameters, and the schedule of its rate."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from relabel.distill.students.specs import TrainSection

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters that weight decay leaves alone, by name; those of `nn.LayerNorm` beside them."""


def make_optimizer(module: Any, settings: TrainSection) -> torch.optim.AdamW:
    """AdamW over what training changes; each group has its peak rate as `initial_lr`, the heads' behind the others."""
    norms = {id(held) for part in module.modules() if isinstance(part, nn.LayerNorm) for held in part.parameters()}
    rates = {False: settings.learning_rate}
    heads: set[int] = set()
    if settings.head_learning_rate is not None:
        rates[True] = settings.head_learning_rate
        heads = {id(parameter) for parameter in module.heads.parameters()}
    held: dict[tuple[bool, bool], list[Any]] = {
        (is_head, is_plain): [] for is_head in rates for is_plain in (False, True)
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_plain = id(parameter) in norms or NOT_DECAYED.search(name.lower()) is not None
            held[id(parameter) in heads, is_plain].append(parameter)
    groups = [
        {"params": own, "weight_decay": 0.0 if is_plain else settings.weight_decay, "initial_lr": rates[is_head]}
        for (is_head, is_plain), own in held.items()
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)


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
