"""Metrics of `evidence-set` and `review`, by numbers counted by hand and by loops; what is undefined, and what is
refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from relabel.manifests.errors import InputError
from relabel.manifests.labels import exact_match, hit_at_1, normal_answer, over_budget, set_f1
from relabel.manifests.metrics.evaluation import Evaluation, evaluate
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.metric import draw_weights
from relabel.manifests.schemas import ids_of
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


def values(queries: list[int], rows: list[dict[str, Any]]) -> dict[str, float | None]:
    return {name: figure.value for name, figure in evaluated(queries, rows).figures.items()}


def test_the_golden_numbers_of_two_documents() -> None:
    found = values([0, 0], [chosen([1, 2], 4, [1]), chosen([3, 4, 5, 6], 9, [])])
    assert (found["chunks_mean"], found["chunks_max"], found["tokens_mean"], found["tokens_max"]) == (6, 6, 60, 60)
    assert found["over_budget"] == 0.25  # φ = (0, 0.5): half of P at η = 2
    assert found["evidence_f1"] == pytest.approx(1 / 3)
    assert not {"exact_match", "hit@1", "sufficient_auc", "useful_precision"} & found.keys()


def test_a_query_counts_once_however_many_documents_it_has() -> None:
    """Query 0: F1 of 1, 1 (both empty) and 0; query 1: of 0.5. A chunk named twice is one chunk and twice the cost."""
    rows = [chosen([2, 2], 1, [2]), chosen([], 3, []), chosen([], 3, [1]), chosen([1, 3], 4, [3, 4])]
    found = evaluated([0, 0, 0, 1], rows).figures
    assert (found["chunks_mean"].value, found["chunks_max"].value) == (1.5, 2)
    assert (found["tokens_mean"].value, found["tokens_max"].value) == (15, 20)
    assert found["over_budget"].value == pytest.approx((1 / 3 + 0) / 2)
    assert found["evidence_f1"].value == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert {found[name].unit for name in ("chunks_max", "evidence_f1")} == {"queries"}
    assert found["evidence_f1"].over == 2


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
        ("U.S.A.", "usa"),
        ("“Élan”—vital", "élanvital"),
        ("E\u0301lan", "\u00e9lan"),
        ("$5", "5"),
        ("?!", "?!"),
        ("", ""),
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


def reviewed(label: int, gold: int, yes: float | None, is_enough: bool | None) -> dict[str, Any]:
    probs = None if yes is None else [1 - yes, yes]
    return {"label": label, "gold": gold, "sufficient_probs": probs, "gold_sufficient": is_enough}


def test_useful_documents_are_counted_query_by_query_and_an_empty_side_is_left_out() -> None:
    """Query 0 names one of two useful documents and one that is not; 1 names none; 2 has none that is useful."""
    pairs = [[(1, 1), (1, 0), (0, 1)], [(0, 1)], [(1, 0), (0, 0)], [(0, 0)]]
    queries = [query for query, held in enumerate(pairs) for _ in held]
    rows = [reviewed(label, gold, 0.5, None) for held in pairs for label, gold in held]
    found = evaluated(queries, rows)
    precision, recall = (found.figures[name] for name in ("useful_precision", "useful_recall"))
    assert (precision.value, precision.over) == ((1 / 2 + 0) / 2, 2)
    assert (recall.value, recall.over) == ((1 / 2 + 0) / 2, 2)
    assert "queries without a value, left out of useful: precision: 2" in found.notes
    assert (found.figures["sufficient_auc"].value, found.figures["sufficient_auc"].over) == (None, 0)


def test_sufficiency_counts_a_query_once_and_a_tie_for_half() -> None:
    said = [(0.9, True), (0.4, True), (0.4, False), (0.1, False), (0.2, None), (None, True)]
    rows = [reviewed(0, 0, *one) for one in said for _ in range(3)]
    found = evaluated([query for query in range(len(said)) for _ in range(3)], rows)
    assert (found.figures["sufficient_auc"].value, found.figures["sufficient_auc"].over) == (3.5 / 4, 4)
    assert "queries without a value, left out of AUC, sufficient: 2" in found.notes


def test_one_kind_of_query_alone_leaves_the_area_undefined() -> None:
    found = evaluated([0, 1], [reviewed(0, 0, 0.9, True), reviewed(0, 0, 0.2, True)], resamples=20).figures
    assert found["sufficient_auc"].value is None
    assert found["sufficient_auc"].low is None
    assert found["sufficient_auc"].undefined_resamples == 20


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("gold_sufficient", True, False), ("answers", ["a"], ["b"]), ("gold_answers", [], ["b"])],
)
def test_rows_of_a_query_that_differ_are_refused(name: str, first: Any, second: Any) -> None:
    held = {"answers": ["a"], "gold_answers": ["a"]}
    pair = [{**chosen([1], 1, [1], **held), **reviewed(1, 1, 0.5, True), name: value} for value in (first, second)]
    with pytest.raises(InputError, match=rf"column `{name}`: rows of query q1 differ: .* and .*\. Give all rows"):
        evaluated([0, 1, 1], [pair[0], *pair])


def test_the_intervals_are_those_of_a_loop_over_resampled_queries() -> None:
    random = np.random.default_rng(3)
    queries = np.repeat(np.arange(12), 3).tolist()
    sufficient = {query: bool(random.random() < 0.5) for query in range(12)}
    yes = {query: float(np.float32(random.integers(0, 9) / 8)) for query in range(12)}
    rows = [
        chosen(random.integers(1, 5, random.integers(0, 4)).tolist(), 4, random.integers(1, 5, 2).tolist())
        | reviewed(int(random.integers(2)), int(random.integers(2)), yes[query], sufficient[query])
        for query in queries
    ]
    found = evaluated(queries, rows, resamples=200).figures
    drawn: dict[str, list[float]] = {"evidence_f1": [], "chunks_max": [], "sufficient_auc": []}
    mine = [[row for query, row in zip(queries, rows, strict=True) if query == number] for number in range(12)]
    for weight in np.concatenate(list(draw_weights(12, 200, 7))).astype(int).tolist():
        picked = [number for number, times in enumerate(weight) for _ in range(times)]
        drawn["evidence_f1"].append(
            float(np.mean([np.mean([set_f1(row["selected"], row["gold_chunks"]) for row in mine[q]]) for q in picked]))
        )
        drawn["chunks_max"].append(max(sum(len(set(row["selected"])) for row in mine[q]) for q in picked))
        better = [np.sign(yes[a] - yes[b]) for a in picked for b in picked if sufficient[a] and not sufficient[b]]
        drawn["sufficient_auc"].append(float(np.mean(better)) / 2 + 0.5 if better else math.nan)
    for name, held in drawn.items():
        low, high = np.nanquantile(held, [0.025, 0.975])
        assert (found[name].low, found[name].high) == (pytest.approx(low), pytest.approx(high)), name
