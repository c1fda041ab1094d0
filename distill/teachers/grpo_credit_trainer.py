"""RolloutTrainer with credit by node: each token takes the advantage of the node it belongs to, and the graph's
coefficients learn beside the model.

Overridden, beside what `grpo_trainer.py` does: `_with_advantages` (segments and base rewards travel with the batch
through TRL's shuffling), `_loss` (advantages by token, never detached, and the coefficients' own term),
`create_optimizer` (the coefficients' rate).
"""

# N prompts, G rollouts of a prompt, B = N·G, T tokens, V nodes

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import TrainerCallback

from relabel.distill.teachers.grpo_credit import (
    ROUNDINGS,
    TEMPLATE,
    CreditPlan,
    effective_ratios,
    node_average_weights,
    token_advantages,
)
from relabel.distill.teachers.grpo_nodes import segments_of
from relabel.distill.teachers.grpo_trainer import RolloutTrainer
from relabel.distill.teachers.rollout_files import NODES


class _Credited(NamedTuple):
    """What travels with a batch of rollouts.

    Args:
        segment_ids: each token's node [B, T].
        group_rewards: base rewards of the whole group [B, G, 3].
        group_index: the rollout's place there [B].
    """

    segment_ids: Tensor
    group_rewards: Tensor
    group_index: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> _Credited:
        return cls(*(batch[name] for name in cls._fields))


class CreditTrainer(RolloutTrainer):
    """GRPO with credit that flows along a graph. Arguments beside this are RolloutTrainer's.

    Args:
        credit: how it flows.
    """

    def __init__(self, *, credit: CreditPlan, **kwargs: Any) -> None:
        self._plan, self._credit = credit, credit.credit
        super().__init__(**kwargs)
        self.rounding = torch.zeros((), device=self.accelerator.device)
        self._credit.to(self.accelerator.device)
        self._credit.logits.requires_grad_(credit.learning_rate is not None)
        self.add_callback(_CreditSteps(self, credit))

    # what travels with the rollouts

    def _with_advantages(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Also each rollout's tokens' nodes, the base rewards of its whole group, and its place there."""
        batch = super()._with_advantages(batch, inputs)
        completion_ids, group = batch["completion_ids"], self.group
        device = completion_ids.device
        template = NODES.index("r") if self._plan.tags_earn else TEMPLATE
        segment_BT = torch.full(completion_ids.shape, TEMPLATE, device=device)
        for row, rollout in enumerate(self._rollouts):
            segments = segments_of(rollout, self._dialogues.tokens, template=template)
            segment_BT[row, : len(segments)] = torch.tensor(segments, device=device)
        base_NG3 = torch.tensor([one.base for one in self._scores], device=device).view(-1, group, 3)
        rewards_BG3 = base_NG3.repeat_interleave(group, 0)
        index_B = torch.arange(group, device=device).repeat(len(base_NG3))
        return batch | _Credited(segment_BT, rewards_BG3, index_B)._asdict()

    def _keep(self, batch: dict[str, Any], node_advantages: Sequence[Sequence[float]] | None = None) -> None:
        super()._keep(batch, self._node_advantages(_Credited.of(batch)).detach().tolist())
        base_B3 = torch.tensor([one.base for one in self._scores], device=self.accelerator.device)
        reward_V = self._credit.node_rewards(base_B3).mean(0).tolist()
        self._pending |= {f"node_reward_{node}": value for node, value in zip(NODES, reward_V, strict=True)}

    # the loss

    def _node_advantages(self, held: _Credited) -> Tensor:
        """A of each rollout's nodes [B, V], with the gradient of the coefficients."""
        node_BGV = self._credit.advantages(held.group_rewards, epsilon=self._plan.epsilon)
        return node_BGV[torch.arange(len(node_BGV)), held.group_index]

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        held = _Credited.of(inputs)
        node_BV = self._node_advantages(held)
        if node_BV.requires_grad:
            node_BV.register_hook(functools.partial(self._note_rounding, self._credit.rounding(held.group_rewards)))
        advantage_BT = token_advantages(node_BV, held.segment_ids)
        if self._plan.average == "node":
            advantage_BT = advantage_BT * node_average_weights(held.segment_ids, inputs["completion_mask"])
        loss = super()._loss(model, {**inputs, "advantages": advantage_BT})
        if self._plan.learning_rate is not None:
            loss = loss + self._plan.decay * self._credit.distance() / self.current_gradient_accumulation_steps
        return loss

    def _note_rounding(self, rounding_BV: Tensor, gradient_BV: Tensor) -> None:
        """Errors of single rewards are independent, so their squares add up, over all batches of a step."""
        self.rounding += (gradient_BV * rounding_BV).square().sum()

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's, with a group of their own for the coefficients."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self._plan.learning_rate is not None:
            rate = self._plan.learning_rate
            optimizer.add_param_group({"params": [self._credit.logits], "lr": rate, "weight_decay": 0.0})
        return optimizer

    # what is written down

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "logits": self._credit.logits.detach()}

    def load_own_state(self, held: dict[str, Any]) -> None:
        super().load_own_state(held)
        with torch.no_grad():
            self._credit.logits.copy_(held["logits"])

    def note_edges(self) -> None:
        """The coefficients after a step."""
        alpha = self._credit.coefficients()
        by_edge = alpha.by_edge()
        self._log_of_rollouts.add_edges(self.state.global_step + 1, self._credit.logits.detach().tolist(), by_edge)
        self._pending |= {f"alpha_{edge}": value for edge, value in by_edge.items()}
        self._pending |= {f"ratio_{node}": value for node, value in effective_ratios(alpha).items()}


class _CreditSteps(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Does for the coefficients what Trainer does for the model's parameters alone: reduces, clips and clears their
    gradient. What of it may be rounding is dropped: where it should be 0 (on the first update of a batch, ρ is 1), Adam
    would make whole steps of 1e-9.
    """

    def __init__(self, trainer: CreditTrainer, plan: CreditPlan) -> None:
        self._trainer, self._plan = trainer, plan

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logits = self._plan.credit.logits
        if logits.grad is not None:
            reduced = self._trainer.accelerator.reduce(logits.grad, reduction="mean")
            floor = ROUNDINGS * self._trainer.accelerator.reduce(self._trainer.rounding, reduction="mean").sqrt()
            is_known = reduced.abs() > floor
            logits.grad = torch.where(is_known, reduced, 0.0) if is_known.any() else None
        if logits.grad is not None:
            clip_grad_norm_([logits], self._plan.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plan.credit.logits.grad = None
        self._trainer.rounding.zero_()
        self._trainer.note_edges()
