"""The contract with TRL's private hooks: the trainer is plain GRPO where it should be, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

from distill.teachers.advantages import group_advantages  # noqa: E402
from distill.teachers.grpo_credit import Credit  # noqa: E402
from distill.teachers.grpo_trainer import CreditPlan, EpochSampler  # noqa: E402
from distill.teachers.rollouts import Rollout  # noqa: E402
from distill.teachers.scores import GoldRow, Score  # noqa: E402
from tests.engines.conftest import make_model, make_tokenizer  # noqa: E402
from tests.teachers.grpo_setup import (  # noqa: E402
    GOLD_ROWS,
    arguments,
    make_trainer,
    score_by_tokens,
    short_dialogues,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def fresh(tokenizer: Any) -> Any:
    return make_model("qwen2", len(tokenizer))


class PlainGrpo(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's own trainer; all that is given to it is the prompts' token ids."""

    def _tokenize_prompts(self, prompts: list[int]) -> tuple[list[list[int]], None, dict[str, Any]]:
        dialogues = short_dialogues(self.processing_class)
        return [dialogues.first_prompt(GOLD_ROWS[place].pair) or [] for place in prompts], None, {}


def even_share(ids: list[int]) -> float:
    return sum(one % 2 == 0 for one in ids) / len(ids)


def even_shares(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [even_share(ids) for ids in completion_ids]


def standardised_shares(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Advantages as ours, given to TRL as rewards that it leaves as they are."""
    rewards = torch.tensor([even_share(ids) for ids in completion_ids]).view(-1, 4)
    found: list[float] = group_advantages(rewards).flatten().tolist()
    return found


def train_plain(model: Any, tokenizer: Any, folder: Path, reward: Any, **changes: Any) -> Any:
    rows = Dataset.from_dict({"prompt": list(range(len(GOLD_ROWS)))})
    args = arguments(folder, **changes)
    trainer = PlainGrpo(model=model, reward_funcs=[reward], args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return trainer.model


def train_ours(model: Any, tokenizer: Any, folder: Path, **options: Any) -> Any:
    trainer = make_trainer(model, tokenizer, folder, **options)
    trainer.train()
    return trainer.model


def furthest(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)


def test_with_trls_normaliser_it_is_trls_grpo_bit_for_bit(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    plain = train_plain(copy.deepcopy(fresh), tokenizer, tmp_path, even_shares)
    ours = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path, normaliser="trl")
    assert furthest(plain, ours) == 0
    assert furthest(plain, fresh) > 1e-3


def test_with_our_normaliser_it_is_grpo_on_those_advantages(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    sgd = {"optim": "sgd"}  # TRL takes the mean off once more, which is rounding that Adam would blow up
    plain = train_plain(copy.deepcopy(fresh), tokenizer, tmp_path, standardised_shares, scale_rewards="none", **sgd)
    ours = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path, args=arguments(tmp_path, **sgd))
    assert furthest(plain, ours) < 1e-6
    assert furthest(plain, fresh) > 1e-3


def test_a_graph_cut_to_its_grade_is_grpo_bit_for_bit(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    def by_node(rollout: Rollout, row: GoldRow) -> Score:
        reward = score_by_tokens(rollout, row).reward
        return Score(reward, (reward, 0.0, 0.0))

    graph = CreditPlan(Credit(), learning_rate=None, average="token", epsilon=0.0)
    plain = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path)
    # a random model's answers are unreadable, so that every token of every rollout is the grade's
    cut = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path, score_of=by_node, credit=graph)
    assert furthest(plain, cut) == 0


def test_the_order_of_prompts_follows_from_seed_and_epoch() -> None:
    def order(epoch: int, seed: int = 3) -> list[int]:
        sampler = EpochSampler(range(20), mini_repeat_count=1, batch_size=2, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in (3, 4)}) == 6
    assert sorted(order(1)) == list(range(20))
