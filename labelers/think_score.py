"""One turn, two sections: reasoning, then a grade. What `umbrela` and `r1` share; they differ in their prompts and
default scale.
"""

from __future__ import annotations

from collections.abc import Generator

from relabel.labelers.one_ask import OneAsk
from relabel.manifests.asks import Answer, Ask, Decision
from relabel.manifests.formats import Choice, Text
from relabel.manifests.labels import Label, Pair
from relabel.manifests.specs import LabelerOptions


class ThinkScore(OneAsk):
    """Asks for `<think>` and `<score>`. Flags: `no_distribution`, and the answer's own. A subclass says which templates
    it uses.
    """

    def __init__(self, options: LabelerOptions) -> None:
        grades = tuple(map(str, range(options.grades)))
        sections = (Text("think", options.max_think_tokens), Choice("score", grades))
        settings = options.model_dump(include={"grades", "steps"})
        super().__init__(options, sections, (Decision("score", "<score>", grades),), settings)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        distribution = answer.distributions.get("score")
        flags = list(answer.flags)
        if distribution is None:
            flags.append("no_distribution")
        return Label(int(sections["score"]), distribution, reasoning=sections["think"], flags=flags)
