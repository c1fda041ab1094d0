"""`umbrela`: a grade after guided reasoning. The prompt leads through intent, match and trust before the grade; one
turn, four grades.

Source: UMBRELA (Upadhyay et al. 2024) as R3A reproduces it, with `<think>` and `<score>`; methods, section 1,
baselines. The sentences are ours.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labelers.think_score import ThinkScore
from manifests.specs import LabelerOptions


class UmbrelaOptions(LabelerOptions):
    """Options of `umbrela`. `max_text_tokens` has no effect: the answer holds no short text."""

    name: str = "umbrela"
    """A registered labeler."""
    grades: int = Field(4, ge=2, le=10)
    """Number of grades K; labels are 0..K-1. Four, as in the TREC judgments that UMBRELA was made to reproduce."""


class Umbrela(ThinkScore):
    """The UMBRELA labeler."""

    Options: ClassVar[type[LabelerOptions]] = UmbrelaOptions
    template_set = "umbrela"
