"""Several workers at once, workers that sleep past their lease and wake, workers that are stopped: one commit a chunk,
same labels.
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Places, Sweep, count, instants, seconds_of_a_run
from tests.faults.forks import Setup
from tests.faults.places import ROWS, SLOW, Place


@pytest.mark.full("s3")
def test_two_workers_that_race_for_every_chunk_commit_each_once(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep, tmp_path: Path
) -> None:
    """Without locks, and meeting right before each receipt: only the store's create-if-absent keeps commits single."""

    def attempt(number: int) -> str | None:
        place = new_place()
        place.write()
        meeting = tmp_path / f"meeting-{number}"
        meeting.mkdir()
        planned = place.call("plan")
        if planned.codes != [0]:
            return f"no plan: {planned}"
        workers = [place.start(setup=Setup("tests.faults.children", "race", (str(meeting),))) for _ in range(2)]
        ended = [worker.wait() for worker in workers]
        if any(worker.code not in (0, 10, 20) for worker in ended):
            return f"{ended[0]}\n{ended[1]}"
        did = [
            json.loads(next(line for line in worker.text.splitlines() if line.startswith('{"exit_code"')))["this_run"]
            for worker in ended
        ]
        chunks = len(place.store().etags("receipts"))
        won, lost = (sum(one[key] for one in did) for key in ("chunks_committed", "chunks_lost"))
        if won != chunks or won + lost != len(list(meeting.iterdir())) or lost == 0:
            return f"{chunks} chunks, {won} commits won and {lost} lost, {len(list(meeting.iterdir()))} tried"
        pairs, in_vain = sum(one["pairs"] for one in did), sum(one["in_vain"]["pairs"] for one in did)
        kept = sum(json.loads(place.store().read(name))["rows"] for name in place.store().etags("lost"))
        if pairs != ROWS or in_vain != kept or not in_vain:
            return f"{pairs} pairs done and {in_vain} discarded, of which {kept} are kept"
        return place.finish(expected)

    sweep(range(count(full=12, short=2 if where == "local" else 1)), attempt)


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

    sweep(instants(count(full=24, short=2 if where == "local" else 1), seed=7), attempt, share=0.08)


def committed_so_far(place: Place) -> dict[str, bytes]:
    store = place.store()
    return {name: store.read(name) for name in store.etags("receipts")}


@pytest.mark.full("s3")
def test_stopped_by_sigterm_at_a_random_instant_and_run_again_equals_an_undisturbed_run(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    run_s = seconds_of_a_run(new_place)

    def attempt(instant: float) -> str | None:
        place = new_place()
        place.write(args=SLOW)
        worker = place.start()
        time.sleep(instant * run_s)
        worker.send(signal.SIGTERM)
        ended = worker.wait()
        if ended.code not in (-signal.SIGTERM, 0, 20):  # the signal itself where it came before relabel listened
            return f"{ended}"
        return place.finish(expected)

    sweep(instants(count(full=40, short=3), seed=8), attempt, share=0.06)


@pytest.mark.full("s3")
def test_workers_killed_one_after_the_other_while_others_work_leave_a_whole_run(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    """Three workers; one is killed every so often and another begun in its stead."""

    def attempt(seed: int) -> str | None:
        rng = random.Random(seed)
        place = new_place()
        place.write(args=SLOW)
        workers = [place.start() for _ in range(3)]
        for _ in range(4):
            time.sleep(rng.uniform(0.05, 0.5))
            victim = workers.pop(rng.randrange(len(workers)))
            victim.send(signal.SIGKILL)
            victim.wait()
            workers.append(place.start())
        ended = [worker.wait() for worker in workers]
        if any(worker.code not in (0, 10, 20, 75) for worker in ended):
            return "\n".join(map(str, ended))
        return place.finish(expected)

    sweep(range(count(full=10, short=1)), attempt, at_a_time=1)
