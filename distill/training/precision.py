"""What a training computes in."""

from __future__ import annotations

from typing import Literal

import torch

from distill.training.sections import TrainingSection
from manifests.errors import ConfigError

Precision = Literal["no", "bf16", "fp16"]
"""As accelerate calls it: `no` is float32 throughout; the others are for matrix products alone, by autocast."""


def is_on_cpu(settings: TrainingSection) -> bool:
    """Whether there is no GPU, or none is wanted."""
    return settings.device == "cpu" or not torch.cuda.is_available()


def precision_of(settings: TrainingSection) -> Precision:
    """The spec's `train.precision` on this machine.

    Raises:
        ConfigError: fp16 without a GPU.
    """
    on_cpu = is_on_cpu(settings)
    if settings.precision == "auto":
        return "bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "no"
    if settings.precision == "fp16" and on_cpu:  # accelerate would compute in float32 and say nothing
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return "no" if settings.precision == "fp32" else settings.precision
