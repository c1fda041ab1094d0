"""A student's figures against its teacher and gold, computed a second time: by scikit-learn, scipy, ir_measures, and a
bootstrap by hand.
"""

from __future__ import annotations

from typing import Any

import ir_measures
import numpy as np
import pyarrow as pa
import pytest
from scipy import stats
from sklearn import metrics

from relabel.manifests.label_sets import LabelPart, gather
from relabel.manifests.metrics.comparison import BY_IDS, BY_ROW, Labelled, compare, kl_rows, match_rows
from relabel.manifests.metrics.measures import tau_by_query
from relabel.manifests.metrics.metric import draw_weights
from relabel.manifests.schemas import ids_of

GRADES = 3


def world(rows: int = 60, queries: int = 6, *, seed: int = 1) -> tuple[Labelled, Labelled, list[int]]:
    """A teacher who is often right, a student who often follows it, and the gold grades."""
    random = np.random.default_rng(seed)
    gold = random.integers(0, GRADES, rows)
    ours = random.dirichlet(np.ones(GRADES), rows) + 0.6 * np.eye(GRADES)[gold]
    theirs = ours + random.dirichlet(np.ones(GRADES), rows)
    sides = []
    for name, probs in (("teacher", ours), ("student", theirs)):
        held = probs / probs.sum(1, keepdims=True)
        part = LabelPart(
            pa.array(range(rows)),
            pa.array(held.argmax(1)),
            ids_of(f"q{row % queries}" for row in range(rows)),
            ids_of(f"d{row}" for row in range(rows)),
            pa.array(held.tolist(), pa.large_list(pa.float64())),
        )
        sides.append(gather([part], grades=GRADES, where=name))
    return sides[0], sides[1], gold.tolist()


def compared(teacher: Labelled, student: Labelled, golds: list[Any] | None, **options: Any) -> Any:
    match = match_rows(teacher, student, is_same_input=True)
    known = np.ones(len(match.teacher), dtype=bool)
    held = None if golds is None else pa.array(golds, pa.int64())
    return compare(teacher, student, match, held, known, grades=GRADES, **{"resamples": 200, "seed": 7} | options)


def test_kl_is_the_relative_entropy_of_scipy_in_the_teachers_direction() -> None:
    teacher, student, _ = world()
    rows = kl_rows(teacher.probs, student.probs)
    assert rows == pytest.approx(stats.entropy(teacher.probs, student.probs, axis=1))
    assert rows.mean() != pytest.approx(stats.entropy(student.probs, teacher.probs, axis=1).mean(), rel=1e-3)
    assert compared(teacher, student, None).against_teacher["kl"].value == pytest.approx(rows.mean())


def test_kendall_tau_leaves_out_queries_that_one_side_does_not_order() -> None:
    query = np.array([0, 0, 1, 1, 1, 2])
    tau = tau_by_query(query, np.array([1.0, 2, 1, 2, 2, 5]), np.array([3.0, 3, 1, 3, 2, 5]), num_queries=3)
    assert np.isnan(tau[[0, 2]]).all()
    assert tau[1] == pytest.approx(stats.kendalltau([1, 2, 2], [1, 3, 2]).statistic)


def test_a_student_that_answers_as_its_teacher_differs_in_nothing() -> None:
    teacher, _, golds = world()
    found = compared(teacher, teacher, golds)
    assert found.against_teacher["kl"].value == pytest.approx(0.0, abs=1e-12)
    assert found.against_teacher["agreement"].value == 1.0
    assert found.against_teacher["kendall_tau"].value == pytest.approx(1.0)
    for name, step in found.against_gold.difference.items():
        assert (step.value, step.low, step.high) == (0.0, 0.0, 0.0), name


def test_swapped_roles_turn_every_difference_around() -> None:
    teacher, student, golds = world()
    there, back = (
        compared(*sides, golds).against_gold.difference for sides in ((teacher, student), (student, teacher))
    )
    for name, step in there.items():
        assert back[name].value == pytest.approx(-step.value), name
        assert (back[name].low, back[name].high) == pytest.approx((-step.high, -step.low)), name


def figures_by_hand(labels: Labelled, golds: list[int], rows: list[int], queries: list[int]) -> dict[str, float]:
    """Figures of drawn rows, each as often as drawn, by scikit-learn and ir_measures; `queries` are the drawn ones."""
    gold, label = np.array(golds)[rows], labels.grades[rows]
    probs = labels.probs[rows] if labels.probs is not None else np.zeros((0, 3))
    ndcg = []
    for query in queries:
        inside = [row for row in range(len(golds)) if row % 6 == query]
        run = {str(row): float(labels.probs[row] @ np.arange(GRADES)) for row in inside}
        qrels = {str(row): golds[row] for row in inside}
        ndcg.append(
            ir_measures.calc_aggregate([ir_measures.nDCG @ 10], {"q": qrels}, {"q": run})[ir_measures.nDCG @ 10]
        )
    return {
        "accuracy": float(metrics.accuracy_score(gold, label)),
        "f1_macro": float(metrics.f1_score(gold, label, average="macro", zero_division=0)),
        "kappa": float(metrics.cohen_kappa_score(gold, label)),
        "auc_0/12": float(metrics.roc_auc_score(gold >= 1, probs[:, 1:].sum(1))),
        "brier": float(((probs - np.eye(GRADES)[gold]) ** 2).sum(1).mean()),
        "ndcg@10": float(np.mean(ndcg)),
    }


def test_the_paired_bootstrap_is_the_one_made_by_hand() -> None:
    """25 draws of six queries, their rows written out as often as drawn, both sides judged by other libraries,
    subtracted, percentiles.
    """
    teacher, student, golds = world()
    steps: dict[str, list[float]] = {}
    for weights in np.concatenate(list(draw_weights(6, 25, seed=7))):
        queries = [query for query in range(6) for _ in range(int(weights[query]))]
        rows = [row for query in queries for row in range(60) if row % 6 == query]
        ours, theirs = (figures_by_hand(side, golds, rows, queries) for side in (teacher, student))
        for name, value in ours.items():
            steps.setdefault(name, []).append(theirs[name] - value)
    found = compared(teacher, student, golds, resamples=25).against_gold.difference
    whole = [figures_by_hand(side, golds, list(range(60)), list(range(6))) for side in (teacher, student)]
    for name, values in steps.items():
        assert found[name].value == pytest.approx(whole[1][name] - whole[0][name]), name
        assert (found[name].low, found[name].high) == pytest.approx(np.quantile(values, [0.025, 0.975])), name


def part(rows: list[int], pairs: list[tuple[str, str]], grades: list[int | None]) -> LabelPart:
    ids = (ids_of(pair[side] for pair in pairs) for side in (0, 1))
    return LabelPart(pa.array(rows, pa.int64()), pa.array(grades, pa.int64()), *ids)


def test_rows_of_one_input_are_matched_by_row_and_others_by_ids() -> None:
    same = [("q", "a"), ("q", "b"), ("q", "c")]
    ours = gather([part([4, 5, 6], same, [0, 1, 2])], grades=3, where="ours")
    theirs = gather([part([6, 4, 9], same, [2, 0, 1])], grades=3, where="theirs")
    by_row = match_rows(ours, theirs, is_same_input=True)
    assert (by_row.how, ours.row_ids[by_row.teacher].tolist(), theirs.row_ids[by_row.student].tolist()) == (
        BY_ROW,
        [4, 6],
        [4, 6],
    )
    by_ids = match_rows(ours, theirs, is_same_input=False)
    assert by_ids.how == BY_IDS
    assert [ours.pairs(3)[row] for row in by_ids.teacher] == [theirs.pairs(3)[row] for row in by_ids.student] == same


def test_rows_without_a_label_are_counted_and_never_matched() -> None:
    ours = gather([part([0, 1], [("q", "a"), ("q", "b")], [None, 1])], grades=3, where="ours")
    theirs = gather([part([0, 1], [("q", "a"), ("q", "b")], [0, 2])], grades=3, where="theirs")
    match = match_rows(ours, theirs, is_same_input=True)
    assert ours.row_ids[match.teacher].tolist() == [1]
    found = compare(ours, theirs, match, None, np.ones(0), grades=3, resamples=0, seed=1)
    assert any("rows of ours without a readable label, left out: 1" in note for note in found.notes)
    assert "kl" not in found.against_teacher
