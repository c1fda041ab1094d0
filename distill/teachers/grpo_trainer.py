"""TRL's GRPOTrainer with rollouts that a labeler asks for and reads, and our advantages.

Importing this file imports TRL's trainer, which takes ten seconds and more: import it where training begins.

TRL's hooks are private; `trl==1.16.*` is pinned, and tests/teachers/test_grpo_trainer.py is the contract: with TRL's
normaliser and loss this equals its plain GRPO bit for bit. Overridden, and why: `rollout_func` (the labeler's turns),
`_calculate_rewards` (format judged on token ids), `_generate_and_score_completions` (the population's σ; what the loss
needs travels with the batch through TRL's shuffling), `_compute_loss` (its figures by row), `_get_train_sampler` (an
order that a resumed second epoch repeats), `_send_telemetry`. Credit by node is `grpo_credit_trainer.py`'s.
"""

# N prompts, G rollouts of a prompt, B = N·G

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from datasets import Dataset
from trl import GRPOTrainer

from relabel.distill.teachers.advantages import group_advantages
from relabel.distill.teachers.grpo_arguments import EpochSampler
from relabel.distill.teachers.held_out import HeldOut, greedy
from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.rollouts import Dialogues, Rollout
from relabel.distill.teachers.scores import GoldRow, Score, Scored, answer_figures, roll_rows
from relabel.distill.teachers.vllm_rollouts import TurnLogprobs, sampling_logprobs
from relabel.distill.teachers.watched import WatchedTrainer
from relabel.distill.training.step_clock import StepClock

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
        scored: what rollouts earn.
        normaliser: `population` is the papers' standard deviation, `trl` leaves TRL's advantages as they are.
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
        scored: Scored,
        normaliser: Literal["population", "trl"] = "population",
        log: RolloutLog | None = None,
        held_out: Sequence[GoldRow] = (),
        at_once: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._dialogues, self._rows, self._scored = dialogues, rows, scored
        self._normaliser, self._at_once = normaliser, at_once
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
        self._held_out = HeldOut(held_out, dialogues, scored, batch=batch)
        self.rollout_func = self._roll  # given to the constructor, TRL would warn that it may change: hence the pin

    @property
    def group(self) -> int:
        """Rollouts of one prompt; they follow each other."""
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    # rollouts and what they earn

    def _roll(self, prompts: list[int], _: Any) -> dict[str, Any]:
        self._logprobs = []
        try:
            self._rollouts = roll_rows(self._dialogues, [self._rows[place] for place in prompts], self._write)
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

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        self._scores = self._scored(self._rollouts, [self._rows[place] for place in prompts])
        rewards_B1 = torch.tensor([[one.reward] for one in self._scores], device=self.accelerator.device)
        return self.accelerator.gather(rewards_B1)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self.clock.part("read"):
            batch = self._with_advantages(super()._generate_and_score_completions(inputs), inputs)
            self._keep(batch)
            return batch

    def _with_advantages(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our advantages, and with what travels along."""
        device = batch["completion_ids"].device
        if self._normaliser == "population":
            rewards_NG = torch.tensor([one.reward for one in self._scores], device=device).view(-1, self.group)
            batch["advantages"] = group_advantages(rewards_NG).flatten()
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

    # the loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.part("forward"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        with self.clock.part("forward"):
            loss = self._loss(model, inputs)
            if self.model.training:
                self.note({"loss": float(loss.detach())}, inputs["place"].tolist())
            return loss

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

    def _send_telemetry(self) -> None:
        """TRL's ping of the Hub: a training tells nobody of itself but the services of `train.report_to`."""

    def own_state(self) -> dict[str, Any]:
        return {"log": self._log_of_rollouts.state(self.state.global_step)}

    def load_own_state(self, held: dict[str, Any]) -> None:
        self._log_of_rollouts.go_on(held["log"])


def _reward(**_: Any) -> list[float]:
    """Named for TRL's figures; `_calculate_rewards` does the work."""
    raise AssertionError("rewards are calculated from rollouts")
