"""The spec's `train` section as transformers' Trainer has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from distill.training.sections import TrainingSection
from manifests.errors import ConfigError


def training_arguments(
    settings: TrainingSection, folder: Path, *, halvings: int = 0, **changes: Any
) -> TrainingArguments:
    """The spec's `train` section as transformers says it.

    Args:
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
        changes: further arguments of transformers.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    return TrainingArguments(**argument_values(settings, folder, halvings=halvings) | changes)


def argument_values(settings: TrainingSection, folder: Path, *, halvings: int = 0) -> dict[str, Any]:
    """What `training_arguments` is made of, for trainers with arguments of their own."""
    is_bf16, is_fp16 = _precision(settings)
    rhythm = {"save_strategy": "steps", "save_steps": settings.save_every} if settings.save_every else {}
    return {
        "output_dir": str(folder),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "per_device_train_batch_size": max(1, settings.batch_size >> halvings),
        "gradient_accumulation_steps": settings.accumulation << halvings,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        "warmup_steps": settings.warmup,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "bf16": is_bf16,
        "fp16": is_fp16,
        "use_cpu": settings.device == "cpu" or not torch.cuda.is_available(),
        "eval_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "log_level_replica": "error",  # the first process is the one that speaks
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        "accelerator_config": {"even_batches": False},
        "ddp_find_unused_parameters": False,
        **({"save_strategy": "epoch"} | rhythm),
    }


def _precision(settings: TrainingSection) -> tuple[bool, bool]:
    on_gpu = settings.device == "auto" and torch.cuda.is_available()
    if settings.precision == "auto":
        return on_gpu and torch.cuda.is_bf16_supported(), False
    if settings.precision == "fp16" and not on_gpu:  # Trainer would compute in float32 and say nothing
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return settings.precision == "bf16", settings.precision == "fp16"
