"""Baselines computed a second time: by scikit-learn, ir_measures over all orders, and bm25s."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import bm25s
import ir_measures
import numpy as np
import pytest
from sklearn import metrics
from sklearn.dummy import DummyClassifier

from relabel.manifests.metrics.evaluation import (
    BM25_B,
    BM25_K1,
    Baselines,
    baselines,
    baselines_with_intervals,
    bm25,
    evaluate,
    not_beaten,
)
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.measures import random_order

GRADES = 3
TEXTS = ["red shoe", "a red running shoe, size 9", "blue kettle", "Shoes: RED, red, red", "", "the kettle of the shoe"]


def rows(count: int = 40, queries: int = 5, *, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, GRADES, count), np.arange(count) % queries, np.arange(count)


def test_a_constant_grade_has_the_figures_of_scikit_learns_most_frequent_class() -> None:
    gold, query, doc = rows()
    found = baselines(gold, query, doc, grades=GRADES, num_queries=5)
    dummy = DummyClassifier(strategy="most_frequent").fit(np.zeros((len(gold), 1)), gold)
    labels = dummy.predict(np.zeros((len(gold), 1)))
    assert found.grade == labels[0]
    for name, value in {
        "accuracy": metrics.accuracy_score(gold, labels),
        "f1_macro": metrics.f1_score(gold, labels, average="macro", zero_division=0.0),
        "kappa": metrics.cohen_kappa_score(gold, labels),
        "mean_absolute_error": metrics.mean_absolute_error(gold, labels),
        "brier": np.square(np.bincount(gold) / len(gold) - np.eye(GRADES)[gold]).sum(1).mean(),
    }.items():
        assert found.constant[name] == pytest.approx(value), name


@pytest.mark.parametrize("depth", [2, 10])
def test_a_random_order_has_the_mean_of_all_orders(depth: int) -> None:
    gold, query, doc = rows(15, 3, seed=4)
    gold[query == 2] = [0, 0, 0, 0, 0]
    found = random_order(query, doc, gold, num_queries=3, depth=depth)
    for number in range(2):
        held = gold[query == number]
        qrels = [ir_measures.Qrel("q", f"d{place}", int(grade)) for place, grade in enumerate(held)]
        ndcgs, bad = [], []
        for order in itertools.permutations(range(len(held))):
            run = [ir_measures.ScoredDoc("q", f"d{doc}", -place) for place, doc in enumerate(order)]
            ndcgs.append(ir_measures.calc_aggregate([ir_measures.nDCG @ depth], qrels, run)[ir_measures.nDCG @ depth])
            bad.append(any(held[doc] == 0 for doc in order[:depth]))
        assert found.ndcg[number] == pytest.approx(np.mean(ndcgs))
        assert found.bad_case[number] == pytest.approx(np.mean(bad))
    assert np.isnan(found.ndcg[2])
    assert (found.tau[:2] == 0).all()


def test_lexical_scores_are_those_of_bm25s() -> None:
    pairs = [(query, text) for query in ("red shoe", "the kettle", "nothing") for text in TEXTS]
    found = bm25(pairs)
    corpus = [text.casefold().replace(":", "").replace(",", "").split() for text in TEXTS]
    other = bm25s.BM25(method="lucene", k1=BM25_K1, b=BM25_B)
    other.index(corpus, show_progress=False)
    wanted = [score for query in ("red shoe", "the kettle", "nothing") for score in other.get_scores(query.split())]
    assert found == pytest.approx(np.array(wanted) * (BM25_K1 + 1), abs=1e-5)


def test_baselines_have_the_intervals_of_labels_that_say_the_same() -> None:
    gold, query, doc = rows()
    score = np.random.default_rng(2).random(len(gold)) * 2 + gold
    judged = Judged(GRADES, gold, gold, query, 5, doc, None, None, None, lexical=score)
    found = baselines_with_intervals(judged)
    assert replace(found, intervals=None) == evaluate(judged, resamples=0).baselines
    constant = evaluate(replace(judged, labels=np.full_like(gold, found.grade))).figures["accuracy"]
    assert found.intervals["constant"]["accuracy"] == (constant.low, constant.high)
    assert found.text("accuracy") == f"{constant.value:.4f} constant ({constant.low:.4f} to {constant.high:.4f})"
    order = evaluate(replace(judged, probs=np.stack([1 - score / 4, 0 * score, score / 4], 1))).figures
    for name in ("ndcg@10", "auc_01/2", "kendall_tau"):
        assert found.intervals["lexical"][name] == pytest.approx((order[name].low, order[name].high))
    low, high = found.intervals["random"]["ndcg@10"]
    assert low < found.random["ndcg@10"] < high
    assert "kappa" not in found.intervals["constant"]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"accuracy": 0.6, "kappa": 0.1, "ndcg@10": 0.7}, []),
        ({"accuracy": 0.4, "kappa": 0.1, "ndcg@10": 0.7}, ["accuracy"]),
        ({"accuracy": 0.5, "kappa": 0.0, "ndcg@10": 0.6}, ["kappa", "ndcg@10"]),
        ({"rows": 0}, []),
    ],
)
def test_what_a_student_does_not_beat_is_named(figures: dict[str, Any], said: list[str]) -> None:
    bounds = Baselines(1, {"accuracy": 0.5, "kappa": 0.0}, {}, {"ndcg@10": 0.65})
    assert [text.split()[0] for text in not_beaten(figures, bounds)] == said
