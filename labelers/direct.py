"""The labelers that ask in one turn: `direct`, `pointwise`, `umbrela`, `complexity`, `r1`, `query`, `ensemble` and
`graph-grpo`; before them what they share. `direct` is the smallest one to read.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts
from relabel.labelers.registry import EXAMPLE, Labeler, OnceAQueryOptions
from relabel.labelers.verdicts import Reader, decided, is_none, mean_distribution, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Distribution,
    Lines,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import (
    DEFAULT_PHI,
    NODE_SCORES,
    Label,
    LabelColumn,
    Pair,
    PhiTable,
    check_phi,
    default_phi,
    phi_grade,
    unreached_grades,
)
from relabel.manifests.specs import DecisionOptions, LabelerOptions, TextOptions, ThinkOptions

# ------------------------------------------------------------------------------
# Base classes of labelers with a single ask: `OneAsk` for one formatted answer, `ThinkScore` for reasoning and then
# a grade, `DecisionAlone` and `YesNo` for one decision without generated tokens.


Instruction = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
"""What to judge by, in words; not blank."""

# ------------------------------------------------------------------------------
# One ask about a query and its document, answered in one format: what labelers share whose answers differ alone.


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
        prompts = Prompts(BUILT_IN / self.template_set, options.templates, shared=SHARED)
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=self.data, settings=settings)
        self.template_digests = prompts.digests
        self._reader = Reader(AnswerFormat(tuple(sections)))
        self._decisions, self._prefill, self._stage = tuple(decisions), prefill, stage
        self._sampling = Sampling(options.temperature, options.top_p)

    def probe(self) -> list[Ask]:
        return [self._ask(self.example)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(*(getattr(pair, name) for name in self.data)))
        format = self._reader.format
        return Ask(
            self._stage,
            messages,
            format if format.sections else None,
            token_budget(format),
            self._decisions,
            self._prefill,
            shared_by=None if self.reads_document else pair.query_id,
            sampling=self._sampling,
        )


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
        super().__init__(
            options, sections, (Decision("score", "<score>", grades),), options.model_dump(include={"grades", "steps"})
        )

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        distribution = answer.distributions.get("score")
        return Label(
            int(sections["score"]),
            distribution,
            reasoning=sections["think"],
            flags=[*answer.flags, *["no_distribution"] * (distribution is None)],
        )


# ------------------------------------------------------------------------------
# One decision, read off the distribution right after the prompt. Nothing is generated.


class DecisionAlone(OneAsk):
    """Asks for one distribution; the label is its mode, the lower one of equals. Its one ask is the same for all rows
    of a query if it does not read the document.

    Args:
        decision: the only one; also the name of the stage.
        prefill: what the answer begins with, up to the decision.
        settings: of the templates.
    """

    def __init__(self, options: LabelerOptions, decision: Decision, prefill: str, settings: Mapping[str, Any]) -> None:
        super().__init__(options, (), (decision,), settings, prefill=prefill, stage=decision.name)

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


# ------------------------------------------------------------------------------
# `direct`: a grade without reasoning. One prompt, one decision, no generated token. The baseline of R3A (methods,
# section 1: "direct grade without reasoning"), and the smallest labeler to read.


class DirectOptions(DecisionOptions):
    """Options of `direct`."""

    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that this baseline is read against."""


class Direct(DecisionAlone):
    """Asks for the distribution over the grades right after `<score>`; the label is its mode."""

    Options: ClassVar[type[LabelerOptions]] = DirectOptions
    template_set = "direct"

    def __init__(self, options: DirectOptions) -> None:
        super().__init__(
            options,
            Decision("score", "<score>", tuple(map(str, range(options.grades)))),
            "<score>",
            {"grades": options.grades},
        )


# ------------------------------------------------------------------------------
# `pointwise`: whether a document meets an instruction for a query, as a probability to rank by. One decision, no
# generated token. Source: R2RAG's pointwise reranker (methods, section 4): yes or no on (instruction, query,
# document), score p(yes) / (p(yes) + p(no)). The sentences are ours; the instruction is an option, as it is there.


class PointwiseOptions(YesNoOptions):
    """Options of `pointwise`."""

    instruction: Instruction = "The document holds information that helps to answer the query."
    """What a document has to be for a yes, in a sentence or a few."""


class Pointwise(YesNo):
    """Asks whether the document meets the instruction; `Label.distribution.probs[1]` is the score."""

    Options: ClassVar[type[LabelerOptions]] = PointwiseOptions
    template_set = "pointwise"

    def __init__(self, options: PointwiseOptions) -> None:
        super().__init__(options, stage="relevant", instruction=options.instruction)


# ------------------------------------------------------------------------------
# `umbrela`: a grade after guided reasoning. The prompt leads through intent, match and trust before the grade; one
# turn, four grades. Source: UMBRELA (Upadhyay et al. 2024), with R3A's tags `<think>` and `<score>`. R3A's own
# reproduction (appendix B) has grades 0 to 2 and asks for the intent alone, no match and no trust: `grades: 3,
# steps: r3a`. The sentences are ours.


class UmbrelaOptions(ThinkOptions):
    """Options of `umbrela`."""

    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that UMBRELA was made to reproduce."""
    steps: Literal["umbrela", "r3a"] = "umbrela"
    """What to reason about: `umbrela`: intent, match and trust, step by step; `r3a`: the intent, as R3A reproduces
    UMBRELA, there with `grades: 3`.
    """


class Umbrela(ThinkScore):
    """The UMBRELA labeler."""

    Options: ClassVar[type[LabelerOptions]] = UmbrelaOptions
    template_set = "umbrela"


# ------------------------------------------------------------------------------
# `complexity`: whether a query takes several searches to answer. Reads the query alone; asked once a query, for
# every row of it. Source: R2RAG's query classifier (methods, section 4): yes is complex, with P(yes) from the two
# words' log-probabilities. The sentences are ours.


class Complexity(YesNo):
    """Asks whether the query is complex; `Label.distribution.probs[1]` is P(complex). The document never reaches the
    prompt.
    """

    Options: ClassVar[type[LabelerOptions]] = YesNoOptions
    template_set = "complexity"
    reads_document = False
    data = ("query",)

    def __init__(self, options: YesNoOptions) -> None:
        super().__init__(options, stage="complex")


# ------------------------------------------------------------------------------
# `r1`: a grade after reasoning that the model shapes by itself. One turn, three grades, no instruction but scale and
# tags. Source: R3A's R1 baseline ("constrained to the <think> and <score> tags"); methods, section 1. The sentences
# are ours.


class R1(ThinkScore):
    """The R1-style labeler."""

    Options: ClassVar[type[LabelerOptions]] = ThinkOptions
    template_set = "r1"


# ------------------------------------------------------------------------------
# `query`: a search that the document answers. Reads the document alone, and gives no grade: `relabel pairs queries
# --by` makes pairs out of these queries. Source: InPars and Promptagator write training queries with a language
# model, from a document. The sentences and the examples in them are ours.


MADE_QUERY = "made_query"


class QueryOptions(OnceAQueryOptions):
    """Options of `query`."""

    grades: Literal[0] = 0
    """None: the label is a query."""
    max_words: int = Field(8, ge=1, le=50)
    """Most words of the query; a longer one is asked for again."""


class Query(OneAsk):
    """Asks for one query. Flags: those of the answer."""

    Options: ClassVar[type[LabelerOptions]] = QueryOptions
    template_set = "query"
    data = ("document",)
    columns = (LabelColumn(MADE_QUERY, "string", "A search that the document answers."),)

    def __init__(self, options: QueryOptions) -> None:
        self._max_words = most = options.max_words
        # six tokens for a word in a language that the tokenizer knows little of
        super().__init__(options, [Lines("query", 1, 1, 6 * most)], (), {"max_words": most})

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format, or its query has no word or too many.
        """
        answer = yield self._ask(pair)
        query = " ".join(self._reader.read(answer)["query"].split())
        if not any(char.isalnum() for char in query):
            raise VerdictError("format", f"the query {query[:40]!r} has no word")
        if (count := len(query.split())) > self._max_words:
            raise VerdictError("format", f"the query has {count} words, expected {self._max_words} at most")
        return Label(None, None, {MADE_QUERY: query}, flags=list(answer.flags))


# ------------------------------------------------------------------------------
# `ensemble`: one soft label from several instructions. One decision an instruction, no generated token; the label is
# the mean of their distributions. Each instruction comes after the document, so an engine that caches prefixes reads
# query and document once.


class EnsembleOptions(DirectOptions):
    """Options of `ensemble`."""

    instructions: list[Instruction] = Field(
        [
            "Judge whether a person who typed this query would be content with it.",
            "Judge by the facts that the document states.",
            "Be strict: a document that is only near the subject deserves one of the lowest grades.",
        ],
        min_length=2,
        max_length=32,
    )
    """What to judge by: a sentence or a few for each ask, put between the document and "Give the grade."."""

    @field_validator("instructions")
    @classmethod
    def _each_once(cls, found: list[str]) -> list[str]:
        if len(set(found)) < len(found):
            raise ValueError("the same instruction is there twice")
        return found


class Ensemble(Labeler):
    """Asks for a distribution after each instruction; the label is the mode of their mean, the lower one of equals.

    A pair with an answer without a distribution gets no label: the mean of fewer is a different label. Flags: those of
    the answers.
    """

    Options: ClassVar[type[LabelerOptions]] = EnsembleOptions
    columns = (
        LabelColumn("judge_probs", "list<float32>", "p(grade) by each instruction, in their order, K values each."),
    )

    def __init__(self, options: EnsembleOptions) -> None:
        prompts = Prompts(BUILT_IN / "ensemble", options.templates, shared=SHARED)
        settings = {"grades": options.grades}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._users = [
            prompts.turn("user", "user.j2", data=("query", "document"), settings={**settings, "instruction": one})
            for one in options.instructions
        ]
        self.template_digests = prompts.digests
        self._decision = Decision("score", "<score>", tuple(map(str, range(options.grades))))

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask an instruction.

        Raises:
            VerdictError: an answer holds no distribution over the grades.
        """
        judges: list[Distribution] = []
        flags: list[str] = []
        for ask in self._asks(pair):
            answer = yield ask
            judges.append(decided(answer, self._decision))
            flags.extend(flag for flag in answer.flags if flag not in flags)
        mean = mean_distribution(judges)
        return Label(mean.argmax, mean, {"judge_probs": [p for one in judges for p in one.probs]}, flags=flags)

    def probe(self) -> list[Ask]:
        return self._asks(EXAMPLE)

    def _asks(self, pair: Pair) -> list[Ask]:
        return [
            Ask(
                f"judge_{number}",
                (self._system, user.message(pair.query, pair.document)),
                None,
                0,
                (self._decision,),
                "<score>",
            )
            for number, user in enumerate(self._users, 1)
        ]


# ------------------------------------------------------------------------------
# `graph-grpo`: e-commerce relevance as a graph of seven nodes, label first. One answer: a first grade, four short
# descriptions (subject and attribute of query and product), two match scores, the final grade. With the grades come
# four distributions, and whether the rule map φ(s, a) agrees with the grade. Source: Graph-GRPO, label-first chain of
# thought (intuition, reasoning, decision); methods, section 2.


_logger = logging.getLogger(__name__)

_TEXTS = ("query_subject", "query_attribute", "product_subject", "product_attribute")


class GraphGrpoOptions(TextOptions):
    """Options of `graph-grpo`."""

    phi: PhiTable = DEFAULT_PHI
    """Rule map: row = subject score 0..4, column = attribute score 0..4, cell = grade. Default, for three grades alone:
    0 counts as 4, the weaker of the two decides, 4 → 2, 3 or 2 → 1, 1 → 0. Other numbers of grades need a map of their
    own.
    """
    phi_in_prompt: bool = True
    """Say in the prompt which grade follows from each pair of scores. Without it the teacher is left to its own rule,
    and a grade that differs from φ's is not flagged.
    """

    @model_validator(mode="after")
    def _phi_fits_grades(self) -> GraphGrpoOptions:
        if "phi" not in self.model_fields_set:
            default_phi(self.grades, key="labeler.phi")
        check_phi(self.phi, grades=self.grades)
        return self


class GraphGrpo(OneAsk):
    """The Graph-GRPO labeler. Flags: `phi_disagrees` (φ(s, a), as the prompt says it, is not the grade),
    `no_distribution` (of any of the four decisions), and the answer's own.

    Every label has all of its columns; distributions are None where the engine gives none.
    """

    Options: ClassVar[type[LabelerOptions]] = GraphGrpoOptions
    columns = (
        LabelColumn("preliminary", "int8", "The first grade, by intuition."),
        LabelColumn("preliminary_probs", "list<float32>", "Its distribution over the grades."),
        LabelColumn("preliminary_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("subject", "int8", "How well the product's subject is the query's, 0 to 4."),
        LabelColumn("subject_probs", "list<float32>", "Its distribution over the five scores."),
        LabelColumn("subject_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("attribute", "int8", "How well the product's attributes are the query's, 0 to 4."),
        LabelColumn("attribute_probs", "list<float32>", "Its distribution over the five scores."),
        LabelColumn("attribute_outside_mass", "float32", "Probability of all other tokens there."),
        LabelColumn("query_subject", "string", "What the query asks for, in a few words; null for none."),
        LabelColumn("query_attribute", "string", "With which attributes; null for none."),
        LabelColumn("product_subject", "string", "What the product is; null for none."),
        LabelColumn("product_attribute", "string", "With which attributes; null for none."),
        LabelColumn("phi_grade", "int8", "The grade by the rule map: φ(subject, attribute)."),
        LabelColumn("phi_agrees", "bool", "Whether that is the grade."),
    )
    template_set = "graph-grpo"
    example = Pair(0, "q", "red running shoes size 42", "d", "Trail shoe for runners, scarlet, sizes 40 to 45.")

    def __init__(self, options: GraphGrpoOptions) -> None:
        self._phi, self._phi_in_prompt = options.phi, options.phi_in_prompt
        if unreached := unreached_grades(options.phi, options.grades):
            _logger.warning(
                "labeler.phi gives no pair of scores grade %s: wherever the teacher writes it, phi_agrees is false.",
                " or ".join(map(str, unreached)),
            )
        grades = tuple(map(str, range(options.grades)))
        scores = tuple(map(str, range(NODE_SCORES)))
        sections: tuple[Section, ...] = (
            Choice("preliminary", grades),
            *(Text(tag, options.max_text_tokens, may_be_empty=False) for tag in _TEXTS),
            Choice("subject_score", scores),
            Choice("attribute_score", scores),
            Choice("score", grades),
        )
        decisions = (
            Decision("preliminary", "<preliminary>", grades),
            Decision("subject", "<subject_score>", scores),
            Decision("attribute", "<attribute_score>", scores),
            Decision("score", "<score>", grades),
        )
        settings = {"phi": options.phi, "phi_in_prompt": options.phi_in_prompt}
        super().__init__(options, sections, decisions, {"grades": options.grades, "scores": NODE_SCORES, **settings})

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        tags = ("preliminary", "subject_score", "attribute_score", "score")
        preliminary, subject, attribute, grade = (int(sections[tag]) for tag in tags)
        by_rule = phi_grade(self._phi, subject, attribute)
        columns: dict[str, Any] = {"preliminary": preliminary, "subject": subject, "attribute": attribute}
        for name in ("preliminary", "subject", "attribute"):
            distribution = answer.distributions.get(name)
            columns[f"{name}_probs"] = None if distribution is None else list(distribution.probs)
            columns[f"{name}_outside_mass"] = None if distribution is None else distribution.outside_mass
        columns |= {tag: None if is_none(sections[tag]) else sections[tag] for tag in _TEXTS}
        columns |= {"phi_grade": by_rule, "phi_agrees": by_rule == grade}
        is_disputed = by_rule != grade and self._phi_in_prompt
        lacks_any = any(decision.name not in answer.distributions for decision in self._decisions)
        return Label(
            grade,
            answer.distributions.get("score"),
            columns,
            flags=[*answer.flags, *["phi_disagrees"] * is_disputed, *["no_distribution"] * lacks_any],
        )
