"""Base classes of the labelers that ask once about a pair: `OneAsk` for one formatted answer, `ThinkScore` for
reasoning and then a grade, `DecisionAlone` and `YesNo` for one decision without generated tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import StringConstraints

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.verdicts import Reader, decided, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.labels import Label, Pair
from relabel.manifests.specs import DecisionOptions, LabelerOptions, ThinkOptions

Instruction = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
"""What to judge by, in words; not blank."""


class OneAsk(Labeler):
    """Renders `system.j2` (fixed for a run) and `user.j2` (the pair). A subclass reads the answer.

    Args:
        sections: that an answer has; none where nothing but decisions is wanted.
        settings: of the templates.
        prefill: what the answer begins with.
        stage: of the ask.
    """

    template_set: ClassVar[str]
    """Folder in `labelers/templates`."""
    data: ClassVar[tuple[str, ...]] = ("query", "document")
    """What of a pair `user.j2` holds."""
    example: ClassVar[Pair] = EXAMPLE
    """What `probe` asks about."""

    def __init__(
        self,
        options: LabelerOptions,
        sections: Sequence[Section],
        decisions: Sequence[Decision],
        settings: Mapping[str, Any],
        *,
        prefill: str = "",
        stage: str = "verdict",
    ) -> None:
        prompts = Prompts(
            BUILT_IN / self.template_set,
            options.templates,
            shared=SHARED,
            takes_examples=self.reads_document and bool(decisions),
        )
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        if decisions:
            self._system = prompts.with_examples(self._system, decisions[-1].labels)
        self._user = prompts.turn("user", "user.j2", data=self.data, settings=settings)
        self.template_digests = prompts.digests
        self._reader = Reader(AnswerFormat(tuple(sections)))
        self._decisions = tuple(decisions)
        self._prefill = prefill
        self._stage = stage
        self._sampling = Sampling(options.temperature, options.top_p)
        self._max_tokens = token_budget(self._reader.format)

    def probe(self) -> list[Ask]:
        return [self._ask(self.example)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(*[getattr(pair, name) for name in self.data]))
        format = self._reader.format
        return Ask(
            stage=self._stage,
            messages=messages,
            format=format if format.sections else None,
            max_tokens=self._max_tokens,
            decisions=self._decisions,
            prefill=self._prefill,
            shared_by=None if self.reads_document else pair.query_id,
            sampling=self._sampling,
        )


class ThinkScore(OneAsk):
    """Asks for `<think>` and `<score>`. Flags: `no_distribution`, and the answer's own. A subclass names the
    templates that it uses.
    """

    def __init__(self, options: ThinkOptions) -> None:
        grades = tuple(map(str, range(options.grades)))
        super().__init__(
            options,
            sections=(Text("think", options.max_think_tokens), Choice("score", grades)),
            decisions=(Decision("score", "<score>", grades),),
            settings=options.model_dump(include={"grades", "steps"}),
        )

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


class DecisionAlone(OneAsk):
    """Asks for one distribution; the label is its mode, the lower one of equals. Its one ask is the same for all rows
    of a query if it does not read the document.

    Args:
        decision: the only one; also the name of the stage.
        prefill: what the answer begins with, up to the decision.
        settings: of the templates.
    """

    def __init__(self, options: LabelerOptions, decision: Decision, prefill: str, settings: Mapping[str, Any]) -> None:
        super().__init__(
            options,
            (),
            (decision,),
            settings,
            prefill=prefill,
            stage=decision.name,
        )

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution.

        Raises:
            VerdictError: `engine` if the distribution is absent or has another number of labels; `overlong` or
                `refused` by the finish.
        """
        answer = yield self._ask(pair)
        distribution = decided(answer, self._decisions[0])
        return Label(distribution.argmax, distribution, flags=list(answer.flags))


# ------------------------------------------------------------------------------
# A yes or a no: grade 0 is no, grade 1 is yes, and `probs[1]` = p(yes) / (p(yes) + p(no)), which is also the expected
# grade. The labels are the lower-case words, right after `<answer>` or after an empty think block, so that no space
# comes between: ` yes` and `yes` are different tokens.
#
# Source: R2RAG (methods, section 4).


class YesNoOptions(DecisionOptions):
    """Options of a yes-or-no labeler."""

    grades: Literal[2] = 2
    """Two: 0 is no, 1 is yes."""
    think: Literal["none", "empty"] = "none"
    """How the answer begins: `none` with `<answer>`; `empty` with an empty think block and then the bare word, the form
    that Qwen3's rerankers were trained on. Chat models that think by default want `engine.chat_template_kwargs`
    instead, where their template has a switch.
    """


class YesNo(DecisionAlone):
    """A labeler that asks one question, to be answered by yes or no."""

    def __init__(self, options: YesNoOptions, *, stage: str, **settings: str) -> None:
        is_bare = options.think == "empty"
        decision = Decision(stage, "</think>\n\n" if is_bare else "<answer>", ("no", "yes"))
        prefill = "<think>\n\n</think>\n\n" if is_bare else "<answer>"
        super().__init__(options, decision, prefill, {**settings, "think": options.think})
