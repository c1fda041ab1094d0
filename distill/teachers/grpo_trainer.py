"""TRL's GRPOTrainer with rollouts asked by a labeler, advantages by group or by node, and greedy evaluation on held-out
rows. Importing it loads TRL."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import GenerationConfig
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from relabel.distill.teachers.manifest import NODES
from relabel.distill.teachers.rewards import (
    ROUNDINGS,
    TEMPLATE,
    Credit,
    GoldRow,
    RolloutLog,
    Score,
    Scored,
    answer_figures,
    effective_ratios,
    group_advantages,
    node_average_weights,
    roll_rows,
    segments_of,
    token_advantages,
)
from relabel.distill.teachers.rollouts import (
    Dialogues,
    Rollout,
    TurnLogprobs,
    sampling_logprobs,
    vllm_arguments,
)
from relabel.distill.teachers.spec import RolloutSection, RolloutTraining
from relabel.distill.teachers.watch import RewardWatch
from relabel.distill.training import checkpoints
from relabel.distill.training.curves import Curve
from relabel.distill.training.loop import Choice, Learner
from relabel.distill.training.output import TrainingPlace
from relabel.distill.training.runtime import is_on_cpu, precision_of
from relabel.manifests.errors import TrainingError

# ------------------------------------------------------------------------------
# A spec as TRL's arguments, and the order of prompts. Imports TRL, which takes ten seconds and more.


_EPOCH_STRIDE = 1_000_003


def grpo_arguments(
    settings: RolloutTraining,
    rollouts: RolloutSection,
    folder: Path,
    *,
    max_answer_tokens: int,
    halvings: int = 0,
    **changes: Any,
) -> GRPOConfig:
    """The spec as TRL's arguments: one generation for each optimizer step's rollouts, used `rollouts.updates` times.
    TRL's trainer makes rollouts and their loss; steps, schedule and checkpoints are those of `Training`.

    Args:
        max_answer_tokens: of any one turn.
        halvings: how often the batch was halved because memory ran out; accumulation doubles as often.
        changes: further arguments of TRL.
    """
    precision = precision_of(settings)
    accumulation = settings.accumulation << halvings
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": max(1, settings.batch_size >> halvings),
        "gradient_accumulation_steps": accumulation,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "seed": settings.seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": is_on_cpu(settings),
        "report_to": [],
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "num_generations": rollouts.group,
        "steps_per_generation": accumulation,
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
    }
    if rollouts.vllm is not None:
        values |= vllm_arguments(rollouts.vllm, max_tokens=settings.max_tokens)
    return GRPOConfig(**(values | changes))


class EpochSampler(RepeatSampler):  # type: ignore[misc]  # TRL is not typed
    """TRL's order of prompts, drawn from (seed, epoch), so that a resumed epoch repeats it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; called before its first batch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + _EPOCH_STRIDE * self.epoch)
        return iter(super().__iter__())


# ------------------------------------------------------------------------------
# Evaluation on held-out rows: the policy answers them without sampling.
#
# Random generators are left as they were: a training with evaluations and one without sample the same rollouts.


SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@contextmanager
def greedy(trainer: Any) -> Iterator[None]:
    """The most probable token each time, and generators as they were, while TRL's trainer generates."""
    if trainer.use_vllm:  # which draws from a generator of its own
        vllm = trainer.vllm_generation
        temperature, vllm.temperature = vllm.temperature, 0.0
        try:
            yield
        finally:
            vllm.temperature = temperature
        return
    sampled = trainer.generation_config, trainer.generation_kwargs
    states = checkpoints.random_states()
    kept = {name: value for name, value in trainer.generation_kwargs.items() if name not in SAMPLING}
    trainer.generation_kwargs = {**kept, "do_sample": False}
    trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = sampled
        checkpoints.restore_random(states)


# ------------------------------------------------------------------------------
# TRL's GRPOTrainer with rollouts that a labeler asks for and reads, and our advantages.
#
# Importing this file imports TRL's trainer, which takes ten seconds and more: import it where training begins.
#
# TRL's hooks are private; `trl==1.16.*` is pinned, and tests/teachers/test_grpo_trainer.py is the contract: with TRL's
# normaliser and loss this equals its plain GRPO bit for bit. Overridden, and why: `rollout_func` (the labeler's turns),
# `_calculate_rewards` (format judged on token ids), `_generate_and_score_completions` (the population's σ; what the
# loss needs travels with the batch through TRL's shuffling), `_compute_loss` (its figures by row), `_get_train_sampler`
# (an order that a resumed second epoch repeats), `_send_telemetry`.


# N prompts, G rollouts of a prompt, B = N·G


CURVES = {
    "reward_std": "reward_std",
    "frac_reward_zero_std": "no_variance_share",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_share",
}
"""TRL's figures that go into the curve, and what they are called there."""


class RolloutTrainer(GRPOTrainer, Learner):  # type: ignore[misc]  # TRL is not typed
    """GRPO over a labeler's conversations. All other arguments are GRPOTrainer's, whose own loop is not used.

    Args:
        place: where checkpoints go.
        rows: what there is to train on, each with gold.
        scored: what rollouts earn.
        advantages: of rewards [N, G], a row a prompt; None leaves TRL's as they are.
        log: keeps every rollout.
        held_out: rows to evaluate on; the step with the best reward there is kept.
        eval_every: steps between evaluations; None is once an epoch.
        patience: evaluations without a better one after which training ends; None trains to the end.
        watch: warns of rewards that are earned without the work, and may end training.
        at_once: answers written together; None writes all of a step together.
    """

    progress_figures = ("reward", "loss")

    def __init__(
        self,
        *,
        place: TrainingPlace,
        dialogues: Dialogues,
        rows: Sequence[GoldRow],
        scored: Scored,
        advantages: Callable[[Tensor], Tensor] | None = group_advantages,
        log: RolloutLog | None = None,
        held_out: Sequence[GoldRow] = (),
        eval_every: int | None = None,
        patience: int | None = None,
        watch: RewardWatch | None = None,
        at_once: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.place, self.eval_every = place, eval_every
        self.choice = Choice("reward", patience) if held_out else None
        self._dialogues, self._rows, self._scored = dialogues, rows, scored
        self._advantages, self._at_once = advantages, at_once
        self._held_out, self._watch = held_out, watch
        self._log_of_rollouts = log if log is not None else RolloutLog(None)
        self._rollouts: list[Rollout] = []
        self._logprobs: list[TurnLogprobs] = []
        self._scores: list[Score] = []
        self._pending: dict[str, float] = {}
        self._places: list[int] = []
        self._upcoming: Iterator[Any] = iter(())
        places = Dataset.from_dict({"prompt": list(range(len(rows)))})
        super().__init__(reward_funcs=[_reward], train_dataset=places, **kwargs)
        self.rollout_func = self._roll  # given to the constructor, TRL would warn that it may change: hence the pin
        self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._loader = self.get_train_dataloader()
        self.epoch_steps = len(self._loader) // self.args.gradient_accumulation_steps

    @property
    def group(self) -> int:
        """Rollouts of one prompt; they follow each other."""
        return int(self.num_generations)

    # rollouts and what they earn

    def _roll(self, prompts: list[int], _: Any) -> dict[str, Any]:
        self._logprobs = []
        try:
            self._rollouts = roll_rows(self._dialogues, [self._rows[place] for place in prompts], self._write)
        except RuntimeError as exc:
            if "probability tensor" not in str(exc):  # torch.multinomial's words
                raise
            raise self._not_finite("probabilities of the next token are not finite", prompts) from exc
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
            ids, sampled = self._generate_single_turn([contexts[place] for place in chosen], None, {}, 1)
            for number, place in enumerate(chosen):
                answers[place] = ids[number]
                logprobs[place] = () if sampled is None else sampled[number]
        if self.use_vllm:
            self._logprobs.append(logprobs)
        return answers

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._scores = self._scored(self._rollouts, [self._rows[place] for place in prompts])
        rewards_B1 = torch.tensor([[one.reward] for one in self._scores], device=self.accelerator.device)
        return self.accelerator.gather(rewards_B1)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._with_advantages(super()._generate_and_score_completions(inputs), inputs)
        self._keep(batch)
        return batch

    def _with_advantages(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our advantages, and with what travels along."""
        device = batch["completion_ids"].device
        if self._advantages is not None:
            rewards_NG = torch.tensor([one.reward for one in self._scores], device=device).view(-1, self.group)
            batch["advantages"] = self._advantages(rewards_NG).flatten()
        batch["place"] = torch.tensor([one["prompt"] for one in inputs], device=device)
        return batch

    def _keep(self, batch: dict[str, Any], node_advantages: Sequence[Sequence[float]] | None = None) -> None:
        """Rollouts and their figures, as this step made them."""
        self._log_of_rollouts.add(
            self.state.global_step + 1,
            self._rollouts,
            self._scores,
            advantages=batch["advantages"].tolist(),
            node_advantages=node_advantages,
            group=self.group,
        )
        self._pending |= answer_figures(self._rollouts, self._scores)

    # a step

    def backward(self, step: int) -> tuple[dict[str, float], list[int]]:
        self.state.global_step = step  # TRL gives vLLM the weights of each step once
        self._pending, self._places = {}, []
        epoch, place = divmod(step, self.epoch_steps)
        if place == 0:
            self._upcoming = self._batches(epoch)
        for batch in islice(self._upcoming, self.args.gradient_accumulation_steps):
            self.training_step(self.model_wrapped, batch, None)
        for name, known in CURVES.items():
            values = self._metrics["train"].get(name)
            if values:
                self._pending[known] = sum(values) / len(values)
        self._metrics["train"].clear()
        return self._pending, self._places

    def _batches(self, epoch: int) -> Iterator[Any]:
        self._loader.set_epoch(epoch)
        return iter(self._loader)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = self._loss(model, inputs)
        shown, places = float(loss.detach()), inputs["place"].tolist()
        if not math.isfinite(shown):
            raise self._not_finite(f"the loss is not finite (loss {shown:.4g})", places)
        self._pending["loss"] = self._pending.get("loss", 0.0) + shown
        self._places += places
        return loss

    def _not_finite(self, what: str, places: Sequence[int]) -> TrainingError:
        return self.place.not_finite(what, places, step=self.state.global_step + 1)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return super()._compute_loss(model, inputs)

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # evaluation on held-out rows

    def dev_figures(self, step: int) -> dict[str, float] | None:
        """What greedy answers to the held-out rows earn."""
        if not self._held_out:
            return None
        self.state.global_step = step
        batch = self.args.per_device_train_batch_size * self.args.steps_per_generation
        rollouts = []
        with greedy(self):
            for start in range(0, len(self._held_out), batch):
                rollouts += roll_rows(self._dialogues, self._held_out[start : start + batch], self._write)
            return answer_figures(rollouts, self._scored(rollouts, self._held_out))

    def warnings(self, curve: Curve, step: int) -> list[str]:
        """Of rewards that are earned without the work, once an episode."""
        return [] if self._watch is None else [f"watch: {episode}" for episode in self._watch.begun(curve, step)]

    def is_suspect(self, curve: Curve) -> bool:
        """Under a warning a step is the best one only if it is the first."""
        return self._watch is not None and self._watch.is_warned(curve)

    def ended_by(self, curve: Curve) -> str | None:
        return "watch" if self._watch is not None and self._watch.ended_by(curve) is not None else None

    def may_stop(self, step: int) -> bool:
        """After the last update on the same rollouts: those are not kept in checkpoints."""
        return bool(step % self.num_iterations == 0)

    def _send_telemetry(self) -> None:
        """No ping of the Hub: a training reports to the services of `train.report_to` alone."""

    def own_state(self, step: int) -> dict[str, Any]:
        return {"log": self._log_of_rollouts.state(step)}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        self._log_of_rollouts.go_on(held["log"])
        epoch, place = divmod(step, self.epoch_steps)
        if place:  # an epoch's loader draws from torch's generator when it starts, which was before the checkpoint
            self._upcoming = self._batches(epoch)
            for _ in range(place * self.args.gradient_accumulation_steps):
                next(self._upcoming)


def _reward(**_: Any) -> list[float]:
    """Named for TRL's figures; `_calculate_rewards` does the work."""
    raise AssertionError("rewards are calculated from rollouts")


# ------------------------------------------------------------------------------
# RolloutTrainer with credit by node: each token takes the advantage of the node it belongs to, and the graph's
# coefficients are learned together with the model.
#
# Overridden in addition: `_with_advantages` (segments and base rewards travel with the batch
# through TRL's shuffling), `_loss` (advantages by token, never detached, and the coefficients' own term),
# `create_optimizer` (the coefficients' rate).


# N prompts, G rollouts of a prompt, B = N·G, T tokens, V nodes


class CreditTrainer(RolloutTrainer):
    """GRPO with credit that flows along a graph. All other arguments are RolloutTrainer's.

    Args:
        credit: how it flows.
    """

    def __init__(self, *, credit: Credit, **kwargs: Any) -> None:
        self._credit = credit
        super().__init__(**kwargs)
        self.rounding = torch.zeros((), device=self.accelerator.device)
        self._credit.to(self.accelerator.device)

    # what travels with the rollouts

    def _with_advantages(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Also each token's node [B, T], the base rewards of each rollout's whole group [B, G, 3], and its place there
        [B].
        """
        batch = super()._with_advantages(batch, inputs)
        completion_ids, group = batch["completion_ids"], self.group
        device = completion_ids.device
        template = NODES.index("r") if self._credit.section.tags == "grade" else TEMPLATE
        segment_BT = torch.full(completion_ids.shape, TEMPLATE, device=device)
        for row, rollout in enumerate(self._rollouts):
            segments = segments_of(rollout, self._dialogues.tokens, template=template)
            segment_BT[row, : len(segments)] = torch.tensor(segments, device=device)
        base_NG3 = torch.tensor([one.base for one in self._scores], device=device).view(-1, group, 3)
        rewards_BG3 = base_NG3.repeat_interleave(group, 0)
        index_B = torch.arange(group, device=device).repeat(len(base_NG3))
        return batch | {"segment_ids": segment_BT, "group_rewards": rewards_BG3, "group_index": index_B}

    def _keep(self, batch: dict[str, Any], node_advantages: Sequence[Sequence[float]] | None = None) -> None:
        super()._keep(batch, self._node_advantages(batch).detach().tolist())
        base_B3 = torch.tensor([one.base for one in self._scores], device=self.accelerator.device)
        reward_V = self._credit.node_rewards(base_B3).mean(0).tolist()
        self._pending |= {f"node_reward_{node}": value for node, value in zip(NODES, reward_V, strict=True)}

    # the loss

    def _node_advantages(self, batch: Mapping[str, Tensor]) -> Tensor:
        """A of each rollout's nodes [B, V], with the gradient of the coefficients."""
        node_BGV = self._credit.advantages(batch["group_rewards"], epsilon=self._credit.section.epsilon)
        return node_BGV[torch.arange(len(node_BGV)), batch["group_index"]]

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        segment_BT, node_BV = inputs["segment_ids"], self._node_advantages(inputs)
        if node_BV.requires_grad:
            node_BV.register_hook(
                functools.partial(self._note_rounding, self._credit.rounding(inputs["group_rewards"]))
            )
        advantage_BT = token_advantages(node_BV, segment_BT)
        if self._credit.is_by_node:
            advantage_BT = advantage_BT * node_average_weights(segment_BT, inputs["completion_mask"])
        loss = super()._loss(model, {**inputs, "advantages": advantage_BT})
        if self._credit.section.learn:
            decay = self._credit.section.decay * self._credit.distance()
            loss = loss + decay / self.current_gradient_accumulation_steps
        return loss

    def _note_rounding(self, rounding_BV: Tensor, gradient_BV: Tensor) -> None:
        """Errors of single rewards are independent, so their squares add up, over all batches of a step."""
        self.rounding += (gradient_BV * rounding_BV).square().sum()

    def create_optimizer(self) -> Any:
        """TRL's, with a group of their own for the coefficients."""
        optimizer = super().create_optimizer()
        if self._credit.section.learn:
            rate = self._credit.section.learning_rate
            optimizer.add_param_group({"params": [self._credit.logits], "lr": rate, "weight_decay": 0.0})
        return optimizer

    def before_update(self) -> None:
        """Reduce and clip the coefficients' gradient, as the loop does for the model's. What of it may be rounding is
        dropped: where it should be 0 (on the first update of a batch, ρ is 1), Adam would make whole steps of 1e-9.
        """
        logits = self._credit.logits
        if logits.grad is not None:
            reduced = self.accelerator.reduce(logits.grad, reduction="mean")
            floor = ROUNDINGS * self.accelerator.reduce(self.rounding, reduction="mean").sqrt()
            is_known = reduced.abs() > floor
            logits.grad = torch.where(is_known, reduced, 0.0) if is_known.any() else None
        if logits.grad is not None:
            clip_grad_norm_([logits], self._credit.section.max_grad_norm)
        self.rounding.zero_()

    # what is written down

    def after_update(self, step: int) -> dict[str, float]:
        """The coefficients after a step."""
        alpha = self._credit.coefficients()
        by_edge = alpha.by_edge()
        self._log_of_rollouts.add_edges(step, self._credit.logits.detach().tolist(), by_edge)
        ratios = {f"ratio_{node}": value for node, value in effective_ratios(alpha).items()}
        return {f"alpha_{edge}": value for edge, value in by_edge.items()} | ratios

    def own_state(self, step: int) -> dict[str, Any]:
        return {**super().own_state(step), "logits": self._credit.logits.detach()}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        super().load_own_state(held, step)
        with torch.no_grad():
            self._credit.logits.copy_(held["logits"])
