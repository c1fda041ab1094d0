"""`pointwise`: whether a document meets an instruction for a query, as a probability to rank by. One decision, no
generated token.

Source: R2RAG's pointwise reranker (methods, section 4): yes or no on (instruction, query, document), score
p(yes) / (p(yes) + p(no)). The sentences are ours; the instruction is an option, as it is there.
"""

from __future__ import annotations

from typing import ClassVar

from relabel.labelers.one_ask import Instruction, YesNo, YesNoOptions
from relabel.manifests.specs import LabelerOptions


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
