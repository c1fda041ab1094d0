"""What a rollout is worth: by its grade (R3A) and by the nodes of its graph (Graph-GRPO). RES-RAG's joint reward is
`manifests.metrics.evidence_sets.evidence_reward`.

A rollout without a readable label is worth 0, whatever it says: no grade is guessed.

Source: R3A, equation 2; Graph-GRPO, base rewards; methods, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from relabel.manifests.labels import Label

NODE_GOLD = ("grade", "subject", "attribute")
"""What gold may say of the three nodes that are rewarded: r, s, a."""


@dataclass(frozen=True, slots=True)
class NodeWorth:
    """Base reward of a node that is right, and of one that is not."""

    match: float = 1.0
    miss: float = -1.0


PAPER_WORTH = NodeWorth()


def graded_reward(grade: int | None, gold: int, *, near: float = 0.0) -> float:
    """R = 1[format and verbatim] · r; r is 1 for gold's grade, λ next to it, 0 further off.

    Args:
        grade: of the label that was read; None where there was none to read.
        near: λ, 0..1.
    """
    if grade is None:
        return 0.0
    return {0: 1.0, 1: near}.get(abs(grade - gold), 0.0)


def node_rewards(
    label: Label | None, gold: dict[str, int | None], worth: NodeWorth = PAPER_WORTH
) -> tuple[float, float, float]:
    """b of the nodes r, s, a.

    A node without gold gets 0, in every rollout of the row alike, so that it takes all its credit from r. A rollout
    without a readable label misses every node that has gold.

    Args:
        gold: by `NODE_GOLD`; None or no entry where a row has none.
    """
    said: dict[str, int | None] = {}
    if label is not None:
        said = {"grade": label.grade, **{name: label.columns[name] for name in NODE_GOLD[1:]}}
    r, s, a = (
        0.0 if (wanted := gold.get(name)) is None else worth.match if said.get(name) == wanted else worth.miss
        for name in NODE_GOLD
    )
    return r, s, a
