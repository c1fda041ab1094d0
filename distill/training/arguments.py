"""The spec's `train` section as transformers' Trainer has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from relabel.distill.training.precision import is_on_cpu, precision_of
from relabel.distill.training.sections import TrainingSection


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
    precision = precision_of(settings)
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
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": is_on_cpu(settings),
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
