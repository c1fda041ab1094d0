"""RES-RAG's reward and its parts, by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.manifests.labels import evidence_reward, over_budget, set_f1

CHOSEN, GOLD, COUNTS = ([1, 2], [3, 4, 5, 6]), ([1], []), (4, 9)


def test_the_golden_numbers() -> None:
    assert [over_budget(len(one), count) for one, count in zip(CHOSEN, COUNTS, strict=True)] == [0.0, 0.5]
    assert evidence_reward(CHOSEN, COUNTS, GOLD, 0.5) == pytest.approx((0.8333, 1.0, 0.3333, 0.5), abs=5e-5)
    assert evidence_reward(CHOSEN, COUNTS, GOLD, None) == pytest.approx((-1.1667, -1.0, 0.3333, 0.5), abs=5e-5)


@pytest.mark.parametrize(
    ("selected", "count", "cost"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (2, 1, 1),
        (1, 3, 0),
        (2, 3, 0.5),
        (3, 9, 0),
        (4, 9, 0.5),
        (9, 9, 0.5),
        (10, 9, 1),
    ],
)
def test_cost_steps_at_the_root_and_at_all_of_the_chunks(selected: int, count: int, cost: float) -> None:
    assert over_budget(selected, count) == cost


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_root_is_exact(selected: int, count: int) -> None:
    assert (over_budget(selected, count) == 0.0) is (selected**2 <= count)


def test_f1_of_empty_sets() -> None:
    assert (set_f1([], []), set_f1([1], []), set_f1([], [1])) == (1.0, 0.0, 0.0)
    assert set_f1([1, 1, 2], [2, 3]) == 0.5


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 9)), min_size=1, max_size=4),
    st.none() | st.floats(0, 1),
)
def test_the_reward_stays_within_its_bounds(held: list[tuple[list[int], int]], answer: float | None) -> None:
    found = evidence_reward([one for one, _ in held], [count for _, count in held], [[] for _ in held], answer).reward
    assert math.isfinite(found)
    assert -5.0 <= found <= 5.0


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        evidence_reward([[1]], [4, 9], [[1]], 1.0)
