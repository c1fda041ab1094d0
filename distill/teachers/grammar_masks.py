"""Answers under a grammar: what it admits at each token, while an answer is written and when its probability is taken.

Masks are few and answers are many: each different mask is kept once, and a token knows its number. Number 0 admits all.
"""

# B rollouts, C tokens of an answer, V vocabulary, U different masks, W = ⌈V / 32⌉ words of a mask

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.asks import Ask

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
        end_ids: tokens that end an answer; a row behind one is left alone.
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
