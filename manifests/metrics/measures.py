"""Measures over arrays of labels and grades: agreement, calibration and ranking."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relabel.manifests.metrics.metric import Share
from relabel.manifests.process import require

# ------------------------------------------------------------------------------
# Agreement of labels with gold grades, from counts alone: accuracy, F1, kappa and alpha are functions of a confusion
# matrix.
#
# Each takes any number of matrices at once, [..., K, K], of counts or sums of weights, and gives [...]; NaN where it is
# not defined (0/0), of which callers silence numpy's warning. That makes a bootstrap cheap: a resample of queries is a
# weighted sum of their matrices.
#
# Letters: N rows, K grades, G groups (queries, or rows where there is no query); a confusion matrix has a row a gold
# grade, a column a label.


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


# ------------------------------------------------------------------------------
# Whether probabilities mean what they say: expected calibration error, Brier score; and the temperature that corrects
# them.
#
# Letters: N rows, K grades, G groups, B bins, R resamples.


BINS = 15
"""Equal-width bins of confidence, the number of Guo et al. 2017."""

TINY = 1e-12
"""Least probability that a logarithm is taken of."""


def brier_rows(probs_NK: np.ndarray, gold_N: np.ndarray) -> np.ndarray:
    """Brier's own multi-class score of each row, Σ_k (p_k - [gold = k])²: 0 to 2, float64 [N]."""
    hit_NK = np.arange(probs_NK.shape[1]) == gold_N[:, None]
    rows_N: np.ndarray = ((probs_NK - hit_NK) ** 2).sum(1)
    return rows_N


def reliability_by_group(
    probs_NK: np.ndarray, gold_N: np.ndarray, group_N: np.ndarray, *, num_groups: int
) -> np.ndarray:
    """What each group adds to each bin of confidence: rows, sum of confidence, number correct; float64 [G, B, 3].

    Confidence is the largest probability, correct means that its grade is gold (the lower grade where two are equally
    probable).
    """
    confidence_N = probs_NK.max(1)
    correct_N = probs_NK.argmax(1) == gold_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    cell_N = group_N * BINS + bin_N
    size = num_groups * BINS
    parts = [
        np.bincount(cell_N, weights, minlength=size)
        for weights in (np.ones(len(gold_N)), confidence_N, correct_N.astype(float))
    ]
    return np.stack(parts, axis=-1).reshape(num_groups, BINS, 3)


def ece_of_bins(bins_B3: np.ndarray) -> np.ndarray:
    """Expected calibration error of sums [..., B, 3] over rows: Σ_bins (share of rows) · |mean confidence - accuracy|;
    NaN without rows.

    Source:
        Guo et al. 2017 (arXiv:1706.04599), equation 3.
    """
    rows = bins_B3[..., 0].sum(-1)
    gap = np.abs(bins_B3[..., 1] - bins_B3[..., 2]).sum(-1)
    return np.asarray(gap / np.where(rows > 0, rows, np.nan))


def ece(probs_NK: np.ndarray, gold_N: np.ndarray) -> float:
    """Expected calibration error of all rows together."""
    bins = reliability_by_group(probs_NK, gold_N, np.zeros(len(gold_N), dtype=np.int64), num_groups=1)
    return float(ece_of_bins(bins[0]))


def tempered(probs_NK: np.ndarray, temperature: float) -> np.ndarray:
    """p^(1/T), renormalised."""
    scaled_NK = np.log(np.maximum(probs_NK, TINY)) / temperature
    raised_NK = np.exp(scaled_NK - scaled_NK.max(1, keepdims=True))
    return np.asarray(raised_NK / raised_NK.sum(1, keepdims=True))


def fit_temperature(probs_NK: np.ndarray, target_NK: np.ndarray) -> float:
    """One temperature, least cross-entropy (Guo et al. 2017, section 4.2), sought between 1/100 and 100.

    Args:
        target_NK: what the distributions should be; 1 at the grade where a row has one.
    Raises:
        MissingExtraError: scipy is absent.
    """
    optimize = require("scipy.optimize", extra="cpu", purpose="A temperature fitted on dev")

    def loss(log_temperature: float) -> float:
        logs_NK = np.log(np.maximum(tempered(probs_NK, np.exp(log_temperature)), TINY))
        return float(-(target_NK * logs_NK).sum(1).mean())

    found = optimize.minimize_scalar(
        loss, bounds=(np.log(0.01), np.log(100.0)), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(found.x))


def at_least(probs_NK: np.ndarray) -> np.ndarray:
    """P(k ≥ j) for j = 1..K-1: float64 [N, K-1]."""
    return np.asarray(np.cumsum(probs_NK[:, ::-1], axis=1)[:, ::-1][:, 1:])


# ------------------------------------------------------------------------------
# How labels order the documents of a query, for all queries at once: nDCG@10, Kendall tau, bad cases; and the area
# under the ROC curve.
#
# An item is one document of a query. Equal scores are ordered by document id, descending, as trec_eval does, so that
# figures do not depend on the order of rows.
#
# Letters: N rows, M items, G queries.


DEPTH = 10
COMPARED_AT_A_TIME = 1 << 20
"""Pairs of rows that are compared at once: 8 MB."""


@dataclass(frozen=True)
class QueryRanking:
    """Figures of each query, float64 [G]; NaN where a query has none (no relevant item for nDCG; scores or grades all
    equal for tau).
    """

    ndcg: np.ndarray
    tau: np.ndarray
    bad_case: np.ndarray


def rank_queries(
    query_N: np.ndarray,
    doc_N: np.ndarray,
    score_N: np.ndarray,
    gold_N: np.ndarray,
    *,
    num_queries: int,
    depth: int = DEPTH,
) -> QueryRanking:
    """nDCG@10, Kendall tau-b and bad cases by query, over the items given.

    Args:
        query_N: 0..G-1.
        doc_N: documents, numbered in the order of their ids' text; one that comes again within its query is one item
            whose score and gold are the means of its rows.
        score_N: higher is better.
        gold_N: grades, 0 is irrelevant.
    """
    query_M, doc_M, score_M, gold_M = _items(query_N, doc_N, score_N, gold_N)
    size_G = np.bincount(query_M, minlength=num_queries)
    order = np.lexsort((-doc_M, -score_M, query_M))
    # query_M[order] ascends, so places run on in each
    place_M = np.arange(len(order)) - (np.cumsum(size_G) - size_G)[query_M[order]]
    top = order[place_M < depth]
    discount_T = 1 / np.log2(place_M[place_M < depth] + 2)
    query_T = query_M[top]
    gain_M = np.floor(gold_M + 0.5)
    best = np.lexsort((-gain_M, query_M))[place_M < depth]
    dcg_G = np.bincount(query_T, gain_M[top] * discount_T, minlength=num_queries)
    ideal_G = np.bincount(query_T, gain_M[best] * discount_T, minlength=num_queries)
    bad_G = np.bincount(query_T, gold_M[top] < 0.5, minlength=num_queries) > 0
    return QueryRanking(
        dcg_G / np.where(ideal_G > 0, ideal_G, np.nan),
        tau_by_query(query_M, score_M, gold_M, num_queries=num_queries),
        np.where(size_G > 0, bad_G, np.nan),
    )


def random_order(
    query_N: np.ndarray, doc_N: np.ndarray, gold_N: np.ndarray, *, num_queries: int, depth: int = DEPTH
) -> QueryRanking:
    """What `rank_queries` gives for a random order of each query's items, on average over all orders: exact."""
    query_M, _, _, gold_M = _items(query_N, doc_N, gold_N, gold_N)
    ndcg_G, tau_G, bad_G = np.full((3, num_queries), np.nan)
    for query, rows in enumerate(rows_by_group(query_M, num_queries)):
        size = min(len(rows), depth)
        gain_M, discount_T = np.floor(gold_M[rows] + 0.5), 1 / np.log2(np.arange(size) + 2)
        ideal = np.sort(gain_M)[::-1][:size] @ discount_T
        if ideal > 0:
            ndcg_G[query] = gain_M.mean() * discount_T.sum() / ideal
        if len(rows) and np.ptp(gold_M[rows]) > 0:
            tau_G[query] = 0.0
        if len(rows):
            left_T = len(rows) - np.arange(size)
            good_T = left_T - (gold_M[rows] < 0.5).sum()
            bad_G[query] = 1 - (np.clip(good_T, 0, None) / left_T).prod()
    return QueryRanking(ndcg_G, tau_G, bad_G)


def _items(
    query_N: np.ndarray, doc_N: np.ndarray, score_N: np.ndarray, gold_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows as items, one for each document of a query: query, document, mean score, mean grade."""
    pair_N = query_N * (int(doc_N.max(initial=0)) + 1) + doc_N
    if (np.diff(np.sort(pair_N)) > 0).all():
        return query_N, doc_N, score_N, gold_N.astype(np.float64)
    _, first_M, item_N = np.unique(pair_N, return_index=True, return_inverse=True)
    count_M = np.bincount(item_N)
    return (
        query_N[first_M],
        doc_N[first_M],
        np.bincount(item_N, score_N) / count_M,
        np.bincount(item_N, gold_N) / count_M,
    )


def tau_by_query(query_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray, *, num_queries: int) -> np.ndarray:
    """Kendall tau-b of two scores over the rows of each query: float64 [G], NaN where either score is the same
    throughout.
    """
    tau_G = np.full(num_queries, np.nan)
    for query, rows in enumerate(rows_by_group(query_N, num_queries)):
        agreement, differ = 0.0, np.zeros(2)
        step = max(1, COMPARED_AT_A_TIME // max(1, len(rows)))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]  # against all rows of the query, so that every pair counts twice
            first, second = (np.sign(np.subtract.outer(one[some], one[rows])) for one in (first_N, second_N))
            agreement += (first * second).sum()
            differ += np.count_nonzero(first), np.count_nonzero(second)
        if differ.all():
            tau_G[query] = agreement / np.sqrt(differ).prod()
    return np.asarray(np.clip(tau_G, -1.0, 1.0))


def rows_by_group(group_N: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Row numbers of each group, ascending."""
    order = np.argsort(group_N, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_N, minlength=num_groups))[:-1])


def cut_names(grades: int) -> list[str]:
    """The cuts of a scale: `0/12` and `01/2` for three grades."""
    digits = "".join(map(str, range(grades)))
    return [f"{digits[:cut]}/{digits[cut:]}" for cut in range(1, grades)]


def auc(score_N: np.ndarray, is_relevant_N: np.ndarray) -> float:
    """Area under the ROC curve: the share of (relevant, other) pairs in the right order, ties a half; NaN where only
    one kind is there.
    """
    relevant, other = score_N[is_relevant_N], np.sort(score_N[~is_relevant_N])
    if not len(relevant) or not len(other):
        return float("nan")
    won = np.searchsorted(other, relevant, side="left").sum() + np.searchsorted(other, relevant, side="right").sum()
    return float(won / 2 / (len(relevant) * len(other)))
