"""Which tokens an answer is made of: drawn by seed, step, prompt and sample, so that the same answer comes out
whichever process writes it, and with whatever others in its batch. Importing it loads torch.

A token is where the sum of the probabilities first exceeds a uniform number. The numbers of an answer follow from what
it is, and no process's generator of random numbers is touched: a training with evaluations, or one that goes on from a
checkpoint, samples what an undisturbed one does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# B answers, C tokens of an answer, V vocabulary


class AnswerKey(NamedTuple):
    """What the numbers of an answer follow from.

    Args:
        seed: of the training.
        step: that it is sampled for.
        row: number of the prompt, in all data.
        sample: number of the rollout, among those of the prompt.
        place: tokens before the answer, which keeps a later turn apart from the first.
    """

    seed: int
    step: int
    row: int
    sample: int
    place: int


def uniforms_of(keys: Sequence[AnswerKey], most: int) -> Tensor:
    """A number in [0, 1) for each token, float64 [B, C].

    Args:
        most: C.
    """
    return torch.from_numpy(np.stack([np.random.default_rng(list(key)).random(most) for key in keys]))


class Drawing:
    """A logits processor of transformers: all tokens but the drawn one get -inf. What reshapes the distribution
    (temperature, `top_p`, a grammar) comes before it.

    Args:
        uniforms_BC: of `uniforms_of`.
        prompt_width: tokens of the padded prompts.
    """

    def __init__(self, uniforms_BC: Tensor, prompt_width: int) -> None:
        self._uniforms_BC = uniforms_BC
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logit 0 at each row's token, float [B, V]."""
        token_B1 = drawn(scores, self._uniforms_BC[:, input_ids.shape[1] - self._prompt_width].to(scores.device))
        return torch.full_like(scores, float("-inf")).scatter_(1, token_B1, 0.0)


def drawn(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """A token of each row's distribution, int64 [B, 1]; never one of probability 0."""
    sum_BV = logits_BV.double().softmax(-1).cumsum(-1)
    total_B1 = sum_BV[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # a product can be rounded up to the total
    return torch.searchsorted(sum_BV, torch.minimum(uniform_B[:, None] * total_B1, below_B1), right=True)
