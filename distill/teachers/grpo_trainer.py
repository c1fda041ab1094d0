"""TRL's GRPOTrainer with rollouts asked by a labeler: advantages by group (grpo), along a graph (graph-grpo), or of
answers under a grammar (res-rag); greedy evaluation on held-out rows. Importing it loads TRL."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler, pad

from relabel.distill.teachers.credit import (
    EDGES,
    ROUNDINGS,
    TEMPLATE,
    Credit,
    effective_ratios,
    group_advantages,
    is_known,
    node_average_weights,
    segments_of,
    token_advantages,
)
from relabel.distill.teachers.rewards import GoldRow, Score, Scored, answer_figures, grades_of, roll_rows
from relabel.distill.teachers.rollout_log import RolloutLog, as_logged
from relabel.distill.teachers.rollouts import AskedIds, Dialogues, Rollout
from relabel.distill.teachers.sampling import AnswerKey, Drawing, uniforms_of
from relabel.distill.teachers.spec import NODES, RolloutSection, RolloutTraining, VllmSection
from relabel.distill.teachers.teaching import shard_decoder
from relabel.distill.training.loop import Choice, Learner, Watch, is_on_cpu, precision_of, prepared
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.asks import Ask

# ------------------------------------------------------------------------------
# Rollouts that vLLM writes on GPUs, by TRL's trainer: its arguments, and what comes back with the tokens.
#
# What vLLM computes and what the trainer computes differ by rounding, so each token comes with the probability that it
# was sampled with, and TRL weighs the token's loss by the two probabilities' ratio, 3 at most (truncated importance
# sampling; TRL's default weighs by the whole answer's, and drops answers beyond).
#
# Written against TRL 1.16's documented options (`use_vllm`, modes `colocate` and `server`).


TurnLogprobs = Sequence[Sequence[float | None]]
"""Log-probabilities of the sampled tokens of a call's answers; None where vLLM has none."""


def vllm_arguments(section: VllmSection, *, max_tokens: int) -> dict[str, Any]:
    """The section as arguments of TRL's GRPOConfig.

    Args:
        max_tokens: longest rollout, prompt and answers.
    """
    arguments: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": section.mode,
        "vllm_max_model_length": max_tokens,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    if section.url is not None:
        return arguments | {"vllm_server_base_url": section.url, "vllm_server_timeout": section.timeout_s}
    return arguments | {
        "vllm_gpu_memory_utilization": section.gpu_memory_utilization,
        "vllm_enable_sleep_mode": section.sleep,
    }


def sampling_logprobs(rollouts: Sequence[Rollout], calls: Sequence[TurnLogprobs]) -> list[list[float | None]]:
    """The log-probability that each token of each rollout's completion was sampled with; None for the template's.

    Args:
        calls: of the first turn of all rollouts, of the second of those that have one, and so on, in their order.
    """
    logprobs: list[list[float | None]] = [[None] * len(rollout.completion_ids) for rollout in rollouts]
    for number, call in enumerate(calls):
        asked = [row for row, rollout in enumerate(rollouts) if len(rollout.turns) > number]
        for row, values in zip(asked, call, strict=True):
            is_own = rollouts[row].is_own
            for at, value in enumerate(values, rollouts[row].turns[number].start):
                if at < len(is_own) and is_own[at]:  # an end token may have given way to the template's
                    logprobs[row][at] = value
    return logprobs


# ------------------------------------------------------------------------------
# A spec as TRL's arguments, and the order of prompts. Imports TRL, which takes ten seconds and more.


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
        "ddp_find_unused_parameters": False,  # all of them are in every loss
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
        self.generator.manual_seed(self.seed + 1_000_003 * self.epoch)
        return iter(super().__iter__())


# ------------------------------------------------------------------------------
# Evaluation on held-out rows: the policy answers them without sampling. A process takes a stretch of the rows, and all
# of them see the figures of all.


@contextmanager
def greedy(trainer: Any) -> Iterator[None]:
    """vLLM takes the most probable token each time; what we draw ourselves, we draw for a step's rollouts alone."""
    if not trainer.use_vllm:
        yield
        return
    vllm = trainer.vllm_generation
    temperature = vllm.temperature
    vllm.temperature = 0.0
    try:
        yield
    finally:
        vllm.temperature = temperature


def own_stretch(count: int, accelerator: Any) -> slice:
    """This process's of so many rows: stretches of all processes, one after another, are all rows in their order."""
    number = accelerator.process_index
    return slice(number * count // accelerator.num_processes, (number + 1) * count // accelerator.num_processes)


# ------------------------------------------------------------------------------
# TRL's GRPOTrainer with rollouts that a labeler asks for and reads, and our advantages.
#
# TRL's hooks are private; `trl==1.16.*` is pinned, and tests/teachers/test_grpo_trainer.py is the contract: with TRL's
# normaliser and loss this equals its plain GRPO bit for bit. Overridden, and why: `rollout_func` (the labeler's turns),
# `_generate_single_turn` (tokens drawn by prompt and sample), `_calculate_rewards` (format judged on token ids),
# `_generate_and_score_completions` (the population's σ; what the loss needs travels with the batch through TRL's
# shuffling), `_compute_loss` (its figures by row), `_get_train_sampler` (an order that a resumed second epoch repeats),
# `_send_telemetry`.
#
# Of several processes each takes whole groups, the same ones that a single process would have at that place of a longer
# batch. The loss is a mean over rollouts, of which all batches have as many, and DDP averages gradients over processes:
# that is the mean over all. What is shuffled, is shuffled alike in all of them, so the random generators of the first
# process, which a checkpoint holds, are those of all.


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
        advantages: of rewards [N, G], a row a prompt.
        log: keeps every rollout.
        held_out: rows to evaluate on; the step with the best reward there is kept.
        eval_every: steps between evaluations; None is once an epoch.
        patience: evaluations without a better one after which training ends; None trains to the end.
        watch: warns of rewards that are earned without the work, and may end training.
        at_once: answers written together; None writes all of a step together.
        whole: makes the model once more, where several processes train shards of it.
    """

    progress_figures = ("reward", "loss")
    warms_up_from_0 = False

    def __init__(
        self,
        *,
        place: TrainingPlace,
        dialogues: Dialogues,
        rows: Sequence[GoldRow],
        scored: Scored,
        advantages: Callable[[Tensor], Tensor] = group_advantages,
        log: RolloutLog | None = None,
        held_out: Sequence[GoldRow] = (),
        eval_every: int | None = None,
        patience: int | None = None,
        watch: Watch | None = None,
        at_once: int | None = None,
        whole: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.place = place
        self.whole = whole
        self.eval_every = eval_every
        self.watch = watch
        self.choice = Choice("reward", patience) if held_out else None
        self._dialogues = dialogues
        self._rows = rows
        self._held_out = held_out
        self._scored = scored
        self._advantages = advantages
        self._at_once = at_once
        self._rollout_log = log if log is not None else RolloutLog(place.folder)
        self._rollouts: list[Rollout] = []
        self._logprobs: list[TurnLogprobs] = []
        self._scores: list[Score] = []
        self._asked: list[tuple[int, int]] | None = None  # row and sample of each conversation; None writes greedily
        self._pending: dict[str, float] = {}
        self._losses: list[float] = []
        self._places: list[list[int]] = []
        self._upcoming: Iterator[Any] = iter(())
        super().__init__(
            reward_funcs=[_reward], train_dataset=Dataset.from_dict({"prompt": list(range(len(rows)))}), **kwargs
        )
        self.updates = self.num_iterations
        if not self.use_vllm:
            self._choose_tokens_ourselves()
        self.rollout_func = self._roll  # given to the constructor, TRL would warn that it may change: hence the pin
        self._is_sharded = whole is not None and self.accelerator.num_processes > 1
        if self._is_sharded:
            shard_decoder(self.model, self.accelerator.device)
        self.model_wrapped = prepared(self.accelerator, self.model)
        self._writes_in_step = self._is_sharded or (self.use_vllm and self.vllm_mode == "server")
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._loader = self.get_train_dataloader()
        self.epoch_steps = len(self._loader) // self.args.gradient_accumulation_steps

    # a step

    def backward(self, step: int) -> tuple[dict[str, float], list[int]]:
        self.state.global_step = step  # TRL gives vLLM the weights of each step once
        self._pending = {}
        self._losses = []
        self._places = []
        epoch, step_of_epoch = divmod(step, self.epoch_steps)
        if step_of_epoch == 0:
            self._upcoming = self._batches(epoch)
        last = self.args.gradient_accumulation_steps - 1
        for number, batch in enumerate(islice(self._upcoming, last + 1)):
            # gradients travel with the last batch
            with nullcontext() if number == last else self.accelerator.no_sync(self.model_wrapped):
                self.training_step(self.model_wrapped, batch, None)
        self._pending["loss"] = self._loss_of_all(step + 1)
        metrics = self._metrics["train"]
        for name, figure in CURVES.items():
            if metrics.get(name):
                self._pending[figure] = sum(metrics[name]) / len(metrics[name])
        metrics.clear()
        return self._pending, [row for rows in self._places for row in rows]

    def _loss_of_all(self, step: int) -> float:
        """The step's loss, the mean over all processes.

        Raises:
            TrainingError: one of a batch is not finite, in any process.
        """
        (shown,) = self.accelerator.reduce(
            torch.tensor([sum(self._losses)], dtype=torch.float64, device=self.accelerator.device), reduction="mean"
        ).tolist()
        if not math.isfinite(shown):
            rows = [rows for loss, rows in zip(self._losses, self._places, strict=True) if not math.isfinite(loss)]
            what = f"the loss is not finite (loss {shown:.4g})"
            raise self.place.not_finite(what, [row for of_batch in gather_object(rows) for row in of_batch], step=step)
        return float(shown)

    def _batches(self, epoch: int) -> Iterator[Any]:
        self._loader.set_epoch(epoch)
        return iter(self._loader)

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # rollouts and what they earn

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our advantages, and with what travels along; its rollouts are written down."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        device = self.accelerator.device
        rewards = torch.tensor([score.reward for score in self._scores], device=device)
        rewards_NG = rewards.view(-1, self.num_generations)
        batch["advantages"] = self._advantages(rewards_NG).flatten()
        batch["place"] = torch.tensor([sample["prompt"] for sample in inputs], device=device)
        self._extend(batch, rewards_NG)
        self._pending |= answer_figures(gather_object(grades_of(self._rollouts)), gather_object(self._scores))
        logged = gather_object(
            as_logged(
                self.state.global_step + 1,
                self._rollouts,
                self._scores,
                advantages=batch["advantages"].tolist(),
                group=self.num_generations,
            )
        )
        if self.accelerator.is_main_process:  # it alone writes
            self._rollout_log.add(logged)
        return batch

    def _extend(self, batch: dict[str, Any], rewards_NG: Tensor) -> None:
        """Add what the loss needs to know of each rollout."""

    def _roll(self, prompts: list[int], _: Any) -> dict[str, Any]:
        self._logprobs = []
        self._asked = [(number, place % self.num_generations) for place, number in enumerate(prompts)]
        self._rollouts = self._roll_rows([self._rows[number] for number in prompts])
        self._asked = None
        generated: dict[str, Any] = {
            "prompt_ids": [rollout.prompt_ids for rollout in self._rollouts],
            "completion_ids": [rollout.completion_ids for rollout in self._rollouts],
            "logprobs": sampling_logprobs(self._rollouts, self._logprobs) if self._logprobs else None,
        }
        if not all(all(rollout.is_own) for rollout in self._rollouts):
            generated["env_mask"] = [list(map(int, rollout.is_own)) for rollout in self._rollouts]
        return generated

    def _roll_rows(self, rows: Sequence[GoldRow]) -> list[Rollout]:
        """One rollout for each row; where processes write in step, until the last of them has its own."""
        rollouts = roll_rows(self._dialogues, rows, self._write)
        while self._writes_in_step and (most := self._most(0)):
            self._write_as_many([], most)
        return rollouts

    def _write(self, contexts: Sequence[AskedIds]) -> Sequence[list[int]]:
        """Answers to all contexts."""
        return self._write_as_many(contexts, self._most(len(contexts)) if self._writes_in_step else len(contexts))

    def _most(self, count: int) -> int:
        """The largest of the counts of all processes."""
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    def _write_as_many(self, contexts: Sequence[AskedIds], most: int) -> Sequence[list[int]]:
        """Answers to all contexts: together, or the longest first in so many at a time that little is padding.

        Args:
            most: so many are written, those beyond the contexts for nothing, so that processes stay in step.
        """
        asked = list(contexts)
        if len(asked) < most:
            first = self._rows[0].first
            assert first is not None
            asked += [AskedIds(first.ask, first.ids)] * (most - len(asked))
        size = self._at_once or most
        order = list(range(most))
        if size < most:
            order.sort(key=lambda number: -len(asked[number]))
        answers: dict[int, list[int]] = {}
        logprobs: dict[int, Sequence[float | None]] = {}
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            ids, sampled = self._generate_single_turn([asked[number] for number in chosen], None, {}, 1)
            answers |= dict(zip(chosen, ids, strict=True))
            logprobs |= dict(zip(chosen, sampled or (), strict=False))
        if self.use_vllm and contexts:
            self._logprobs.append([logprobs.get(number, ()) for number in range(len(contexts))])
        return [answers[number] for number in range(len(contexts))]

    def _choose_tokens_ourselves(self) -> None:
        """transformers takes the most probable token each time, which `Drawing` may have chosen."""
        for name in ("temperature", "top_p", "top_k", "min_p"):
            del self.generation_kwargs[name]
        self.generation_kwargs["do_sample"] = False
        self.generation_config = GenerationConfig(**self.generation_kwargs, disable_compile=True)

    def _generate_single_turn(self, prompt_ids: Sequence[AskedIds], *others: Any, **options: Any) -> Any:
        """An answer to each prompt, up to its end token or the limit."""
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, *others, **options)
        prompts = [torch.tensor(list(ids)) for ids in prompt_ids]
        device = self.accelerator.device
        inputs = {
            "input_ids": pad(prompts, padding_value=self._tokenizer.pad_token_id, padding_side="left").to(device),
            "attention_mask": pad([torch.ones_like(prompt) for prompt in prompts], padding_side="left").to(device),
        }
        width = inputs["input_ids"].shape[1]
        settings = {
            "generation_kwargs": self.generation_kwargs,
            "gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs,
        }
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, **settings) as model, torch.no_grad():
            written = model.generate(
                **inputs,
                generation_config=self.generation_config,
                synced_gpus=self._is_sharded,
                logits_processor=LogitsProcessorList(self._processors(prompt_ids, width)),
            )[:, width:].tolist()
        ends = set(self.eos_token_ids)
        return [_up_to_end(ids, ends) for ids in written], None

    def _processors(self, prompt_ids: Sequence[AskedIds], width: int) -> list[Any]:
        """What chooses the tokens of answers to these prompts, padded to so many; none chooses the most probable."""
        if self._asked is None:
            return []
        keys = []
        for ids in prompt_ids:
            row, sample = self._asked[ids.number]
            keys.append(
                AnswerKey(
                    seed=self.args.seed,
                    step=self.state.global_step,
                    row=row,
                    sample=sample,
                    place=len(ids),
                )
            )
        processors: list[Any] = []
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        return [*processors, Drawing(uniforms_of(keys, self.max_completion_length), width)]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._scores = self._scored(self._rollouts, [self._rows[number] for number in prompts])
        rewards = [[score.reward] for score in self._scores]
        return self.accelerator.gather(torch.tensor(rewards, device=self.accelerator.device))

    # the loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = self._loss(model, inputs)
        self._losses.append(float(loss.detach()))
        self._places.append(inputs["place"].tolist())
        return loss

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return super()._compute_loss(model, inputs)

    # evaluation on held-out rows, and what a checkpoint keeps

    def dev_figures(self, step: int) -> dict[str, float] | None:
        """What greedy answers to the held-out rows earn."""
        if not self._held_out:
            return None
        self.state.global_step = step
        batch = self.args.per_device_train_batch_size * self.args.steps_per_generation
        own = self._held_out[own_stretch(len(self._held_out), self.accelerator)]
        rollouts = []
        with greedy(self):
            for start in range(0, -(-len(self._held_out) // self.accelerator.num_processes), batch):
                rollouts += self._roll_rows(own[start : start + batch])
            scores = self._scored(rollouts, own)
        return answer_figures(gather_object(grades_of(rollouts)), gather_object(scores))

    def own_state(self, step: int) -> dict[str, Any]:
        return {"log": self._rollout_log.state(step)}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        self._rollout_log.go_on(held["log"])
        epoch, place = divmod(step, self.epoch_steps)
        if place:  # an epoch's loader draws from torch's generator when it starts, which was before the checkpoint
            self._upcoming = self._batches(epoch)
            for _ in range(place * self.args.gradient_accumulation_steps):
                next(self._upcoming)

    def _send_telemetry(self) -> None:
        """No ping of the Hub: a training reports to the services of `train.report_to` alone."""


def _reward(**_: Any) -> list[float]:
    """Named for TRL's figures; `_calculate_rewards` does the work."""
    raise AssertionError("rewards are calculated from rollouts")


def _up_to_end(ids: list[int], ends: Set[int]) -> list[int]:
    """An answer's tokens up to the first one that ends it."""
    for number, token in enumerate(ids, start=1):
        if token in ends:
            return ids[:number]
    return ids


# ------------------------------------------------------------------------------
# RolloutTrainer with credit by node: each token takes the advantage of the node it belongs to, and the graph's
# coefficients are learned together with the model.


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

    def _extend(self, batch: dict[str, Any], rewards_NG: Tensor) -> None:
        """Each token's node [B, T], the base rewards of each rollout's whole group [B, G, 3], and its place there
        [B].
        """
        device = self.accelerator.device
        template = NODES.index("r") if self._credit.section.tags == "grade" else TEMPLATE
        segment_BT = torch.full(batch["completion_ids"].shape, TEMPLATE, device=device)
        for row, rollout in enumerate(self._rollouts):
            segments = segments_of(rollout, self._dialogues.tokens, template=template)
            segment_BT[row, : len(segments)] = torch.tensor(segments, device=device)
        base_B3 = torch.tensor([score.base for score in self._scores], device=device)
        batch["segment_ids"] = segment_BT
        batch["group_rewards"] = base_B3.view(-1, self.num_generations, 3).repeat_interleave(self.num_generations, 0)
        batch["group_index"] = torch.arange(self.num_generations, device=device).repeat(len(rewards_NG))
        for score, values in zip(self._scores, self._node_advantages(batch).tolist(), strict=True):
            score.columns["node_advantages"] = values
        reward_V = self.accelerator.reduce(self._credit.node_rewards(base_B3).detach().mean(0), reduction="mean")
        self._pending |= {f"node_reward_{node}": value for node, value in zip(NODES, reward_V.tolist(), strict=True)}

    def _node_advantages(self, batch: Mapping[str, Tensor]) -> Tensor:
        """A of each rollout's nodes [B, V], with the gradient of the coefficients."""
        node_BGV = self._credit.advantages(batch["group_rewards"], epsilon=self._credit.section.epsilon)
        return node_BGV[torch.arange(len(node_BGV)), batch["group_index"]]

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """With advantages by token, never detached, and the coefficients' own term."""
        segment_BT = inputs["segment_ids"]
        node_BV = self._node_advantages(inputs)
        if node_BV.requires_grad:
            node_BV.register_hook(
                functools.partial(self._note_rounding, self._credit.rounding(inputs["group_rewards"]))
            )
        advantage_BT = token_advantages(node_BV, segment_BT)
        section = self._credit.section
        if section.average == "node" or (section.average == "auto" and section.learn):
            advantage_BT = advantage_BT * node_average_weights(segment_BT, inputs["completion_mask"])
        loss = super()._loss(model, {**inputs, "advantages": advantage_BT})
        if section.learn:
            distance = self._credit.logits.square().sum()
            loss = loss + section.decay * distance / self.current_gradient_accumulation_steps
        return loss

    def _note_rounding(self, rounding_BV: Tensor, gradient_BV: Tensor) -> None:
        """Errors of single rewards are independent, so their squares add up, over all batches of a step."""
        self.rounding += (gradient_BV * rounding_BV).square().sum()

    def create_optimizer(self) -> Any:
        """TRL's, with a group of their own for the coefficients."""
        optimizer = super().create_optimizer()
        if self._credit.section.learn:
            optimizer.add_param_group(
                {"params": [self._credit.logits], "lr": self._credit.section.learning_rate, "weight_decay": 0.0}
            )
        return optimizer

    def before_update(self) -> None:
        """Reduce and clip the coefficients' gradient, as the loop does for the model's. What of it may be rounding is
        dropped: where it should be 0 (on the first update of a batch, ρ is 1), Adam would make whole steps of 1e-9.
        """
        logits = self._credit.logits
        if logits.grad is not None:
            reduced = self.accelerator.reduce(logits.grad, reduction="mean")
            # squares add up over processes, too, and the root of their sum is averaged as the gradient is
            rounding = self.accelerator.reduce(self.rounding).sqrt() / self.accelerator.num_processes
            is_sure = reduced.abs() > ROUNDINGS * rounding
            logits.grad = torch.where(is_sure, reduced, 0.0) if is_sure.any() else None
        if logits.grad is not None:
            nn.utils.clip_grad_norm_([logits], self._credit.section.max_grad_norm)
        self.rounding.zero_()

    def after_update(self, step: int) -> dict[str, float]:
        """The coefficients after a step."""
        alpha_E = self._credit.coefficients()
        by_edge = list(zip(EDGES, self._credit.logits.tolist(), alpha_E.tolist(), strict=True))
        self._rollout_log.edges += [[step, *values] for values in by_edge]
        ratios = {f"ratio_{node}": value for node, value in effective_ratios(alpha_E).items()}
        return {f"alpha_{edge}": value for edge, _, value in by_edge} | ratios

    def own_state(self, step: int) -> dict[str, Any]:
        return {**super().own_state(step), "logits": self._credit.logits.detach()}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        super().load_own_state(held, step)
        with torch.no_grad():
            self._credit.logits.copy_(held["logits"])


# ------------------------------------------------------------------------------
# Answers under a grammar: what it admits at each token, while an answer is written and when its probability is taken.
#
# Masks are few and answers are many: each different mask is kept once, and a token knows its number. Number 0 admits
# all.


# B rollouts, C tokens of an answer, V vocabulary, U different masks, W = ⌈V / 32⌉ words of a mask


FREE = 0
"""The mask that admits every token."""


class GrammarMasks:
    """The masks of one batch of answers.

    Args:
        compiler: for the model's tokenizer, as wide as its logits.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.num_words = -(-compiler.vocab_size // 32)
        self.clear()

    def clear(self) -> None:
        """Forget all masks but the one that admits every token."""
        self._numbers = {np.full(self.num_words, -1, dtype=np.int32).tobytes(): FREE}
        self._table: Tensor | None = None

    def matcher(self, ask: Ask) -> Any:
        """What holds an answer to the ask's format, at its start."""
        assert ask.format is not None
        return self._compiler.matcher(ask.format)

    def numbers(self, ask: Ask, ids: Sequence[int]) -> list[int]:
        """The number of the mask at each token of an answer.

        Raises:
            ValueError: the grammar does not admit a token.
        """
        matcher = self.matcher(ask)
        numbers = list[int]()
        for token in ids:
            words = self.words_of(matcher)
            if not words[token // 32] >> (token % 32) & 1:
                raise ValueError(f"token {token} at place {len(numbers)} is not one that the grammar admits")
            numbers.append(self._numbers.setdefault(words.tobytes(), len(self._numbers)))
            if not matcher.is_stopped():
                matcher.consume_token(token)
        return numbers

    def words_of(self, matcher: Any) -> np.ndarray:
        """What a matcher admits now, as bits, 32 to a word and lowest first, int32 [W]; at its end, end tokens."""
        words = np.zeros(self.num_words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def admitted(self, numbers: Tensor, width: int) -> Tensor:
        """Which tokens the masks with these numbers admit, bool [..., V].

        Args:
            numbers: of masks, any shape.
            width: V, of the model's logits.
        """
        if self._table is None or len(self._table) < len(self._numbers) or self._table.device != numbers.device:
            masks = np.array([np.frombuffer(words, dtype=np.int32) for words in self._numbers])
            self._table = torch.from_numpy(masks).to(numbers.device)
        return unpacked(self._table[numbers], width)


def unpacked(words: Tensor, width: int) -> Tensor:
    """Bits, 32 to a word of int32 [..., W] and lowest first, as booleans [..., V]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places & 1).bool().flatten(-2)[..., :width]


class GrammarHold:
    """A logits processor of transformers: each row's answer is held to its grammar while it is written.

    Args:
        matchers: of each row, at its start; one that has stopped admits end tokens alone.
        prompt_width: tokens of the padded prompts.
    """

    def __init__(self, masks: GrammarMasks, matchers: Sequence[Any], prompt_width: int) -> None:
        self._masks = masks
        self._matchers = matchers
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits with -inf at what the grammars do not admit, float [B, V]."""
        if input_ids.shape[1] > self._prompt_width:
            for matcher, token in zip(self._matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped() and not matcher.consume_token(token):
                    raise ValueError(f"the grammar got stuck: {matcher.get_error()[:300]}")
        words = np.stack([self._masks.words_of(matcher) for matcher in self._matchers])
        return scores.masked_fill(~unpacked(torch.from_numpy(words).to(scores.device), scores.shape[1]), float("-inf"))


# ------------------------------------------------------------------------------
# GRPO over answers that a grammar holds, rewarded by a generator that may fail.
#
# The log-probabilities of the old, the new and the reference policy are all those of the masked logits, renormalised:
# what is sampled is then the policy itself (but for `top_p`), and tokens that the grammar forces teach nothing.
#
# Overridden of TRL in addition: `_get_per_token_logps_and_entropies` (the grammar's masks).


# B rollouts, C tokens of the longest answer, V vocabulary


class HeldTrainer(RolloutTrainer):
    """GRPO on answers of one turn under a grammar. All other arguments are RolloutTrainer's.

    Args:
        masks: for the model's tokenizer.
        lowest: the reward of evaluations where no row has one.
    """

    def __init__(self, *, masks: GrammarMasks, lowest: float, **kwargs: Any) -> None:
        self._masks = masks
        self._lowest = lowest
        self._numbers_BC: Tensor | None = None
        super().__init__(**kwargs)

    # writing under the grammar

    def _roll(self, prompts: list[int], trainer: Any) -> dict[str, Any]:
        generated = super()._roll(prompts, trainer)
        self._masks.clear()
        numbers = [
            torch.tensor(self._masks.numbers(rollout.turns[0].ask, rollout.completion_ids))
            for rollout in self._rollouts
        ]
        self._numbers_BC = pad(numbers, padding_value=FREE).to(self.accelerator.device)
        return generated

    def _processors(self, prompt_ids: Sequence[AskedIds], width: int) -> list[Any]:
        """The grammar of each answer before all else."""
        matchers = [self._masks.matcher(asked.ask) for asked in prompt_ids]
        return [GrammarHold(self._masks, matchers, width), *super()._processors(prompt_ids, width)]

    # what it earned

    def dev_figures(self, step: int) -> dict[str, float] | None:
        """Where the generator failed at every row, this step is not the best one."""
        figures = super().dev_figures(step)
        if figures is None:
            return None
        return {"reward": self._lowest} | figures

    def _extend(self, batch: dict[str, Any], rewards_NG: Tensor) -> None:
        known_B = is_known(rewards_NG).flatten()
        batch["mask_numbers"] = self._numbers_BC
        # the loss is a mean over all rollouts: those that are dropped add nothing, and the others make up for them
        num_known, num_all = self.accelerator.reduce(
            torch.tensor([int(known_B.sum()), len(known_B)], device=self.accelerator.device)
        ).tolist()
        batch["share"] = known_B.float() * (num_all / max(1, num_known))

    # the loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._numbers_BC = inputs["mask_numbers"]
        share_B = inputs["share"]
        if bool((share_B == 1).all()):
            return super()._compute_loss(model, inputs)
        own_BC = (share_B > 0)[:, None].expand_as(inputs["completion_mask"])
        inputs = {**inputs, "tool_mask": own_BC.to(inputs["completion_mask"].dtype)}
        return super()._compute_loss(model, inputs) * share_B.max()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Of the answers' tokens [B, C]: log-probabilities under the grammar, and the entropies of what it admits."""
        assert not compute_aux_loss, "no mixture of experts is trained under a grammar yet"
        assert self._numbers_BC is not None
        size = batch_size or len(input_ids)
        logps = []
        entropies = []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            with self.accelerator.autocast():
                logits_BCV = model(
                    input_ids=input_ids[rows],
                    attention_mask=attention_mask[rows],
                    logits_to_keep=logits_to_keep + 1,
                    use_cache=False,
                ).logits[:, -logits_to_keep - 1 : -1]
            admitted_BCV = self._masks.admitted(self._numbers_BC[rows], logits_BCV.shape[-1])
            logits_BCV = (logits_BCV / self.temperature).to(torch.get_default_dtype())
            logp_BCV = logits_BCV.masked_fill(~admitted_BCV, float("-inf")).log_softmax(-1)
            logps.append(logp_BCV.gather(-1, input_ids[rows, -logits_to_keep:, None])[..., 0])
            if compute_entropy:
                known_BCV = logp_BCV.detach()
                entropies.append(-(known_BCV.exp() * known_BCV.masked_fill(~admitted_BCV, 0.0)).sum(-1))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None
