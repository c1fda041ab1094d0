"""TRL's pin: each private place of its trainer that ours depends on, so that a version without it fails by name."""

# ruff: noqa: E402 — trl may be missing
import inspect
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

from trl.models import unwrap_model_for_generation
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import RepeatSampler, pad

Trainer: Any = trl.GRPOTrainer
CALLED = {
    "rollout_func": (Trainer._generate, "self.rollout_func(prompts, self)"),
    "env_mask": (Trainer._generate, 'extra_fields.pop("env_mask"'),
    "_generate_single_turn": (Trainer._generate, "self._generate_single_turn("),
    "_calculate_rewards": (Trainer._generate_and_score_completions, "self._calculate_rewards("),
    "_generate_and_score_completions": (Trainer._prepare_inputs, "self._generate_and_score_completions("),
    "_get_per_token_logps_and_entropies": (Trainer._compute_loss, "self._get_per_token_logps_and_entropies("),
    "_compute_loss": (Trainer.compute_loss, "self._compute_loss(model, inputs)"),
    "_get_train_sampler": (Trainer.get_train_dataloader, "self._get_train_sampler"),
    "_send_telemetry": (_BaseTrainer.__init__, "self._send_telemetry("),
    "sync_weights": (Trainer._generate_single_turn, "self.vllm_generation.sync_weights()"),
}
"""What TRL calls of ours, or reads of what ours returns: where, and in which words."""
READ = {
    "_metrics": "self._metrics =",
    "_tokenizer": "self._tokenizer =",
    "eos_token_ids": "self.eos_token_ids =",
    "generation_config": "self.generation_config =",
    "generation_kwargs": "self.generation_kwargs =",
    "num_generations": "self.num_generations =",
    "num_iterations": "self.num_iterations =",
    "max_completion_length": "self.max_completion_length =",
    "vllm_generation": "self.vllm_generation =",
}
"""What ours reads of TRL's trainer, and where that is made."""
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.parametrize("name", CALLED)
def test_trl_still_calls_what_is_overridden(name: str) -> None:
    owner, words = CALLED[name]
    assert words in inspect.getsource(owner), f"TRL {trl.__version__} no longer has {name} in {owner.__qualname__}"


@pytest.mark.parametrize("name", READ)
def test_trl_still_has_what_is_read(name: str) -> None:
    assert READ[name] in inspect.getsource(Trainer.__init__), f"TRL {trl.__version__} no longer makes {name}"


def test_the_functions_taken_of_trl_take_what_they_are_given() -> None:
    assert {"mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"} <= set(
        inspect.signature(RepeatSampler).parameters
    )
    assert {"padding_value", "padding_side"} <= set(inspect.signature(pad).parameters)
    given = {"generation_kwargs", "gradient_checkpointing_kwargs"}
    assert given <= set(inspect.signature(unwrap_model_for_generation).parameters)


def test_every_hook_is_explained_to_contributors() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert [name for name in [*CALLED, *READ] if f"`{name}`" not in text] == []
