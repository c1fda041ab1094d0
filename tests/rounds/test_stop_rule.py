"""When a search is over: the whole truth table."""

from __future__ import annotations

import pytest

from relabel.jobs.rounds.loop import stop_reason
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
