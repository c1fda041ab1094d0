"""ECE and Brier by hand; a fitted temperature undoes what was bent on purpose."""

from __future__ import annotations

import numpy as np
import pytest

from relabel.manifests.metrics.measures import (
    brier_rows,
    ece,
    fit_temperature,
    tempered,
)


def test_a_case_worked_out_by_hand() -> None:
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [1.0, 0.0]])
    gold = np.array([0, 1, 1, 0])
    # bin of .9: two rows, half right, gap .4; bin of .6: gap .4; bin of 1: gap 0
    assert ece(probs, gold) == pytest.approx(0.5 * 0.4 + 0.25 * 0.4)
    assert brier_rows(probs, gold).tolist() == pytest.approx([0.02, 1.62, 0.32, 0.0])


def test_a_temperature_fitted_to_distributions_finds_the_one_that_they_were_flattened_by() -> None:
    target_NK = np.random.default_rng(5).dirichlet([2.0, 1.0, 0.5], 500)
    assert fit_temperature(tempered(target_NK, 3.0), target_NK) == pytest.approx(1 / 3, rel=1e-3)
