"""`r3a`: relevance by way of the searcher's intent and a verbatim piece of evidence, in two turns of one conversation.

Turn one reads the query and up to four documents found or clicked for it, reasons about what is wanted and states the
intent. It never sees the document, so all documents of a query share it. Turn two goes on with the document: reasoning,
extract, grade. The sentences are ours; scale, order and rules are the paper's. There is no hint on how to judge that
the labelers it is compared with go without.

Source: R3A (papers' section 2 and Table 4's ablations); the options `intent`, `extract`, `context` and `stages` are
those ablations.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.evidence import read_evidence
from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.showing import OfOneQuery
from relabel.labelers.verdicts import Reader, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Fragment,
    Message,
    Role,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.labels import Label, Pair
from relabel.manifests.specs import LabelerOptions, TextOptions, ThinkOptions

_MOST_CONTEXT = 4
"""Documents that the paper shows; the shapes for 0 and 4 are rendered at the start so that a bad
template fails there.
"""


class R3AOptions(ThinkOptions, TextOptions):
    """Options of `r3a`."""

    intent: bool = True
    """Have the intent stated. Without it the reasoning that leads to it stays, in a turn of its own as before: nothing
    but the tag goes.
    """
    extract: bool = True
    """Have the evidence copied from the document before the grade."""
    context: Literal["use", "none"] = "use"
    """Documents that hint at the query's intent: shown or left out."""
    context_is: Literal["found", "clicked"] = "found"
    """What the column of context documents holds, as the prompt says it: documents that a search found for the query,
    or those that people who typed it opened (the paper's).
    """
    max_context_chars: int = Field(2000, ge=1)
    """Each context document is cut to this many characters: they hint at the intent, and no engine may cut them for
    want of room.
    """
    stages: Literal[1, 2] = 2
    """Turns: 2 reasons about the query once, before any document, and shares that; 1 asks everything in one prompt, for
    each pair.
    """
    evidence: Literal["constrained", "checked"] = "checked"
    """`constrained` admits only one substring of the document, or none, while decoding, where the engine can; `checked`
    lets the model write (also several fragments, one a line) and refuses what is not in the document. Both are checked
    when read.
    """


class R3A(Labeler):
    """The R3A labeler. Flags: `evidence_missing` (grade 1 or more with no extract), `evidence_unneeded` (grade 0 with
    one), `context_truncated`, `no_distribution`, and the answers' own.
    """

    Options: ClassVar[type[LabelerOptions]] = R3AOptions

    def __init__(self, options: R3AOptions) -> None:
        self._options = options
        self.uses_context = options.context != "none"
        self._sampling = Sampling(options.temperature, options.top_p)
        is_constrained = options.extract and options.evidence == "constrained"
        self._settings = {
            "grades": options.grades,
            "intent": options.intent,
            "extract": options.extract,
            "one_fragment": options.evidence == "constrained",
            "clicked": options.context_is == "clicked",
        }
        self._prompts = Prompts(BUILT_IN / "r3a", options.templates, shared=SHARED, takes_examples=True)
        self._turn = functools.cache(self._make_turn)
        grades = tuple(map(str, range(options.grades)))
        self._system = self._prompts.with_examples(self._turn("system.j2").message(), grades)
        self._first_turn(0)
        if self.uses_context:
            self._first_turn(_MOST_CONTEXT)
        if options.stages == 2:
            self._turn("verdict.j2", ("document",))
        self.template_digests = self._prompts.digests

        think = Text("think", options.max_think_tokens)
        score = Choice("score", grades)
        understood: list[Section] = [think]
        if options.intent:
            understood.append(Text("intent", options.max_text_tokens, may_be_empty=False))
        before: list[Section] = [think] if options.stages == 2 else understood
        verdict: list[Section] = [*before]
        if options.extract:
            verdict.append(Fragment("extract", options.max_text_tokens, is_constrained))
        verdict.append(score)
        self._intent = Reader(AnswerFormat(tuple(understood)))
        self._verdict = Reader(AnswerFormat(tuple(verdict)))
        self._max_intent_tokens = token_budget(self._intent.format)
        self._max_verdict_tokens = token_budget(self._verdict.format)
        # No substring of an empty document can be quoted: there, a constrained extract is `none`.
        none = AnswerFormat((*before, Choice("extract", ("none",)), score))
        self._empty_format = none if is_constrained else self._verdict.format
        self._decisions = (Decision("score", "<score>", grades),)
        self._first_asks: OfOneQuery[Ask] = OfOneQuery()
        self._earlier_turns: OfOneQuery[Message] = OfOneQuery()

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """Two asks (one with `stages: 1`), then the label.

        Raises:
            VerdictError: an answer is out of format, or its extract is not in the document.
        """
        flags: list[str] = []
        if self.uses_context and any(len(text) > self._options.max_context_chars for text in pair.context):
            flags.append("context_truncated")
        sections: dict[str, str] = {}
        if self._options.stages == 2:
            ask = self._intent_ask(pair)
            answer = yield ask
            sections = self._intent.read(answer)
            flags += answer.flags
            answer = yield self._verdict_ask(pair, self._second_turn(pair, ask, answer.text))
        else:
            answer = yield self._verdict_ask(pair, self._opening(pair, pair.document))
        sections |= self._verdict.read(answer)
        flags += answer.flags
        grade = int(sections["score"])
        distribution = answer.distributions.get("score")
        evidence = read_evidence(sections["extract"], pair.document) if self._options.extract else ()
        if self._options.extract and bool(evidence) != (grade > 0):
            flags.append("evidence_missing" if grade > 0 else "evidence_unneeded")
        if distribution is None:
            flags.append("no_distribution")
        return Label(
            grade=grade,
            distribution=distribution,
            columns={},
            evidence=evidence,
            intent=sections.get("intent"),
            reasoning=sections["think"],
            flags=list(dict.fromkeys(flags)),
        )

    def probe(self) -> list[Ask]:
        """Both turns (or the one) for a made-up pair; the second goes on from a made-up first answer."""
        context = ("Prune in late winter, before the buds swell.",) if self.uses_context else ()
        pair = EXAMPLE._replace(context=context)
        made = {"think": "A gardener's question.", "intent": "Steps for pruning rose bushes."}
        tags = [section.tag for section in self._intent.format.sections]
        earlier = "\n".join(f"<{tag}>{made[tag]}</{tag}>" for tag in tags)
        if self._options.stages == 1:
            return [self._verdict_ask(pair, self._opening(pair, pair.document))]
        ask = self._intent_ask(pair)
        return [ask, self._verdict_ask(pair, self._second_turn(pair, ask, earlier))]

    def _intent_ask(self, pair: Pair) -> Ask:
        """The first turn, one ask for all rows of a query."""
        return self._first_asks.get((pair.query_id, pair.query, pair.context), lambda: self._make_intent_ask(pair))

    def _make_intent_ask(self, pair: Pair) -> Ask:
        return Ask(
            "intent" if self._options.intent else "think",
            self._opening(pair),
            self._intent.format,
            self._max_intent_tokens,
            shared_by=pair.query_id,
            sampling=self._sampling,
        )

    def _second_turn(self, pair: Pair, first: Ask, answer: str) -> tuple[Message, ...]:
        """The same conversation, continued, with the first answer as the model's own turn."""
        earlier = self._earlier_turns.get((answer,), lambda: self._as_turn(answer))
        verdict = self._turn("verdict.j2", ("document",)).message(pair.document)
        return (*first.messages, earlier, verdict)

    def _as_turn(self, answer: str) -> Message:
        tags = tuple(section.tag for section in self._intent.format.sections)
        return Message("assistant", self._intent.turn_parts(answer), tags)

    def _verdict_ask(self, pair: Pair, messages: tuple[Message, ...]) -> Ask:
        source = pair.document if self._options.extract else None
        format = self._verdict.format if pair.document.strip() else self._empty_format
        return Ask(
            stage="verdict",
            messages=messages,
            format=format,
            max_tokens=self._max_verdict_tokens,
            decisions=self._decisions,
            prefill="",
            fragment_source=source,
            shared_by=None,
            sampling=self._sampling,
        )

    def _opening(self, pair: Pair, *document: str) -> tuple[Message, ...]:
        longest = self._options.max_context_chars
        context = [text[:longest] for text in pair.context] if self.uses_context else []
        return self._system, self._first_turn(len(context)).message(pair.query, *context, *document)

    def _first_turn(self, num_context: int) -> Turn:
        if self._options.stages == 2:
            return self._turn("intent.j2", ("query", "context"), num_context)
        return self._turn("single.j2", ("query", "context", "document"), num_context)

    def _make_turn(self, file: str, data: tuple[str, ...] = (), num_context: int = 0) -> Turn:
        role: Role = "user" if data else "system"
        return self._prompts.turn(
            role,
            file,
            data=data,
            settings=self._settings,
            num_context=num_context,
        )
