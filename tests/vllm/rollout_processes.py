"""GRPO whose rollouts vLLM writes, by one of several processes: `torchrun rollout_processes.py FOLDER`.

The folder has `spec.json`. Each process writes `seen-<rank>.json`: of each step, the prompts that it rolled out, and
how far vLLM's weights were from the policy's.

Two things are replaced, since vLLM's build for CPUs has no other: matrix products keep their weights as they were
loaded, where it would pack them so that no new ones can be loaded; and weights go to a server over NCCL alone, so what
would be sent there is compared here with the policy.
"""

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.utils as gemm
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from relabel.distill.teachers import grpo, grpo_trainer
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.files import Storage
from tests.teachers.grpo_setup import score_by_tokens

SENT: list[dict[str, torch.Tensor]] = []
"""Weights on their way to a server, of each time that any were sent."""


def keep_as_loaded(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def send(client: Any, metadata: Any, named: Any) -> None:
    sent = {name: value.clone() for name, value in named}
    assert [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in sent.items()] == [
        tuple(one) for one in metadata
    ]
    SENT.append(sent)


def held_by_vllm(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights that answers are written by, in so far as vLLM keeps them under the policy's names."""
    vllm = trainer.vllm_generation
    if vllm.mode == "server":
        return SENT[-1] if SENT else {}
    return dict(vllm.llm.llm_engine.model_executor.driver_worker.model_runner.model.named_parameters())


def apart(own: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two weights; vLLM adds rows to an embedding."""
    return float((own - theirs[: len(own)].to(own.dtype)).abs().max())


def main(folder: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    steps: list[dict[str, Any]] = []
    whole_roll = grpo_trainer.RolloutTrainer._roll

    def roll(trainer: Any, prompts: list[int], given: Any) -> Any:
        rolled = whole_roll(trainer, prompts, given)
        own = {name: value.detach() for name, value in trainer.model.named_parameters()}
        theirs = held_by_vllm(trainer)
        both = own.keys() & theirs.keys()
        steps.append(
            {
                "prompts": prompts,
                "compared": len(both),
                "apart": max((apart(own[name], theirs[name]) for name in both), default=0.0),
                "norm": float(own["model.norm.weight"].double().sum()),
                "logprobs": rolled["logprobs"],
                "ids": rolled["completion_ids"],
            }
        )
        return rolled

    grpo_trainer.RolloutTrainer._roll = roll  # type: ignore[method-assign]
    grpo.grade_score = lambda near: score_by_tokens  # rewards that a random model's answers differ in
    grpo.longest_answer = lambda labeler: 12
    grpo.torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))  # it refuses what has no GPU
    spec = read_teacher_spec(json.loads((folder / "spec.json").read_text()), where="the test")
    gemm.dispatch_cpu_unquantized_gemm = keep_as_loaded
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)
    VLLMClient.init_communicator = lambda client, device: None
    VLLMClient.update_named_params = send
    VLLMClient.reset_prefix_cache = lambda client: True
    train_teacher(spec, Storage(), is_writer=rank == 0)
    (folder / f"seen-{rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
