"""Agreement of labels with human grades, from counts alone: accuracy, F1, kappa and alpha are functions of a confusion matrix.

`count_figures` takes any number of matrices at once, which makes a bootstrap cheap: a resample of queries is a weighted sum of their
matrices. `agreement_figures` is the figure itself, from scikit-learn and krippendorff; tests hold the two equal.

Letters: N rows, K grades, G groups (queries, or rows where there is no query); a confusion matrix has a row a gold grade, a column a label.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from manifests.extras import require

EXTRA = "eval"
PURPOSE = "relabel evaluate"


def confusion_by_group(gold_N: np.ndarray, label_N: np.ndarray, group_N: np.ndarray, *, num_groups: int, grades: int) -> np.ndarray:
    """One confusion matrix a group: int64 [G, K, K].

    Args:
        gold_N, label_N: grades 0..K-1.
        group_N: 0..G-1.
    """
    cell_N = (group_N * grades + gold_N) * grades + label_N
    return np.bincount(cell_N, minlength=num_groups * grades * grades).reshape(num_groups, grades, grades)


def count_figures(counts_KK: np.ndarray) -> dict[str, np.ndarray]:
    """Every figure that is a function of a confusion matrix; NaN where it is not defined (0/0).

    Args:
        counts_KK: [..., K, K], counts or sums of weights; leading dimensions are kept in the figures.
    Returns:
        `accuracy`, `f1_0`… `f1_macro` (over grades that occur in gold or labels), `f1_weighted` (by gold), `kappa`, `kappa_quadratic`,
        `alpha_ordinal`, `alpha_nominal`, `irrelevant_precision`, `irrelevant_recall`, `irrelevant_f1`.
    """
    counts_KK = np.asarray(counts_KK, dtype=np.float64)
    grades = counts_KK.shape[-1]
    gold_K, label_K = counts_KK.sum(-1), counts_KK.sum(-2)
    hit_K = np.diagonal(counts_KK, axis1=-2, axis2=-1)
    total = gold_K.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        f1_K = 2 * hit_K / (gold_K + label_K)
        found = {"accuracy": hit_K.sum(-1) / total}
        found |= {f"f1_{grade}": f1_K[..., grade] for grade in range(grades)}
        occurs_K = gold_K + label_K > 0
        found["f1_macro"] = np.where(occurs_K, f1_K, 0).sum(-1) / occurs_K.sum(-1)
        found["f1_weighted"] = (np.where(occurs_K, f1_K, 0) * gold_K).sum(-1) / total
        step_KK = np.subtract.outer(np.arange(grades), np.arange(grades))
        found["kappa"] = _kappa(counts_KK, gold_K, label_K, (step_KK != 0).astype(float))
        found["kappa_quadratic"] = _kappa(counts_KK, gold_K, label_K, step_KK.astype(float) ** 2)
        found["alpha_ordinal"], found["alpha_nominal"] = _alphas(counts_KK, gold_K + label_K)
        found["irrelevant_precision"] = hit_K[..., 0] / label_K[..., 0]
        found["irrelevant_recall"] = hit_K[..., 0] / gold_K[..., 0]
        found["irrelevant_f1"] = f1_K[..., 0]
    return found


def _kappa(counts_KK: np.ndarray, gold_K: np.ndarray, label_K: np.ndarray, cost_KK: np.ndarray) -> np.ndarray:
    """Cohen 1960 and 1968: 1 - observed cost / cost expected from the two margins."""
    expected = (gold_K[..., :, None] * label_K[..., None, :] * cost_KK).sum((-2, -1))
    kappa: np.ndarray = 1 - (counts_KK * cost_KK).sum((-2, -1)) * gold_K.sum(-1) / np.where(expected > 0, expected, np.nan)
    return kappa


def _alphas(counts_KK: np.ndarray, margin_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Krippendorff 2011, two raters and no missing value: 1 - (n-1) Σ o δ² / Σ n_c n_k δ², o = counts + countsᵀ, n = 2N values.

    Ordinal δ_ck = Σ_{g=c..k} n_g - (n_c + n_k)/2, which is the distance between the grades' mid-ranks.
    """
    values = margin_K.sum(-1)
    midrank_K = np.cumsum(margin_K, -1) - margin_K / 2
    ordinal_KK = (midrank_K[..., :, None] - midrank_K[..., None, :]) ** 2
    nominal_KK = 1.0 - np.eye(margin_K.shape[-1])
    pairs_KK = margin_K[..., :, None] * margin_K[..., None, :]
    found = []
    for distance_KK in (ordinal_KK, nominal_KK):
        expected = (pairs_KK * distance_KK).sum((-2, -1))
        observed = 2 * (counts_KK * distance_KK).sum((-2, -1))  # δ is symmetric, so counts and their transpose cost the same
        found.append(1 - (values - 1) * observed / np.where(expected > 0, expected, np.nan))
    return found[0], found[1]


def agreement_figures(gold_N: np.ndarray, label_N: np.ndarray, *, grades: int) -> dict[str, float]:
    """The figures of `count_figures` for all rows at once, by scikit-learn and krippendorff; NaN where one is not defined.

    Args:
        gold_N, label_N: grades 0..K-1, at least one row.
    Raises:
        MissingExtraError: scikit-learn or krippendorff is absent.
    """
    metrics = require("sklearn.metrics", extra=EXTRA, purpose=PURPOSE)
    krippendorff = require("krippendorff", extra=EXTRA, purpose=PURPOSE)
    group_N = np.zeros(len(gold_N), dtype=np.int64)
    counts_KK = confusion_by_group(gold_N, label_N, group_N, num_groups=1, grades=grades)[0]
    is_defined = {name: math.isfinite(value) for name, value in count_figures(counts_KK).items()}
    every = list(range(grades))
    # the cells of the matrix with their counts as weights are the same rows, K² of them instead of N
    cells = np.argwhere(counts_KK)
    gold_C, label_C, weight_C = cells[:, 0], cells[:, 1], counts_KK[cells[:, 0], cells[:, 1]]
    weighted: dict[str, Any] = {"sample_weight": weight_C}
    precision_K, recall_K, f1_K, _ = metrics.precision_recall_fscore_support(
        gold_C, label_C, labels=every, average=None, zero_division=np.nan, **weighted
    )
    found = {"accuracy": metrics.accuracy_score(gold_C, label_C, **weighted)}
    found |= {f"f1_{grade}": f1_K[grade] for grade in every}
    found["f1_macro"] = metrics.f1_score(gold_C, label_C, average="macro", zero_division=0, **weighted)
    found["f1_weighted"] = metrics.f1_score(gold_C, label_C, average="weighted", zero_division=0, **weighted)
    found["irrelevant_precision"], found["irrelevant_recall"], found["irrelevant_f1"] = precision_K[0], recall_K[0], f1_K[0]
    for name, weights in (("kappa", None), ("kappa_quadratic", "quadratic")):
        if is_defined[name]:
            found[name] = metrics.cohen_kappa_score(gold_C, label_C, labels=every, weights=weights, **weighted)
    for level in ("ordinal", "nominal"):
        if is_defined[f"alpha_{level}"]:
            data = np.stack([gold_N, label_N]).astype(float)
            found[f"alpha_{level}"] = krippendorff.alpha(data, value_domain=every, level_of_measurement=level)
    return {name: float(found[name]) if is_defined[name] else math.nan for name in is_defined}


def pass_at_k(num_correct_N: np.ndarray, num_samples_N: np.ndarray, k: int) -> np.ndarray:
    """For each row the chance that k of its samples, drawn without replacement, hold one that equals gold: float64 [N].

    Args:
        num_correct_N, num_samples_N: samples equal to gold, and all samples (a failed one is never correct), at least k each.
    Source:
        Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(S-c, k) / C(S, k).
    """
    missed_N = np.ones(len(num_correct_N))
    for drawn in range(k):
        missed_N *= np.clip(num_samples_N - num_correct_N - drawn, 0, None) / (num_samples_N - drawn)
    return 1 - missed_N
