"""What a choice of evidence is worth: a generator's short answers compared with those wanted (exact match, Hit@1 and
F1_ans), the choice's cost, its agreement with a wanted set, and the joint reward.

Answers are compared in a normal form: lower case, without punctuation, white space folded. Articles stay, which SQuAD
drops and the paper does not name. Chunks are numbered from 1, and a number that occurs twice counts twice as cost.

Source: RES-RAG (papers, section 3.4, equations 8 to 14; section 4.1 and figure 6).
"""

from __future__ import annotations

import math
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def normal_answer(answer: str) -> str:
    """Unicode NFC, lower case, without punctuation (ASCII's, and Unicode's P), runs of white space one space. An answer
    of punctuation alone keeps it.
    """
    lower = unicodedata.normalize("NFC", answer.lower())
    words = "".join(one for one in lower if one not in string.punctuation and unicodedata.category(one)[0] != "P")
    # an accent that was on a sign is now on what came before
    return " ".join(unicodedata.normalize("NFC", words).split()) or " ".join(lower.split())


def exact_match(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where every gold answer is among the answers, else 0; further answers do not count against it."""
    return float(set(map(normal_answer, gold)) <= set(map(normal_answer, answers)))


def hit_at_1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where the first answer is any gold answer, else 0."""
    return float(bool(answers) and normal_answer(answers[0]) in set(map(normal_answer, gold)))


def token_f1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """F1_ans: F1 of the words of all answers together and those of all gold answers together, in normal form. A word
    that occurs twice counts twice; 0 where no word is common.

    The paper has one gold answer; of several, all are wanted, as `exact_match` has it.
    """
    given = _word_counts(answers)
    wanted = _word_counts(gold)
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def _word_counts(texts: Sequence[str]) -> Counter[str]:
    counts = Counter[str]()
    for text in texts:
        counts.update(normal_answer(text).split())
    return counts


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
    chosen = set(selected)
    wanted = set(gold)
    if not chosen and not wanted:
        return 1.0
    return 2 * len(chosen & wanted) / (len(chosen) + len(wanted))


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
