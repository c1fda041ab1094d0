"""A budget holds whatever becomes of its workers: killed before and after they take a share, between a share and its
settlement, several at once; and what they were paid for never exceeds what counts as spent.
"""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from relabel.manifests.costs import last_entry
from relabel.manifests.failpoints import BUDGET_FAILPOINTS
from tests.faults.conftest import Places, Sweep, count, some
from tests.faults.forks import Setup
from tests.faults.places import FAULTY, SLOW, Place

LIMIT = 12_000
"""A third of what the whole run takes."""
ENOUGH = 10_000_000


def budget(limit: int) -> dict[str, int]:
    return {"max_tokens": limit}


def metered(place: Place, failpoint: str = "") -> Setup:
    return Setup("tests.faults.children", "meter", (str(place.folder / "asked"), failpoint))


def asked(place: Place) -> int:
    """Tokens of all requests that ever reached an engine there, answered or not."""
    log = place.folder / "asked"
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def overshot(place: Place, limit: int) -> str | None:
    """What is wrong with what was spent, or None."""
    paid, counted = asked(place), last_entry(place.store())[1].taken.tokens
    return None if paid <= counted <= limit else f"{paid} tokens paid, {counted} counted, {limit} allowed"


def ends_at_budget(place: Place) -> str | None:
    """Call until the budget is gone; then a call asks nothing any more."""
    for _ in range(20):
        ended = place.call(setup=metered(place))
        if ended.code == 5:
            break
        if ended.code not in (20, 75):
            return f"it did not end at its budget: {ended}"
        time.sleep(0.5)  # a killed worker's lease lives for some seconds
    paid = asked(place)
    again = place.call(setup=metered(place))
    if again.code != 5 or asked(place) != paid:
        return f"the next call asked {asked(place) - paid} tokens more: {again}"
    return overshot(place, LIMIT)


def test_a_worker_killed_at_any_place_of_the_ledger_or_between_two_asks_overdraws_nothing(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    hits = (1, 2, 3, 5, 8)
    schedules = [f"{name}:{hit}" for name in BUDGET_FAILPOINTS for hit in hits] + [f"ask:{nth}" for nth in (1, 7, 20)]

    def attempt(failpoint: str) -> str | None:
        place = new_place()
        place.write(args=FAULTY, run=budget(LIMIT))
        killed = place.call(setup=metered(place, failpoint))
        if killed.code not in (-signal.SIGKILL, 5):  # an early end may come before a late hit
            return f"not killed: {killed}"
        wrong = overshot(place, LIMIT) or ends_at_budget(place)
        if wrong is not None:
            return wrong
        place.write(args=FAULTY, run=budget(ENOUGH))
        return place.finish(expected) or overshot(place, ENOUGH)

    sweep(some(schedules, short=5 if where == "local" else 2), attempt, share=0.04)


@pytest.mark.full("s3")
def test_workers_at_once_some_of_them_killed_keep_to_one_budget(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    def attempt(number: int) -> str | None:
        rng = random.Random(number)
        place = new_place()
        place.write(args=SLOW, run=budget(LIMIT))
        kills = [f"ask:{rng.randrange(2, 9)}", f"{rng.choice(BUDGET_FAILPOINTS)}:{rng.randrange(1, 4)}", ""]
        workers = [place.start(setup=metered(place, kill)) for kill in kills]
        ended = [worker.wait() for worker in workers]
        if any(worker.code not in (-signal.SIGKILL, 5, 20, 75) for worker in ended):
            return "\n".join(map(str, ended))
        wrong = overshot(place, LIMIT) or ends_at_budget(place)
        if wrong is not None:
            return wrong
        place.write(args=SLOW, run=budget(ENOUGH))
        return place.finish(expected) or overshot(place, ENOUGH)

    sweep(range(count(full=12, short=2 if where == "local" else 1)), attempt, at_a_time=1, share=0.04)


def test_a_reservation_takes_few_requests(new_place: Places, where: str) -> None:
    """Of a whole run: entries of the ledger, each a put, against asks."""
    place = new_place()
    place.write(run=budget(ENOUGH))
    ended = place.call()
    assert ended.code == 0
    result = json.loads(ended.text[ended.text.index('{"exit_code"') :].splitlines()[0])
    entries = len(place.store().names("budget"))
    assert result["this_run"]["requests"] > 60
    assert entries <= 6, "the first share, what is in flight, the settlement"
