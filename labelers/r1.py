"""`r1`: a grade after reasoning that the model shapes by itself. One turn, three grades, no instruction but scale and
tags.

Source: R3A's R1 baseline ("constrained to the <think> and <score> tags"); methods, section 1. The sentences are ours.
"""

from __future__ import annotations

from typing import ClassVar

from relabel.labelers.one_ask import ThinkScore
from relabel.manifests.specs import LabelerOptions, ThinkOptions


class R1(ThinkScore):
    """The R1-style labeler."""

    Options: ClassVar[type[LabelerOptions]] = ThinkOptions
    template_set = "r1"
