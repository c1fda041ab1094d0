"""How labels order the documents of a query: nDCG@10, Kendall tau, bad cases, and the AUC of graded distributions.

An item is one document of a query. Equal scores are ordered by document id, descending, as trec_eval does, so that figures
do not depend on the order of rows.

Letters: N rows, G groups, K grades, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manifests.extras import require
from manifests.metrics.agreement import EXTRA, PURPOSE
from manifests.metrics.bootstrap import Statistic

DEPTH = 10


@dataclass(frozen=True)
class QueryRanking:
    """Figures of each query, float64 [G]; NaN where a query has none (no relevant item for nDCG; scores or grades all equal for tau)."""

    ndcg: np.ndarray
    tau: np.ndarray
    bad_case: np.ndarray


def rank_queries(
    query_N: np.ndarray, doc_N: Sequence[str], score_N: np.ndarray, gold_N: np.ndarray, *, num_queries: int, depth: int = DEPTH
) -> QueryRanking:
    """nDCG@10, Kendall tau-b and bad cases by query, over the items given.

    Args:
        query_N: 0..G-1.
        doc_N: ids; an id that comes again within its query is one item whose score and gold are the means of its rows.
        score_N: higher is better.
        gold_N: grades, 0 is irrelevant.
    Raises:
        MissingExtraError: ir_measures or scipy is absent.
    """
    stats = require("scipy.stats", extra=EXTRA, purpose=PURPOSE)
    ndcg_G, tau_G, bad_G = (np.full(num_queries, np.nan) for _ in range(3))
    run: dict[str, dict[str, float]] = {}
    qrels: dict[str, dict[str, int]] = {}
    for query, rows in enumerate(rows_by_group(query_N, num_queries)):
        if not len(rows):
            continue
        docs, scores, golds = _items([doc_N[row] for row in rows], score_N[rows], gold_N[rows])
        order = sorted(range(len(docs)), key=lambda item: (scores[item], docs[item].encode("utf-8", "replace")), reverse=True)
        bad_G[query] = any(golds[item] < 0.5 for item in order[:depth])
        if np.ptp(scores) > 0 and np.ptp(golds) > 0:
            tau_G[query] = stats.kendalltau(scores, golds, variant="b").statistic
        if golds.max() > 0:
            # ranks instead of scores: trec_eval keeps 32 bits of a score, which would tie what differs
            run[str(query)] = {str(item): float(len(order) - place) for place, item in enumerate(order)}
            qrels[str(query)] = {str(item): int(np.floor(gold + 0.5)) for item, gold in enumerate(golds)}
    if run:
        measures = require("ir_measures", extra=EXTRA, purpose=PURPOSE)
        for found in measures.iter_calc([measures.nDCG @ depth], qrels, run):
            if max(qrels[found.query_id].values()) > 0:
                ndcg_G[int(found.query_id)] = found.value
    return QueryRanking(ndcg_G, tau_G, bad_G)


def _items(docs: list[str], scores: np.ndarray, golds: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Rows of one query as items: one an id, scores and grades averaged over its rows."""
    if len(set(docs)) == len(docs):
        return docs, scores, golds.astype(float)
    names = sorted(set(docs))
    place = {name: number for number, name in enumerate(names)}
    index = np.array([place[doc] for doc in docs])
    count = np.bincount(index)
    return names, np.bincount(index, scores) / count, np.bincount(index, golds) / count


def rows_by_group(group_N: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Row numbers of each group, ascending."""
    order = np.argsort(group_N, kind="stable")
    return np.split(order, np.cumsum(np.bincount(group_N, minlength=num_groups))[:-1])


def cut_names(grades: int) -> list[str]:
    """The cuts of a scale: `0/12` and `01/2` for three grades."""
    digits = "".join(map(str, range(grades)))
    return [f"{digits[:cut]}/{digits[cut:]}" for cut in range(1, grades)]


def auc(score_N: np.ndarray, is_relevant_N: np.ndarray) -> float:
    """Area under the ROC curve, by scikit-learn; NaN where only one kind is there.

    Raises:
        MissingExtraError: scikit-learn is absent.
    """
    if is_relevant_N.all() or not is_relevant_N.any():
        return float("nan")
    return float(require("sklearn.metrics", extra=EXTRA, purpose=PURPOSE).roc_auc_score(is_relevant_N, score_N))


def auc_statistic(name: str, score_N: np.ndarray, is_relevant_N: np.ndarray, group_N: np.ndarray) -> Statistic:
    """AUC of weighted rows, for many weightings at once: the share of (relevant, other) pairs in the right order, ties a half.

    The order never changes, so each relevant row's place among the others is looked up once; a resample then costs one running sum.
    """
    order = np.argsort(score_N, kind="stable")
    relevant, other = order[is_relevant_N[order]], order[~is_relevant_N[order]]
    first = np.searchsorted(score_N[other], score_N[relevant], side="left")
    last = np.searchsorted(score_N[other], score_N[relevant], side="right")
    relevant_group, other_group = group_N[relevant], group_N[other]

    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        relevant_R = weight_RG[:, relevant_group]
        below_R = np.zeros((len(weight_RG), len(other) + 1))
        np.cumsum(weight_RG[:, other_group], axis=1, out=below_R[:, 1:])
        won_R = (np.einsum("rn,rn->r", relevant_R, below_R[:, first]) + np.einsum("rn,rn->r", relevant_R, below_R[:, last])) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            return {name: won_R / (relevant_R.sum(1) * below_R[:, -1])}

    return statistic
