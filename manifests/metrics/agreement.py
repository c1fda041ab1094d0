"""Agreement of labels with gold grades, from counts alone: accuracy, F1, kappa and alpha are functions of a confusion
matrix.

Each takes any number of matrices at once, [..., K, K], of counts or sums of weights, and gives [...]; NaN where it is
not defined (0/0), of which callers silence numpy's warning. That makes a bootstrap cheap: a resample of queries is a
weighted sum of their matrices.

Letters: N rows, K grades, G groups (queries, or rows where there is no query); a confusion matrix has a row a gold
grade, a column a label.
"""

from __future__ import annotations

import numpy as np

from relabel.manifests.metrics.metric import Share

EXTRA = "eval"
PURPOSE = "relabel evaluate"


def confusion_by_group(
    gold_N: np.ndarray, label_N: np.ndarray, group_N: np.ndarray, *, num_groups: int, grades: int
) -> np.ndarray:
    """One confusion matrix a group: int64 [G, K, K].

    Args:
        gold_N, label_N: grades 0..K-1.
        group_N: 0..G-1.
    """
    cell_N = (group_N * grades + gold_N) * grades + label_N
    return np.bincount(cell_N, minlength=num_groups * grades * grades).reshape(num_groups, grades, grades)


accuracy = Share(lambda counts_KK: _hits(counts_KK).sum(-1), lambda counts_KK: counts_KK.sum((-2, -1)))
"""Share of rows whose label is gold."""


def f1_by_grade(counts_KK: np.ndarray) -> np.ndarray:
    """2·both / (gold k + labels k): [..., K]."""
    return np.asarray(2 * _hits(counts_KK) / (counts_KK.sum(-1) + counts_KK.sum(-2)))


def f1_macro(counts_KK: np.ndarray) -> np.ndarray:
    """Mean of F1 over grades that occur in gold or labels."""
    occurs_K = counts_KK.sum(-1) + counts_KK.sum(-2) > 0
    return np.asarray(np.where(occurs_K, f1_by_grade(counts_KK), 0).sum(-1) / occurs_K.sum(-1))


def f1_weighted(counts_KK: np.ndarray) -> np.ndarray:
    """Mean of F1 by the number of gold rows."""
    gold_K = counts_KK.sum(-1)
    return np.asarray((np.where(gold_K > 0, f1_by_grade(counts_KK), 0) * gold_K).sum(-1) / gold_K.sum(-1))


def kappa(counts_KK: np.ndarray, *, power: int) -> np.ndarray:
    """Cohen 1960 and 1968: 1 - observed cost / cost expected from the two margins.

    Args:
        power: of the distance of two grades, which is their cost: 2, or 0 for a cost of 1 whatever the distance.
    """
    gold_K, label_K = counts_KK.sum(-1), counts_KK.sum(-2)
    step_KK = np.abs(np.subtract.outer(np.arange(counts_KK.shape[-1]), np.arange(counts_KK.shape[-1])))
    cost_KK = np.where(step_KK > 0, step_KK.astype(float) ** power, 0.0)
    expected = (gold_K[..., :, None] * label_K[..., None, :] * cost_KK).sum((-2, -1))
    return np.asarray(
        1 - (counts_KK * cost_KK).sum((-2, -1)) * gold_K.sum(-1) / np.where(expected > 0, expected, np.nan)
    )


def alpha(counts_KK: np.ndarray, *, is_ordinal: bool) -> np.ndarray:
    """Krippendorff 2011, two raters and no missing value: 1 - (n-1) Σ o δ² / Σ n_c n_k δ², o = counts + countsᵀ, n = 2N
    values.

    Nominal δ is 1 for any two grades; ordinal δ_ck = Σ_{g=c..k} n_g - (n_c + n_k)/2, which is the distance between
    their mid-ranks.
    """
    margin_K = counts_KK.sum(-1) + counts_KK.sum(-2)
    midrank_K = np.cumsum(margin_K, -1) - margin_K / 2
    distance_KK = (
        (midrank_K[..., :, None] - midrank_K[..., None, :]) ** 2 if is_ordinal else 1.0 - np.eye(margin_K.shape[-1])
    )
    expected = (margin_K[..., :, None] * margin_K[..., None, :] * distance_KK).sum((-2, -1))
    # δ is symmetric, so counts and their transpose cost the same
    observed = 2 * (counts_KK * distance_KK).sum((-2, -1))
    return np.asarray(1 - (margin_K.sum(-1) - 1) * observed / np.where(expected > 0, expected, np.nan))


def auc_of_counts(counts_KK: np.ndarray, cut: int) -> np.ndarray:
    """Area under the ROC curve of the label itself against gold ≥ cut."""
    relevant_K, other_K = counts_KK[..., cut:, :].sum(-2), counts_KK[..., :cut, :].sum(-2)
    below_K = np.cumsum(other_K, -1) - other_K / 2
    return np.asarray((relevant_K * below_K).sum(-1) / (relevant_K.sum(-1) * other_K.sum(-1)))


def _hits(counts_KK: np.ndarray) -> np.ndarray:
    return np.diagonal(counts_KK, axis1=-2, axis2=-1)


def pass_at_k(num_correct_N: np.ndarray, num_samples_N: np.ndarray, k: int) -> np.ndarray:
    """For each row the chance that k of its samples, drawn without replacement, hold one that equals gold: float64 [N].

    Args:
        num_correct_N, num_samples_N: samples equal to gold, and all samples (a failed one is never correct), at least k
            each.
    Source:
        Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(S-c, k) / C(S, k).
    """
    missed_N = np.ones(len(num_correct_N))
    for drawn in range(k):
        missed_N *= np.clip(num_samples_N - num_correct_N - drawn, 0, None) / (num_samples_N - drawn)
    return 1 - missed_N
