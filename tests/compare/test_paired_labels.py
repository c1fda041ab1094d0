"""The figures of two label sets against scikit-learn, scipy and plain loops; and that cutting the rows otherwise
changes nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon
from sklearn import metrics

from relabel.manifests.metrics.comparison import PairedRows, PairedSums

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
