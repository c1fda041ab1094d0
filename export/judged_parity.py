"""What a difference of two sets of answers does to their figures by gold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from relabel.distill.students.examples import NO_GRADE
from relabel.export.parity_records import F1Loss, NdcgLoss
from relabel.export.reference_pairs import PairSet
from relabel.export.specs import ParitySpec
from relabel.manifests.ids import codes_of, ids_of
from relabel.manifests.metrics.agreement import confusion_by_group, f1_macro
from relabel.manifests.metrics.bootstrap import Statistic, paired_bootstrap
from relabel.manifests.metrics.ranking import rank_queries

POINTS = 100.0


def expected_grade(probs_NK: np.ndarray) -> np.ndarray:
    """Σ k p(k), float64 [N]: what documents are ordered by."""
    return np.nan_to_num(probs_NK.astype(np.float64)) @ np.arange(probs_NK.shape[1])


class _ByGrades(NamedTuple):
    judge: str
    rows: int
    queries: int
    f1_macro: F1Loss
    ndcg: NdcgLoss


def judged_figures(ours_NK: np.ndarray, theirs_NK: np.ndarray, pairs: PairSet, spec: ParitySpec) -> _ByGrades:
    """Macro F1 and nDCG@10 of both by grades: gold, else the teacher's, else the student's own."""
    has_N = pairs.grades != NO_GRADE
    judge_name = pairs.judge if pairs.judge and has_N.any() else "student"
    rows = np.flatnonzero(has_N) if judge_name != "student" else np.arange(len(ours_NK))
    grade_N = pairs.grades[rows] if judge_name != "student" else ours_NK.argmax(1)
    _, query_N = np.unique(pairs.queries[rows], return_inverse=True)
    queries, grades = int(query_N.max()) + 1, ours_NK.shape[1]
    counts = [
        confusion_by_group(grade_N, probs_NK[rows].argmax(1), query_N, num_groups=queries, grades=grades)
        for probs_NK in (ours_NK, theirs_NK)
    ]
    ours, theirs = (float(_f1_macro(count_GKK.sum(0))) for count_GKK in counts)
    first, second = (_resampled(count_GKK) for count_GKK in counts)
    drawn = paired_bootstrap(first, second, num_groups=queries, resamples=spec.resamples, seed=spec.seed).difference
    loss = (ours - theirs) * POINTS
    interval = drawn.get("f1_macro")
    # from zero, since a minus alone makes -0.0 of no loss
    low, high = (0 - interval.high * POINTS, 0 - interval.low * POINTS) if interval else (loss, loss)
    doc_N, _ = codes_of(ids_of(map(str, rows.tolist())))
    first_ndcg, second_ndcg = (
        _mean(rank_queries(query_N, doc_N, expected_grade(probs_NK)[rows], grade_N, num_queries=queries).ndcg)
        for probs_NK in (ours_NK, theirs_NK)
    )
    ndcg_loss = None if first_ndcg is None or second_ndcg is None else first_ndcg - second_ndcg
    f1_loss = F1Loss(student=ours, model=theirs, loss_points=loss, loss_low=low, loss_high=high)
    return _ByGrades(judge_name, len(rows), queries, f1_loss, NdcgLoss(first_ndcg, second_ndcg, ndcg_loss))


def _f1_macro(counts_KK: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return f1_macro(counts_KK)


def _resampled(counts_GKK: np.ndarray) -> Statistic:
    """Macro F1 of weighted queries."""
    return lambda weight_RG: {"f1_macro": _f1_macro(np.tensordot(weight_RG, counts_GKK, axes=1))}


def _mean(value_G: np.ndarray) -> float | None:
    return float(np.nanmean(value_G)) if np.isfinite(value_G).any() else None
