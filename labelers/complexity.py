"""`complexity`: whether a query takes several searches to answer. Reads the query alone; asked once a query, for every
row of it.

Source: R2RAG's query classifier (methods, section 4): yes is complex, with P(yes) from the two words'
log-probabilities. The sentences are ours.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from labelers.prompts import BUILT_IN, Prompts
from labelers.yes_no import YesNo, YesNoOptions
from manifests.asks import Answer, Ask
from manifests.labels import Label, Pair
from manifests.specs import LabelerOptions


class ComplexityOptions(YesNoOptions):
    """Options of `complexity`."""

    name: str = "complexity"
    """A registered labeler."""


class Complexity:
    """Asks whether the query is complex; `Label.distribution.probs[1]` is P(complex). The document never reaches the
    prompt.
    """

    Options: ClassVar[type[LabelerOptions]] = ComplexityOptions
    uses_context = False
    reads_document = False

    def __init__(self, options: ComplexityOptions) -> None:
        prompts = Prompts(BUILT_IN / "complexity", options.templates)
        settings = {"think": options.think}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query",), settings=settings)
        self._digests = prompts.digests
        self._question = YesNo(options, stage="complex")

    @property
    def template_digests(self) -> dict[str, str]:
        return self._digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, the same for all rows of the query, whose answer holds no text but the distribution.

        Raises:
            VerdictError: see `YesNo.read`.
        """
        answer = yield self._ask(pair)
        return self._question.read(answer)

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", ""))]

    def _ask(self, pair: Pair) -> Ask:
        return self._question.ask((self._system, self._user.message(pair.query)), shared_by=pair.query_id)
