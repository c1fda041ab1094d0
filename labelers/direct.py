"""`direct`: a grade without reasoning. One prompt, one decision, no generated token.

The baseline of R3A (methods, section 1: "direct grade without reasoning"), and the smallest labeler to read.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from relabel.labelers.base import DecisionAlone
from relabel.manifests.asks import Decision
from relabel.manifests.specs import DecisionOptions, LabelerOptions


class DirectOptions(DecisionOptions):
    """Options of `direct`."""

    name: str = "direct"
    """A registered labeler."""
    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that this baseline is read against."""


class Direct(DecisionAlone):
    """Asks for the distribution over the grades right after `<score>`; the label is its mode."""

    Options: ClassVar[type[LabelerOptions]] = DirectOptions

    def __init__(self, options: DirectOptions) -> None:
        decision = Decision("score", "<score>", tuple(map(str, range(options.grades))))
        super().__init__(options, "direct", decision, "<score>", {"grades": options.grades})
