"""Which rows are blamed for deaths: those that end the process each time, all of them, after few calls; and none where
processes are killed from outside, however often and whenever.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.crashes import PIECES, Isolation
from tests.jobs.kill_schedules import (
    FAST,
    ON_S3,
    SLOW,
    STEADY,
    Machine,
    Schedule,
    World,
    after_the_start,
    at_random,
    every,
    run,
    world,
)

MACHINES = {"fast": FAST, "on S3": ON_S3, "steady": STEADY, "slow": SLOW}
EVERY_S = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
SCHEDULES: dict[str, Schedule] = {
    **{f"at random, every {every_s:g} s": at_random(every_s) for every_s in EVERY_S},
    **{f"every {every_s:g} s": every(every_s) for every_s in EVERY_S},
    **{f"when it begins to ask, {spread} asks more or less": after_the_start(spread) for spread in (1, 5, 20)},
}
NEVER = every(math.inf)
KILLS = 30
"""Of a schedule, before the run is left alone."""


def play(number: int, *, poison: int = 0) -> World:
    """A run under one schedule of many: each kind of machine and of kill in turn, with sizes and times of its own."""
    rng = random.Random(number)
    machine = list(MACHINES.values())[number % len(MACHINES)]
    schedule = list(SCHEDULES.values())[number // len(MACHINES) % len(SCHEDULES)]
    shape = world(machine, rng, rows=rng.randint(20, 300), each=rng.choice([6, 12, 64, 256]), poison=poison)
    return run(shape, schedule, kills=KILLS)


def test_no_row_is_blamed_in_a_thousand_schedules_of_kills_from_outside() -> None:
    """Each kind of machine, rates from one a second to one a minute."""
    assert [number for number in range(1000) if play(number).quarantine] == []


@pytest.mark.full
def test_no_row_is_blamed_in_twenty_thousand_schedules_either() -> None:
    assert [number for number in range(1000, 21_000) if play(number).quarantine] == []


def test_among_kills_from_outside_the_poison_rows_are_found_and_no_others() -> None:
    for number in range(120):
        ended = play(number, poison=1 + number % 3)
        assert set(ended.quarantine) == ended.poison, number


@pytest.mark.parametrize(("rows", "each"), [(36, 6), (200, 12), (600, 256)])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_poison_row_costs_six_calls_at_most_the_last_of_which_finishes_the_run(
    machine: str, rows: int, each: int
) -> None:
    for number in range(20):
        shape = world(MACHINES[machine], random.Random(number), rows=rows, each=each, poison=1)
        ended = run(shape, NEVER, kills=0)
        assert set(ended.quarantine) == ended.poison
        assert ended.calls <= 6


@st.composite
def cases(draw: st.DrawFn) -> World:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    chunks = dict[str, list[int]]()
    row = 0
    for number, size in enumerate(sizes):
        chunks[f"{number}.1"] = list(range(row, row + size))
        row += size
    poison = draw(st.sets(st.integers(0, row - 1), max_size=8))
    machine = Machine(start_s=0.85, answer_s=0.004, write_s=0.001, capacity=draw(st.integers(1, 64)))
    return World(machine, chunks, poison, random.Random(0))


@given(cases())
def test_exactly_the_poisonous_rows_are_isolated_and_the_number_of_crashes_is_bounded(case: World) -> None:
    ended = run(case, NEVER, kills=0)
    assert set(ended.quarantine) == ended.poison
    assert ended.isolation.num_isolated == len(ended.poison)
    assert ended.isolation.deaths == []
    levels = math.ceil(math.log(max(map(len, ended.chunks.values())), PIECES)) + 1
    assert ended.calls - 1 <= len(ended.poison) * (2 + levels + 2)


def test_rows_that_were_in_flight_at_one_death_are_asked_like_any_other() -> None:
    isolation = Isolation()
    isolation.died({"0.1": [1, 2, 3]}, is_apart=False, reason=None)
    assert isolation.groups("0.1") == []
    isolation.died({"0.1": [2, 3, 4]}, is_apart=False, reason=None)
    assert isolation.groups("0.1") == [[2], [3]]


def test_rows_of_a_crash_that_the_engine_reported_are_asked_apart_at_once() -> None:
    isolation = Isolation()
    isolation.died({"0.1": list(range(32))}, is_apart=False, reason="memory ran out")
    assert isolation.groups("0.1") == [list(range(start, start + 2)) for start in range(0, 32, 2)]


def test_what_others_died_over_is_asked_after_what_was_not_tried() -> None:
    isolation = Isolation()
    isolation.died({"0.1": list(range(32))}, is_apart=False, reason="out of memory")
    isolation.died({"0.1": [0, 1]}, is_apart=True, reason="out of memory")
    assert isolation.groups("0.1")[-2:] == [[0], [1]]
    assert [isolation.turn(chunk) for chunk in ("0.1", "1.1")] == [2, 0]


def test_a_row_that_is_answered_alone_is_as_good_as_any_again() -> None:
    isolation = Isolation()
    for _ in range(2):
        isolation.died({"0.1": [1]}, is_apart=True, reason="died")
        isolation.passed("0.1", [1])
        assert isolation.groups("0.1") == []
    isolation.died({"0.1": [1]}, is_apart=True, reason="died")
    assert not isolation.num_isolated, "caught three times, and answered in between"
    assert isolation.strays == 2, "no row explains the first two"


def test_a_row_that_an_earlier_attempt_isolated_is_asked_alone_and_goes_back_after_one_death() -> None:
    isolation = Isolation()
    isolation.convict({"0.2": [7]})
    assert isolation.groups("0.2") == [[7]]
    isolation.died({"0.2": [7]}, is_apart=True, reason=None)
    assert list(isolation.isolated["0.2"]) == [7]


def test_a_row_that_an_earlier_attempt_isolated_is_labelled_if_it_is_answered_now() -> None:
    isolation = Isolation()
    isolation.convict({"0.2": [7]})
    isolation.passed("0.2", [7])
    assert (isolation.chunks(), isolation.strays) == (set(), 0)


def test_many_kills_make_no_row_of_an_earlier_attempt_one_to_be_asked_with_others() -> None:
    isolation = Isolation()
    isolation.convict({"0.2": list(range(20))})
    for number in range(20):
        isolation.died({f"{number}.2": [100 + number]}, is_apart=False, reason=None)
    assert sorted(isolation.groups("0.2")) == [[row] for row in range(20)]
    assert isolation.strays > 0
