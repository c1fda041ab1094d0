"""What the driver makes of an actor's last word, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relabel.jobs.pool.messages import Done, Fails
from relabel.jobs.pool.ray_backend import Actor, Driver, Look, Work
from relabel.jobs.pool.supervisor import Results
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.stop import Stop
from relabel.manifests.errors import StoreUnreachableError

FAULT = Fails("RuntimeError", "worker r0: its engine went down 3 times", is_terminal=False, is_ours=False)


def driver_of(failure: Fails, actors: int) -> Driver:
    """A driver whose actors all end with this failure."""
    found = Work(Results(), failure, None, Look("a", Done(), []))
    gone = type("RayActorError", (Exception,), {})
    ray = SimpleNamespace(get=lambda _: found, exceptions=SimpleNamespace(RayActorError=gone))
    session: Any = SimpleNamespace(progress=Progress(), stop=Stop())
    driver = Driver(ray, session, on_progress=lambda: None, say=lambda _: None)
    driver._actors = [Actor(f"r{number}", None, call=object()) for number in range(actors)]
    return driver


def test_a_fault_of_ours_on_every_node_is_reported_as_one_and_not_as_work_to_run_again() -> None:
    """A `partial` (20) would have a scheduler start it for ever."""
    driver = driver_of(FAULT, 1)
    with pytest.raises(RuntimeError, match="went down 3 times"):
        driver._end(driver._actors[0])


def test_a_fault_on_one_node_gives_up_that_node_alone() -> None:
    driver = driver_of(FAULT, 2)
    driver._end(driver._actors[0])
    assert isinstance(driver._actors[0].error, RuntimeError)
    assert driver._actors[1].error is None
    assert any("went down 3 times" in remark for remark in driver.results.remarks)


def test_what_another_try_would_not_mend_ends_the_run_in_its_own_words() -> None:
    failure = Fails("StoreUnreachableError", "no good answer", is_terminal=False, is_ours=True)
    driver = driver_of(failure, 2)
    with pytest.raises(StoreUnreachableError, match="no good answer"):
        driver._end(driver._actors[0])
