"""One turn, two sections: reasoning, then a grade. What `umbrela` and `r1` share; they differ in their prompts and
default scale.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from labelers.prompts import BUILT_IN, SHARED, Prompts
from labelers.verdicts import Reader, token_budget
from manifests.asks import Answer, Ask, Decision, Sampling
from manifests.formats import AnswerFormat, Choice, Text
from manifests.labels import Label, Pair
from manifests.specs import LabelerOptions


class ThinkScore:
    """Asks for `<think>` and `<score>`. Flags: `no_distribution`, and the answer's own.

    A subclass says which templates it uses: `system.j2` (fixed for a run) and `user.j2` (query and document).
    """

    Options: ClassVar[type[LabelerOptions]]
    template_set: ClassVar[str]
    """Folder in `labelers/templates`."""
    uses_context = False

    def __init__(self, options: LabelerOptions) -> None:
        prompts = Prompts(BUILT_IN / self.template_set, options.templates, shared=SHARED)
        settings = {"grades": options.grades}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query", "document"), settings=settings)
        self._digests = prompts.digests
        grades = tuple(map(str, range(options.grades)))
        self._format = AnswerFormat((Text("think", options.max_think_tokens), Choice("score", grades)))
        self._decisions = (Decision("score", "<score>", grades),)
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
        self._sampling = Sampling(options.temperature, options.top_p)

    @property
    def template_digests(self) -> dict[str, str]:
        return self._digests

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

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter."))]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(pair.query, pair.document))
        return Ask("verdict", messages, self._format, self._max_tokens, self._decisions, "", None, None, self._sampling)
