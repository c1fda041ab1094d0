"""How much these tests try, and the places they work in.

Plain pytest takes a seeded short cut of every sweep; `RELABEL_FAULTS=full` (which `make faults` sets) takes all of
them. A sweep never runs past its share of the time: on a machine that is too busy it tries less, and warns of it.
`RELABEL_FAULTS=long` (`make faults-long`) takes the same without a limit.
"""

import itertools
import math
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import seaweed
from tests.faults.places import ROWS, SLOW, Place

LEVEL = os.environ.get("RELABEL_FAULTS") or "short"
IS_LONG = LEVEL == "long"
IS_FULL = LEVEL == "full" or IS_LONG
AT_A_TIME = 2
SHOWN = 3
TOTAL_S = 200.0
"""What the sweeps of the full suite may take of each process, seconds, so that all of it ends within fifteen
minutes."""
ALL_SHARES = 3.0
"""The shares of all sweeps, added up."""
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


AFTER_ALL = 1.05
"""Instants are drawn up to so much of an undisturbed run's time, so that some come after the end."""
LEAST_SHARE = 0.8
"""A sweep that tried less of its schedules says so."""
ItemT = TypeVar("ItemT")
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_variables(s3_server: seaweed.Server) -> Iterator[dict[str, str]]:
    """This process's variables lead to the server, for anyone who looks at what the children left; theirs are handed to
    them.
    """
    with pytest.MonkeyPatch.context() as patch:
        seaweed.lead_to(s3_server.environment, patch)
        yield s3_server.environment
        seaweed.forget_connections()


@pytest.fixture(autouse=True)
def own_connections() -> None:
    """fsspec keeps filesystems by their options, and where a variable leads is none of them: that of a test elsewhere
    may lead to a proxy that is gone.
    """
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


Places = Callable[[], Place]


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def where(request: pytest.FixtureRequest) -> str:
    """On a local disk, and on S3."""
    return str(request.param)


@pytest.fixture
def new_place(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> Places:
    """`new_place()`: a place where nothing is yet, of the kind that `where` says."""
    variables: Mapping[str, str] = request.getfixturevalue("s3_variables") if where == "s3" else {}
    lock_free = itertools.count()

    def make() -> Place:
        folder = tmp_path / f"place-{next(lock_free)}"
        folder.mkdir()
        return Place(
            folder, f"s3://{seaweed.BUCKET}/faults-{next(_numbers)}" if where == "s3" else str(folder), variables
        )

    return make


@pytest.fixture
def local_place(tmp_path: Path) -> Places:
    """As `new_place`, local in any case."""
    numbers = itertools.count()

    def make() -> Place:
        folder = tmp_path / f"local-{next(numbers)}"
        folder.mkdir()
        return Place(folder, str(folder))

    return make


@pytest.fixture
def expected(new_place: Places) -> dict[str, str]:
    """The committed files of a run that nobody disturbs, in a place of the same kind."""
    return undisturbed(new_place())


def undisturbed(place: Place) -> dict[str, str]:
    """The committed files of a run that nobody disturbs; every input row is there once."""
    place.write()
    ended = place.call("run", "verify")
    assert ended.codes == [0, 0], ended
    assert place.row_ids() == Counter(range(ROWS))
    found = place.committed()
    assert any(name.startswith("quarantine") for name in found), (
        "the faults of the engine should leave something in quarantine"
    )
    return found


def seconds_of_a_run(new_place: Places) -> float:
    """How long a slowed-down run takes in a fork, on this machine as busy as it is now."""
    place = new_place()
    place.write(args=SLOW)
    started = time.monotonic()
    assert place.call().codes == [0]
    return time.monotonic() - started


def instants(number: int, *, seed: int = 11) -> list[float]:
    """Parts of a run's time, one in each of so many equal parts; in any order, so that a sweep that is cut short has
    tried all over.
    """
    rng = random.Random(seed)
    found = [AFTER_ALL * (part + rng.random()) / number for part in range(number)]
    rng.shuffle(found)
    return found


Sweep = Callable[..., None]


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Sweep:
    """`sweep(schedules, attempt)` tries each schedule, two at a time; `attempt` returns what went wrong, or None, and
    fails the test so.

    `share` is the part of the full suite's time that it may take; what is not tried by then is not tried.
    """

    def go(
        schedules: Sequence[Any],
        attempt: Callable[[Any], str | None],
        *,
        at_a_time: int = AT_A_TIME,
        share: float = 0.03,
    ) -> None:
        may_take_s = TOTAL_S * PROCESSES * share / ALL_SHARES if IS_FULL and not IS_LONG else math.inf
        deadline = time.monotonic() + may_take_s
        failures: list[str] = []

        def one(schedule: Any) -> bool:
            if time.monotonic() > deadline and schedule is not schedules[0]:
                return False
            wrong = attempt(schedule)
            if wrong is not None:
                failures.append(f"{schedule}: {wrong}")
            return True

        if at_a_time == 1:  # in this very thread, the only one that may set signal handlers
            tried = sum(map(one, schedules))
        else:
            with ThreadPoolExecutor(at_a_time) as pool:
                tried = sum(pool.map(one, schedules))
        print(f"tried {tried} of {len(schedules)} schedules")
        if tried < LEAST_SHARE * len(schedules):
            with warnings.catch_warnings():  # which are errors here
                warnings.simplefilter("always")
                warnings.warn(f"{request.node.name}: tried {tried} of {len(schedules)} schedules", stacklevel=1)
        heads = [failure.partition("\n")[0][:200] for failure in failures]
        assert not failures, f"{len(failures)} of {tried} schedules:\n" + "\n".join(
            [*heads[SHOWN:40], *failures[:SHOWN]]
        )

    return go


def some(items: Sequence[ItemT], *, short: int, seed: int = 4) -> list[ItemT]:
    """All of them in full, a seeded few in the short cut, in their order."""
    if IS_FULL or len(items) <= short:
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), short))
    return [items[number] for number in chosen]


def count(*, full: int, short: int, long: int | None = None) -> int:
    """How many schedules of a sweep; without a limit of time as many as in full, unless said otherwise."""
    return long if IS_LONG and long is not None else full if IS_FULL else short
