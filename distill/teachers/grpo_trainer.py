"""TRL's GRPOTrainer with rollouts that a labeler asks for and reads, our advantages, and credit by node.

Importing this file imports TRL's trainer, which takes ten seconds and more: import it where training begins.

TRL's hooks are private; `trl==1.16.*` is pinned, and tests/teachers/test_grpo_trainer.py is the contract: with TRL's
normaliser and loss this equals its plain GRPO bit for bit. Overridden, and why: `rollout_func` (the labeler's turns),
`_calculate_rewards` (format judged on token ids), `_generate_and_score_completions` (the population's σ; segments and
base rewards travel with the batch through TRL's shuffling), `_compute_loss` (advantages by token, never detached, and
the coefficients' own term), `create_optimizer` (the coefficients' rate), `_get_train_sampler` (an order that a resumed
second epoch repeats).
"""

# N prompts, G rollouts of a prompt, B = N·G, T tokens, V nodes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from datasets import Dataset
from torch.nn.utils import clip_grad_norm_
from transformers import TrainerCallback
from trl import GRPOTrainer

from distill.teachers.advantages import group_advantages
from distill.teachers.grpo_arguments import EpochSampler
from distill.teachers.grpo_credit import (
    TEMPLATE,
    CreditPlan,
    effective_ratios,
    node_average_weights,
    token_advantages,
)
from distill.teachers.grpo_nodes import segments_of
from distill.teachers.held_out import HeldOut, greedy
from distill.teachers.rollout_files import NODES
from distill.teachers.rollout_log import RolloutLog
from distill.teachers.rollouts import Dialogues, Rollout
from distill.teachers.scores import GoldRow, Score, ScoreOf, answer_figures
from distill.teachers.vllm_rollouts import TurnLogprobs, sampling_logprobs
from distill.teachers.watched import WatchedTrainer
from distill.training.step_clock import StepClock

CURVES = {
    "reward_std": "reward_std",
    "frac_reward_zero_std": "no_variance_share",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_share",
}
"""TRL's figures that go into the curve, and what they are called there."""


class RolloutTrainer(WatchedTrainer, GRPOTrainer):  # type: ignore[misc]  # transformers and TRL are not typed
    """GRPO over a labeler's conversations. Arguments beside these are GRPOTrainer's and WatchedTrainer's.

    Args:
        rows: what there is to train on, each with gold.
        score_of: what a rollout earns.
        normaliser: `population` is the papers' standard deviation, `trl` leaves TRL's advantages as they are.
        credit: how credit flows along the graph; None gives every token its rollout's advantage.
        log: keeps every rollout.
        held_out: rows to look at the training with.
        at_once: answers written together; None writes all of a step together.
    """

    clock: StepClock
    progress_figures = ("reward", "loss")

    def __init__(
        self,
        *,
        dialogues: Dialogues,
        rows: Sequence[GoldRow],
        score_of: ScoreOf,
        normaliser: Literal["population", "trl"] = "population",
        credit: CreditPlan | None = None,
        log: RolloutLog | None = None,
        held_out: Sequence[GoldRow] = (),
        at_once: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._dialogues, self._rows, self._score_of = dialogues, rows, score_of
        self._normaliser, self._plan, self._at_once = normaliser, credit, at_once
        self._log_of_rollouts = log if log is not None else RolloutLog(None)
        self._rollouts: list[Rollout] = []
        self._logprobs: list[TurnLogprobs] = []
        self._scores: list[Score] = []
        self.clock = StepClock(("write", "read", "forward", "backward"), rest="update")
        places = Dataset.from_dict({"prompt": list(range(len(rows)))})
        super().__init__(
            reward_funcs=[_reward],
            train_dataset=places,
            eval_dataset=places,  # Trainer wants one where there are looks; those have rows of their own
            dev_figures=self._held_out_figures,
            **kwargs,
        )
        batch = self.args.per_device_train_batch_size * self.args.steps_per_generation
        self._held_out = HeldOut(held_out, dialogues, self._scored, batch=batch)
        self.rollout_func = self._roll  # given to the constructor, TRL would warn that it may change: hence the pin
        if credit is not None:
            credit.credit.to(self.accelerator.device)
            credit.credit.logits.requires_grad_(credit.learning_rate is not None)
            self.add_callback(_CreditSteps(self, credit))

    # rollouts and what they earn

    def _roll(self, prompts: list[int], _: Any) -> dict[str, Any]:
        self._logprobs = []
        try:
            self._rollouts = self._dialogues.roll([self._rows[place].pair for place in prompts], self._write)
        except RuntimeError as exc:
            if "probability tensor" not in str(exc):  # torch.multinomial's words
                raise
            raise self.not_finite("probabilities of the next token are not finite", prompts) from exc
        found: dict[str, Any] = {
            "prompt_ids": [one.prompt_ids for one in self._rollouts],
            "completion_ids": [one.completion_ids for one in self._rollouts],
            "logprobs": sampling_logprobs(self._rollouts, self._logprobs) if self._logprobs else None,
        }
        if not all(all(one.is_own) for one in self._rollouts):
            found["env_mask"] = [list(map(int, one.is_own)) for one in self._rollouts]
        return found

    def _write(self, contexts: Sequence[list[int]]) -> Sequence[list[int]]:
        """Answers to all contexts: together, or the longest first in so many at a time that little is padding."""
        size = self._at_once or len(contexts)
        order = list(range(len(contexts)))
        if size < len(order):
            order.sort(key=lambda place: -len(contexts[place]))
        answers: list[list[int]] = [[] for _ in contexts]
        logprobs: list[Sequence[float | None]] = [[] for _ in contexts]
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            with self.clock.part("write"):
                ids, sampled = self._generate_single_turn([contexts[place] for place in chosen], None, {}, 1)
            for number, place in enumerate(chosen):
                answers[place] = ids[number]
                logprobs[place] = () if sampled is None else sampled[number]
        if self.use_vllm:
            self._logprobs.append(logprobs)
        return answers

    def _held_out_figures(self, _: Any) -> dict[str, float]:
        with greedy(self):
            return self._held_out.figures(self._write)

    def _scored(self, rollouts: Sequence[Rollout], rows: Sequence[GoldRow]) -> list[Score]:
        return [self._score_of(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._scores = self._scored(self._rollouts, [self._rows[place] for place in prompts])
        rewards_B1 = torch.tensor([[one.reward] for one in self._scores], device=self.accelerator.device)
        return self.accelerator.gather(rewards_B1)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self.clock.part("read"):
            return self._with_advantages(super()._generate_and_score_completions(inputs), inputs)

    def _with_advantages(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our advantages, and with what travels along."""
        device = batch["completion_ids"].device
        group = self.num_generations if self.model.training else self.num_generations_eval
        if self._normaliser == "population":
            rewards_NG = torch.tensor([one.reward for one in self._scores], device=device).view(-1, group)
            batch["advantages"] = group_advantages(rewards_NG).flatten()
        batch["place"] = torch.tensor([one["prompt"] for one in inputs], device=device)
        if self._plan is not None:
            batch |= self._graph_tensors(batch["completion_ids"], group)
        self._keep(batch, group)
        return batch

    def _graph_tensors(self, completion_ids: Any, group: int) -> dict[str, Any]:
        """What travels with each rollout: its tokens' nodes, the base rewards of its whole group, its place there."""
        device = completion_ids.device
        assert self._plan is not None
        template = NODES.index("r") if self._plan.tags_earn else TEMPLATE
        segment_BT = torch.full(completion_ids.shape, TEMPLATE, device=device)
        for row, rollout in enumerate(self._rollouts):
            segments = segments_of(rollout, self._dialogues.tokens, template=template)
            segment_BT[row, : len(segments)] = torch.tensor(segments, device=device)
        base_NG3 = torch.tensor([one.base for one in self._scores], device=device).view(-1, group, 3)
        return {
            "segment_ids": segment_BT,
            "group_rewards": base_NG3.repeat_interleave(group, 0),
            "group_index": torch.arange(group, device=device).repeat(len(base_NG3)),
        }

    def _keep(self, batch: dict[str, Any], group: int) -> None:
        """Rollouts and their figures, as this step made them."""
        nodes = None if self._plan is None else self._node_advantages(batch).detach().tolist()
        self._log_of_rollouts.add(
            self.state.global_step + 1,
            self._rollouts,
            self._scores,
            advantages=batch["advantages"].tolist(),
            node_advantages=nodes,
            group=group,
        )
        figures = answer_figures(self._rollouts, self._scores)
        if self._plan is not None:
            base_B3 = torch.tensor([one.base for one in self._scores])
            reward_V = self._plan.credit.node_rewards(base_B3.to(batch["advantages"].device)).mean(0).tolist()
            figures |= {f"node_reward_{node}": value for node, value in zip(NODES, reward_V, strict=True)}
        self._pending |= figures

    # the loss

    def _node_advantages(self, batch: dict[str, Any]) -> Any:
        """A of each rollout's nodes [B, V], with the gradient of the coefficients."""
        assert self._plan is not None
        node_BGV = self._plan.credit.advantages(batch["group_rewards"], epsilon=self._plan.epsilon)
        return node_BGV[torch.arange(len(node_BGV)), batch["group_index"]]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.part("forward"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        with self.clock.part("forward"):
            return self._loss(model, inputs)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        plan = self._plan
        if plan is not None:
            segment_BT = inputs["segment_ids"]
            advantage_BT = token_advantages(self._node_advantages(inputs), segment_BT)
            if plan.average == "node":
                advantage_BT = advantage_BT * node_average_weights(segment_BT, inputs["completion_mask"])
            inputs = {**inputs, "advantages": advantage_BT}
        loss = super()._compute_loss(model, inputs)
        if plan is not None and plan.learning_rate is not None:
            loss = loss + plan.decay * plan.credit.distance() / self.current_gradient_accumulation_steps
        if self.model.training:
            self.note({"loss": float(loss.detach())}, inputs["place"].tolist())
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer's, with a group of their own for the coefficients."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self._plan is not None and self._plan.learning_rate is not None:
            rate = self._plan.learning_rate
            optimizer.add_param_group({"params": [self._plan.credit.logits], "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # what is written down

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._step % self.args.gradient_accumulation_steps == 0:
            self.begin_step(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)
            self.clock.begin_step()
        with self.clock.part("backward"):
            return super().training_step(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.clock.end_step(self.state.global_step)
        for name, known in CURVES.items():
            values = self._metrics["train"].get(name)
            if values:
                self._pending[known] = sum(values) / len(values)
        self._metrics["train"].clear()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def may_stop(self) -> bool:
        """Behind the last update on the same rollouts: those are not kept in checkpoints."""
        return bool(self.state.global_step % self.num_iterations == 0)

    def own_state(self) -> dict[str, Any]:
        held: dict[str, Any] = {"log": self._log_of_rollouts.state(self.state.global_step)}
        if self._plan is not None:
            held["logits"] = self._plan.credit.logits.detach()
        return held

    def load_own_state(self, held: dict[str, Any]) -> None:
        self._log_of_rollouts.go_on(held["log"])
        if self._plan is not None:
            with torch.no_grad():
                self._plan.credit.logits.copy_(held["logits"])

    def note_edges(self) -> None:
        """The coefficients after a step."""
        assert self._plan is not None
        alpha = self._plan.credit.coefficients()
        self._log_of_rollouts.add_edges(self.state.global_step + 1, self._plan.credit.logits.detach().tolist(), alpha)
        self._pending |= {f"alpha_{edge}": float(value.detach()) for edge, value in alpha.items()}
        self._pending |= {f"ratio_{node}": value for node, value in effective_ratios(alpha).items()}


class _CreditSteps(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Does for the coefficients what Trainer does for the model's parameters alone: reduces, clips and clears their
    gradient.
    """

    def __init__(self, trainer: RolloutTrainer, plan: CreditPlan) -> None:
        self._trainer, self._plan = trainer, plan

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logits = self._plan.credit.logits
        if logits.grad is not None:
            logits.grad = self._trainer.accelerator.reduce(logits.grad, reduction="mean")
            clip_grad_norm_([logits], self._plan.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plan.credit.logits.grad = None
        self._trainer.note_edges()


def _reward(**_: Any) -> list[float]:
    """Named for TRL's figures; `_calculate_rewards` does the work."""
    raise AssertionError("rewards are calculated from rollouts")
