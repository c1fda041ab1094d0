"""When a search is over: the whole truth table."""

from __future__ import annotations

import itertools

import pytest

from relabel.jobs.rounds.searches import stop_reason
from relabel.manifests.specs import RoundsSpec

LIMITS = RoundsSpec(corpus="docs.parquet")


@pytest.mark.parametrize(
    ("tokens", "is_sufficient", "num_rounds", "reason"),
    [
        (20_000, False, 4, None),
        (20_001, False, 1, "tokens"),
        (0, True, 1, "sufficient"),
        (0, False, 5, "rounds"),
    ],
)
def test_the_paper_s_limits(tokens: int, is_sufficient: bool, num_rounds: int, reason: str | None) -> None:
    assert stop_reason(tokens, is_sufficient=is_sufficient, num_rounds=num_rounds, limits=LIMITS) == reason


@pytest.mark.parametrize(("max_tokens", "max_rounds"), [(20_000, 5), (0, 1), (7, 3)])
def test_it_is_over_just_where_one_of_three_things_holds_and_the_first_is_named(
    max_tokens: int, max_rounds: int
) -> None:
    limits = RoundsSpec(corpus="docs.parquet", max_tokens=max_tokens, max_rounds=max_rounds)
    tried = set()
    for is_sufficient, is_many, is_last in itertools.product((False, True), repeat=3):
        for tokens in (max_tokens + 1, 10 * max_tokens + 1) if is_many else (0, max_tokens):
            for number in (max_rounds, max_rounds + 3) if is_last else range(1, max_rounds):
                holds = {"sufficient": is_sufficient, "tokens": is_many, "rounds": is_last}
                expected = next((name for name, is_so in holds.items() if is_so), None)
                found = stop_reason(tokens, is_sufficient=is_sufficient, num_rounds=number, limits=limits)
                assert found == expected
                tried.add((is_sufficient, is_many, is_last))
    assert len(tried) == (8 if max_rounds > 1 else 4)
