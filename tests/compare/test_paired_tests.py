"""McNemar, Bowker and Stuart–Maxwell against statsmodels, and against figures that were published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import SquareTable
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar

from relabel.manifests.metrics.measures import EXACT_BELOW, bowker, mcnemar, stuart_maxwell

VISION = np.array([[1520, 266, 124, 66], [234, 1512, 432, 78], [117, 362, 1772, 205], [36, 82, 179, 492]])
"""Unaided distance vision of 7,477 women, right eye and left, by four grades: Stuart 1955."""


def square(grades: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, 30), min_size=grades * grades, max_size=grades * grades).map(
        lambda values: np.array(values).reshape(grades, grades)
    )


def test_the_published_example_gives_the_published_figures() -> None:
    assert stuart_maxwell(VISION).statistic == pytest.approx(11.957, abs=5e-4)
    assert bowker(VISION).statistic == pytest.approx(19.107, abs=5e-4)
    assert (stuart_maxwell(VISION).df, bowker(VISION).df) == (3, 6)


@given(first=st.integers(0, 200), second=st.integers(0, 200))
def test_mcnemar_is_statsmodels_exact_for_few_rows_and_corrected_for_many(first: int, second: int) -> None:
    found = mcnemar(first, second)
    if first + second == 0:
        assert (found.p, found.statistic) == (1.0, None)
        return
    theirs = reference_mcnemar([[5, first], [second, 7]], exact=first + second < EXACT_BELOW, correction=True)
    assert found.p == pytest.approx(theirs.pvalue, abs=1e-12)
    assert (found.statistic is None) == (first + second < EXACT_BELOW)
    if found.statistic is not None:
        assert found.statistic == pytest.approx(theirs.statistic)


@given(counts=st.integers(2, 5).flatmap(square))
def test_bowker_and_stuart_maxwell_are_statsmodels_wherever_both_are_defined(counts: np.ndarray) -> None:
    off = counts + counts.T - 2 * np.diag(np.diag(counts))
    if (off[np.triu_indices(len(counts), 1)] == 0).any():
        return
    theirs = SquareTable(counts, shift_zeros=False)
    ours, symmetry = bowker(counts), theirs.symmetry()
    assert (ours.statistic, ours.df, ours.p) == (
        pytest.approx(symmetry.statistic),
        symmetry.df,
        pytest.approx(symmetry.pvalue),
    )
    ours, homogeneity = stuart_maxwell(counts), theirs.homogeneity(method="stuart_maxwell")
    assert (ours.statistic, ours.df) == (pytest.approx(homogeneity.statistic, abs=1e-8), homogeneity.df)
    assert ours.p == pytest.approx(homogeneity.pvalue, abs=1e-9)


@given(counts=square(2))
def test_with_two_grades_all_three_are_one_test(counts: np.ndarray) -> None:
    there, back = int(counts[0, 1]), int(counts[1, 0])
    expected = (there - back) ** 2 / (there + back) if there + back else 0.0
    for found in (bowker(counts), stuart_maxwell(counts)):
        assert found.statistic == pytest.approx(expected, abs=1e-9)
        assert found.p == pytest.approx(float(stats.chi2.sf(expected, 1)) if there + back else 1.0)


@given(counts=square(3))
def test_a_grade_that_nobody_gives_changes_nothing(counts: np.ndarray) -> None:
    wider = np.zeros((4, 4), dtype=int)
    kept = [0, 2, 3]
    wider[np.ix_(kept, kept)] = counts
    for test in (bowker, stuart_maxwell):
        narrow, wide = test(counts), test(wider)
        assert (wide.statistic, wide.df) == (pytest.approx(narrow.statistic, abs=1e-8), narrow.df)


def test_equal_labels_shift_nothing() -> None:
    same = np.diag([3, 4, 5])
    assert bowker(same) == ("Bowker", 0.0, 0, 1.0)
    assert stuart_maxwell(same) == ("Stuart–Maxwell", 0.0, 0, 1.0)
