"""How good a student is on rows that it did not learn from, beside its teacher: by gold, or where there is none by what
the teacher said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relabel.distill.students.examples import NO_GRADE, Examples
from relabel.distill.students.figures import graded_counts, graded_figures, teacher_figures
from relabel.distill.students.logits import logits_of_rows, softmax
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.splits import DEV
from relabel.distill.students.student_manifest import (
    Figures,
    SideFigures,
)
from relabel.distill.students.trainers import TrainingInputs
from relabel.manifests.metrics.baselines import MOST_LEXICAL, Baselines, baselines, bm25
from relabel.manifests.metrics.ranking import DEPTH, rank_queries

NDCG = f"ndcg@{DEPTH}"


def judge(examples: Examples) -> tuple[np.ndarray, str]:
    """The grades that a student is judged by, -1 where there is none, and what they are."""
    if (examples.gold != NO_GRADE).any():
        return examples.gold, "gold"
    return examples.teacher, "labels"


def dev_figures(work: TrainingInputs, module: Any) -> dict[str, float]:
    """Figures on dev while training."""
    rows = work.examples.rows_of(DEV)
    logits = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    found = {"loss": dev_loss(work.spec, work.examples, logits, rows)}
    judge_N, _ = judge(work.examples)
    graded = judge_N[rows] != NO_GRADE
    figures = graded_figures(softmax(logits["relevance"][graded]), judge_N[rows][graded])
    names = ("accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc")
    return found | {name: float(value) for name in names if (value := figures.get(name)) is not None}


def dev_loss(spec: DistillSpec, examples: Examples, logits: dict[str, np.ndarray], rows: np.ndarray) -> float:
    """The training loss of these rows."""
    import torch

    from relabel.distill.students.objective import Objective

    objective = Objective(spec.loss, examples.heads, examples.phi)
    batch = {
        "targets": {name: torch.from_numpy(values[rows]) for name, values in examples.targets.items()},
        "weights": {name: torch.from_numpy(values[rows]) for name, values in examples.weights.items()},
        "row_weight": torch.from_numpy(examples.row_weight[rows]),
    }
    sums = objective.sums({name: torch.from_numpy(values) for name, values in logits.items()}, batch)
    return float(objective.loss(sums, {name: weight.sum() for name, weight in objective.row_weights(batch).items()}))


def head_grades(examples: Examples, name: str) -> np.ndarray:
    """The most probable grade of each row's target for a head, -1 where it has none: int64 [N]."""
    return np.where(examples.weights[name] > 0, examples.targets[name].argmax(1), NO_GRADE)


def side_figures(work: TrainingInputs, probs: dict[str, np.ndarray], trained_NK: np.ndarray, side: int) -> SideFigures:
    """All figures of one side: student and teacher by the judge, student by teacher, nodes by the labels.

    Args:
        probs: calibrated.
        trained_NK: the relevance head's before calibration, which may have moved it away from its teacher and towards
            trusted grades.
    """
    examples = work.examples
    rows = examples.rows_of(side)
    judge_N, by = judge(examples)
    judged = rows[judge_N[rows] != NO_GRADE]
    taught = rows[examples.teacher[rows] != NO_GRADE]
    both = judged[examples.teacher[judged] != NO_GRADE]
    is_beside = by == "gold" and len(both) > 0
    by_node = {}
    for name in set(examples.heads) - {"relevance"}:
        grade_N = head_grades(examples, name)
        by_node[name] = _graded(probs[name], grade_N, rows[grade_N[rows] != NO_GRADE])
    relevance_NK = probs["relevance"]
    taught_sets = (trained_NK[taught], examples.teacher_probs[taught], examples.teacher[taught])
    return SideFigures(
        rows=len(rows),
        judged_by=by,
        baselines=_baselines(examples, judge_N, judged) if len(judged) else None,
        student=_graded(relevance_NK, judge_N, judged) | _ranked(examples, relevance_NK, judge_N, judged),
        teacher=_teacher_against(examples, both) if is_beside else None,
        student_where_teacher=(
            _graded(relevance_NK, judge_N, both) | _ranked(examples, relevance_NK, judge_N, both)
            if is_beside and len(both) != len(judged)
            else None
        ),
        to_teacher=teacher_figures(*taught_sets) if len(taught) else None,
        **by_node,
    )


def _ranked(examples: Examples, probs_NK: np.ndarray, grade_N: np.ndarray, rows: np.ndarray) -> Figures:
    """nDCG@10 of the expected grade, over queries that have a relevant row; equal ones in the order of the rows."""
    if not len(rows):
        return {}
    query_N, names = np.unique([examples.queries[row] for row in rows.tolist()], return_inverse=True)[::-1]
    score_N = np.round(probs_NK[rows].astype(np.float64) @ np.arange(probs_NK.shape[1]), 6)
    found = rank_queries(query_N, np.arange(len(rows)), score_N, grade_N[rows], num_queries=len(names))
    return {NDCG: None if np.isnan(found.ndcg).all() else float(np.nanmean(found.ndcg))}


def _baselines(examples: Examples, grade_N: np.ndarray, rows: np.ndarray) -> Baselines:
    query_N, names = np.unique([examples.queries[row] for row in rows.tolist()], return_inverse=True)[::-1]
    few = len(rows) <= MOST_LEXICAL
    lexical_N = bm25([examples.texts[row] for row in rows.tolist()]) if few else None
    return baselines(
        grade_N[rows],
        query_N,
        np.arange(len(rows)),
        grades=examples.grades,
        num_queries=len(names),
        lexical_N=lexical_N,
    )


def _graded(probs_NK: np.ndarray, grade_N: np.ndarray, rows: np.ndarray) -> Figures:
    return graded_figures(probs_NK[rows], grade_N[rows]) if len(rows) else {"rows": 0}


def _teacher_against(examples: Examples, rows: np.ndarray) -> Figures:
    """The teacher's own figures by gold: of the grades that it wrote, with those of its distributions where it gave
    them.
    """
    gold_N = examples.gold[rows]
    found = graded_counts(examples.teacher[rows], gold_N, grades=examples.grades)
    probs_NK = examples.teacher_probs[rows]
    if not np.isnan(probs_NK).any():
        of_probs = graded_figures(probs_NK, gold_N)
        found |= {name: value for name, value in of_probs.items() if name not in found}
    scores_NK = np.where(np.isnan(probs_NK), np.eye(examples.grades)[examples.teacher[rows]], probs_NK)
    whole_NK = np.zeros((len(examples.gold), examples.grades))
    whole_NK[rows] = scores_NK
    return found | _ranked(examples, whole_NK, examples.gold, rows)
