"""The teacher spec, as far as all methods share it: what a user writes in `teacher.yaml`, checked key by key. Pure: no
environment, no network, no disk.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator

from relabel.distill.students.sources import GoldSource
from relabel.distill.training.sections import LoraSpec, TrainingSection
from relabel.manifests.specs import LabelerOptions, ModelText, PathText, Spec


class TeacherGold(GoldSource):
    """Trusted grades: with runs, only answers whose grade is the trusted one are learned; alone, the grades are."""


class RunSource(Spec):
    """The answers of one run."""

    path: PathText = Field(min_length=1)
    """Output folder of a finished run."""
    allow_over_limit: bool = False
    """Take a run with more quarantined rows than its limit allows: what is missing is seldom a fair sample."""


class TeacherTraining(TrainingSection):
    """How it is trained; transformers' Trainer does it."""

    epochs: float = Field(1, gt=0)
    """Passes over the examples."""
    batch_size: int = Field(8, ge=1)
    """Examples of one forward pass on one device."""
    learning_rate: float = Field(1e-5, gt=0.0)
    """Peak of the schedule."""
    max_tokens: int = Field(2048, ge=64)
    """Longest example in tokens, prompt and answer. Where it is longer, the document is cut as `relabel run` does."""


class TeacherSpec(Spec):
    """One teacher, whatever the method; each method's spec adds to it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the teacher: letters, digits, dot, dash and underscore."""
    method: str
    """How it is trained."""
    init: ModelText = Field(min_length=1)
    """The model that it starts from: a reference as everywhere (a folder, `hf:…`, `s3://…`,
    `pypi:PACKAGE==VERSION`), also another teacher's folder.
    """
    labeler: SerializeAsAny[LabelerOptions] | None = None
    """Whose prompts it is trained on and whose answers it learns to write, with the options of a job's `labeler`.
    Default: the one of the runs.
    """
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Passed to the tokenizer's chat template, as a job's `engine.chat_template_kwargs`."""
    train: TeacherTraining = TeacherTraining()
    """How."""
    lora: LoraSpec | None = None
    """Train low-rank adapters instead of all weights; they are merged into the weights that are written."""
    output: PathText = Field(min_length=1)
    """Folder that the teacher owns, or `s3://bucket/folder`, where it is copied once it is finished."""
    storage_options: dict[str, dict[str, Any]] = Field(default={}, exclude=True, repr=False)
    """For each URL scheme, options of its fsspec filesystem, for all paths of the spec. Secrets, as in a job: never
    written.
    """


def as_sources(value: Any) -> Any:
    """A path, a mapping or a list of either as a list of mappings with a path: the short form of `data.runs`."""
    value = [value] if isinstance(value, str | dict) else value
    if not isinstance(value, list | tuple):
        return value
    return [{"path": one} if isinstance(one, str) else one for one in value]


class RunData(Spec):
    """What is learned from, for methods that learn answers of runs."""

    runs: tuple[RunSource, ...] = ()
    """Finished runs of one labeler: paths, or mappings with a path."""
    gold: TeacherGold | None = None
    """Trusted grades."""

    @field_validator("runs", mode="before")
    @classmethod
    def _paths_are_sources(cls, value: Any) -> Any:
        return as_sources(value)
