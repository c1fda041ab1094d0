"""ECE and Brier against loops and scikit-learn; a fitted temperature undoes what was bent on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.metrics.measures import (
    BINS,
    at_least,
    brier_rows,
    ece,
    fit_temperature,
    tempered,
)


def world(rows: int, *, grades: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Distributions, and gold grades drawn from them: calibrated by construction."""
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.ones(grades), rows)
    gold = (random.random((rows, 1)) > np.cumsum(probs, 1)).sum(1).clip(max=grades - 1)
    return probs, gold


def slow_ece(probs: np.ndarray, gold: np.ndarray) -> float:
    total = 0.0
    for number in range(BINS):
        low, high = number / BINS, (number + 1) / BINS
        mine = [
            row
            for row in range(len(gold))
            if low <= probs[row].max() < high or (number == BINS - 1 and probs[row].max() >= high)
        ]
        if mine:
            confidence = sum(probs[row].max() for row in mine) / len(mine)
            accuracy = sum(probs[row].argmax() == gold[row] for row in mine) / len(mine)
            total += len(mine) / len(gold) * abs(confidence - accuracy)
    return total


def test_a_case_worked_out_by_hand() -> None:
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [1.0, 0.0]])
    gold = np.array([0, 1, 1, 0])
    # bin of .9: two rows, half right, gap .4; bin of .6: gap .4; bin of 1: gap 0
    assert ece(probs, gold) == pytest.approx(0.5 * 0.4 + 0.25 * 0.4)
    assert brier_rows(probs, gold).tolist() == pytest.approx([0.02, 1.62, 0.32, 0.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(0, 1000))
def test_loops_and_scikit_learn_agree(rows: int, grades: int, seed: int) -> None:
    from sklearn.metrics import brier_score_loss

    probs, gold = world(rows, grades=grades, seed=seed)
    assert ece(probs, gold) == pytest.approx(slow_ece(probs, gold))
    slow = [sum((probs[row, grade] - (grade == gold[row])) ** 2 for grade in range(grades)) for row in range(rows)]
    assert brier_rows(probs, gold).tolist() == pytest.approx(slow)
    if grades > 2:
        expected = brier_score_loss(gold, probs, labels=list(range(grades)), scale_by_half=False)
        assert brier_rows(probs, gold).mean() == pytest.approx(expected)


def test_calibrated_distributions_have_a_small_error_and_perfect_ones_none() -> None:
    probs, gold = world(20_000)
    assert ece(probs, gold) < 0.02
    assert ece(np.eye(3)[gold], gold) == 0.0
    assert brier_rows(np.eye(3)[gold], gold).sum() == 0.0


def test_a_temperature_of_one_leaves_distributions_alone_and_never_turns_their_order() -> None:
    probs, _ = world(50)
    assert np.allclose(tempered(probs, 1.0), probs)
    assert (tempered(probs, 3.0).argmax(1) == probs.argmax(1)).all()


def test_a_temperature_fitted_to_distributions_finds_the_one_that_they_were_flattened_by() -> None:
    target_NK = np.random.default_rng(5).dirichlet([2.0, 1.0, 0.5], 500)
    assert fit_temperature(tempered(target_NK, 3.0), target_NK) == pytest.approx(1 / 3, rel=1e-3)


def test_at_least_sums_the_upper_grades() -> None:
    assert at_least(np.array([[0.2, 0.3, 0.5]])).tolist() == [[pytest.approx(0.8), pytest.approx(0.5)]]
