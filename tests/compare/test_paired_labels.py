"""The figures of two label sets against scikit-learn, scipy and plain loops; and that cutting the rows otherwise
changes nothing.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon
from sklearn import metrics

from relabel.manifests.metrics.comparison import PairedRows, PairedSums, js_rows, query_moves
from relabel.manifests.metrics.metric import draw_weights, interval_of

GRADES = 3


def world(seed: int, *, queries: int = 8, most: int = 9, lacking: float = 0.2) -> PairedRows:
    """Two sets over a few queries; some rows lack a distribution in one of them."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, most + 1, queries)
    query = np.repeat(np.arange(queries), sizes)
    count = len(query)
    docs = [f"d{number}" for number in random.permutation(count)]
    probs = [random.dirichlet(np.ones(GRADES), count) for _ in range(2)]
    for side in probs:
        side[random.random(count) < lacking] = np.nan
    grades = [random.integers(0, GRADES, count) for _ in range(2)]
    expected = [side @ np.arange(GRADES) for side in probs]
    return PairedRows(query, docs, (grades[0], grades[1]), (expected[0], expected[1]), (probs[0], probs[1]))


def part(rows: PairedRows, start: int, stop: int) -> PairedRows:
    """The rows of the queries start..stop, numbered again."""
    kept = (rows.query >= start) & (rows.query < stop)
    sides = [tuple(side[kept] for side in both) for both in (rows.grades, rows.expected, rows.probs)]
    docs = [doc for doc, is_kept in zip(rows.docs, kept, strict=True) if is_kept]
    return PairedRows(rows.query[kept] - start, docs, *sides)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_figures_are_those_of_the_libraries(seed: int) -> None:
    rows = world(seed)
    sums = PairedSums(GRADES, depth=3)
    sums.add(rows)
    found = {name: figure.value for name, figure in sums.figures(resamples=0, seed=1).items()}
    first, second = rows.grades
    every = list(range(GRADES))
    assert found["agreement"] == pytest.approx(metrics.accuracy_score(first, second))
    kappa = metrics.cohen_kappa_score(first, second, labels=every)
    quadratic = metrics.cohen_kappa_score(first, second, labels=every, weights="quadratic")
    assert found["kappa"] == pytest.approx(kappa, abs=1e-9)
    assert found["kappa_quadratic"] == pytest.approx(quadratic, abs=1e-9)
    assert sums.confusion.tolist() == metrics.confusion_matrix(first, second, labels=every).tolist()
    assert found["mean_grade_a"] == pytest.approx(first.mean())
    assert found["mean_grade_difference"] == pytest.approx(second.mean() - first.mean(), abs=1e-9)
    both = ~np.isnan(rows.expected[0]) & ~np.isnan(rows.expected[1])
    if both.any():
        assert found["mean_expected_difference"] == pytest.approx(
            (rows.expected[1] - rows.expected[0])[both].mean(), abs=1e-9
        )
        ours, theirs = rows.probs[0][both], rows.probs[1][both]
        assert found["js"] == pytest.approx(
            np.mean([jensenshannon(p, q) ** 2 for p, q in zip(ours, theirs, strict=True)]), abs=1e-9
        )
        assert found["kl_a_b"] == pytest.approx(
            np.mean([stats.entropy(p, q) for p, q in zip(ours, theirs, strict=True)]), abs=1e-7
        )
        assert found["kl_b_a"] == pytest.approx(
            np.mean([stats.entropy(q, p) for p, q in zip(ours, theirs, strict=True)]), abs=1e-7
        )
    taus, stayed, changed = [], [], []
    for query in range(int(rows.query[-1]) + 1):
        here = np.flatnonzero(rows.query == query)
        scores = [side[here] for side in rows.scores]
        if np.ptp(scores[0]) > 0 and np.ptp(scores[1]) > 0:
            taus.append(stats.kendalltau(*scores).statistic)
        tops = [
            sorted(range(len(here)), key=lambda row: (score[row], rows.docs[here[row]]), reverse=True)[:3]
            for score in scores
        ]
        stayed.append(len(set(tops[0]) & set(tops[1])) / min(3, len(here)))
        changed.append(tops[0][0] != tops[1][0])
    assert found["kendall_tau"] == pytest.approx(np.mean(taus)) if taus else found["kendall_tau"] is None
    assert found["overlap@3"] == pytest.approx(np.mean(stayed))
    assert found["first_changed"] == pytest.approx(np.mean(changed))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 7))
def test_how_queries_are_cut_into_parts_changes_nothing(seed: int, cut: int) -> None:
    rows = world(seed)
    whole, parts = PairedSums(GRADES, depth=4), PairedSums(GRADES, depth=4)
    whole.add(rows)
    parts.add(part(rows, 0, cut))
    parts.add(part(rows, cut, 8))
    assert whole.confusion.tolist() == parts.confusion.tolist()
    ours, theirs = (side.figures(resamples=50, seed=3) for side in (whole, parts))
    assert ours.keys() == theirs.keys()
    for name, figure in ours.items():
        assert figure.value == pytest.approx(theirs[name].value), name
        assert figure.low == pytest.approx(theirs[name].low, abs=1e-12), name


def test_the_interval_of_a_difference_is_a_paired_bootstrap_over_queries() -> None:
    """By hand: the same draws of whole queries for both, the mean again from each, the middle 95 %."""
    rows = world(5, lacking=0.0)
    sums = PairedSums(GRADES, depth=3)
    sums.add(rows)
    found = sums.figures(resamples=200, seed=11)["mean_grade_difference"]
    step = rows.grades[1] - rows.grades[0]
    drawn = [
        float((weights[rows.query] * step).sum() / weights[rows.query].sum())
        for block in draw_weights(8, 200, 11)
        for weights in block
    ]
    by_hand = interval_of(np.array(drawn))
    assert (found.low, found.high) == (pytest.approx(by_hand.low), pytest.approx(by_hand.high))
    assert found.low < found.value < found.high


def test_js_lies_between_nothing_and_ln_2() -> None:
    same = np.array([[0.2, 0.8], [1.0, 0.0]])
    assert js_rows(same, same).tolist() == [0.0, 0.0]
    assert js_rows(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))[0] == pytest.approx(math.log(2))


def test_equal_scores_keep_the_order_of_ids_so_that_nothing_seems_to_move() -> None:
    nothing = np.full((4, GRADES), np.nan)
    flat = np.array([1, 1, 1, 1])
    rows = PairedRows(
        np.zeros(4, dtype=int), ["b", "a", "d", "c"], (flat, flat), (nothing[:, 0], nothing[:, 0]), (nothing, nothing)
    )
    moves = query_moves(rows, 1, depth=2)
    assert (moves.entered.tolist(), moves.top_changed.tolist(), math.isnan(moves.tau[0])) == ([0], [False], True)
