"""Several trainings of teachers by the same processes, so that torch is imported once in each: `torchrun
process_runs.py PLAN.json`.

The plan is a list of entries: `spec`, and if wanted `start`, `die_at` and `signal_at` as in
tests/distill/sharded_runs.py, `signal_to` (the process that gets it, the second by default), `copies` (a folder that
becomes the output before it starts), `second` (keys that all but the first process have another value of) and `folders`
(where each process works, which relative paths are of). Each process writes what it saw to `seen-<rank>.json` next to
the plan.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen2 import modeling_qwen2

from relabel.distill.teachers import grpo, grpo_trainer, teaching
from relabel.distill.teachers.rewards import GoldRow, Score
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.manifests import failpoints
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.process import forget_interruptions, on_signal
from tests.distill.sharded_runs import Killed, dying_at
from tests.teachers.grpo_setup import score_by_tokens


def score_nodes_by_tokens(rollout: Rollout, row: GoldRow) -> Score:
    ids = rollout.completion_ids
    r, s, a = (1.0 if sum(ids) % prime else -1.0 for prime in (2, 3, 5))
    return Score(r, (r, s, a))


def log_probs_in_double(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """What TRL computes in float32, whatever the model's weights are."""
    values = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep + 1}
    logits = model(**values, use_cache=False).logits[:, -logits_to_keep - 1 : -1] / trainer.temperature
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs.detach().exp() * log_probs.detach()).sum(-1)
    return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None


def norm_in_double(self: Any, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """What Qwen2 computes in float32, whatever the model's weights are."""
    mean_BT1 = hidden_BTD.pow(2).mean(-1, keepdim=True)
    normed: torch.Tensor = self.weight * hidden_BTD * torch.rsqrt(mean_BT1 + self.variance_epsilon)
    return normed


def attention_in_double(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm_in_double`."""
    keys = modeling_qwen2.repeat_kv(key, module.num_key_value_groups)
    values = modeling_qwen2.repeat_kv(value, module.num_key_value_groups)
    scores = query @ keys.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ values).transpose(1, 2).contiguous(), weights


@contextlib.contextmanager
def learning_in_double() -> Iterator[None]:
    """All in float64, short answers, and rewards that those of a random model differ in. In float32 AdamW's first
    steps make of rounding another training; see tests/distill/sharded_runs.py.
    """
    replaced = {
        (teaching, "read_weights"): lambda *args, **options: whole(*args, **{**options, "dtype": torch.float64}),
        (grpo_trainer.RolloutTrainer, "_get_per_token_logps_and_entropies"): log_probs_in_double,
        (modeling_qwen2.Qwen2RMSNorm, "forward"): norm_in_double,
        (modeling_qwen2, "eager_attention_forward"): attention_in_double,
        (grpo, "longest_answer"): lambda labeler: 24,
        (grpo, "grade_score"): lambda near: score_by_tokens,
        (grpo, "graph_score"): lambda match, miss: score_nodes_by_tokens,
        (grpo_trainer, "segments_of"): lambda rollout, *_, **__: [
            place % 8 - 1 for place in range(len(rollout.completion_ids))
        ],
    }
    whole = teaching.read_weights
    were = {(module, name): getattr(module, name) for module, name in replaced}
    torch.set_default_dtype(torch.float64)
    for (module, name), value in replaced.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for (module, name), value in were.items():
            setattr(module, name, value)


def go(entry: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    """One training, and what this process saw of it."""
    said: list[str] = []
    seen: dict[str, Any] = {"ended": "whole", "said": said}
    whole_hit = failpoints.hit
    here = Path.cwd()

    def say(line: str) -> None:
        said.append(line)
        is_signalled = int(os.environ.get("RANK", "0")) == entry.get("signal_to", 1)
        if is_signalled and line.startswith(f"step {entry.get('signal_at')} of"):
            on_signal(signal.SIGTERM, None)

    failpoints.hit = dying_at(entry.get("die_at"))
    if "folders" in entry:
        os.chdir(entry["folders"][0 if is_first else 1])
    try:
        changed = {} if is_first else entry.get("second", {})
        spec = read_teacher_spec({**entry["spec"], **changed}, where="the plan")
        if is_first and "copies" in entry:
            shutil.copytree(entry["copies"], spec.output)
        with learning_in_double():
            teaching.train_teacher(spec, Storage(), start=entry.get("start", "new"), report=say, is_writer=is_first)
    except Killed:
        seen["ended"] = "killed"
    except KeyboardInterrupt:
        seen["ended"] = "stopped"
    except RelabelError as exc:
        seen["ended"] = f"{type(exc).__name__}: {exc}"
    finally:
        os.chdir(here)
        forget_interruptions()
        failpoints.hit = whole_hit
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    found = [go(entry, is_first=rank == 0) for entry in json.loads(plan.read_text())]
    (plan.parent / f"seen-{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():  # one process alone has no group
        torch.distributed.destroy_process_group()
