"""nDCG, tau and bad cases by hand, and nDCG against ir_measures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relabel.manifests.metrics import measures
from relabel.manifests.metrics.measures import QueryRanking
from relabel.manifests.schemas import codes_of, ids_of


def rank_queries(query: np.ndarray, docs: list[str], score: np.ndarray, gold: np.ndarray, **kept: int) -> QueryRanking:
    """By ids as they are written."""
    return measures.rank_queries(query, codes_of(ids_of(docs))[0], score, gold, **kept)


def test_a_query_worked_out_by_hand() -> None:
    found = rank_queries(
        np.zeros(3, dtype=int), ["a", "b", "c"], np.array([3.0, 2.0, 1.0]), np.array([0, 2, 1]), num_queries=1
    )
    ideal = 2 + 1 / math.log2(3)
    assert found.ndcg[0] == pytest.approx((2 / math.log2(3) + 1 / 2) / ideal)
    assert found.tau[0] == pytest.approx((1 - 2) / 3)  # of three pairs one is in order
    assert found.bad_case[0] == 1.0


def test_an_irrelevant_document_below_the_top_ten_is_no_bad_case() -> None:
    scores = np.arange(11, 0, -1).astype(float)
    docs = [f"d{number:02d}" for number in range(11)]
    golds = np.array([1] * 10 + [0])
    assert rank_queries(np.zeros(11, dtype=int), docs, scores, golds, num_queries=1).bad_case[0] == 0.0
    assert rank_queries(np.zeros(11, dtype=int), docs, -scores, golds, num_queries=1).bad_case[0] == 1.0


def test_queries_without_a_figure_have_none() -> None:
    query = np.array([0, 0, 1, 1, 3])
    found = rank_queries(
        query, ["a", "b"] * 2 + ["c"], np.array([1, 2, 5, 5, 1.0]), np.array([0, 0, 1, 2, 2]), num_queries=4
    )
    assert np.isnan(found.ndcg).tolist() == [True, False, True, False]  # no relevant document; none at all
    assert np.isnan(found.tau).tolist() == [True, True, True, True]  # equal grades, equal scores, nothing, one document
    assert found.bad_case.tolist()[:2] == [1.0, 0.0]
    assert math.isnan(found.bad_case[2])


def test_a_document_that_comes_twice_is_ranked_once() -> None:
    query = np.zeros(3, dtype=int)
    twice = rank_queries(query, ["a", "b", "a"], np.array([4.0, 2.0, 2.0]), np.array([1, 2, 1]), num_queries=1)
    once = rank_queries(query[:2], ["a", "b"], np.array([3.0, 2.0]), np.array([1, 2]), num_queries=1)
    assert twice.ndcg[0] == once.ndcg[0]
    assert twice.tau[0] == once.tau[0]
