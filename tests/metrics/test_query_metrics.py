"""Metrics of `evidence-set` and `review`, by numbers counted by hand and by loops; what is undefined, and what is
refused.
"""

import itertools
import math
from typing import Any

import bm25s
import ir_measures
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.dummy import DummyClassifier

from relabel.manifests.evidence_sets import evidence_reward, exact_match, hit_at_1, normal_answer, over_budget, set_f1
from relabel.manifests.labels import ids_of
from relabel.manifests.metrics.evaluation import (
    BM25_B,
    BM25_K1,
    Baselines,
    Evaluation,
    baselines,
    bm25,
    evaluate,
    not_beaten,
)
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.metric import random_order
from tests.strategies import texts

KINDS = {
    "selected": pa.list_(pa.int16()),
    "num_chunks": pa.int32(),
    "selected_tokens": pa.int32(),
    "over_budget": pa.float32(),
    "sufficient_probs": pa.list_(pa.float32()),
    "gold_chunks": pa.large_list(pa.int64()),
    "gold_sufficient": pa.bool_(),
    "answers": pa.large_list(pa.large_string()),
    "gold_answers": pa.large_list(pa.large_string()),
}


def judged_of(queries: list[int], rows: list[dict[str, Any]]) -> Judged:
    """Rows with the columns that the first of them names; `label` and `gold` are grades."""
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in KINDS.items() if name in rows[0]}
    gold, labels = (np.array([row.get(name, 0) for row in rows]) for name in ("gold", "label"))
    count = max(queries) + 1
    names = ids_of(f"q{number}" for number in range(count))
    docs = np.arange(len(rows))
    return Judged(2, gold, labels, np.array(queries), count, docs, None, None, None, names, columns)


def chosen(selected: list[int] | None, count: int, gold: list[int] | None, **more: Any) -> dict[str, Any]:
    """A row of `evidence-set`, of ten tokens a chunk."""
    numbers = selected or []
    tokens = 10 * len(set(numbers))
    cost = over_budget(len(numbers), count)
    held = {"selected": selected, "num_chunks": count, "selected_tokens": tokens, "over_budget": cost}
    return {**held, "gold_chunks": gold, **more}


def evaluated(queries: list[int], rows: list[dict[str, Any]], resamples: int = 0) -> Evaluation:
    return evaluate(judged_of(queries, rows), resamples=resamples)


def test_rows_without_gold_chunks_and_rows_of_other_labelers_are_left_out() -> None:
    rows = [chosen([1], 1, None), chosen([1], 1, [1]), chosen([1], 1, None), chosen(None, 0, [1])]
    found = evaluated([0, 0, 1, 2], rows).figures
    assert (found["evidence_f1"].value, found["evidence_f1"].over) == (1.0, 1)
    assert (found["chunks_mean"].value, found["chunks_mean"].over) == (1.5, 2)
    assert evaluated([0], [chosen([1], 1, None)]).figures["evidence_f1"].value is None


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("  The  Beatles. ", "the beatles"),
        ("“Élan”—vital", "élanvital"),
        ("E\u0301lan", "\u00e9lan"),
        ("?!", "?!"),
        ("«北京»。", "北京"),
        ("score>\u0301", "scor\u00e9"),
    ],
)
def test_answers_are_compared_in_lower_case_without_punctuation(answer: str, normal: str) -> None:
    assert normal_answer(answer) == normal


@given(texts())
def test_the_normal_form_of_a_normal_form_is_itself(answer: str) -> None:
    once = normal_answer(answer)
    assert normal_answer(once) == once
    assert hit_at_1([answer], [answer]) == exact_match([answer], [answer]) == 1.0


def test_exact_match_wants_all_gold_answers_and_hit_at_1_any() -> None:
    assert [exact_match(given, ["a", "B"]) for given in (["b.", "A"], ["a", "b", "c"], ["a"], [])] == [1, 1, 0, 0]
    assert [hit_at_1(given, ["a", "B"]) for given in (["b!", "x"], ["x", "a"], [])] == [1, 0, 0]
    rows = [
        chosen([1], 1, [1], answers=["b", "a"], gold_answers=["A", "B"]),
        chosen([1], 1, [1], answers=None, gold_answers=None),  # of query 0, too
        chosen([1], 1, [1], answers=["a"], gold_answers=["A", "B"]),
        chosen([1], 1, [1], answers=[], gold_answers=["A"]),
        chosen([1], 1, [1], answers=["a"], gold_answers=[]),
        chosen([1], 1, [1], answers=None, gold_answers=["A"]),
    ]
    found = evaluated([0, 0, 1, 2, 3, 4], rows).figures
    assert (found["exact_match"].value, found["exact_match"].over) == (pytest.approx(1 / 3), 3)
    assert found["hit@1"].value == pytest.approx(2 / 3)


# RES-RAG's reward and its parts, by numbers worked out by hand.


CHOSEN, GOLD, COUNTS = ([1, 2], [3, 4, 5, 6]), ([1], []), (4, 9)


def test_the_golden_numbers() -> None:
    assert [over_budget(len(one), count) for one, count in zip(CHOSEN, COUNTS, strict=True)] == [0.0, 0.5]
    assert evidence_reward(CHOSEN, COUNTS, GOLD, 0.5) == pytest.approx((0.8333, 1.0, 0.3333, 0.5), abs=5e-5)
    assert evidence_reward(CHOSEN, COUNTS, GOLD, None) == pytest.approx((-1.1667, -1.0, 0.3333, 0.5), abs=5e-5)


@pytest.mark.parametrize(
    ("selected", "count", "cost"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (2, 1, 1),
        (1, 3, 0),
        (2, 3, 0.5),
        (3, 9, 0),
        (4, 9, 0.5),
        (9, 9, 0.5),
        (10, 9, 1),
    ],
)
def test_cost_steps_at_the_root_and_at_all_of_the_chunks(selected: int, count: int, cost: float) -> None:
    assert over_budget(selected, count) == cost


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_root_is_exact(selected: int, count: int) -> None:
    assert (over_budget(selected, count) == 0.0) is (selected**2 <= count)


def test_f1_of_empty_sets() -> None:
    assert (set_f1([], []), set_f1([1], []), set_f1([], [1])) == (1.0, 0.0, 0.0)
    assert set_f1([1, 1, 2], [2, 3]) == 0.5


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 9)), min_size=1, max_size=4),
    st.none() | st.floats(0, 1),
)
def test_the_reward_stays_within_its_bounds(held: list[tuple[list[int], int]], answer: float | None) -> None:
    found = evidence_reward([one for one, _ in held], [count for _, count in held], [[] for _ in held], answer).reward
    assert math.isfinite(found)
    assert -5.0 <= found <= 5.0


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        evidence_reward([[1]], [4, 9], [[1]], 1.0)


# The metrics of `route`, each against a count by hand; what is undefined, and rows of other labelers.


ROUTE_KINDS = {
    "answer_ids": pa.list_(pa.int32()),
    "expand_ids": pa.list_(pa.int32()),
    "refused": pa.bool_(),
    "expelled": pa.int32(),
    "gold_answer_ids": pa.large_list(pa.int64()),
    "gold_expand_ids": pa.large_list(pa.int64()),
}
NAMES = ("answer_f1", "expand_precision", "refusal_accuracy", "expelled_mean", "collapse_rate")
Row = tuple[list[int] | None, list[int] | None, bool | None, int | None, list[int] | None, list[int] | None]

ROWS: list[Row] = [
    ([3, 5], [], False, 0, [5], []),  # F1 2/3
    ([], [7, 8], False, 1, [9, 10], [8]),  # F1 0, precision 1/2
    ([4], [], False, 2, [4], [2]),  # F1 1, precision 0: none was to be unfolded
    ([], [], True, 0, [], []),  # refused, rightly
    ([6], [], False, 0, [], []),  # gold refuses, it answers
    ([], [], False, 0, [], []),  # collapsed; has neither
    ([], [], False, 3, None, None),  # gold says nothing; all lines were expelled
    (None, None, None, None, [1], [1]),  # of another labeler
]


def values(rows: list[Row], without: str = "") -> dict[str, tuple[float | None, int]]:
    columns = {
        name: pa.array([row[place] for row in rows], kind)
        for place, (name, kind) in enumerate(ROUTE_KINDS.items())
        if name != without
    }
    count = np.arange(len(rows))
    judged = Judged(3, 0 * count, 0 * count, count, len(rows), count, None, None, None, columns=columns)
    figures: dict[str, Any] = evaluate(judged, resamples=0).figures
    return {name: (figures[name].value, figures[name].over) for name in NAMES if name in figures}


def test_each_is_what_a_count_by_hand_gives() -> None:
    assert values(ROWS) == {
        "answer_f1": (pytest.approx((2 / 3 + 0 + 1) / 3), 3),
        "expand_precision": (pytest.approx((1 / 2 + 0) / 2), 2),
        "refusal_accuracy": (pytest.approx(2 / 3), 3),
        "expelled_mean": (pytest.approx(6 / 7), 7),
        "collapse_rate": (pytest.approx(1 / 7), 7),
    }


def test_what_gold_does_not_say_is_not_measured() -> None:
    assert values(ROWS, "gold_answer_ids").keys() == {"expand_precision", "expelled_mean", "collapse_rate"}
    assert values(ROWS, "gold_expand_ids").keys() == {"answer_f1", "expelled_mean", "collapse_rate"}
    assert values(ROWS[5:6])["answer_f1"] == (None, 0)
    assert values(ROWS[7:])["collapse_rate"] == (None, 0)


# Baselines computed a second time: by scikit-learn, ir_measures over all orders, and bm25s.


GRADES = 3
TEXTS = ["red shoe", "a red running shoe, size 9", "blue kettle", "Shoes: RED, red, red", "", "the kettle of the shoe"]


def rows(count: int = 40, queries: int = 5, *, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, GRADES, count), np.arange(count) % queries, np.arange(count)


def test_a_constant_grade_has_the_figures_of_scikit_learns_most_frequent_class() -> None:
    gold, query, doc = rows()
    found = baselines(Judged(GRADES, gold, gold, query, 5, doc, None, None, None))
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


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"accuracy": 0.6, "kappa": 0.1, "ndcg@10": 0.7}, []),
        ({"accuracy": 0.4, "kappa": 0.1, "ndcg@10": 0.7}, ["accuracy"]),
        ({"accuracy": 0.5, "kappa": 0.0, "ndcg@10": 0.6}, ["accuracy", "kappa", "ndcg@10"]),
        ({"rows": 0}, []),
    ],
)
def test_what_a_student_does_not_beat_is_named(figures: dict[str, Any], said: list[str]) -> None:
    bounds = Baselines(1, {"accuracy": 0.5, "kappa": 0.0}, {}, {"ndcg@10": 0.65})
    assert [text.split()[0] for text in not_beaten(figures, bounds)] == said
