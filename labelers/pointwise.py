"""`pointwise`: whether a document meets an instruction for a query, as a probability to rank by. One decision, no
generated token.

Source: R2RAG's pointwise reranker (methods, section 4): yes or no on (instruction, query, document), score p(yes) /
(p(yes) + p(no)). The sentences are ours; the instruction is an option, as it is there.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from pydantic import Field

from labelers.prompts import BUILT_IN, Prompts
from labelers.yes_no import YesNo, YesNoOptions
from manifests.asks import Answer, Ask
from manifests.labels import Label, Pair
from manifests.specs import LabelerOptions


class PointwiseOptions(YesNoOptions):
    """Options of `pointwise`."""

    name: str = "pointwise"
    """A registered labeler."""
    instruction: str = Field(
        "The document holds information that helps to answer the query.", pattern=r"^[^\x00]*[^\x00\s][^\x00]*$"
    )
    """What a document has to be for a yes, in a sentence or a few."""


class Pointwise:
    """Asks whether the document meets the instruction; `Label.distribution.probs[1]` is the score."""

    Options: ClassVar[type[LabelerOptions]] = PointwiseOptions
    uses_context = False

    def __init__(self, options: PointwiseOptions) -> None:
        prompts = Prompts(BUILT_IN / "pointwise", options.templates)
        settings = {"instruction": options.instruction, "think": options.think}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query", "document"), settings=settings)
        self._digests = prompts.digests
        self._question = YesNo(options, stage="relevant")

    @property
    def template_digests(self) -> dict[str, str]:
        return self._digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution.

        Raises:
            VerdictError: see `YesNo.read`.
        """
        answer = yield self._ask(pair)
        return self._question.read(answer)

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter."))]

    def _ask(self, pair: Pair) -> Ask:
        return self._question.ask((self._system, self._user.message(pair.query, pair.document)))
