"""Drawing the next token: greedy, or by a random number that only the request's own seed decides."""

# B rows, V vocabulary

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from manifests.asks import Sampling

NUCLEUS_GUESS = 1024
"""Tokens sorted at first for a nucleus; the whole vocabulary is sorted only where these do not hold `top_p`."""


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
