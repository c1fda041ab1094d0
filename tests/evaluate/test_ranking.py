"""nDCG, tau, bad cases and AUC against ir_measures, scipy and loops."""

from __future__ import annotations

import math

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.metrics import measures
from relabel.manifests.metrics.measures import QueryRanking, auc, cut_names
from relabel.manifests.metrics.metric import Order, places_of
from relabel.manifests.schemas import codes_of, ids_of

# query, gold, score
ranked_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=50)


def rank_queries(query: np.ndarray, docs: list[str], score: np.ndarray, gold: np.ndarray, **kept: int) -> QueryRanking:
    """By ids as they are written."""
    return measures.rank_queries(query, codes_of(ids_of(docs))[0], score, gold, **kept)


def slow_ndcg(golds: list[int], depth: int = 10) -> float:
    """Gold in ranked order; linear gain, as trec_eval has it."""

    def dcg(gains: list[int]) -> float:
        return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains[:depth]))

    return dcg(golds) / dcg(sorted(golds, reverse=True))


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


@settings(max_examples=80, deadline=None)
@given(ranked_rows)
def test_ndcg_is_that_of_ir_measures_ties_included(rows: list[tuple[int, int, int]]) -> None:
    query, gold, score = (np.array(column) for column in zip(*rows, strict=True))
    docs = [f"d{(row * 7) % len(rows)}-{row}" for row in range(len(rows))]
    found = rank_queries(query, docs, score.astype(float), gold, num_queries=4)
    run = [ir_measures.ScoredDoc(str(q), doc, float(s)) for q, doc, s in zip(query, docs, score, strict=True)]
    qrels = [ir_measures.Qrel(str(q), doc, int(g)) for q, doc, g in zip(query, docs, gold, strict=True)]
    expected = {int(one.query_id): one.value for one in ir_measures.iter_calc([ir_measures.nDCG @ 10], qrels, run)}
    for number in range(4):
        mine = [row for row in range(len(rows)) if query[row] == number]
        if mine and gold[mine].max() > 0:
            assert found.ndcg[number] == pytest.approx(expected[number], abs=1e-9)
            order = sorted(mine, key=lambda row: (score[row], docs[row]), reverse=True)
            assert found.ndcg[number] == pytest.approx(slow_ndcg(gold[order].tolist()), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(ranked_rows, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_ranking(rows: list[tuple[int, int, int]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    query, gold, score = (np.array(column) for column in zip(*rows, strict=True))
    docs = [f"d{row % 5}" for row in range(len(rows))]
    here = rank_queries(query, docs, score.astype(float), gold, num_queries=4)
    there = rank_queries(
        query[order], [docs[row] for row in order], score[order].astype(float), gold[order], num_queries=4
    )
    for name in ("ndcg", "tau", "bad_case"):
        assert np.allclose(getattr(here, name), getattr(there, name), equal_nan=True), name


@settings(max_examples=60, deadline=None)
@given(ranked_rows)
def test_tau_is_tau_b_by_counting_pairs(rows: list[tuple[int, int, int]]) -> None:
    query, gold, score = (np.array(column) for column in zip(*rows, strict=True))
    found = rank_queries(query, [f"d{row}" for row in range(len(rows))], score.astype(float), gold, num_queries=4)
    for number in range(4):
        mine = np.flatnonzero(query == number)
        pairs = [(np.sign(score[i] - score[j]), np.sign(gold[i] - gold[j])) for i in mine for j in mine if i < j]
        untied = math.sqrt(sum(s != 0 for s, _ in pairs) * sum(g != 0 for _, g in pairs))
        if untied:
            assert found.tau[number] == pytest.approx(sum(float(s * g) for s, g in pairs) / untied)
        else:
            assert math.isnan(found.tau[number])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)
)
def test_auc_counts_pairs_in_order_weighted_or_not(rows: list[tuple[bool, int, int, int]]) -> None:
    relevant, score, group, _ = (np.array(column) for column in zip(*rows, strict=True))
    weights = np.array([[1, 1, 1, 1], [2, 0, 1, 3]], dtype=float)
    order = Order(score.astype(float), relevant, group, num_groups=4)
    found = order.weighted(weights, places_of(weights))
    for weight, (pairs, ours, others) in zip(weights, found, strict=True):
        won = total = 0.0
        for i in np.flatnonzero(relevant):
            for j in np.flatnonzero(~relevant):
                both = weight[group[i]] * weight[group[j]]
                total += both
                won += both * (1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
        assert (pairs, ours * others) == (won, total)
    plain = auc(score.astype(float), relevant)
    pairs, ours, others = found[0]
    assert math.isnan(plain) if not ours * others else plain == pytest.approx(pairs / (ours * others))


def test_cuts_are_named_as_the_papers_name_them() -> None:
    assert cut_names(3) == ["0/12", "01/2"]
    assert cut_names(4) == ["0/123", "01/23", "012/3"]
    assert cut_names(2) == ["0/1"]
