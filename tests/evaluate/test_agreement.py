"""Every count-based figure against hand-made cases, loops written out, and the libraries."""

from __future__ import annotations

import itertools
import math

import krippendorff
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from relabel.manifests.metrics.measures import confusion_by_group, pass_at_k
from relabel.manifests.metrics.registry import count_metrics, metric_of

GRADES = 4
Rows = list[tuple[int, int]]
rows_of_grades = st.lists(st.tuples(st.integers(0, GRADES - 1), st.integers(0, GRADES - 1)), min_size=1, max_size=60)


def arrays(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(rows, dtype=np.int64)
    return pairs[:, 0], pairs[:, 1]


def counted(rows: Rows, grades: int = GRADES) -> dict[str, float]:
    gold, label = arrays(rows)
    matrix = confusion_by_group(gold, label, np.zeros(len(rows), dtype=np.int64), num_groups=1, grades=grades)[0]
    return {name: float(value) for name, value in count_metrics(matrix).items()}


def same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or one == pytest.approx(other, abs=1e-9)


def slow_kappa(rows: Rows, power: int) -> float:
    """1 - mean cost of the pairs that are there / mean cost of all pairs of a gold and a label."""

    def cost(gold: int, label: int) -> float:
        return float(gold != label) if power == 0 else float((gold - label) ** power)

    observed = sum(cost(gold, label) for gold, label in rows) / len(rows)
    chance = sum(cost(gold, label) for (gold, _), (_, label) in itertools.product(rows, rows)) / len(rows) ** 2
    return 1 - observed / chance if chance else math.nan


def slow_alpha(rows: Rows, *, is_ordinal: bool) -> float:
    """1 - disagreement within rows / disagreement between all values, as Krippendorff puts it."""
    values = [value for row in rows for value in row]

    def distance(one: int, other: int) -> float:
        if not is_ordinal:
            return float(one != other)
        low, high = sorted((one, other))
        between = sum(values.count(grade) for grade in range(low, high + 1))
        return (between - (values.count(low) + values.count(high)) / 2) ** 2

    within = 2 * sum(distance(*row) for row in rows) / len(values)
    across = sum(distance(one, other) for one, other in itertools.permutations(values, 2)) / (
        len(values) * (len(values) - 1)
    )
    return 1 - within / across if across else math.nan


def slow_f1(rows: Rows, grade: int) -> float:
    hits = sum(gold == label == grade for gold, label in rows)
    golds, labels = sum(gold == grade for gold, _ in rows), sum(label == grade for _, label in rows)
    return 2 * hits / (golds + labels) if golds + labels else math.nan


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


def by_libraries(gold: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """By scikit-learn and krippendorff, where they define a value."""
    every = list(range(GRADES))
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        gold, label, labels=every, average=None, zero_division=np.nan
    )
    found = {
        "accuracy": metrics.accuracy_score(gold, label),
        "f1_macro": metrics.f1_score(gold, label, average="macro", zero_division=0),
        "f1_weighted": metrics.f1_score(gold, label, average="weighted", zero_division=0),
        "irrelevant_precision": precision[0],
        "irrelevant_recall": recall[0],
        "irrelevant_f1": f1[0],
        **{f"f1_{grade}": f1[grade] for grade in every},
    }
    if len(set(gold) | set(label)) > 1:
        found["kappa"] = metrics.cohen_kappa_score(gold, label, labels=every)
        found["kappa_quadratic"] = metrics.cohen_kappa_score(gold, label, labels=every, weights="quadratic")
        for level in ("ordinal", "nominal"):
            data = np.stack([gold, label]).astype(float)
            found[f"alpha_{level}"] = krippendorff.alpha(data, value_domain=every, level_of_measurement=level)
    return {name: float(value) for name, value in found.items()}


@settings(max_examples=150, deadline=None)
@given(rows_of_grades)
def test_counts_loops_and_libraries_agree(rows: Rows) -> None:
    gold, label = arrays(rows)
    found = counted(rows)
    slow = {
        "accuracy": sum(one == other for one, other in rows) / len(rows),
        "kappa": slow_kappa(rows, 0),
        "kappa_quadratic": slow_kappa(rows, 2),
        "alpha_ordinal": slow_alpha(rows, is_ordinal=True),
        "alpha_nominal": slow_alpha(rows, is_ordinal=False),
        **{f"f1_{grade}": slow_f1(rows, grade) for grade in range(GRADES)},
    }
    for name, value in slow.items():
        assert same(value, found[name]), name
    for name, value in by_libraries(gold, label).items():
        assert same(value, found[name]), name


@given(st.lists(st.integers(0, GRADES - 1), min_size=1, max_size=40))
def test_perfect_labels_get_the_best_value_or_are_undefined(grades: list[int]) -> None:
    found = counted([(grade, grade) for grade in grades])
    assert found["accuracy"] == found["f1_macro"] == found["f1_weighted"] == pytest.approx(1)
    best = {
        name: 1 if metric[0].direction == "higher" else 0 for name in found if (metric := metric_of(name)) is not None
    }
    assert all(math.isnan(value) or value == pytest.approx(best[name]) for name, value in found.items())
    assert math.isnan(found["kappa"]) == (len(set(grades)) == 1)


@given(rows_of_grades)
def test_kappa_and_alpha_do_not_care_who_is_gold(rows: Rows) -> None:
    here, there = counted(rows), counted([(label, gold) for gold, label in rows])
    for name in ("accuracy", "kappa", "kappa_quadratic", "alpha_ordinal", "alpha_nominal", "f1_macro"):
        assert same(here[name], there[name]), name
    assert same(here["irrelevant_precision"], there["irrelevant_recall"])


@given(rows_of_grades, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(rows: Rows, random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    here, there = counted(rows), counted(shuffled)
    assert all(same(here[name], there[name]) for name in here)


def test_many_matrices_at_once_are_each_alone() -> None:
    matrices = np.random.default_rng(3).integers(0, 9, (7, 3, 3))
    together = count_metrics(matrices)
    for number, matrix in enumerate(matrices):
        for name, value in count_metrics(matrix).items():
            assert same(float(together[name][number]), float(value))


def test_groups_add_up_to_the_whole() -> None:
    random = np.random.default_rng(5)
    gold, label, group = random.integers(0, 3, 200), random.integers(0, 3, 200), random.integers(0, 11, 200)
    by_group = confusion_by_group(gold, label, group, num_groups=12, grades=3)
    assert by_group.shape == (12, 3, 3)
    assert by_group[11].sum() == 0
    expected = np.zeros((3, 3))
    for one, other in zip(gold, label, strict=True):
        expected[one, other] += 1
    assert (by_group.sum(0) == expected).all()


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(correct: int, wrong: int, k: int) -> None:
    samples = [True] * correct + [False] * wrong
    if k > len(samples):
        return
    draws = list(itertools.combinations(samples, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(np.array([correct]), np.array([len(samples)]), k)[0] == pytest.approx(expected)
