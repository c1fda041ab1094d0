"""What TRL gets about vLLM, what comes back with its tokens, and what is refused where it can't run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.teachers.rollouts import Rollout, WrittenTurn, sampling_logprobs, vllm_arguments
from relabel.distill.teachers.spec import VllmSection, read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher
from relabel.manifests.asks import Ask
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import Storage
from relabel.manifests.labels import Pair

PAIR = Pair(0, "q", "query", "d", "document")
ASK = Ask("one", (), None, 8)


def rollout(*turns: list[int], between: int = 2, has_dropped: bool = False) -> Rollout:
    """Turns of these tokens with the template's between them; `has_dropped`: the first turn's end gave way to it."""
    made = Rollout(PAIR, [1])
    for number, ids in enumerate(turns):
        if number:
            made.completion_ids += [0] * between
            made.is_own += [False] * between
        made.turns.append(WrittenTurn(ASK, len(made.completion_ids), ids, ""))
        own = ids[:-1] if has_dropped and number == 0 and len(turns) > 1 else ids
        made.completion_ids += own
        made.is_own += [True] * len(own)
    return made


def test_each_sampled_token_has_its_log_probability_and_the_templates_have_none() -> None:
    rollouts = [rollout([5, 6], [7]), rollout([8]), rollout([5, 9], [4, 4], has_dropped=True)]
    calls = [[[-0.1, -0.2], [-0.3], [-0.4, -0.5]], [[-0.6], [-0.7, None]]]
    assert sampling_logprobs(rollouts, calls) == [
        [-0.1, -0.2, None, None, -0.6],
        [-0.3],
        [-0.4, None, None, -0.7, None],
    ]


def test_trl_gets_the_mode_and_its_options() -> None:
    assert vllm_arguments(VllmSection(), max_tokens=512) == {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
    }
    server = vllm_arguments(VllmSection(mode="server", url="http://node:8000", timeout_s=9), max_tokens=512)
    assert server["vllm_mode"] == "server"
    assert (server["vllm_server_base_url"], server["vllm_server_timeout"]) == ("http://node:8000", 9)
    assert "vllm_gpu_memory_utilization" not in server


@pytest.fixture
def estimate(values: Callable[..., dict[str, Any]], pairs_path: Path) -> Callable[..., Any]:
    def go(vllm: dict[str, Any]) -> Any:
        held = values(
            method="grpo",
            labeler={"name": "r1", "grades": 3, "max_think_tokens": 8},
            data={"gold": {"path": str(pairs_path)}},
            rollouts={"group": 4, "vllm": vllm},
            train={"batch_size": 4, "accumulation": 2, "max_tokens": 4000},
        )
        return estimate_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage(), say=lambda _: None)

    return go


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        ({"mode": "server"}, "mode: server, which needs it"),
        ({"mode": "server", "url": "http://me:secret@node:8000"}, r"rollouts.vllm.url: want scheme"),
    ],
)
def test_what_does_not_fit_together_is_refused(vllm: dict[str, Any], words: str, estimate: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        estimate(vllm)
    assert "secret" not in str(found.value)
