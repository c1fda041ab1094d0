"""A student against its teacher and gold: the labels of both beside each other and beside gold grades, over the same
rows.

Rows of two label sets are matched by their row of the input where both were made from the same one, else by (query_id,
doc_id); what only one set has is counted and left out, so that no figure compares different rows.

Letters: N rows, G queries, K grades.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from relabel.manifests.ids import codes_of
from relabel.manifests.metrics.bootstrap import bootstrap
from relabel.manifests.metrics.evaluation import Evaluation
from relabel.manifests.metrics.evaluation_of_both import Difference, evaluate_both
from relabel.manifests.metrics.judged import Judged, RowsBeside, sample_counts
from relabel.manifests.metrics.metric import MetricSet, MetricValue
from relabel.manifests.metrics.student_matches import Labelled, Match, match_notes
from relabel.manifests.metrics.teacher_statistics import AGAINST_TEACHER, TeacherStatistics


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
    lexical: np.ndarray | None = None,
) -> StudentComparison:
    """Compare over matched rows, of which there is at least one.

    Args:
        pass_at: the k of pass@k, see `manifests.metrics.evaluation.evaluate`.
        golds: gold grade of each matched row, or null; None where nobody judges.
        is_known: whether the row has a gold grade at all, null or not.
        columns: what gold says beside the grade, of each matched row.
        lexical: BM25 of each row that has a gold grade.
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
                lexical=lexical,
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
