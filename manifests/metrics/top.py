"""Figures of the top k of a system's ranking, query by query: nDCG, precision, reciprocal rank and bad documents.

Only judged documents count: a document without a grade is passed over, and the next takes its place (the condensed list
of Sakai 2007, `trec_eval -J`).

Letters: N ranked rows, M judged ones, P judged pairs, G queries.
"""

from dataclasses import dataclass

import numpy as np

from relabel.manifests.metrics.metric import dcg_by_query, ideal_dcg, places_in_query

NDCG = "ndcg"
PRECISION = "p"
RECIPROCAL_RANK = "rr"
BAD = "bad"
FIGURES = (NDCG, PRECISION, RECIPROCAL_RANK, BAD)
"""In the order in which they are shown; of bad documents fewer are better."""


@dataclass(frozen=True)
class Cut:
    """What is looked at.

    Args:
        k: documents of a query.
        relevant: the least grade that precision and reciprocal rank take for relevant.
    """

    k: int
    relevant: int


def ideal_gains(query_P: np.ndarray, grade_P: np.ndarray, *, num_queries: int, cut: Cut) -> np.ndarray:
    """The DCG of the best order of each query's judged documents, float64 [G].

    Args:
        query_P: of each judged pair, 0..G-1.
    """
    return ideal_dcg(query_P, grade_P, num_queries=num_queries, depth=cut.k)


def expected_grades(label_M: np.ndarray, grade_M: np.ndarray, label_U: np.ndarray) -> np.ndarray:
    """What humans would give documents that they did not grade, by a judge's labels: the mean of what they gave the
    documents with that label; between labels of which they graded none, interpolated. float64 [U].

    Args:
        label_M, grade_M: of the documents that both graded, one at least.
        label_U: the judge's labels of the others.
    """
    labels, place_M = np.unique(label_M, return_inverse=True)
    means = np.bincount(place_M, weights=grade_M) / np.bincount(place_M)
    return np.asarray(np.interp(label_U, labels, means))


def top_figures(query_N: np.ndarray, grade_N: np.ndarray, ideal_G: np.ndarray, *, cut: Cut) -> dict[str, np.ndarray]:
    """Each of `FIGURES` by query, float64 [G]; 0 where the system returns nothing, or nothing is relevant.

    nDCG has linear gains and discounts by log2(place + 1), as trec_eval's; precision and bad documents (grade 0) are
    shares of k places.

    Args:
        query_N: of each ranked row, 0..G-1, ascending; the rows of a query with the best document first.
        grade_N: float64, NaN where the document is not judged.
        ideal_G: of `ideal_gains`.
    """
    num_queries = len(ideal_G)
    is_judged_N = ~np.isnan(grade_N)
    query_M = query_N[is_judged_N]
    grade_M = grade_N[is_judged_N]
    place_M = places_in_query(query_M, num_queries)
    is_top_M = place_M < cut.k
    is_relevant_M = is_top_M & (grade_M >= cut.relevant)
    gain_G = dcg_by_query(query_M, grade_M, num_queries=num_queries, depth=cut.k)
    first_G = np.full(num_queries, np.inf)
    np.minimum.at(first_G, query_M[is_relevant_M], place_M[is_relevant_M] + 1)
    return {
        NDCG: np.minimum(gain_G / np.where(ideal_G > 0, ideal_G, np.inf), 1.0),
        PRECISION: np.bincount(query_M[is_relevant_M], minlength=num_queries) / cut.k,
        RECIPROCAL_RANK: 1 / first_G,
        BAD: np.bincount(query_M[is_top_M & (grade_M <= 0)], minlength=num_queries) / cut.k,
    }
