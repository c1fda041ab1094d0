"""Base classes of labelers with a single ask: `OneAsk` for one formatted answer, `ThinkScore` for reasoning and then a
grade, `DecisionAlone` and `YesNo` for one decision without generated tokens."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts, Turn
from relabel.labelers.query_inputs import ASPECT, PREVIOUS_QUERIES, SearchOptions, folded
from relabel.labelers.registry import Labeler, labeler_class
from relabel.labelers.verdicts import Reader, decided, lines_of, token_budget
from relabel.manifests.asks import GREEDY, Answer, Ask, Decision, Sampling
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.formats import AnswerFormat, Choice, Lines, Section, Text
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import DecisionOptions, LabelerOptions, ThinkOptions

# ------------------------------------------------------------------------------
# Base classes of labelers with a single ask: `OneAsk` for one formatted answer, `ThinkScore` for reasoning and then
# a grade, `DecisionAlone` and `YesNo` for one decision without generated tokens.


Instruction = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
"""What to judge by, in words; not blank."""

EXAMPLE = Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter.")
"""The made-up pair of `probe`."""

# ------------------------------------------------------------------------------
# One ask about a query and its document, answered in one format: what labelers share whose answers differ alone.


class OneAsk(Labeler):
    """Renders `system.j2` (fixed for a run) and `user.j2` (the pair). A subclass reads the answer.

    Args:
        sections: that an answer has.
        settings: of the templates.
    """

    Options: ClassVar[type[LabelerOptions]]
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
    ) -> None:
        prompts = Prompts(BUILT_IN / self.template_set, options.templates, shared=SHARED)
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=self.data, settings=settings)
        self.template_digests = prompts.digests
        self._format, self._decisions = AnswerFormat(tuple(sections)), tuple(decisions)
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
        self._sampling = Sampling(options.temperature, options.top_p)

    def probe(self) -> list[Ask]:
        return [self._ask(self.example)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(*(getattr(pair, name) for name in self.data)))
        return Ask("verdict", messages, self._format, self._max_tokens, self._decisions, "", None, None, self._sampling)


# ------------------------------------------------------------------------------
# One turn, two sections: reasoning, then a grade. What `umbrela` and `r1` share; they differ in their prompts and
# default scale.


class ThinkScore(OneAsk):
    """Asks for `<think>` and `<score>`. Flags: `no_distribution`, and the answer's own. A subclass says which templates
    it uses.
    """

    def __init__(self, options: ThinkOptions) -> None:
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


# ------------------------------------------------------------------------------
# One decision, read off the distribution right after the prompt. Nothing is generated.


class DecisionAlone(Labeler):
    """Asks for one distribution; the label is its mode, the lower one of equals. Its one ask is the same for all rows
    of a query if it does not read the document.

    Args:
        folder: of its templates `system.j2` and `user.j2`.
        decision: the only one; also the name of the stage.
        prefill: what the answer begins with, up to the decision.
        settings: of the templates.
    """

    choices: ClassVar[str] = "the grades"
    """What the labels are, for messages."""

    def __init__(
        self, options: LabelerOptions, folder: str, decision: Decision, prefill: str, settings: Mapping[str, Any]
    ) -> None:
        prompts = Prompts(BUILT_IN / folder, options.templates, shared=SHARED)
        self._data = ("query", "document") if self.reads_document else ("query",)
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=self._data, settings=settings)
        self.template_digests = prompts.digests
        self._decision, self._prefill = decision, prefill

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution.

        Raises:
            VerdictError: `engine` if the distribution is absent or has another number of labels; `overlong` or
                `refused` by the finish.
        """
        answer = yield self._ask(pair)
        distribution = decided(answer, self._decision, self.choices)
        return Label(distribution.argmax, distribution, flags=list(answer.flags))

    def probe(self) -> list[Ask]:
        return [self._ask(EXAMPLE)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(*(getattr(pair, name) for name in self._data)))
        shared_by = None if self.reads_document else pair.query_id
        return Ask(self._decision.name, messages, None, 0, (self._decision,), self._prefill, None, shared_by, GREEDY)


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

    choices = "yes and no"

    def __init__(self, options: YesNoOptions, folder: str, *, stage: str, **settings: str) -> None:
        is_bare = options.think == "empty"
        decision = Decision(stage, "</think>\n\n" if is_bare else "<answer>", ("no", "yes"))
        prefill = "<think>\n\n</think>\n\n" if is_bare else "<answer>"
        super().__init__(options, folder, decision, prefill, {**settings, "think": options.think})


# ------------------------------------------------------------------------------
# Where a labeler's built-in prompt templates lie, so that they can be copied and edited.


def template_files(name: str) -> dict[str, Path]:
    """A labeler's own templates and those of the shared ones that it uses, by file name.

    They are in `templates/NAME` or `templates` in the folder of the labeler's module, and taken where they are what
    the labeler says it uses.

    Raises:
        ConfigError: there is no such labeler, or its templates lie elsewhere.
    """
    cls = labeler_class(name)
    templates = Path(inspect.getfile(cls)).parent / "templates"
    own = templates / name if (templates / name).is_dir() else templates
    found = {path.name: path for path in sorted(own.glob("*.j2"))}
    for file, digest in cls(cls.Options(name=name)).template_digests.items():
        path = found.setdefault(file, SHARED / file)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ConfigError(
                f"labeler {name}: its template {file} does not lie in {own}, where a labeler's templates are looked "
                "for. Copy the files from where its author keeps them."
            )
    if not found:
        raise ConfigError(f"labeler {name}: has no templates in {own}; its prompts can't be edited.")
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------
# `variants`: several search queries for one question. Asked once a query, for every row of it; no document reaches
# the prompt, and rows get no grade. Source: R2RAG (papers, section 3.2 and appendix A.2): two to n queries, n 3 for
# a simple question and 5 for a complex one. The sentences are ours.


_FEWEST = 2


class VariantsOptions(SearchOptions, ThinkOptions):
    """Options of `variants`."""

    name: str = "variants"
    """A registered labeler."""
    grades: Literal[0] = 0
    """None: the label is a list of queries."""
    max_variants: int = Field(3, ge=_FEWEST, le=20)
    """Most queries for one question: 3 suit a simple one, 5 a complex one."""


class Variants(Labeler):
    """Asks for queries that lead to an answer together. Flags: those of the answer."""

    Options: ClassVar[type[LabelerOptions]] = VariantsOptions
    columns = (LabelColumn("variants", "list<string>", "The queries, as written, without repetitions."),)
    input_columns = (ASPECT, PREVIOUS_QUERIES)
    reads_document = False

    def __init__(self, options: VariantsOptions) -> None:
        prompts = Prompts(BUILT_IN / "variants", options.templates)
        self._settings = {"most": options.max_variants}
        self._system = prompts.turn("system", "system.j2", data=(), settings=self._settings).message()
        self._turn = functools.lru_cache(maxsize=64)(functools.partial(self._make_turn, prompts))
        for shape in ((False, 0), (True, 1)):  # a bad template fails here
            self._turn(*shape)
        self.template_digests = prompts.digests
        queries = Lines("queries", _FEWEST, options.max_variants, options.max_text_tokens)
        self._format = AnswerFormat((Text("think", options.max_think_tokens), queries))
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
        self._sampling = Sampling(options.temperature, options.top_p)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, the same for all rows of the query.

        Raises:
            VerdictError: the answer is out of format, or holds fewer than two queries that are not the question.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        variants: dict[str, str] = {}
        for line in lines_of(sections["queries"]):
            variants.setdefault(folded(line), line)
        variants.pop(folded(pair.query), None)
        if len(variants) < _FEWEST:
            raise VerdictError("format", f"{len(variants)} queries that differ from the question, expected {_FEWEST}")
        return Label(
            None, None, {"variants": list(variants.values())}, reasoning=sections["think"], flags=list(answer.flags)
        )

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", ""))]

    def _ask(self, pair: Pair) -> Ask:
        aspect, previous = pair.columns.get(ASPECT.name, ""), pair.columns.get(PREVIOUS_QUERIES.name, ())
        turn = self._turn(bool(aspect), len(previous))
        user = turn.message(pair.query, *((aspect,) if aspect else ()), *previous)
        messages = (self._system, user)
        return Ask(
            "variants", messages, self._format, self._max_tokens, shared_by=pair.query_id, sampling=self._sampling
        )

    def _make_turn(self, prompts: Prompts, has_aspect: bool, num_previous: int) -> Turn:
        data = ("query", *(("aspect",) if has_aspect else ()), "previous_queries")
        settings = {**self._settings, "has_aspect": has_aspect, "num_previous": num_previous}
        return prompts.turn("user", "user.j2", data=data, settings=settings, counts={"previous_queries": num_previous})
