"""`umbrela`: a grade after guided reasoning. The prompt leads through intent, match and trust before the grade; one
turn, four grades.

Source: UMBRELA (Upadhyay et al. 2024), with R3A's tags `<think>` and `<score>`. R3A's own reproduction (appendix B) has
grades 0 to 2 and asks for the intent alone, no match and no trust: `grades: 3, steps: r3a`. The sentences are ours.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.one_ask import ThinkScore
from relabel.manifests.specs import LabelerOptions, ThinkOptions


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
