"""A generator's short answers beside those wanted: RES-RAG's exact match, Hit@1 and F1_ans.

Source: RES-RAG (papers, equation 10, section 4.1 and figure 6). Answers are compared in a normal form: lower case,
without punctuation, white space folded. Articles stay, which SQuAD drops and the paper does not name.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Sequence


def normal_answer(answer: str) -> str:
    """Unicode NFC, lower case, without punctuation (ASCII's, and Unicode's P), runs of white space one space. An answer
    of punctuation alone keeps it.
    """
    lower = unicodedata.normalize("NFC", answer.lower())
    words = "".join(one for one in lower if not _is_punctuation(one))
    # an accent that stood on a sign now stands on what came before
    return _folded(unicodedata.normalize("NFC", words)) or _folded(lower)


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


def token_f1(answers: Sequence[str], gold: Sequence[str]) -> float:
    """F1_ans: F1 of the words of all answers together and those of all gold answers together, in normal form. A word
    that occurs twice counts twice; 0 where no word is common.

    The paper has one gold answer; of several, all are wanted, as `exact_match` has it.
    """
    said, wanted = (Counter(word for one in texts for word in normal_answer(one).split()) for texts in (answers, gold))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0
