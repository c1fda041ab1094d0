"""Drawing the next token: greedy, or by a random number that only the request's own seed decides."""

# B rows, V vocabulary

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from relabel.labelers.engines.sequences import TokenSequence
from relabel.manifests.asks import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUCLEUS_GUESS = 1024
"""Tokens sorted at first for a nucleus; the whole vocabulary is sorted only where these do not hold `top_p`."""


class TokenDrawer:
    """Draws the next tokens of sequences, each within its grammar.

    Args:
        most: sequences at a time.
        vocab_size: V.
    """

    def __init__(self, most: int, vocab_size: int) -> None:
        self._mask_words = np.zeros((most, -(-vocab_size // 32)), dtype=np.int32)

    def draw(self, sequences: Sequence[TokenSequence], logits_BV: torch.Tensor) -> list[int]:
        """One token a sequence, from its raw logits."""
        bound = [number for number, sequence in enumerate(sequences) if sequence.matcher is not None]
        if bound:
            for place, number in enumerate(bound):
                words = self._mask_words[place]
                sequences[number].matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            is_allowed = torch.from_numpy(unpack_mask(self._mask_words[: len(bound)], logits_BV.shape[1])).to(
                logits_BV.device
            )
            if len(bound) == len(sequences):
                logits_BV = logits_BV.masked_fill(~is_allowed, float("-inf"))
            else:
                logits_BV = logits_BV.clone()
                logits_BV[bound] = logits_BV[bound].masked_fill(~is_allowed, float("-inf"))
        return sample_tokens(
            logits_BV,
            [sequence.request.ask.sampling for sequence in sequences],
            [sequence.rng for sequence in sequences],
        )


def unpack_mask(words: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    """llguidance's bits, 32 to a word and lowest first, as booleans [B, width]."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return bits.view(np.bool_)


def sample_tokens(logits_BV: torch.Tensor, samplings: Sequence[Sampling], rngs: Sequence[random.Random]) -> list[int]:
    """One token a row.

    Args:
        logits_BV: float32, already masked by the grammar (-inf where it forbids).
        samplings: temperature and top_p of each row.
        rngs: each row's own source of chance, used once per token and only if the temperature is above 0: what other
            rows do in the meantime does not shift it.
    """
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0.0:
            tokens[row] = _draw_row(logits_BV[row], sampling, rngs[row].random())
    return tokens


def _draw_row(logits_V: torch.Tensor, sampling: Sampling, chance: float) -> int:
    probs_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    order: torch.Tensor | None = None
    if sampling.top_p < 1.0:
        probs_V, order = _nucleus(probs_V, sampling.top_p)
    mass = probs_V.double().cumsum(dim=-1)
    place = int(torch.searchsorted(mass, mass.new_tensor(chance * float(mass[-1])), right=True))
    place = min(place, len(mass) - 1)
    while float(probs_V[place]) == 0.0:  # rounding at the very end of the sum: step back to a token that has mass
        place -= 1
    return int(order[place]) if order is not None else place


def _nucleus(probs_V: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest most probable tokens that hold `top_p`, most probable first, and their ids."""
    top, order = probs_V.topk(min(NUCLEUS_GUESS, len(probs_V)))
    if float(top.sum()) < top_p:
        top, order = probs_V.sort(descending=True)
    size = int((top.cumsum(dim=-1) < top_p).sum()) + 1
    return top[:size], order[:size]
