"""`direct`: a grade without reasoning. One prompt, one decision, no generated token.

The baseline of R3A (methods, section 1: "direct grade without reasoning"), and the smallest labeler to read.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.base import DecisionAlone, Instruction, ThinkScore, YesNo, YesNoOptions
from relabel.manifests.asks import Decision
from relabel.manifests.specs import DecisionOptions, LabelerOptions, ThinkOptions

# ------------------------------------------------------------------------------
# `direct`: a grade without reasoning. One prompt, one decision, no generated token. The baseline of R3A (methods,
# section 1: "direct grade without reasoning"), and the smallest labeler to read.


class DirectOptions(DecisionOptions):
    """Options of `direct`."""

    name: str = "direct"
    """A registered labeler."""
    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that this baseline is read against."""


class Direct(DecisionAlone):
    """Asks for the distribution over the grades right after `<score>`; the label is its mode."""

    Options: ClassVar[type[LabelerOptions]] = DirectOptions
    template_set = "direct"

    def __init__(self, options: DirectOptions) -> None:
        decision = Decision("score", "<score>", tuple(map(str, range(options.grades))))
        super().__init__(options, decision, "<score>", {"grades": options.grades})


# ------------------------------------------------------------------------------
# `pointwise`: whether a document meets an instruction for a query, as a probability to rank by. One decision, no
# generated token. Source: R2RAG's pointwise reranker (methods, section 4): yes or no on (instruction, query,
# document), score p(yes) / (p(yes) + p(no)). The sentences are ours; the instruction is an option, as it is there.


class PointwiseOptions(YesNoOptions):
    """Options of `pointwise`."""

    name: str = "pointwise"
    """A registered labeler."""
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

    name: str = "umbrela"
    """A registered labeler."""
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


class ComplexityOptions(YesNoOptions):
    """Options of `complexity`."""

    name: str = "complexity"
    """A registered labeler."""


class Complexity(YesNo):
    """Asks whether the query is complex; `Label.distribution.probs[1]` is P(complex). The document never reaches the
    prompt.
    """

    Options: ClassVar[type[LabelerOptions]] = ComplexityOptions
    template_set = "complexity"
    reads_document = False
    data = ("query",)

    def __init__(self, options: ComplexityOptions) -> None:
        super().__init__(options, stage="complex")


# ------------------------------------------------------------------------------
# `r1`: a grade after reasoning that the model shapes by itself. One turn, three grades, no instruction but scale and
# tags. Source: R3A's R1 baseline ("constrained to the <think> and <score> tags"); methods, section 1. The sentences
# are ours.


class R1Options(ThinkOptions):
    """Options of `r1`."""

    name: str = "r1"
    """A registered labeler."""


class R1(ThinkScore):
    """The R1-style labeler."""

    Options: ClassVar[type[LabelerOptions]] = R1Options
    template_set = "r1"
