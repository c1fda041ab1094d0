"""What a choice of evidence is worth: its cost, its agreement with a wanted set, and the reward of RES-RAG.

Source: RES-RAG (papers, section 3.4), equations 8 to 14. Chunks are numbered from 1, and a number that occurs twice
counts twice as cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of the reward; all defaults but `empty_answer` are the paper's."""

    cost: float = 2.0
    answer: float = 2.0
    retrieval: float = 1.0
    empty_answer: float = -1.0
    lowest: float = -5.0
    highest: float = 5.0


PAPER_WEIGHTS = RewardWeights()


def over_budget(num_selected: int, num_chunks: int) -> float:
    """φ of one document: 0 up to √N chunks, 0.5 up to N, 1 beyond."""
    if num_selected <= math.isqrt(num_chunks):  # S ≤ √N exactly where S ≤ ⌊√N⌋
        return 0.0
    return 0.5 if num_selected <= num_chunks else 1.0


def set_f1(selected: Collection[int], gold: Collection[int]) -> float:
    """F1 of two sets: 1 where both are empty, 0 where one is."""
    found, wanted = set(selected), set(gold)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * len(found & wanted) / (len(found) + len(wanted))


class EvidenceReward(NamedTuple):
    """What a choice earns.

    Args:
        reward: R.
        usefulness: U, of the answer.
        agreement: F1_ret, without its weight.
        penalty: P.
    """

    reward: float
    usefulness: float
    agreement: float
    penalty: float


def evidence_reward(
    selected: Sequence[Sequence[int]],
    num_chunks: Sequence[int],
    gold: Sequence[Collection[int]],
    answer_f1: float | None,
    weights: RewardWeights = PAPER_WEIGHTS,
) -> EvidenceReward:
    """R = clip(U + α_ret · F1_ret - P), where P = η · mean φ and U = α_ans · F1_ans, or γ for an empty answer.

    Args:
        selected: chunk numbers chosen, by document, as written.
        num_chunks: that each document has.
        gold: chunk numbers wanted, by document.
        answer_f1: of the generator's answer, 0..1; None where it gave none.
    Raises:
        ValueError: the three do not speak of the same documents, at least one.
    """
    if not len(selected) == len(num_chunks) == len(gold) > 0:
        raise ValueError(f"{len(selected)} choices, {len(num_chunks)} documents and {len(gold)} gold sets do not fit")
    count = len(selected)
    penalty = weights.cost * sum(map(over_budget, map(len, selected), num_chunks)) / count
    usefulness = weights.empty_answer if answer_f1 is None else weights.answer * answer_f1
    agreement = sum(map(set_f1, selected, gold)) / count
    whole = usefulness + weights.retrieval * agreement - penalty
    return EvidenceReward(min(weights.highest, max(weights.lowest, whole)), usefulness, agreement, penalty)
