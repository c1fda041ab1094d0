"""A student's `manifest.json` as records: all that there is to say of how it was made. Fields stand in the order of the
JSON; those that JSON may do without are None there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

from manifests.errors import ManifestError
from manifests.metrics.gates import GateVerdict
from manifests.phi import PhiTable
from manifests.records import LEFT_OUT, checked, fault_of

STUDENT_MANIFEST_VERSION = 1

Figures: TypeAlias = dict[str, int | float | None]
"""Figures by name, as `distill/students/figures.py` gives them, with `rows`; None where one is not defined."""


@dataclass(frozen=True)
class BaseModelUsed:
    """The model that a student starts from."""

    reference: str
    digest: str
    type: str | None = None


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source of labels; of a file all that it holds, of a run also by what became of them."""

    in_: Annotated[int, Field(alias="in")]
    labelled: int | None = field(default=None, metadata=LEFT_OUT)
    reused: int | None = field(default=None, metadata=LEFT_OUT)
    quarantined: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class LearnedLabels:
    """A source of labels: a run, or a file, which has no name, labeler, model and fingerprint.

    Args:
        manifest_sha256, sha256: of a run's manifest, of a file.
        rows_by_status: of a file.
        labels: those that could be used.
    """

    path: str
    kind: Literal["run", "file"]
    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    manifest_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    sha256: str | None = field(default=None, metadata=LEFT_OUT)
    rows: SourceRows | None = field(default=None, metadata=LEFT_OUT)
    quarantined_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    rows_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    over_limit: bool | None = field(default=None, metadata=LEFT_OUT)
    weight: float
    labels: int


@dataclass(frozen=True, kw_only=True)
class LearnedGold:
    """Where gold grades come from.

    Args:
        rows, without_grade, inputs_sha256: of gold that was learned from.
        graded_rows: rows of the distillation that have a grade.
    """

    path: str
    grade: str
    map: dict[int, int] | None = None
    rows: int | None = field(default=None, metadata=LEFT_OUT)
    without_grade: int | None = field(default=None, metadata=LEFT_OUT)
    inputs_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    joined_by: str | None = field(default=None, metadata=LEFT_OUT)
    graded_rows: int = 0


@dataclass(frozen=True)
class ExampleCounts:
    """Rows of a distillation."""

    all: int
    labelled: int
    gold_alone: int


@dataclass(frozen=True)
class SplitSide:
    """One side; `texts_seen_in_train` counts its queries whose text a training query has under another id."""

    rows: int
    queries: int
    texts_seen_in_train: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class SplitShares:
    """Expected shares of the queries."""

    dev: float
    test: float


@dataclass(frozen=True)
class SplitFacts:
    """How rows were split; `sha256` says which query lies where."""

    by: str
    seed: int
    shares: SplitShares
    train: SplitSide
    dev: SplitSide
    test: SplitSide
    sha256: str

    def sides(self) -> dict[str, SplitSide]:
        """Train, dev and test, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}


@dataclass(frozen=True)
class DataFacts:
    """What a student learns from: the part of its manifest that is known before it is trained.

    Args:
        rows_by_head: rows that train each head.
    """

    labels: list[LearnedLabels]
    gold: LearnedGold | None
    rows: ExampleCounts
    rows_by_head: dict[str, int]
    split: SplitFacts


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
    """

    rows: int
    judged_by: str
    student: Figures
    teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    student_where_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    to_teacher: Figures | None = field(default=None, metadata=LEFT_OUT)
    subject: Figures | None = field(default=None, metadata=LEFT_OUT)
    attribute: Figures | None = field(default=None, metadata=LEFT_OUT)


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


@dataclass(frozen=True)
class _Mark:
    kind: Literal["student"]
    fingerprint: str


class StoredManifest(NamedTuple):
    """A manifest that lies somewhere, known to be a student's; the rest of it may be of another version."""

    data: bytes
    where: str
    fingerprint: str

    def read(self) -> StudentManifest:
        """
        Raises:
            ManifestError: it is damaged, or of another version.
        """
        return read_student_manifest(self.data, self.where)


def read_student_manifest(data: bytes, where: str) -> StudentManifest:
    """
    Raises:
        ManifestError: it is damaged, or of another version.
    """
    try:
        return checked(StudentManifest, json.loads(data))
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not as this relabel writes a student's manifest ({fault_of(exc)}). Restore it from a copy, or "
            "train again."
        ) from exc


def student_manifest_at(data: bytes, where: str) -> StoredManifest:
    """What a `manifest.json` is, without a look at more than its kind and fingerprint.

    Raises:
        ManifestError: it is not a student's.
    """
    try:
        held = json.loads(data)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not readable as a student's manifest. Move it away, or name another output."
        ) from exc
    try:
        return StoredManifest(data, where, checked(_Mark, held).fingerprint)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: is not a student's manifest; the folder belongs to something else. Name another output."
        ) from exc
