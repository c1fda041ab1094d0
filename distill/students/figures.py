"""Figures of a student on some rows: by trusted grades, by the labels, and how far it lies from its teacher.

From counts and sums alone (`count_metrics`), so that they cost nothing while training; `relabel evaluate` gives more of
them, with intervals.
"""

from __future__ import annotations

import numpy as np

from relabel.manifests.metrics.agreement import confusion_by_group
from relabel.manifests.metrics.calibration import TINY, brier_rows, ece
from relabel.manifests.metrics.metric import finite
from relabel.manifests.metrics.ranking import auc, cut_names
from relabel.manifests.metrics.registry import count_metrics

# N rows, K grades


def graded_figures(probs_NK: np.ndarray, gold_N: np.ndarray) -> dict[str, float | None]:
    """Figures of distributions against grades; None where one is not defined.

    Args:
        probs_NK: rows sum to 1; the label is the most probable grade, the lower of equals.
        gold_N: grades 0..K-1.
    Returns:
        Those of `count_metrics`, `auc_<cut>` with their mean `auc`, `ece`, `brier`, `nll` (mean negative
        log-likelihood, nats), `rows`.
    """
    grades = probs_NK.shape[1]
    found: dict[str, float | None] = graded_counts(probs_NK.argmax(1), gold_N, grades=grades)
    if len(gold_N):
        probs_NK = probs_NK.astype(np.float64)
        probs_NK /= probs_NK.sum(1, keepdims=True)
        found |= _aucs(probs_NK, gold_N)
        found |= {
            "ece": ece(probs_NK, gold_N),
            "brier": float(brier_rows(probs_NK, gold_N).mean()),
            "nll": float(-np.log(np.maximum(probs_NK[np.arange(len(gold_N)), gold_N], TINY)).mean()),
        }
    return found


def graded_counts(label_N: np.ndarray, gold_N: np.ndarray, *, grades: int) -> dict[str, float | None]:
    """Figures of bare labels against grades, and the number of rows."""
    found: dict[str, float | None] = {"rows": len(gold_N)}
    if len(gold_N):
        counts_KK = confusion_by_group(
            gold_N, label_N, np.zeros(len(gold_N), dtype=np.int64), num_groups=1, grades=grades
        )[0]
        found |= {name: finite(float(value)) for name, value in count_metrics(counts_KK).items()}
    return found


def _aucs(probs_NK: np.ndarray, gold_N: np.ndarray) -> dict[str, float | None]:
    """AUC of P(k ≥ j) against [gold ≥ j] by cut, and the mean of those that are defined."""
    found = {
        f"auc_{name}": finite(auc(probs_NK[:, cut:].sum(1), gold_N >= cut))
        for cut, name in enumerate(cut_names(probs_NK.shape[1]), start=1)
    }
    defined = [value for value in found.values() if value is not None]
    return {**found, "auc": float(np.mean(defined)) if defined else None}


def teacher_figures(probs_NK: np.ndarray, teacher_NK: np.ndarray, teacher_N: np.ndarray) -> dict[str, float | None]:
    """How far the student lies from its teacher.

    Args:
        teacher_NK: the teacher's distributions, NaN where it gave none.
        teacher_N: the teacher's grades.
    Returns:
        `agreement` (share of equal grades), `f1_macro` by the teacher's grades, `kl` (mean KL(teacher ‖ student) over
        rows with a distribution, nats), `rows`.
    """
    if not len(teacher_N):
        return {"rows": 0, "agreement": None, "f1_macro": None, "kl": None}
    has_N = ~np.isnan(teacher_NK).any(1)
    kl = None
    if has_N.any():
        p_NK = teacher_NK[has_N].astype(np.float64)
        p_NK /= p_NK.sum(1, keepdims=True)
        q_NK = np.maximum(probs_NK[has_N].astype(np.float64), TINY)
        kl = float((p_NK * (np.log(np.maximum(p_NK, TINY)) - np.log(q_NK))).sum(1).mean())
    counts = graded_counts(probs_NK.argmax(1), teacher_N, grades=probs_NK.shape[1])
    return {"rows": len(teacher_N), "agreement": counts["accuracy"], "f1_macro": counts["f1_macro"], "kl": kl}
