"""A student against its teacher and gold: the labels of both beside each other and beside gold grades, over the same
rows.

Rows of two label sets are matched by their row of the input where both were made from the same one, else by (query_id,
doc_id); what only one set has is counted and left out, so that no figure compares different rows.

Letters: N rows, G queries, K grades.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from manifests.ids import codes_of
from manifests.metrics.agreement import accuracy, confusion_by_group, kappa
from manifests.metrics.bootstrap import bootstrap
from manifests.metrics.calibration import TINY
from manifests.metrics.evaluation import Difference, Evaluation, evaluate_both
from manifests.metrics.judged import Judged, RowsBeside, sample_counts
from manifests.metrics.metric import Formula, Measured, Metric, MetricSet, MetricValue, mean
from manifests.metrics.ranking import tau_by_query
from manifests.metrics.statistics import Sums, mean_of_queries, mean_of_rows
from manifests.metrics.student_matches import Labelled, Match, match_notes


@dataclass(frozen=True)
class StudentComparisonCounts:
    """Labels of both sets, rows that both have, of these those with a distribution on both sides, their queries, and
    what gold says of them.
    """

    teacher: int
    student: int
    matched: int
    only_teacher: int
    only_student: int
    with_distributions: int
    queries: int
    judged: int
    unjudged: int
    gold_null: int


@dataclass(frozen=True)
class StudentComparison:
    """A student beside its teacher, and both beside gold grades.

    Args:
        against_teacher: those of `AGAINST_TEACHER`.
        confusion: rows teacher, columns student.
        teacher, student: by gold grades, over the judged rows; None without any.
        difference: student minus teacher.
    """

    grades: int
    matched_by: str
    counts: StudentComparisonCounts
    against_teacher: dict[str, MetricValue]
    confusion: list[list[int]]
    teacher: Evaluation | None
    student: Evaluation | None
    difference: dict[str, Difference]
    notes: list[str]


def compare(
    teacher: Labelled,
    student: Labelled,
    match: Match,
    golds: pa.Int64Array | None,
    is_known: np.ndarray,
    *,
    grades: int,
    resamples: int,
    seed: int,
    pass_at: Sequence[int] = (),
    columns: Mapping[str, pa.Array] | None = None,
) -> StudentComparison:
    """Compare over matched rows, of which there is at least one.

    Args:
        pass_at: the k of pass@k, see `manifests.metrics.evaluation.evaluate`.
        golds: gold grade of each matched row, or null; None where nobody judges.
        is_known: whether the row has a gold grade at all, null or not.
        columns: what gold says beside the grade, of each matched row.
    """
    query_N, query_names = codes_of(teacher.query_ids.take(pa.array(match.teacher)))
    num_queries = len(query_names)
    beside = TeacherStatistics(teacher, student, match, query_N, num_queries, grades)
    metrics = MetricSet(AGAINST_TEACHER, beside, num_groups=num_queries)
    intervals = bootstrap(metrics.resampled, num_groups=num_queries, resamples=resamples, seed=seed)
    found: tuple[Evaluation | None, Evaluation | None, dict[str, Difference]] = (None, None, {})
    num_judged = num_known = 0
    if golds is not None:
        num_judged, num_known = len(golds) - golds.null_count, int(is_known.sum())
    if golds is not None and num_judged:
        judged = golds.is_valid().to_numpy(zero_copy_only=False)
        gold_N = golds.drop_null().to_numpy()
        wanted, unjudged = (
            {name: column.take(pa.array(np.flatnonzero(rows))) for name, column in (columns or {}).items()}
            for rows in (judged, ~judged)
        )
        ours, theirs = (
            replace(
                _judged(one, rows[judged], match.teacher[judged], teacher, gold_N, grades, wanted),
                beside=_beside(one, rows[~judged], query_N[~judged], query_N[judged], unjudged),
            )
            for one, rows in ((teacher, match.teacher), (student, match.student))
        )
        found = evaluate_both(ours, theirs, resamples=resamples, seed=seed, pass_at=pass_at)
    counts = StudentComparisonCounts(
        teacher=len(teacher.grades),
        student=len(student.grades),
        matched=len(match.teacher),
        only_teacher=len(teacher.grades) - len(match.teacher),
        only_student=len(student.grades) - len(match.student),
        with_distributions=metrics.over("kl"),
        queries=num_queries,
        judged=num_judged,
        unjudged=0 if golds is None else len(golds) - num_known,
        gold_null=num_known - num_judged,
    )
    notes = [*beside.notes, *match_notes(teacher, student, match)]
    notes += dict.fromkeys(note for one in found[:2] if one is not None for note in one.notes)
    confusion = beside.counts.by_group.sum(0).tolist()
    return StudentComparison(grades, match.how, counts, metrics.with_intervals(intervals), confusion, *found, notes)


def kl_rows(teacher_NK: np.ndarray, student_NK: np.ndarray) -> np.ndarray:
    """KL(teacher ‖ student) of each row, Σ_k p_T(k) log(p_T(k) / p_S(k)): float64 [N], nats, 0 where both are equal,
    NaN where either is.

    A student's probability counts as 1e-12 at least: a softmax in float32 may round to 0 what it does not mean as
    impossible.
    """
    ratio_NK = np.log(np.maximum(teacher_NK, TINY)) - np.log(np.maximum(student_NK, TINY))
    rows_N: np.ndarray = np.where(teacher_NK == 0, 0.0, teacher_NK * ratio_NK).sum(1)
    return rows_N


class TeacherStatistics:
    """Statistics of a student with its teacher for gold, over matched rows.

    Args:
        query_N: int64 [N], 0..num_queries-1.
    """

    def __init__(
        self, teacher: Labelled, student: Labelled, match: Match, query_N: np.ndarray, num_queries: int, grades: int
    ) -> None:
        ours_N, theirs_N = teacher.grades[match.teacher], student.grades[match.student]
        ours_NK, theirs_NK = _taken(teacher.probs, match.teacher, grades), _taken(student.probs, match.student, grades)
        self.kl = mean_of_rows(kl_rows(ours_NK, theirs_NK), query_N, num_queries)
        self.counts = Sums(
            confusion_by_group(ours_N, theirs_N, query_N, num_groups=num_queries, grades=grades), len(ours_N)
        )
        self.tau = mean_of_queries(
            tau_by_query(query_N, _scores(ours_N, ours_NK), _scores(theirs_N, theirs_NK), num_queries=num_queries)
        )
        self.notes = []
        if self.kl.over < len(ours_N):
            self.notes.append(
                f"matched rows without a distribution on both sides, left out of KL: {len(ours_N) - self.kl.over:,}"
            )
        if self.tau.over < num_queries:
            flat = num_queries - self.tau.over
            self.notes.append(
                f"queries where teacher or student scores every row alike, left out of their Kendall tau: {flat:,}"
            )


def _kl(rows: TeacherStatistics) -> Mapping[str, Measured]:
    return {"": Measured(rows.kl, mean)} if rows.kl.over else {}


def _tau(rows: TeacherStatistics) -> Mapping[str, Measured]:
    return {"": Measured(rows.tau, mean)}


def of_counts(formula: Formula) -> Callable[[Any], Mapping[str, Measured]]:
    """Measures a function of `counts`, the confusion matrix of two sets of labels."""
    return lambda rows: {"": Measured(rows.counts, formula)}


AGREEMENT = Metric("agreement", "agreement", "higher", "rows", of_counts(accuracy), "share of equal grades")
KAPPA = Metric(
    "kappa",
    "Cohen kappa",
    "higher",
    "rows",
    of_counts(lambda counts_KK: kappa(counts_KK, power=0)),
    "the same beyond chance",
)
AGAINST_TEACHER = (
    Metric("kl", "mean KL(teacher ‖ student), nats", "lower", "rows", _kl, "over rows where both have a distribution"),
    AGREEMENT,
    KAPPA,
    Metric(
        "kendall_tau",
        "Kendall tau of expected grades, by query",
        "higher",
        "queries",
        _tau,
        "tau-b of the expected grades; mean over queries where both vary",
    ),
)
"""Metrics of a student beside its teacher, in the order in which they are shown."""


def _taken(probs_NK: np.ndarray | None, rows: np.ndarray, grades: int) -> np.ndarray:
    return np.full((len(rows), grades), np.nan) if probs_NK is None else probs_NK[rows]


def _scores(grades_N: np.ndarray, probs_NK: np.ndarray) -> np.ndarray:
    """Expected grades, or the grade where there is no distribution; to 6 digits, which float32 keeps."""
    expected_N = probs_NK @ np.arange(probs_NK.shape[1])
    return np.round(np.where(np.isnan(expected_N), grades_N, expected_N), 6)


def _judged(
    labels: Labelled,
    rows: np.ndarray,
    name_rows: np.ndarray,
    names: Labelled,
    gold_N: np.ndarray,
    grades: int,
    wanted: Mapping[str, pa.Array],
) -> Judged:
    """Rows of a set with their gold grades; query and document ids are the teacher's for both sets, so that both have
    the same groups.
    """
    named = pa.array(name_rows)
    query_N, query_names = codes_of(names.query_ids.take(named))
    probs_NK = None if labels.probs is None else labels.probs[rows]
    if probs_NK is not None and np.isnan(probs_NK).all():
        probs_NK = None
    counted = sample_counts(labels.samples and labels.samples.take(pa.array(rows)), gold_N)
    doc_N, _ = codes_of(names.doc_ids.take(named))
    own = {name: column.take(pa.array(rows)) for name, column in labels.columns.items()}
    return Judged(
        grades,
        gold_N,
        labels.grades[rows],
        query_N,
        len(query_names),
        doc_N,
        probs_NK,
        *counted,
        query_names,
        {**own, **wanted},
    )


def _beside(
    labels: Labelled, rows: np.ndarray, query_M: np.ndarray, judged_N: np.ndarray, wanted: Mapping[str, pa.Array]
) -> RowsBeside:
    """Rows of a set without a gold grade, by the numbers that `_judged` gives their queries: in the order of ids.

    Args:
        query_M, judged_N: numbers among all matched rows' queries, of these rows and of the judged ones.
    """
    own = {name: column.take(pa.array(rows)) for name, column in labels.columns.items()}
    return RowsBeside.of(pa.array(query_M), pa.array(np.unique(judged_N)), {**own, **wanted})
