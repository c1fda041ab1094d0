"""How much better a rollout was than the others of its prompt: rewards standardised within their group.

The population's standard deviation, as the papers have it, where TRL takes the sample's. A group whose rewards are all
equal says nothing: its advantages are 0, and so is every gradient through them.

Source: R3A, equation 1; Graph-GRPO, equation 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

# N prompts, G rollouts of a prompt, ... anything


def group_advantages(reward_NG: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """(R - mean) / (σ + ε) within each group; 0 where a group's rewards are equal.

    Args:
        reward_NG: rewards, one row a prompt. May carry a gradient, which is then exact, and 0 in a group of equals. NaN
            stands for a rollout that nothing is known of: its advantage is 0, and the others' are those of the rest; a
            group with fewer than two others is dropped as a whole.
        epsilon: added to σ, in the rewards' unit.
    """
    if bool(reward_NG.isnan().any()):
        return torch.stack([_of_known(reward_G, epsilon) for reward_G in reward_NG])
    lowest_N1, highest_N1 = reward_NG.amin(-1, keepdim=True), reward_NG.amax(-1, keepdim=True)
    # Equal rewards leave a mean that is off by rounding; only their range says that they are equal.
    rounding = 4 * torch.finfo(reward_NG.dtype).eps
    is_equal_N1 = (highest_N1 - lowest_N1) <= rounding * torch.maximum(lowest_N1.abs(), highest_N1.abs())
    centred_NG = reward_NG - reward_NG.mean(-1, keepdim=True)
    variance_N1 = centred_NG.square().mean(-1, keepdim=True)
    # A root of 0 has an infinite slope, and 0 times that is no number: equals take the root of 1 and are dropped after.
    deviation_N1 = torch.where(is_equal_N1, 1.0, variance_N1).sqrt()
    return torch.where(is_equal_N1, 0.0, centred_NG / (deviation_N1 + epsilon))


def is_known(reward_NG: Tensor) -> Tensor:
    """Which rollouts count, bool [N, G]: those with a reward, in groups with two or more of them."""
    found_NG = ~reward_NG.isnan()
    return found_NG & (found_NG.sum(-1, keepdim=True) >= 2)


def _of_known(reward_G: Tensor, epsilon: float) -> Tensor:
    known_G = is_known(reward_G[None])[0]
    advantage_G = torch.zeros_like(reward_G)
    if bool(known_G.any()):
        advantage_G[known_G] = group_advantages(reward_G[known_G][None], epsilon=epsilon)[0]
    return advantage_G
