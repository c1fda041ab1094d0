"""Whether a model keeps the order of a query's documents: what counts as an order, what breaks it, and what each query
weighs.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.parity import expected_grade, kept_orders, least_difference, tau_of


def tau(query: Any, ours: Any, theirs: Any, margin: float = 0.01) -> float | None:
    return tau_of(kept_orders(np.array(query), np.array(ours), np.array(theirs), margin)[1])


def test_orders_kept_reversed_and_tied_count_one_minus_one_and_nothing() -> None:
    query = [0, 0, 0]
    assert tau(query, [1, 2, 3], [1, 2, 3]) == 1.0
    assert tau(query, [1, 2, 3], [3, 2, 1]) == -1.0
    assert tau(query, [1, 2, 3], [2, 1, 3]) == pytest.approx(1 / 3)
    assert tau(query, [1, 2, 3], [5, 5, 5]) == 0.0


def test_documents_that_the_student_does_not_order_have_no_order_to_keep() -> None:
    found, by_query = kept_orders(np.zeros(3, dtype=int), np.array([1.0, 1.005, 3.0]), np.array([9.0, 1.0, 10.0]), 0.01)
    assert (tau_of(by_query), found) == (1.0, 2)
    # a reversal, however small in the model, of an order beyond the margin
    assert tau([0, 0], [1.0, 1.011], [1.0, 0.999]) == -1.0
    assert tau([0, 0, 1], [1.0, 1.0, 2.0], [2.0, 1.0, 0.0]) is None


def test_a_query_weighs_as_many_documents_as_it_has_so_neither_a_tiny_nor_a_huge_one_decides_alone() -> None:
    sizes = [2, *[10] * 20]
    query = np.repeat(np.arange(len(sizes)), sizes)
    ours = np.concatenate([np.arange(size, dtype=float) for size in sizes])
    theirs = ours.copy()
    theirs[:2] = theirs[1::-1]
    assert tau(query, ours, theirs) == pytest.approx(1 - 2 * 2 / 202)
    sizes = [300, *[2] * 50]  # by pairs of documents the huge one would hide that all others are upside down
    query = np.repeat(np.arange(len(sizes)), sizes)
    ours = np.concatenate([np.arange(size, dtype=float) for size in sizes])
    theirs = np.where(query == 0, ours, -ours)
    assert tau(query, ours, theirs) == pytest.approx((300 - 100) / 400)


@given(st.integers(2, 5), st.integers(0, 10_000))
def test_what_the_fp32_gate_lets_pass_keeps_every_order(grades: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    # some far apart, some hardly
    ours = chance.dirichlet(np.full(grades, 0.5), size=40) * chance.choice([1.0, 1e-3], size=(40, 1))
    theirs = ours + chance.uniform(-1e-4, 1e-4, size=ours.shape)
    query = np.repeat(np.arange(4), 10)
    assert tau(query, expected_grade(ours), expected_grade(theirs), least_difference(grades)) in (1.0, None)


@given(st.integers(2, 5), st.integers(0, 1000))
def test_an_order_just_beyond_the_margin_is_noticed_when_it_is_reversed(grades: int, seed: int) -> None:
    apart = least_difference(grades) * 1.01
    low = np.random.default_rng(seed).uniform(0, grades - 1 - apart)
    assert tau([0, 0], [low, low + apart], [low, low - 1e-6], least_difference(grades)) == -1.0
