"""Judges whose weakness is known: the fake engine with distributions of their own."""

import re
from abc import abstractmethod
from typing import Any

from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Answer, Ask, Distribution, Request

KIND = re.compile(r"of\s+kind\s+(\d+)")


def data_of(ask: Ask) -> dict[str, str]:
    """The texts of an ask's data, by field."""
    data: dict[str, str] = {}
    for message in ask.messages:
        data.update(zip(message.fields, message.parts[1::2], strict=True))
    return data


def gold_of(document: str) -> int:
    """The grade of a pair of the tests, 0 to 3: nothing but its document's kind decides."""
    kind = KIND.search(document)
    return int(kind[1]) % 4 if kind else 0


class Judge(Fake):
    """A judge that is sure of a share of the scale."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asks: dict[int, Ask] = {}

    def submit(self, request: Request) -> None:
        self._asks[request.id] = request.ask
        super().submit(request)

    def poll(self) -> list[Answer]:
        answers = super().poll()
        for answer in answers:
            ask = self._asks.pop(answer.request_id)
            data = data_of(ask)
            share = self.share(data["query"], data["document"])
            for decision in ask.decisions:
                answer.distributions[decision.name] = between(share, len(decision.labels))
        return answers

    @abstractmethod
    def share(self, query: str, document: str) -> float:
        """How relevant, 0 to 1."""


def between(share: float, grades: int) -> Distribution:
    """The distribution over two neighbouring grades whose mean is a share of the scale."""
    place = share * (grades - 1)
    low = min(int(place), grades - 2)
    probs = [0.0] * grades
    probs[low] = 1 - (place - low)
    probs[low + 1] = place - low
    return Distribution(tuple(probs), 0.0)


class CountsWords(Judge):
    """Fooled by words: what share of the query's words does the document have?"""

    def share(self, query: str, document: str) -> float:
        words = set(query.split())
        return len(words & set(document.split())) / max(len(words), 1)


class ReadsGold(Judge):
    """Not fooled."""

    def share(self, query: str, document: str) -> float:
        return gold_of(document) / 3


class ReadsTheBeginning(Judge):
    """Sees the first twelve words alone."""

    def share(self, query: str, document: str) -> float:
        return gold_of(" ".join(document.split()[:12])) / 3


class Obeys(Judge):
    """Does what a document says."""

    def share(self, query: str, document: str) -> float:
        return 1.0 if "highest grade" in document or "<score>3</score>" in document else 0.0
