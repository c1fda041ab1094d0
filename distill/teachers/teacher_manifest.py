"""A teacher's `manifest.json` as records: all that there is to say of how it was made. Fields are in the order of the
JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relabel.distill.students.data_facts import LearnedGold, LearnedLabels, SplitSide
from relabel.distill.training.model_manifests import BaseModelUsed, read_manifest
from relabel.manifests.records import LEFT_OUT

TEACHER_MANIFEST_VERSION = 1


@dataclass(frozen=True)
class TeacherData:
    """What a teacher learned from.

    Args:
        rows: pairs that it learned from.
        dropped: rows left out, by reason.
        examples: prompts with an answer: a row of a labeler that asks twice has two, and rows of a query may share one.
        tokens, answer_tokens: of one pass over them; where answers are the model's own, all that it wrote in training.
        held_out: rows that it was looked at with, where the method has such looks.
    """

    runs: list[LearnedLabels]
    gold: LearnedGold | None
    rows: int
    dropped: dict[str, int]
    examples: int
    tokens: int
    answer_tokens: int
    held_out: SplitSide | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class TeacherTrainingFacts:
    """How a training went.

    Args:
        best_step: the one that was kept, by the reward on held-out rows.
        stopped_by: `early_stopping` or `watch` where one of them ended it.
        step_seconds: what a step of the last call took, by part, where the method tells.
    """

    steps: int
    epochs: int | float
    device: str
    rows_per_s: int | float | None
    batch_size: int
    accumulation: int
    was_batch_halved: bool
    best_step: int | None = None
    stopped_by: str | None = None
    step_seconds: dict[str, float] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class TeacherManifest:
    """All that there is to say about a teacher.

    Args:
        labeler: its options, by name.
        templates: sha256 of its prompt templates, by file name.
        spec: the resolved spec.
        files: sha256 by name, of all files but the manifest and the card.
    """

    version: int
    kind: Literal["teacher"]
    relabel: str
    name: str
    method: str
    fingerprint: str
    model: BaseModelUsed
    labeler: dict[str, Any]
    templates: dict[str, str]
    data: TeacherData
    training: TeacherTrainingFacts
    notes: list[str]
    versions: dict[str, str]
    spec: dict[str, Any]
    files: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


def read_teacher_manifest(data: bytes, where: str) -> TeacherManifest:
    """
    Raises:
        ManifestError: it is damaged, or of another version.
    """
    return read_manifest(data, where, TeacherManifest, kind="teacher")
