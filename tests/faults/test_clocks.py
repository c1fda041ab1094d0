"""Clocks that jump by an hour in the middle of a run, the wall clock and those that never should: no label depends on
any.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.conftest import Places, Sweep, count, seconds_of_a_run
from tests.faults.forks import Setup
from tests.faults.places import SLOW

HOUR_S = 3600.0


@pytest.mark.full("s3")
def test_clocks_that_jump_by_an_hour_change_no_label(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    run_s = seconds_of_a_run(new_place)
    rng = random.Random(15)

    def attempt(schedule: tuple[float, float]) -> str | None:
        instant, jump_s = schedule
        place = new_place()
        place.write(args=SLOW)
        ended = place.call(setup=Setup("tests.faults.children", "jump_clocks", (instant * run_s, jump_s)))
        if ended.codes not in ([0], [20]):
            return str(ended)
        return place.finish(expected)

    schedules = [(rng.random(), jump_s) for _ in range(count(full=15, short=1)) for jump_s in (HOUR_S, -HOUR_S)]
    sweep(schedules, attempt)
