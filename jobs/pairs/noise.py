"""Noise among context documents: a share of each query's replaced by random documents of the corpus.

For measuring how much noise a teacher bears, as R3A's Table 4 does ("half" and "all noisy docs": documents "randomly
replaced with irrelevant ones"). Nobody says that a random document is irrelevant; it is one that no row of the query
judges and its context did not hold.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from relabel.manifests.errors import InputError, UsageError


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """How much, and of which draw.

    Args:
        share: of a query's context documents, above 0 to 1; what it comes to is rounded, halves up.
        seed: each query draws by itself, so that other queries in the file change nothing.
    """

    share: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:  # also NaN, which no bound of a flag refuses
            raise UsageError(f"--noisy {self.share}: want a share above 0 and up to 1, for instance 0.5.")

    def replaced(self, num_context: int) -> int:
        """How many of so many documents."""
        return math.floor(self.share * num_context + 0.5)


class Deck:
    """The corpus to draw from.

    Args:
        documents: text and key of each; no two texts equal and none blank, in any order. Equal texts have equal keys.
        max_chars: what a context document is cut to; texts that are equal so far are one document.
        where: what the corpus is called, for messages.
    """

    def __init__(self, documents: Iterable[tuple[str, int]], rule: NoiseRule, *, max_chars: int, where: str) -> None:
        # the draw depends on the corpus, not on its order
        self._documents = sorted((text[:max_chars], key) for text, key in documents)
        self._rule = rule
        self._max_chars = max_chars
        self._where = where

    def noisy(self, query: str, context: Sequence[str], judged: AbstractSet[int]) -> list[str]:
        """The context with its share replaced; the others keep their places.

        Args:
            query: its text, which seeds the draw.
            context: the documents that it has.
            judged: keys of the documents that can't be noise for this query.
        Raises:
            InputError: the corpus holds too few other documents.
        """
        wanted = self._rule.replaced(len(context))
        rng = random.Random(f"{self._rule.seed}|{query}")
        found = list(context)
        shown = {text[: self._max_chars] for text in context}
        places = sorted(rng.sample(range(len(found)), wanted))
        for place, text in zip(places, self._draw(rng, wanted, shown, judged, query), strict=True):
            found[place] = text
        return found

    def _draw(
        self, rng: random.Random, wanted: int, shown: set[str], judged: AbstractSet[int], query: str
    ) -> list[str]:
        deck = self._documents
        if len(deck) < 4 * (wanted + len(shown) + len(judged)):
            # few are left: throwing again and again would take long
            left = list(dict.fromkeys(text for text, key in deck if text not in shown and key not in judged))
            if len(left) < wanted:
                raise InputError(
                    f"{self._where}: query {query[:60]!r} wants {wanted} random documents, and {len(left)} are left "
                    "that it neither judges "
                    "nor has for context. Give a larger corpus with --corpus."
                )
            return rng.sample(left, wanted)
        drawn: dict[str, None] = {}
        while len(drawn) < wanted:
            text, key = deck[rng.randrange(len(deck))]
            if text not in shown and key not in judged:
                drawn[text] = None
        return list(drawn)
