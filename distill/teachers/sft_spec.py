"""The spec of `method: sft`: supervised fine-tuning on answers, with the reasoning masked at random.

Source: Graph-GRPO, equation 1 (label-first chain of thought, its two stages); the default of `mask` is ours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from relabel.distill.teachers.specs import RunData, TeacherGold, TeacherSpec, TeacherTraining


class SftGold(TeacherGold):
    """Trusted grades; or, for `evidence-set`, the chunks that are wanted."""

    sets: str | None = None
    """Column with the numbers of each document's wanted chunks, a list of integers, instead of grades: `similar` of
    `relabel pairs similar`, or gold. Whole questions are learned, without runs.
    """


class SftData(RunData):
    """What is learned from: answers of runs, or gold alone."""

    gold: SftGold | None = None
    """Trusted grades, or sets of chunks."""
    answer: Literal["whole", "preliminary"] = "whole"
    """`whole`: the answer as the labeler reads it. `preliminary`: its first grade alone (Graph-GRPO's first stage)."""

    @model_validator(mode="after")
    def _there_is_something(self) -> SftData:
        if not self.runs and self.gold is None:
            raise ValueError("nothing to learn from: name `runs`, or `gold`")
        if self.gold is not None and self.gold.sets is not None and (self.runs or self.answer != "whole"):
            raise ValueError("`gold.sets` is learned alone and whole: leave out `runs` and `answer`, or `gold.sets`")
        return self


class SftTraining(TeacherTraining):
    """How it is trained; transformers' Trainer does it."""

    mask: float = Field(0.5, ge=0.0, le=1.0)
    """ρ: chance of each token of the reasoning to be left out of the loss, drawn anew in each epoch. The grades, their
    tags and the answer's end are always learned.
    """


class SftSpec(TeacherSpec):
    """One teacher, by supervised fine-tuning."""

    method: Literal["sft"] = "sft"
    """How it is trained."""
    data: SftData
    """What it learns from."""
    train: SftTraining = SftTraining()
    """How."""

    @model_validator(mode="after")
    def _gold_alone_names_its_labeler(self) -> SftSpec:
        if not self.data.runs and self.labeler is None:
            raise ValueError("gold grades without runs do not say whose prompts they answer: name `labeler`")
        return self
