"""What `evaluate` found, of one set of labels or of several side by side: the fields of its JSON, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relabel.jobs.evaluate.sides import SideCut
from relabel.manifests.metrics.baselines import Baselines
from relabel.manifests.metrics.calibration_trial import CalibrationTrial
from relabel.manifests.metrics.evaluation import Evaluation, ReliabilityBin
from relabel.manifests.metrics.evaluation_of_both import Difference
from relabel.manifests.metrics.gates import GateVerdict
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.student_comparison import StudentComparison, StudentComparisonCounts
from relabel.manifests.records import LEFT_OUT


@dataclass(frozen=True)
class JudgedSource:
    """Labels that were judged: `kind` and `grades` as in `LabelSet`, the rest as in `LabelOrigin`."""

    path: str
    kind: str
    grades: int | None
    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    column: str | None = field(default=None, metadata=LEFT_OUT)
    where: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class JudgedCounts:
    """Labels by what gold says of them, rows without one, and queries of the judged.

    Args:
        without_label: rows that hold none that can be read.
        relabelled: judged labels beyond the first of their pair.
        qrels: pairs; None where labels and gold are joined by row.
        qrels_without_label: of them graded, and not labelled.
    """

    labels: int
    judged: int
    unjudged: int
    gold_null: int
    without_label: int
    quarantined: int
    relabelled: int
    queries: int
    qrels: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_repeated: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_in_conflict: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_without_label: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class JudgedLabels:
    """One set of labels, or several as one, by gold; from `grades` to `baselines` as in `Evaluation`."""

    labels: list[JudgedSource]
    qrels: str | None
    joined_by: list[str]
    side: SideCut
    counts: JudgedCounts
    resamples: int
    seed: int
    grades: int
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    resampled: str
    num_groups: int
    reliability: list[ReliabilityBin] | None
    calibration: CalibrationTrial | None
    notes: list[str]
    baselines: Baselines
    gates: list[GateVerdict]
    exit_code: int


@dataclass(frozen=True)
class SetBeside:
    """A set that is compared: `kind` and `quarantined` as in `LabelSet`, from `labeler` on as in `LabelOrigin`."""

    name: str
    role: Literal["teacher", "student"]
    path: str
    kind: str
    quarantined: int | None
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    column: str | None = field(default=None, metadata=LEFT_OUT)
    where: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class BothByGold:
    """Teacher and student by gold, over the rows that both have; student minus teacher."""

    teacher: Evaluation
    student: Evaluation
    difference: dict[str, Difference]


@dataclass(frozen=True)
class StudentBeside:
    """One student beside the teacher.

    Args:
        matched_by, joined_by: how rows met each other, and gold; the latter None where nobody judges.
        confusion: rows teacher, columns student.
        gates: verdicts on this student.
    """

    teacher: str
    student: str
    matched_by: str
    joined_by: str | None
    counts: StudentComparisonCounts
    against_teacher: dict[str, MetricValue]
    confusion: list[list[int]]
    against_gold: BothByGold | None
    gates: list[GateVerdict]
    notes: list[str]

    @classmethod
    def of(
        cls, names: tuple[str, str], found: StudentComparison, joined_by: str | None, gates: list[GateVerdict]
    ) -> StudentBeside:
        """`names` are teacher and student."""
        gold = None
        if found.teacher is not None and found.student is not None:
            gold = BothByGold(found.teacher, found.student, found.difference)
        return cls(
            *names,
            matched_by=found.matched_by,
            joined_by=joined_by,
            counts=found.counts,
            against_teacher=found.against_teacher,
            confusion=found.confusion,
            against_gold=gold,
            gates=gates,
            notes=found.notes,
        )


@dataclass(frozen=True)
class SetsBeside:
    """All students beside one teacher."""

    sets: list[SetBeside]
    side: SideCut
    qrels: str | None
    grades: int
    resamples: int
    seed: int
    comparisons: list[StudentBeside]
    notes: list[str]
    exit_code: int
