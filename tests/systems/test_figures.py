"""Figures of the top k are those of ir_measures (trec_eval): on the documents that are judged alone, and with unjudged
ones irrelevant.
"""

from collections.abc import Callable

import ir_measures
import numpy as np
import pytest
from ir_measures import RR, P, nDCG

from relabel.manifests.files import Storage
from relabel.manifests.labels import texts_of
from relabel.manifests.metrics.top import BAD, NDCG, PRECISION, RECIPROCAL_RANK, Cut, ideal_gains, top_figures
from relabel.manifests.rankings import load_ranking
from tests.systems.conftest import Collection, Grades

Scores = dict[str, dict[str, float]]


def by_reference(grades: Grades, scores: Scores, *, k: int, relevant: int) -> dict[str, dict[str, float]]:
    """Figures of ir_measures by name and query, over all queries with grades."""
    measures = {
        NDCG: nDCG @ k,
        PRECISION: P(rel=relevant) @ k,
        RECIPROCAL_RANK: RR(rel=relevant),
    }
    found = {name: dict.fromkeys(grades, 0.0) for name in measures}
    # RR has no cut in all of its providers: the run is cut
    cut = {query: dict(sorted(held.items(), key=lambda one: (one[1], one[0]))[-k:]) for query, held in scores.items()}
    for name, measure in measures.items():
        for one in ir_measures.iter_calc([measure], grades, cut):
            found[name][one.query_id] = one.value
    return found


def figures(grades: Grades, path: str, *, cut: Cut, unjudged: float | None = None) -> dict[str, np.ndarray]:
    """Figures of a run file by the product's code."""
    ranking = load_ranking(path, Storage())
    queries = sorted(grades)
    place = {query: number for number, query in enumerate(queries)}
    names, docs = texts_of(ranking.query_ids), texts_of(ranking.doc_ids)
    grade_N = np.array([grades[query].get(doc, np.nan) for query, doc in zip(names, docs, strict=True)])
    query_N = np.array([place[query] for query in names])
    if unjudged is not None:
        grade_N = np.nan_to_num(grade_N, nan=unjudged)
    query_P = np.array([place[query] for query in queries for _ in grades[query]])
    grade_P = np.array([grade for query in queries for grade in grades[query].values()], dtype=float)
    ideal_G = ideal_gains(query_P, grade_P, num_queries=len(queries), cut=cut)
    return top_figures(query_N, grade_N, ideal_G, cut=cut)


def some_unjudged(grades: Grades, *, seed: int = 1) -> Grades:
    """Grades of about two thirds of the pairs; one query has irrelevant documents alone."""
    random = np.random.default_rng(seed)
    kept = {
        query: {doc: grade for doc, grade in held.items() if random.random() < 0.66} for query, held in grades.items()
    }
    kept["q001"] = dict.fromkeys(kept["q001"], 0)
    return kept


@pytest.mark.parametrize("k", [1, 5, 10, 40])
@pytest.mark.parametrize("is_condensed", [True, False])
def test_figures_are_those_of_ir_measures(collection: Collection, k: int, is_condensed: bool) -> None:
    path = collection.write_run("bad")
    grades = some_unjudged(collection.humans)
    scores = collection.systems["bad"]
    if is_condensed:
        scores = {
            query: {doc: score for doc, score in held.items() if doc in grades[query]} for query, held in scores.items()
        }
    wanted = by_reference(grades, scores, k=k, relevant=2)
    found = figures(grades, path, cut=Cut(k, 2), unjudged=None if is_condensed else 0.0)
    for name, values in wanted.items():
        assert found[name] == pytest.approx([values[query] for query in sorted(grades)], abs=1e-6), name


def test_bad_cases_are_the_share_of_places_with_grade_0(collection: Collection) -> None:
    path = collection.write_run("good")
    grades = some_unjudged(collection.judge)
    found = figures(grades, path, cut=Cut(5, 2))[BAD]
    for place, query in enumerate(sorted(grades)):
        scores = collection.systems["good"][query]
        ranked = sorted((doc for doc in scores if doc in grades[query]), key=lambda doc: (scores[doc], doc))[::-1]
        assert found[place] == sum(grades[query][doc] == 0 for doc in ranked[:5]) / 5


def test_a_query_without_documents_is_0_in_every_figure() -> None:
    cut = Cut(10, 1)
    found = top_figures(np.array([0, 2]), np.array([1.0, 0.0]), np.array([1.0, 2.0, 0.0]), cut=cut)
    assert {name: values[1] for name, values in found.items()} == dict.fromkeys(found, 0.0)


def test_equal_scores_are_in_the_order_of_trec_eval(folder: object, write_lines: Callable[..., str]) -> None:
    """Equal scores: the last document id first, as trec_eval has them."""
    path = write_lines("ties.run", ["q Q0 a 1 1.0 t", "q Q0 c 2 1.0 t", "q Q0 b 3 1.0 t", "q Q0 d 4 0.5 t"])
    assert texts_of(load_ranking(path, Storage()).doc_ids) == ["c", "b", "a", "d"]
    grades = {"q": {"a": 1, "b": 0, "c": 0, "d": 0}}
    wanted = by_reference(grades, {"q": {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.5}}, k=4, relevant=1)
    assert wanted[RECIPROCAL_RANK]["q"] == pytest.approx(1 / 3)
    assert figures(grades, path, cut=Cut(4, 1))[RECIPROCAL_RANK] == pytest.approx([1 / 3])
