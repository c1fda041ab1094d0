"""What engines spent together: a sum only where each part is known."""

from __future__ import annotations

import itertools

import pytest

from relabel.jobs.pool.supervisor import Results


@pytest.mark.parametrize("order", list(itertools.permutations([5.0, None, 2.5])))
def test_a_cost_that_one_engine_does_not_know_is_not_known_of_all(order: tuple[float | None, ...]) -> None:
    together = Results()
    for cost in order:
        together.add(Results(costs={"http_requests": 2, "cost": cost}))
    assert together.costs == {"http_requests": 6, "cost": None}


def test_known_costs_are_added_and_an_engine_that_is_not_paid_for_adds_none() -> None:
    together = Results()
    for costs in ({"cost": 5.0}, None, {"cost": 2.5}):
        together.add(Results(costs=costs))
    assert together.costs == {"cost": 7.5}
