"""One ask about a query and its document, answered in one format: what labelers share whose answers differ alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts
from relabel.labelers.verdicts import Reader, token_budget
from relabel.manifests.asks import Ask, Decision, Sampling
from relabel.manifests.formats import AnswerFormat, Section
from relabel.manifests.labels import Pair
from relabel.manifests.specs import LabelerOptions


class OneAsk:
    """Renders `system.j2` (fixed for a run) and `user.j2` (query and document). A subclass reads the answer.

    Args:
        sections: that an answer has.
        settings: of the templates.
    """

    Options: ClassVar[type[LabelerOptions]]
    template_set: ClassVar[str]
    """Folder in `labelers/templates`."""
    example: ClassVar[Pair] = Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter.")
    """What `probe` asks about."""
    uses_context = False

    def __init__(
        self,
        options: LabelerOptions,
        sections: Sequence[Section],
        decisions: Sequence[Decision],
        settings: Mapping[str, Any],
    ) -> None:
        prompts = Prompts(BUILT_IN / self.template_set, options.templates, shared=SHARED)
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query", "document"), settings=settings)
        self.template_digests = prompts.digests
        self._format, self._decisions = AnswerFormat(tuple(sections)), tuple(decisions)
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
        self._sampling = Sampling(options.temperature, options.top_p)

    def probe(self) -> list[Ask]:
        return [self._ask(self.example)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(pair.query, pair.document))
        return Ask("verdict", messages, self._format, self._max_tokens, self._decisions, "", None, None, self._sampling)
