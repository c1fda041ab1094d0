"""Metrics of `evidence-set` and `review`, by numbers counted by hand and by loops; what is undefined, and what is
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from relabel.manifests.labels import exact_match, hit_at_1, normal_answer, over_budget
from relabel.manifests.metrics.evaluation import Evaluation, evaluate
from relabel.manifests.metrics.judged import Judged
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


def reviewed(label: int, gold: int, yes: float | None, is_enough: bool | None) -> dict[str, Any]:
    probs = None if yes is None else [1 - yes, yes]
    return {"label": label, "gold": gold, "sufficient_probs": probs, "gold_sufficient": is_enough}


def test_sufficiency_counts_a_query_once_and_a_tie_for_half() -> None:
    said = [(0.9, True), (0.4, True), (0.4, False), (0.1, False), (0.2, None), (None, True)]
    rows = [reviewed(0, 0, *one) for one in said for _ in range(3)]
    found = evaluated([query for query in range(len(said)) for _ in range(3)], rows)
    assert (found.figures["sufficient_auc"].value, found.figures["sufficient_auc"].over) == (3.5 / 4, 4)
    assert "queries without a value, left out of AUC, sufficient: 2" in found.notes
