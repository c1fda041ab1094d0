"""A worker that sleeps past its lease and wakes while another works: one commit a chunk, same labels."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.conftest import Places, Sweep, count, instants, seconds_of_a_run
from tests.faults.places import SLOW, Place


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
