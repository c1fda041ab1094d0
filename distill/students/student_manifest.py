"""A student's `manifest.json` as records: all that there is to say of how it was made. Fields are in the order of the
JSON; those that JSON may do without are None there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from relabel.distill.students.data_facts import ExampleCounts, LearnedGold, LearnedLabels, SplitFacts
from relabel.distill.training.model_manifests import BaseModelUsed, read_manifest
from relabel.manifests.metrics.baselines import Baselines
from relabel.manifests.metrics.gates import GateVerdict
from relabel.manifests.phi import PhiTable
from relabel.manifests.records import LEFT_OUT

STUDENT_MANIFEST_VERSION = 1

Figures: TypeAlias = dict[str, int | float | None]
"""Figures by name, as `distill/students/figures.py` gives them, with `rows`; None where one is not defined."""


@dataclass(frozen=True)
class TrainingFacts:
    """How a training went; the first five as in `training.Outcome`, the rest as it was batched in the end."""

    steps: int
    epochs: int | float
    best_step: int | None
    device: str
    rows_per_s: int | float | None
    batch_size: int | None
    tokens_per_batch: int | None
    accumulation: int
    was_batch_halved: bool
    padding_share: int | float


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """All figures of one side of the split.

    Args:
        judged_by: `gold` or `labels`.
        teacher: by gold, over rows that have a label; `student_where_teacher` is the student over the same rows, where
            these are not all.
        to_teacher: the student against its teacher, before calibration.
        subject, attribute: of these heads, by their labels.
        baselines: of the rows that `student` is over; None in students of earlier days, and without such a row.
    """

    rows: int
    judged_by: str
    student: Figures
    teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    student_where_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    to_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    subject: Figures | None = field(default=None, metadata=LEFT_OUT)
    attribute: Figures | None = field(default=None, metadata=LEFT_OUT)
    baselines: Baselines | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class StudentFigures:
    """A student's figures on both sides that did not train it."""

    dev: SideFigures
    test: SideFigures


@dataclass(frozen=True)
class GateCheck(GateVerdict):
    """A verdict, with its words."""

    text: str


@dataclass(frozen=True)
class JudgedGates:
    """The gates of a spec, held against figures."""

    has_passed: bool
    checks: list[GateCheck]


@dataclass(frozen=True)
class StudentManifest:
    """All that there is to say about a student.

    Args:
        phi: its rule map, where it has more than one head.
        spec: the resolved spec.
        student: its record, as `student.json` has it.
        files: sha256 by name, of all files but the manifest.
    """

    version: int
    kind: Literal["student"]
    relabel: str
    name: str
    fingerprint: str
    model: BaseModelUsed
    heads: dict[str, int]
    temperature: dict[str, float]
    phi: PhiTable | None
    labels: list[LearnedLabels]
    gold: LearnedGold | None
    rows: ExampleCounts
    rows_by_head: dict[str, int]
    split: SplitFacts
    training: TrainingFacts
    metrics: StudentFigures
    gate: JudgedGates
    notes: list[str]
    versions: dict[str, str]
    spec: dict[str, Any]
    student: dict[str, Any]
    files: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class StudentFiles:
    """The part of a manifest that says what the student's files are."""

    files: dict[str, str]


def read_student_manifest(data: bytes, where: str) -> StudentManifest:
    """
    Raises:
        ManifestError: it is damaged, or of another version.
    """
    return read_manifest(data, where, StudentManifest, kind="student")
