"""A teacher's training from its last checkpoint to its end, whatever the method, with half the batch if memory ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from relabel.distill.teachers.bases import merged
from relabel.distill.teachers.specs import TeacherSpec
from relabel.distill.teachers.trainers import Trained
from relabel.distill.training import checkpoints, sharding
from relabel.distill.training.checkpointed import CheckpointedTrainer, run_to_end
from relabel.distill.training.memory import halving
from relabel.distill.training.outcomes import Outcome
from relabel.distill.training.precision import is_on_cpu
from relabel.distill.training.sections import TrainingSection
from relabel.manifests.cpus import usable_cores
from relabel.manifests.errors import TrainingError


def set_threads(train: TrainingSection) -> None:
    """One below the cores: a thread that a step waits for must not wait for others. Those who say fewer are taken at
    their word.
    """
    if is_on_cpu(train):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() - 1)))


def train_to_end(
    spec: TeacherSpec,
    folder: Path,
    say: Callable[[str], None],
    build: Callable[[int], CheckpointedTrainer],
    *,
    examples: str,
    keys: str = "train.batch_size or train.max_tokens",
    can_halve: bool = True,
) -> Trained:
    """Train, going on from the last whole checkpoint.

    Args:
        folder: of the checkpoints.
        build: makes the trainer, whose batch is halved so often.
        examples: what a batch holds, for errors.
        keys: to lower where memory ends, for errors.
        can_halve: whether half a batch is as good, accumulated twice as often.
    Raises:
        TrainingError: memory ends with half the batch too, or the loss is not finite.
    """
    sharding.refuse_other_sharding(
        instead="Teachers are not sharded: take it out, or set it to plain multi-GPU with `method: sft`; where memory "
        "is short, train adapters alone (`lora: {}`)."
    )
    set_threads(spec.train)

    def attempt(halvings: int) -> tuple[Any, Outcome]:
        trainer = build(halvings)
        outcome = run_to_end(trainer, resume_from=checkpoints.last_checkpoint(folder, say))
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.accelerator.free_memory()
        return model, outcome

    def refusal(words: str) -> TrainingError:
        size = spec.train.batch_size
        tried = f"also with half the batch ({size // 2} {examples})"
        if not can_halve or size < 2:
            tried = f"and the batch ({size} {examples}) can't be halved"
        return TrainingError(
            f"out of memory, {tried}: {words}. Set train.gradient_checkpointing: true, with which --resume goes on, or "
            f"begin again with --restart: lower {keys}, or train adapters alone (lora: {{}})."
        )

    batch_size = spec.train.batch_size if can_halve else None
    (model, outcome), halved = halving(attempt, batch_size=batch_size, say=say, refusal=refusal)
    return Trained(merged(model), outcome, halved)
