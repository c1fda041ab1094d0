"""The spec of `method: grpo`: what is rolled out, and what it earns.

Source: R3A, section 2 and its training settings (16 rollouts, learning rate 5e-7, 32 prompts a step, 360 steps, λ 0);
clip range and temperature are ours.
"""

from __future__ import annotations

from pydantic import Field

from manifests.specs import Spec


class RolloutSection(Spec):
    """How answers are sampled and learned from."""

    group: int = Field(16, ge=2, le=1024)
    """Rollouts of one prompt; their rewards are compared with each other."""
    temperature: float = Field(1.0, gt=0.0)
    """At which answers are sampled, and at which their probabilities are taken."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Smallest set of tokens, by probability, that is sampled from. Below 1, samples are not quite the policy's own."""
    updates: int = Field(1, ge=1, le=64)
    """Optimizer steps on the same rollouts. From 2 on, the ratio of probabilities leaves 1 and is clipped."""
    clip: float = Field(0.2, gt=0.0, lt=1.0)
    """ε: the ratio counts within 1 ± ε."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the divergence (k3) from the model that training starts from; the reference costs its memory."""
