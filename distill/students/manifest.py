"""A student's manifest, the record of its training data, and the record next to its weights."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from relabel.distill.students.spec import KindName
from relabel.distill.training.output import TrainedManifest, read_manifest
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import translate_errors
from relabel.manifests.labels import DEFAULT_PHI, PhiTable
from relabel.manifests.metrics.evaluation import Baselines, GateVerdict
from relabel.manifests.records import LEFT_OUT, read_record

# ------------------------------------------------------------------------------
# What a student learns from, as records: the part of its manifest that is known before it is trained. Fields
# that JSON may do without are None there.


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
    """Where gold comes from.

    Args:
        grade: column of the grades; None where gold says other things.
        sets, answers: columns of the chunks and of the answers that are wanted.
        rows, without_grade, inputs_sha256: of gold that was learned from.
        graded_rows: rows of the distillation that have a grade.
    """

    path: str
    grade: str | None
    map: dict[int, int] | None = None
    sets: str | None = field(default=None, metadata=LEFT_OUT)
    answers: str | None = field(default=None, metadata=LEFT_OUT)
    rows: int | None = field(default=None, metadata=LEFT_OUT)
    without_grade: int | None = field(default=None, metadata=LEFT_OUT)
    inputs_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    joined_by: str | None = field(default=None, metadata=LEFT_OUT)
    graded_rows: int = 0


@dataclass(frozen=True)
class SplitSide:
    """One side; `texts_seen_in_train` counts its queries whose text a training query has under another id."""

    rows: int
    queries: int
    texts_seen_in_train: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class SplitFacts:
    """How rows were split.

    Args:
        shares: of the queries, expected for dev and test.
        sha256: of which query lies where.
    """

    by: str
    seed: int
    shares: dict[str, float]
    train: SplitSide
    dev: SplitSide
    test: SplitSide
    sha256: str

    def sides(self) -> dict[str, SplitSide]:
        """Train, dev and test, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """All of it.

    Args:
        rows: how many there are: `all`, `labelled`, and with `gold_alone`.
        rows_by_head: rows that train each head.
    """

    labels: list[LearnedLabels]
    gold: LearnedGold | None
    rows: dict[str, int]
    rows_by_head: dict[str, int]
    split: SplitFacts


# ------------------------------------------------------------------------------
# A student's `manifest.json` as records.


STUDENT_MANIFEST_VERSION = 1

Figures: TypeAlias = dict[str, int | float | None]
"""Figures by name, as `distill/students/distillation.py` gives them, with `rows`; None where one is not defined."""
SHOWN = ("rows", "accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc", "ece", "nll", "ndcg@10")


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
        intervals: of `student`, 95 % over queries, by figure; likewise.
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
    intervals: dict[str, tuple[float, float]] | None = field(default=None, metadata=LEFT_OUT)

    def figure_rows(self) -> list[list[str]]:
        """The main figures as a table, its head first; columns that would be empty are left out."""
        rows = [[f"judged by {self.judged_by}", "student", "95 % interval", "teacher", "baselines"]]
        for name in (name for name in SHOWN if name in self.student):
            values = [_number(figures.get(name, "")) for figures in (self.student, self.teacher or {})]
            bounds = self.baselines.text(name) if self.baselines else ""
            rows.append([name, values[0], self.interval_text(name), values[1], bounds])
        kept = [any(column[1:]) for column in zip(*rows, strict=True)]
        return [list(itertools.compress(row, kept)) for row in rows]

    def interval_text(self, figure: str) -> str:
        """The interval of a figure of the student; empty where it has none."""
        ends = (self.intervals or {}).get(figure)
        return "" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}"


def _number(value: float | str | None) -> str:
    return "undefined" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


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
    """The gates of a spec, applied to figures."""

    has_passed: bool
    checks: list[GateCheck]


@dataclass(frozen=True, kw_only=True)
class StudentManifest(TrainedManifest, DataFacts):
    """The manifest of a student: how it was made, and how good it is.

    Args:
        phi: its rule map, where it has more than one head.
        student: its record, as `student.json` has it.
    """

    kind: Literal["student"] = "student"
    heads: dict[str, int]
    temperature: dict[str, float]
    phi: PhiTable | None
    metrics: StudentFigures
    gate: JudgedGates
    student: dict[str, Any]


@dataclass(frozen=True)
class StudentFiles:
    """The part of a manifest that says what the student's files are."""

    files: dict[str, str]


def read_student_manifest(data: bytes, where: str) -> StudentManifest:
    """
    Raises:
        ManifestError: it is damaged, or of another version.
    """
    return read_manifest(data, where, StudentManifest)


# ------------------------------------------------------------------------------
# The record of a student, in its folder.


STUDENT_NAME = "student.json"
STUDENT_VERSION: Final = 1


@dataclass(frozen=True)
class StudentRecord:
    """What a student is, as `student.json` says it.

    Args:
        heads: number of grades by head; `relevance` is always there.
        max_tokens: longest row in tokens; longer pairs are cut.
        columns: the input's columns that it was trained on, as `manifests.specs.Columns` takes them.
        temperature: by head, above 0; logits are divided by it.
        phi: the rule map of a student with subject and attribute heads.
        pooling: of an encoder.
        prompt: of a decoder, the text before the query, between query and document, and after the document; of a
            logistic student the first alone.
        grade_ids: of a decoder, the tokens of grades 0..K-1.
        packs: whether a decoder's batches are packed instead of padded.
    """

    version: Literal[1]
    kind: KindName
    name: str
    heads: dict[str, int]
    max_tokens: int
    columns: dict[str, Any]
    temperature: dict[str, float]
    phi: PhiTable = DEFAULT_PHI
    pooling: Literal["mean", "cls"] = "mean"
    prompt: tuple[str, str, str] = ("", "", "")
    grade_ids: list[int] = field(default_factory=list)
    packs: bool = False

    @property
    def grades(self) -> int:
        """K of the relevance head."""
        return self.heads["relevance"]


def read_student(path: str | Path) -> StudentRecord:
    """What the student in a folder is, without loading it.

    Raises:
        ManifestError: the folder holds no student, or one that this version can't read.
    """
    file = Path(path) / STUDENT_NAME
    if not file.exists():
        raise ManifestError(f"{path}: holds no {STUDENT_NAME}, so no student. Give the output of `relabel distill`.")
    with translate_errors("read", file):
        data = file.read_bytes()
    what = "not as this relabel writes a student's record"
    return read_record(StudentRecord, data, str(file), what, "Restore it, or train again.")
