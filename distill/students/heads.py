"""Heads that a student can have."""

from __future__ import annotations

from collections.abc import Collection

NODE_HEADS = ("subject", "attribute")
HEADS = ("relevance", *NODE_HEADS)
"""Heads that a student can have, in the order in which they are built."""

NODE_HEADS_REACH = 0.84
"""Steps times the heads' peak rate from which heads for nodes were seen not to cost the grade: 168 steps at 5e-3
(benchmarks/heads_vs_label_cpu_2026-11-23.md). A weight moves by no more than the rate in a step of AdamW.
"""


def remark_on_nodes(heads: Collection[str], *, steps: int, learning_rate: float) -> list[str]:
    """What there is to say of a training too short for its heads for nodes.

    Args:
        steps: of the whole training.
        learning_rate: peak of the heads.
    """
    if not set(NODE_HEADS) & set(heads) or steps * learning_rate >= NODE_HEADS_REACH:
        return []
    return [
        f"heads for subject and attribute have {steps:,} steps at a rate of {learning_rate:g}, which may be too few: "
        "under-trained, they cost the grade. Set train.head_learning_rate: 5e-3 and more train.epochs (168 steps were "
        "enough), or leave them out: loss.subject, loss.attribute and loss.consistency: 0"
    ]
