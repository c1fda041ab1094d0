"""Defaults of a spec: the papers' settings, and ours where they have none."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relabel.distill.teachers.spec import read_teacher_spec

TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"
GOLD: dict[str, Any] = {"data": {"gold": {"path": "pairs.parquet"}}}
LEAST: dict[str, dict[str, Any]] = {
    "sft": {"labeler": "direct", **GOLD},
    "grpo": {"labeler": "r3a", **GOLD},
    "graph-grpo": {"labeler": "graph-grpo", **GOLD},
    "res-rag": {"labeler": "evidence-set", "generator": {"name": "fake"}, **GOLD},
}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("sft", {"train.mask": 0.5, "train.learning_rate": 1e-5, "train.max_tokens": 2048, "lora": None}),
        (
            "grpo",
            {
                "rollouts.group": 16, "rollouts.clip": 0.2, "rollouts.beta": 0, "rollouts.temperature": 1,
                "rollouts.top_p": 1, "rollouts.updates": 1, "train.learning_rate": 5e-7, "prompts_per_step": 32,
                "near": 0,
            },
        ),
        (
            "graph-grpo",
            {
                "rollouts.group": 8, "rollouts.clip": 0.2, "rollouts.beta": 0.01, "rollouts.updates": 2,
                "credit.learn": True, "credit.learning_rate": 1e-3, "credit.decay": 0.01, "credit.epsilon": 1e-6,
                "credit.average": "auto", "credit.match": 1, "credit.miss": -1, "credit.consistency": True,
            },
        ),
        (
            "res-rag",
            {
                "rollouts.group": 4, "rollouts.beta": 0.05, "rollouts.temperature": 1, "rollouts.top_p": 0.8,
                "train.learning_rate": 1e-5, "reward.eta": 2, "reward.alpha_ans": 2, "reward.alpha_ret": 1,
                "reward.gamma": -1, "reward.r_min": -5, "reward.r_max": 5,
            },
        ),
    ],
)  # fmt: skip
def test_a_spec_that_says_no_more_than_it_must_trains_as_the_papers_do(method: str, wanted: dict[str, Any]) -> None:
    spec = read_teacher_spec({"name": "t", "method": method, "init": "m", "output": "o", **LEAST[method]}, where="here")
    assert {key: operator.attrgetter(key)(spec) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("r3a-grpo", {"train.max_steps": 360, "prompts_per_step": 32, "rollouts.group": 16, "near": 0}),
        ("r1-grpo", {"train.max_steps": 360, "prompts_per_step": 32, "labeler.name": "r1"}),
        ("r3a-cold-start", {"train.mask": 0}),
        ("graph-grpo-1-label", {"data.answer": "preliminary"}),
        ("graph-grpo-2-masked-cot", {"train.mask": 0.5}),
        ("res-rag-warm-up", {"train.mask": 0, "data.gold.sets": "similar"}),
        (
            "router-sft",
            {"train.mask": 0, "lora.r": 8, "lora.alpha": 16, "train.learning_rate": 1e-5, "train.batch_size": 8},
        ),
    ],
)
def test_the_docs_specs_have_the_papers_settings(name: str, wanted: dict[str, Any]) -> None:
    spec = read_teacher_spec(yaml.safe_load((TEACHERS / f"{name}.yaml").read_text()), where=name)
    assert {key: operator.attrgetter(key)(spec) for key in wanted} == wanted
