"""A spec as TRL says it, and the order of prompts. Imports TRL, which takes ten seconds and more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from relabel.distill.teachers.grpo_spec import RolloutSection
from relabel.distill.teachers.vllm_rollouts import vllm_arguments
from relabel.distill.training.arguments import argument_values
from relabel.distill.training.looks import Looks
from relabel.distill.training.sections import TrainingSection

_EPOCH_STRIDE = 1_000_003


def grpo_arguments(
    settings: TrainingSection,
    rollouts: RolloutSection,
    folder: Path,
    *,
    max_answer_tokens: int,
    looks: Looks | None = None,
    halvings: int = 0,
    **changes: Any,
) -> GRPOConfig:
    """The spec as TRL says it: one generation for each optimizer step's rollouts, used `rollouts.updates` times.

    Args:
        max_answer_tokens: of any one turn.
        looks: at dev, if there is such a split.
        halvings: how often the batch was halved for want of memory; accumulation doubles as often.
        changes: further arguments of TRL.
    """
    values = argument_values(settings, folder, halvings=halvings)
    values |= {
        "num_generations": rollouts.group,
        "steps_per_generation": values["gradient_accumulation_steps"],
        "num_iterations": rollouts.updates,
        "max_completion_length": max_answer_tokens,
        "temperature": rollouts.temperature,
        "top_p": rollouts.top_p,
        "epsilon": rollouts.clip,
        "beta": rollouts.beta,
        "loss_type": "grpo",  # a mean over tokens, then over rollouts; TRL's default is another
        "use_bias_correction_kl": False,
        "disable_dropout": True,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "per_device_eval_batch_size": rollouts.group,  # TRL wants a multiple of it; looks make batches of their own
    }
    if looks is not None:
        values |= looks.arguments()
    if rollouts.vllm is not None:
        values |= vllm_arguments(rollouts.vllm, max_tokens=settings.max_tokens)
    return GRPOConfig(**(values | changes))


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # TRL is not typed
    """TRL's order of prompts, drawn anew from (seed, epoch), so that a resumed epoch repeats it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Said before an epoch's first batch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + _EPOCH_STRIDE * self.epoch)
        return iter(super().__iter__())
