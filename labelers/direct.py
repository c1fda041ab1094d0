"""`direct`: a grade without reasoning. One prompt, one decision, no generated token. The smallest labeler to read.

Source: the baseline of R3A (methods, section 1: "direct grade without reasoning").
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from relabel.labelers.one_ask import DecisionAlone
from relabel.manifests.asks import Decision
from relabel.manifests.specs import DecisionOptions, LabelerOptions


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
