"""GRPO over grammar-constrained answers for `method: res-rag`, with masked log-probabilities. Importing it loads
TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from relabel.distill.teachers.evidence import EvidenceJudge
from relabel.distill.teachers.grpo_trainer import RolloutTrainer
from relabel.distill.teachers.rewards import is_known
from relabel.distill.teachers.rollouts import AskedIds
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.asks import Ask

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
        free = np.full(self.num_words, -1, dtype=np.int32)
        self._masks, self._numbers = [free], {free.tobytes(): FREE}
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
        matcher, found = self.matcher(ask), list[int]()
        for token in ids:
            words = self.words_of(matcher)
            if not words[token // 32] >> (token % 32) & 1:
                raise ValueError(f"token {token} at place {len(found)} is not one that the grammar admits")
            key = words.tobytes()
            if key not in self._numbers:
                self._numbers[key] = len(self._masks)
                self._masks.append(words)
                self._table = None
            found.append(self._numbers[key])
            if not matcher.is_stopped():
                matcher.consume_token(token)
        return found

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
        if self._table is None or self._table.device != numbers.device:
            self._table = torch.from_numpy(np.stack(self._masks)).to(numbers.device)
        return unpacked(self._table[numbers], width)


def unpacked(words: Tensor, width: int) -> Tensor:
    """Bits, 32 to a word of int32 [..., W] and lowest first, as booleans [..., V]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places & 1).bool().flatten(-2)[..., :width]


class GrammarHold:
    """A logits processor of transformers: each row's answer is held to its grammar while it is written.

    Args:
        matchers: of each row, at its start.
        end_ids: tokens that end an answer; a row after one is left alone.
        prompt_width: tokens of the padded prompts.
    """

    def __init__(self, masks: GrammarMasks, matchers: Sequence[Any], end_ids: Sequence[int], prompt_width: int) -> None:
        self._masks, self._matchers, self._prompt_width = masks, matchers, prompt_width
        self._end_ids = frozenset(end_ids)
        self._is_done = [False] * len(matchers)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits with -inf at what the grammars do not admit, float [B, V]."""
        if input_ids.shape[1] > self._prompt_width:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self._take(row, token)
        words = [
            np.full(self._masks.num_words, -1, dtype=np.int32) if done else self._masks.words_of(matcher)
            for done, matcher in zip(self._is_done, self._matchers, strict=True)
        ]
        admitted = unpacked(torch.from_numpy(np.stack(words)).to(scores.device), scores.shape[1])
        return scores.masked_fill(~admitted, float("-inf"))

    def _take(self, row: int, token: int) -> None:
        matcher = self._matchers[row]
        if self._is_done[row]:
            return
        if token in self._end_ids:
            self._is_done[row] = True
        elif not matcher.is_stopped() and not matcher.consume_token(token):
            raise ValueError(f"the grammar got stuck: {matcher.get_error()[:300]}")


# ------------------------------------------------------------------------------
# GRPO over answers that a grammar holds, rewarded by a generator that may fail.
#
# The log-probabilities of the old, the new and the reference policy are all those of the masked logits, renormalised:
# what is sampled is then the policy itself (but for `top_p`), and tokens that the grammar forces say nothing.
#
# Importing this file imports TRL's trainer. Overridden of TRL, in addition to what `grpo_trainer.py` does:
# `_generate_single_turn` (generation under the grammar) and `_get_per_token_logps_and_entropies` (its masks).


# B rollouts, C tokens of the longest answer, V vocabulary


class HeldTrainer(RolloutTrainer):
    """GRPO on answers of one turn under a grammar. All other arguments are RolloutTrainer's.

    Args:
        masks: for the model's tokenizer.
        judge: scores all rollouts of a step together.
    """

    def __init__(self, *, masks: GrammarMasks, judge: EvidenceJudge, **kwargs: Any) -> None:
        self._masks, self._judge = masks, judge
        self._numbers_BC: Tensor | None = None
        super().__init__(scored=judge.scores, **kwargs)

    # writing under the grammar

    def _roll(self, prompts: list[int], trainer: Any) -> dict[str, Any]:
        found = super()._roll(prompts, trainer)
        self._masks.clear()
        numbers = [self._masks.numbers(one.turns[0].ask, one.completion_ids) for one in self._rollouts]
        self._numbers_BC = pad([torch.tensor(one) for one in numbers], padding_value=FREE).to(self.accelerator.device)
        return found

    def _generate_single_turn(self, prompt_ids: Sequence[AskedIds], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """An answer to each prompt, held to its grammar, up to its end token or the limit."""
        prompts = [torch.tensor(list(ids)) for ids in prompt_ids]
        device = self.accelerator.device
        inputs = {
            "input_ids": pad(prompts, padding_value=self._tokenizer.pad_token_id, padding_side="left").to(device),
            "attention_mask": pad([torch.ones_like(one) for one in prompts], padding_side="left").to(device),
        }
        width = inputs["input_ids"].shape[1]
        matchers = [self._masks.matcher(one.ask) for one in prompt_ids]
        hold = GrammarHold(self._masks, matchers, self.eos_token_ids, width)
        options = {"generation_kwargs": self.generation_kwargs}
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, **options) as model, torch.no_grad():
            written_BC = model.generate(
                **inputs, generation_config=self.generation_config, logits_processor=LogitsProcessorList([hold])
            )[:, width:]
        return [self._up_to_end(ids) for ids in written_BC.tolist()], None

    def _up_to_end(self, ids: list[int]) -> list[int]:
        ends = set(self.eos_token_ids)
        return ids[: next((place + 1 for place, one in enumerate(ids) if one in ends), len(ids))]

    # what it earned

    def dev_figures(self, step: int) -> dict[str, float] | None:
        """Where the generator failed at every row, this step is not the best one."""
        found = super().dev_figures(step)
        return None if found is None else {"reward": self._judge.lowest} | found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        rewards_B = torch.tensor([one.reward for one in self._scores], device=self.accelerator.device)
        known_B = is_known(rewards_B.view(-1, self.group)).flatten()
        batch["mask_numbers"] = self._numbers_BC
        # the loss is a mean over all rollouts: those that are dropped add nothing, and the others make up for them
        batch["share"] = known_B.float() * (len(known_B) / max(1, int(known_B.sum())))
        return batch

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
        logps, entropies = [], []
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
            logp_BCV = masked_log_probs(logits_BCV / self.temperature, admitted_BCV)
            logps.append(logp_BCV.gather(-1, input_ids[rows, -logits_to_keep:, None])[..., 0])
            if compute_entropy:
                held_BCV = logp_BCV.detach()
                entropies.append(-(held_BCV.exp() * held_BCV.masked_fill(~admitted_BCV, 0.0)).sum(-1))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None


def masked_log_probs(logits: Tensor, admitted: Tensor) -> Tensor:
    """log-softmax over the admitted tokens alone, float32 [..., V]; -inf elsewhere.

    Args:
        admitted: bool, as `logits`; one token or more of each row.
    """
    return logits.float().masked_fill(~admitted, float("-inf")).log_softmax(-1)
