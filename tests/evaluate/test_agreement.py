"""Every count-based figure against a hand-made case and the libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.metrics.measures import confusion_by_group
from relabel.manifests.metrics.registry import count_metrics, metric_of

GRADES = 4
Rows = list[tuple[int, int]]


def arrays(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(rows, dtype=np.int64)
    return pairs[:, 0], pairs[:, 1]


def counted(rows: Rows, grades: int = GRADES) -> dict[str, float]:
    gold, label = arrays(rows)
    matrix = confusion_by_group(gold, label, np.zeros(len(rows), dtype=np.int64), num_groups=1, grades=grades)[0]
    return {name: float(value) for name, value in count_metrics(matrix).items()}


def test_a_case_worked_out_by_hand() -> None:
    # gold 0 0 0 1 1 2, label 0 0 1 1 2 2
    found = counted([(0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2)], grades=3)
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["f1_0"] == pytest.approx(2 * 2 / (3 + 2))
    assert found["f1_1"] == pytest.approx(2 * 1 / (2 + 2))
    assert found["f1_2"] == pytest.approx(2 * 1 / (1 + 2))
    assert found["f1_macro"] == pytest.approx((0.8 + 0.5 + 2 / 3) / 3)
    assert found["f1_weighted"] == pytest.approx((3 * 0.8 + 2 * 0.5 + 1 * 2 / 3) / 6)
    assert found["kappa"] == pytest.approx((4 / 6 - 12 / 36) / (1 - 12 / 36))  # chance: (3·2 + 2·2 + 1·2) / 36
    # quadratic: observed 2 steps of 1; expected sum over all 36 pairings (3,2,1) x (2,2,2): 0-1 6, 0-2 6·4, 1-0 4, 1-2
    # 4, 2-0 2·4, 2-1 2
    assert found["kappa_quadratic"] == pytest.approx(1 - (2 / 6) / ((6 + 24 + 4 + 4 + 8 + 2) / 36))
    assert found["irrelevant_precision"] == 1.0
    assert found["irrelevant_recall"] == pytest.approx(2 / 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, GRADES - 1), min_size=1, max_size=40))
def test_perfect_labels_get_the_best_value_or_are_undefined(grades: list[int]) -> None:
    found = counted([(grade, grade) for grade in grades])
    assert found["accuracy"] == found["f1_macro"] == found["f1_weighted"] == pytest.approx(1)
    best = {
        name: 1 if metric[0].direction == "higher" else 0 for name in found if (metric := metric_of(name)) is not None
    }
    assert all(math.isnan(value) or value == pytest.approx(best[name]) for name, value in found.items())
    assert math.isnan(found["kappa"]) == (len(set(grades)) == 1)
