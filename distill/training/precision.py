"""What a training computes in."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import torch

from relabel.distill.training.sections import TrainingSection
from relabel.manifests.cpus import cpu_flags
from relabel.manifests.errors import ConfigError

AMX = "amx_bf16"
"""The flag of CPUs that multiply bfloat16 in tiles; `auto` does not go by `avx512_bf16` alone."""
Precision = Literal["no", "bf16", "fp16"]
"""As accelerate calls it: `no` is float32 throughout; the others are for matrix products alone, by autocast."""


def is_on_cpu(settings: TrainingSection) -> bool:
    """Whether there is no GPU, or none is wanted."""
    return settings.device == "cpu" or not torch.cuda.is_available()


def precision_of(settings: TrainingSection, flags: Set[str] | None = None) -> Precision:
    """The spec's `train.precision` on this machine.

    Args:
        flags: of the CPU, for tests.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    on_cpu = is_on_cpu(settings)
    if settings.precision == "auto":
        is_fast = AMX in (cpu_flags() if flags is None else flags) if on_cpu else torch.cuda.is_bf16_supported()
        return "bf16" if is_fast else "no"
    if settings.precision == "fp16" and on_cpu:  # accelerate would compute in float32 and say nothing
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return "no" if settings.precision == "fp32" else settings.precision
