"""How labels order the documents of a query, for all queries at once: nDCG@10, Kendall tau, bad cases; and the area
under the ROC curve.

An item is one document of a query. Equal scores are ordered by document id, descending, as trec_eval does, so that
figures do not depend on the order of rows.

Letters: N rows, M items, G queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEPTH = 10


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
    # first, while nothing else is held: of a million rows it takes the most memory of all
    tau_G = tau_by_query(query_M, score_M, gold_M, num_queries=num_queries)
    size_G = np.bincount(query_M, minlength=num_queries)
    order = np.argsort(_places(query_M, -score_M).astype(np.int64) * (int(doc_M.max(initial=0)) + 1) - doc_M)
    # query_M[order] ascends, so places run on in each
    place_M = np.arange(len(order)) - (np.cumsum(size_G) - size_G)[query_M[order]]
    top = order[place_M < depth]
    discount_T = 1 / np.log2(place_M[place_M < depth] + 2)
    query_T = query_M[top]
    gain_M = np.floor(gold_M + 0.5)
    best = np.argsort(_places(query_M, -gain_M))[place_M < depth]
    dcg_G = np.bincount(query_T, gain_M[top] * discount_T, minlength=num_queries)
    ideal_G = np.bincount(query_T, gain_M[best] * discount_T, minlength=num_queries)
    bad_G = np.bincount(query_T, gold_M[top] < 0.5, minlength=num_queries) > 0
    return QueryRanking(
        dcg_G / np.where(ideal_G > 0, ideal_G, np.nan),
        tau_G,
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

    All queries at once, in O(N log N): pairs in the wrong order are the inversions of the second score once rows are
    sorted by the first (Knight 1966), counted bit by bit of its rank.
    """
    size_G = np.bincount(query_N, minlength=num_queries)
    pairs_G = size_G * (size_G - 1) // 2
    first_N, second_N = (_places(query_N, score_N) for score_N in (first_N, second_N))
    both_N = _places(first_N, second_N)
    ties = [_tied_pairs(query_N, place_N, num_queries) for place_N in (first_N, second_N, both_N)]
    order = np.argsort(both_N)
    query_N, second_N = query_N[order], second_N[order]
    starts = np.minimum.reduceat(second_N, np.flatnonzero(np.diff(query_N, prepend=-1))) if len(order) else second_N
    wrong_G = _inversions(query_N, second_N - np.repeat(starts, size_G[size_G > 0]), num_queries)
    with np.errstate(divide="ignore", invalid="ignore"):
        tau_G = (
            (pairs_G - ties[0] - ties[1] + ties[2] - 2 * wrong_G)
            / np.sqrt(pairs_G - ties[0])
            / np.sqrt(pairs_G - ties[1])
        )
    return np.asarray(np.clip(tau_G, -1.0, 1.0))


def _places(query_N: np.ndarray, score_N: np.ndarray) -> np.ndarray:
    """The place of each row's (query, score) among the different ones, queries first, from 0: int32 [N]."""
    # twice whole numbers, which are sorted three times as fast as two keys are
    level_N = _dense_ranks(score_N)
    return _dense_ranks(query_N.astype(np.int64) * (int(level_N.max(initial=0)) + 1) + level_N)


def _dense_ranks(value_N: np.ndarray) -> np.ndarray:
    """The place of each value among the different ones, from 0: int32 [N]; with half the memory of `np.unique`."""
    order = np.argsort(value_N)
    sorted_N = value_N[order]
    rank_N = np.zeros(len(order), dtype=np.int32)
    rank_N[order[1:]] = np.cumsum(sorted_N[1:] != sorted_N[:-1], dtype=np.int32)
    return rank_N


def _tied_pairs(query_N: np.ndarray, place_N: np.ndarray, num_queries: int) -> np.ndarray:
    """Pairs of rows with the same place, of each query: int64 [G]. No place is left out, and each is of one query."""
    count = np.bincount(place_N)
    query = np.empty(len(count), dtype=np.int64)
    query[place_N] = query_N
    return np.bincount(query, count * (count - 1) // 2, minlength=num_queries).astype(np.int64)


def _inversions(query_N: np.ndarray, rank_N: np.ndarray, num_queries: int) -> np.ndarray:
    """Pairs of rows of a query of which the earlier has the higher rank: int64 [G].

    Two ranks differ first at some bit. Rows are kept together by query and by the bits above, in their order; then a 0
    after a 1 is one.

    Args:
        query_N: ascending.
        rank_N: int32 [N]; put in order of itself.
    """
    wrong_G = np.zeros(num_queries, dtype=np.int64)
    for bit in reversed(range(int(rank_N.max(initial=0)).bit_length())):
        is_one_N = (rank_N >> bit) & 1
        ones_N = np.cumsum(is_one_N, dtype=np.int32) - is_one_N  # before each row
        above_N = rank_N >> (bit + 1)
        starts = np.flatnonzero(np.append(True, (query_N[1:] != query_N[:-1]) | (above_N[1:] != above_N[:-1])))
        starts = starts.astype(np.int32)
        sizes = np.diff(starts, append=np.int32(len(rank_N)))
        here_N = ones_N - np.repeat(ones_N[starts], sizes)
        wrong_G += np.bincount(query_N, np.where(is_one_N == 0, here_N, 0), minlength=num_queries).astype(np.int64)
        # zeros before ones, each in their order
        zeros_N = np.repeat(sizes - np.add.reduceat(is_one_N, starts), sizes)
        one_N, zero_N = np.repeat(starts, sizes) + zeros_N + here_N, np.arange(len(rank_N), dtype=np.int32) - here_N
        place_N = np.where(is_one_N, one_N, zero_N)
        rank_N[place_N] = rank_N.copy()
    return wrong_G


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
