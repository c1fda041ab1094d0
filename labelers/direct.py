"""`direct`: a grade without reasoning. One prompt, one decision, no generated token.

The baseline of R3A (methods, section 1: "direct grade without reasoning"), and the smallest labeler to read.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import require_generated
from relabel.manifests.asks import GREEDY, Answer, Ask, Decision
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.specs import LabelerOptions


class DirectOptions(LabelerOptions):
    """Options of `direct`. `samples`, `temperature` and the caps have no effect: no token is drawn."""

    name: str = "direct"
    """A registered labeler."""
    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that this baseline is read against."""


class Direct(Labeler):
    """Asks for the distribution over the grades right after `<score>`; the label is its mode."""

    Options: ClassVar[type[LabelerOptions]] = DirectOptions

    def __init__(self, options: DirectOptions) -> None:
        self._grades = options.grades
        prompts = Prompts(BUILT_IN / "direct", options.templates, shared=SHARED)
        settings = {"grades": options.grades}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query", "document"), settings=settings)
        self._decisions = (Decision("score", "<score>", tuple(map(str, range(options.grades)))),)
        self.template_digests = prompts.digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution.

        Raises:
            VerdictError: `engine` if the distribution is absent or has another number of grades; `overlong` or
                `refused` by the finish.
        """
        answer = yield self._ask(pair)
        if answer.finish != "stop" and answer.finish != "length":
            require_generated(answer)
            raise VerdictError("refused", answer.detail or "the server refused to answer")
        distribution = answer.distributions.get("score")
        if distribution is None:
            raise VerdictError("engine", "the engine gave no distribution over the grades")
        if len(distribution.probs) != self._grades:
            raise VerdictError(
                "engine",
                f"the engine gave a distribution over {len(distribution.probs)} grades, expected {self._grades}",
            )
        return Label(distribution.argmax, distribution, flags=list(answer.flags))

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter."))]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(pair.query, pair.document))
        return Ask("score", messages, None, 0, self._decisions, "<score>", None, None, GREEDY)
