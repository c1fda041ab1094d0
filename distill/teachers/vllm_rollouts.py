"""Rollouts that vLLM writes on GPUs, as TRL's trainer has it do: what TRL is told, and what comes back with the tokens.

What vLLM computes and what the trainer computes differ by rounding, so each token comes with the probability that it
was sampled with, and TRL weighs the token's loss by the two probabilities' ratio, 3 at most (truncated importance
sampling; TRL's default weighs by the whole answer's, and drops answers beyond).

Written against TRL 1.16's documented options (`use_vllm`, modes `colocate` and `server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relabel.distill.teachers.grpo_spec import VllmSection
from relabel.distill.teachers.rollouts import Rollout
from relabel.labelers.engines.api_options import server_address
from relabel.manifests.errors import ConfigError
from relabel.manifests.extras import require

TurnLogprobs = Sequence[Sequence[float | None]]
"""Log-probabilities of the sampled tokens of a call's answers; None where vLLM has none."""


def check_vllm(section: VllmSection) -> None:
    """Before anything is read.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: there is no GPU, or the URL is none.
    """
    if section.url is not None:
        server_address(section.url, key="rollouts.vllm.url")
    require("vllm", extra="train-gpu", purpose="rollouts.vllm")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "rollouts.vllm: torch finds no GPU here, and vLLM takes a model's new weights over CUDA alone. Leave "
            "rollouts.vllm out: transformers writes the answers then."
        )


def vllm_arguments(section: VllmSection, *, max_tokens: int) -> dict[str, Any]:
    """The section as TRL's GRPOConfig says it.

    Args:
        max_tokens: longest rollout, prompt and answers.
    """
    found: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": section.mode,
        "vllm_max_model_length": max_tokens,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    if section.url is not None:
        return found | {"vllm_server_base_url": section.url, "vllm_server_timeout": section.timeout_s}
    return found | {
        "vllm_gpu_memory_utilization": section.gpu_memory_utilization,
        "vllm_enable_sleep_mode": section.sleep,
    }


def sampling_logprobs(rollouts: Sequence[Rollout], calls: Sequence[TurnLogprobs]) -> list[list[float | None]]:
    """The log-probability that each token of each rollout's completion was sampled with; None for the template's.

    Args:
        calls: of the first turn of all rollouts, of the second of those that have one, and so on, in their order.
    """
    found: list[list[float | None]] = [[None] * len(one.completion_ids) for one in rollouts]
    for number, call in enumerate(calls):
        asked = [place for place, one in enumerate(rollouts) if len(one.turns) > number]
        for place, values in zip(asked, call, strict=True):
            rollout = rollouts[place]
            start = rollout.turns[number].start
            for at, value in enumerate(values, start):
                if at < len(rollout.is_own) and rollout.is_own[at]:  # an end token may have given way to the template's
                    found[place][at] = value
    return found
