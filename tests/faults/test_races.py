"""A worker that sleeps past its lease and wakes while another works: one commit a chunk, same labels."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.failpoints import FAILPOINTS
from tests.faults.conftest import IS_FULL, Places, Sweep, count, instants, seconds_of_a_run, some, undisturbed
from tests.faults.forks import Ended, Setup
from tests.faults.places import SLOW, Place
from tests.faults.shared_jobs import SHARED, faults_of, receipts_of, write


@pytest.mark.full("s3")
def test_a_worker_that_sleeps_past_its_lease_and_wakes_changes_nothing(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    run_s = seconds_of_a_run(new_place)

    def attempt(instant: float) -> str | None:
        place = new_place()
        place.write(args=SLOW)
        sleeper = place.start()
        time.sleep(instant * run_s)
        sleeper.send(signal.SIGSTOP)
        time.sleep(3.5 if where == "s3" else 0.0)  # its leases die; a lock of the kernel's lasts as long as its holder
        second = place.start()
        deadline = time.monotonic() + 8.0
        while second.is_alive() and time.monotonic() < deadline:
            # it may wait for the sleeper, who holds the manifest's lock
            time.sleep(0.05)
        before = committed_so_far(place)
        sleeper.send(signal.SIGCONT)
        ended = [sleeper.wait(), second.wait()]
        if any(worker.code not in (0, 10, 20, 75) for worker in ended):
            return f"{ended[0]}\n{ended[1]}"
        after = committed_so_far(place)
        if any(after.get(name) != data for name, data in before.items()):
            return "a receipt changed after the sleeper woke"
        return place.finish(expected)

    sweep(instants(count(full=24, short=1), seed=7), attempt, share=0.08)


def committed_so_far(place: Place) -> dict[str, bytes]:
    store = place.store()
    return {name: store.read(name) for name in store.etags("receipts")}


# A run that takes labels over and asks a canary first, killed at a failpoint: the next run ends it as an undisturbed
# one ends.


TOUCHED = (3, 17, 31, 32, 48)


def test_a_run_that_takes_over_and_asks_a_canary_survives_a_kill(local_place: Places, sweep: Sweep) -> None:
    earlier = local_place()
    undisturbed(earlier)

    def tuesday(place: Place) -> None:
        place.write(reuse=[earlier.output], canary=20, touched=TOUCHED)

    whole = local_place()
    tuesday(whole)
    assert whole.call("run", "verify").codes == [0, 0]
    expected, manifest = whole.committed(), whole.manifest()
    assert manifest["rows"]["reused"] > 0
    assert manifest["canary"], "no canary was asked: the test tests nothing"

    def attempt(failpoint: str) -> str | None:
        place = local_place()
        tuesday(place)
        place.call(setup=Setup("tests.faults.children", "arm", (failpoint,)))
        wrong = place.finish(expected)
        if wrong is None and place.manifest()["rows"] != manifest["rows"]:
            wrong = f"other counts: {place.manifest()['rows']}"
        return wrong

    failpoints = (
        "after_labels:2",
        "after_answers:3",
        "before_receipt:4",
        "after_receipt:1",
        "after_receipt:5",
        "before_manifest",
    )
    sweep(some(failpoints, short=2), attempt)


# Asks that rows of a query share, under kills, races, retries and chunks that are done again: every row has one
# state, an ask is counted once for what is committed, and no query has rows of two answers. The engine answers
# otherwise in each of its lives (`Fickle`), so that rows of two answers can't look alike. What a run that nobody
# disturbs leaves is compared with the fake engine's.


FICKLE = {"p_garbage": 0.3, "p_truncated": 0.1}


def engine(log: Path) -> dict[str, Any]:
    log.mkdir(exist_ok=True)
    return {"name": "fickle", "args": {**FICKLE, "log": str(log)}}


def call(place: Place, *verbs: str, kill: str = "") -> Ended:
    what = ("register_and", ("arm", kill)) if kill else ("register",)
    return place.call(*verbs, setup=Setup("tests.faults.odd_engine", *what))


class Story:
    """What becomes of one job, drawn by a seed.

    Args:
        place: where it lies.
    """

    def __init__(self, place: Place, name: str, seed: int) -> None:
        self.place, self.name, self.rng = place, name, random.Random(f"{name} {seed}")
        self.log = place.folder / "log"
        write(place, name, engine=engine(self.log))

    def tell(self) -> str | None:
        """Go through all of it; what went wrong, or None."""
        return self.is_run() or self.is_retried() or self.is_done_again() or self.is_retried()

    def is_run(self) -> str | None:
        """Killed now and then, by workers that race for its chunks in the end."""
        for _ in range(self.rng.randint(1, 2)):
            killed = call(self.place, "run", kill=self._failpoint())
            if killed.code not in (-signal.SIGKILL, 0, 10, 20):
                return f"not killed: {killed}"
        if self.rng.random() < 0.5:
            setup = Setup("tests.faults.odd_engine", "register")
            ended = [worker.wait() for worker in [self.place.start("run", setup=setup) for _ in range(2)]]
            if any(worker.code not in (0, 10, 20) for worker in ended):
                return f"{ended[0]}\n{ended[1]}"
        return self._ends("run")

    def is_retried(self) -> str | None:
        """Killed on the way, perhaps."""
        if self.rng.random() < 0.5:
            call(self.place, "retry", kill=self._failpoint())
        return self._ends("retry")

    def is_done_again(self) -> str | None:
        """As our errors advise: the receipts of a chunk, or of its last attempts, are moved away."""
        chunk = self.rng.choice(receipts_of(self.place)).id
        receipts = sorted(one.id for one in receipts_of(self.place) if one.id[:2] == chunk[:2])
        for one in receipts if self.rng.random() < 0.5 else receipts[-1:]:
            Path(self.place.output, one.receipt_name).unlink()
        return self._ends("run")

    def _failpoint(self) -> str:
        return f"{self.rng.choice(FAILPOINTS[5:])}:{self.rng.randint(1, 6)}"

    def _ends(self, verb: str) -> str | None:
        ended = call(self.place, verb, "run", "verify")
        if any(code not in (0, 10) for code in ended.codes) or len(ended.codes) < 3:
            return f"{verb} did not end well: {ended}"
        wrong = faults_of(self.place, self.name, self.log)
        return f"after {verb}: {wrong}" if wrong else None


def test_whatever_becomes_of_a_job_no_query_has_rows_of_two_answers(local_place: Places, sweep: Sweep) -> None:
    seeds = [(name, seed) for seed in range(count(full=12, short=1)) for name in (SHARED if IS_FULL else SHARED[:1])]

    def attempt(schedule: tuple[str, int]) -> str | None:
        return Story(local_place(), *schedule).tell()

    sweep(seeds, attempt, share=0.06)
