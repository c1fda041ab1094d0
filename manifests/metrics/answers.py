"""A generator's short answers beside those wanted: RES-RAG's exact match and Hit@1.

Source: RES-RAG (papers, equation 10, section 4.1 and figure 6). Answers are compared in a normal form: lower case,
without punctuation, white space folded. Articles stay, which SQuAD drops and the paper does not name.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence


def normal_answer(answer: str) -> str:
    """Unicode NFC, lower case, without punctuation (ASCII's, and Unicode's P), runs of white space one space. An answer
    of punctuation alone keeps it.
    """
    lower = unicodedata.normalize("NFC", answer.lower())
    return _folded("".join(one for one in lower if not _is_punctuation(one))) or _folded(lower)


def _folded(text: str) -> str:
    return " ".join(text.split())


def _is_punctuation(one: str) -> bool:
    return one in string.punctuation or unicodedata.category(one).startswith("P")


def exact_match(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where every gold answer is among the answers, else 0; further answers do not count against it."""
    return float(set(map(normal_answer, gold)) <= set(map(normal_answer, answers)))


def hit_at_1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """1 where the first answer is any gold answer, else 0."""
    return float(bool(answers) and normal_answer(answers[0]) in set(map(normal_answer, gold)))
