"""What is compared of a student and its teacher, and how it is resampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relabel.manifests.metrics.agreement import accuracy, confusion_by_group, kappa
from relabel.manifests.metrics.calibration import TINY
from relabel.manifests.metrics.metric import Formula, Measured, Metric, mean
from relabel.manifests.metrics.ranking import tau_by_query
from relabel.manifests.metrics.statistics import Sums, mean_of_queries, mean_of_rows
from relabel.manifests.metrics.student_matches import Labelled, Match


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
