"""Object storage that fails: each request of a run in turn is lost, hangs, is refused or answered in part; nothing is
lost, all is reported.

First in memory, where every call of a small run can be made to fail in every way; then a real server through a proxy,
where the failures are those of connections.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relabel.jobs.cli import main
from relabel.manifests import objects as retries
from relabel.manifests.errors import StoreError
from relabel.manifests.files import Storage
from relabel.manifests.objects import Found, TryAgainError
from relabel.manifests.receipts import load_receipt
from relabel.manifests.store import ObjectRunStore
from tests import seaweed
from tests.faults.conftest import Sweep, some, undisturbed
from tests.faults.places import Place
from tests.manifests.memory_objects import MemoryObjects

HOWS = ("lost before", "lost after", "down before", "down after", "refused", "cut")
ALLOWED = {"lost": (0,), "down": (0, 20), "refused": (0, 3), "cut": (0, 3)}
"""Exit codes by what went wrong: one lost answer is asked for again; where the last calls of a run are refused (logs, a
lease that is given back), nothing is missing.
"""
SMALL = 18


class Faulty:
    """Storage of which the nth call goes wrong, or all from the nth on.

    Args:
        how: `lost` (this one call; no answer, `before` it acted or `after`), `down` (from here on), `refused` (from
            here on, for good), `cut` (this one reply holds half of the bytes).
    """

    has_atomic_conditions = True

    def __init__(self, objects: MemoryObjects, nth: int, how: str) -> None:
        self._objects, self._nth, self._how = objects, nth, how
        self.count = 0

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        real = getattr(self._objects, verb)

        def called(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            is_due = self.count == self._nth or (self.count > self._nth and not self._how.startswith(("lost", "cut")))
            if not is_due:
                return real(*arguments, **options)
            if self._how == "refused":
                raise StoreError(f"{arguments[0]}: no permission (by the test)")
            if self._how == "cut":
                found = real(*arguments, **options)
                return found._replace(data=found.data[: len(found.data) // 2]) if isinstance(found, Found) else found
            if self._how.endswith("after"):
                real(*arguments, **options)
            raise TryAgainError(f"{self._how}, by the test")

        return called


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Place]]:
    """`memory(objects)`: from here on, mem:// leads to these objects; gives the place of a small job there, with its
    input on disk.
    """
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    place = Place(tmp_path, str(tmp_path))

    def lead(objects: Any) -> Place:
        monkeypatch.setattr(
            "relabel.manifests.store.objects_of",
            lambda url, storage: (objects, url.partition("://")[2].strip("/")),
        )
        place.write(rows=SMALL, output="mem://bucket/out", shards=2)
        return place

    return lead


def inside(*arguments: str | Path) -> tuple[int, str]:
    """A command in this process: its exit code and all that it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        main([*map(str, arguments), "--output", "json"])
    assert isinstance(end.value.code, int)
    return end.value.code, said.getvalue()


def held(objects: MemoryObjects) -> dict[str, bytes]:
    """The committed label and quarantine files, through the receipts."""
    store = ObjectRunStore(objects, "bucket/out", Storage(), root="mem://bucket/out")
    receipts = [load_receipt(store, name) for name in store.etags("receipts")]
    return {
        file.path: store.read(file.path)
        for one in receipts
        for file in (one.labels, one.quarantine)
        if file is not None
    }


def test_every_storage_call_may_fail_in_every_way_and_the_next_run_ends_whole(
    memory: Callable[[Any], Place], sweep: Sweep
) -> None:
    whole = MemoryObjects()
    counting = Faulty(whole, 0, "lost before")
    place = memory(counting)
    assert inside("run", place.job)[0] == 0
    expected, num_calls = held(whole), counting.count
    assert len(expected) > 4

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        objects = MemoryObjects()
        place = memory(Faulty(objects, nth, how))
        code, said = inside("run", place.job)
        if code not in ALLOWED[how.partition(" ")[0]]:
            return f"exit code {code}: {said[-1500:]}"
        if code == 0 and held(objects) != expected:
            return "exit code 0, and the labels are not those of an undisturbed run"
        objects.now_s += 1000.0  # leases that were left are dead
        place = memory(objects)
        code, said = inside("run", place.job)
        if code not in (0, 10):
            return f"the second run: exit code {code}: {said[-1500:]}"
        code, said = inside("verify", place.job)
        if code != 0:
            return f"verify: {said[-1500:]}"
        return None if held(objects) == expected else "other labels than those of an undisturbed run"

    schedules = list(itertools.product(range(1, num_calls + 1), HOWS))
    random.Random(17).shuffle(schedules)  # where time runs out, what was tried lies all over the run
    sweep(some(schedules, short=20), attempt, at_a_time=1, share=0.08)


PROXY_HOWS = ("refuse", "drop", "503", "500", "507", "quota", "cut", "flip", "bare", "hang", "hang after")
READ_TIMEOUT_S = 2


@pytest.mark.s3
def test_every_request_to_a_real_server_may_fail_and_the_run_ends_whole(
    s3_server: seaweed.Server, s3_variables: dict[str, str], tmp_path: Path, sweep: Sweep
) -> None:
    """Connections refused, or dropped after the act, 503 and 500, bodies cut short, and a server that is silent beyond
    the time-out.
    """
    numbers = itertools.count()

    def new_place() -> Place:
        folder = tmp_path / f"place-{next(numbers)}"
        return Place(folder, f"s3://{seaweed.BUCKET}/proxy-{folder.name}", s3_variables)

    expected = undisturbed(new_place())

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        place = new_place()
        seen = itertools.count(1)

        def decide(exchange: seaweed.Exchange) -> str:
            if next(seen) != nth:
                return "pass"
            if how == "hang":
                time.sleep(READ_TIMEOUT_S + 2)
                return "refuse"
            if how == "hang after":
                return "drop"
            return how

        place.write(run={"store_retry_s": 60.0})
        spec = yaml.safe_load(place.job.read_text())
        spec["storage_options"] = {"s3": {"config_kwargs": {"read_timeout": READ_TIMEOUT_S}}}
        place.job.write_text(yaml.safe_dump(spec))
        with seaweed.proxying(s3_server, decide) as proxy:
            ended = place.call(variables=proxy.environment)
            if len(proxy.seen) < nth:
                return None  # the run needed fewer requests
        is_full = how in ("507", "quota") and ended.codes == [20]
        if ended.codes not in ([0], [20]) or (is_full and "no space left in the bucket" not in ended.text):
            return f"{how} at request {nth}: {ended}"
        return place.finish(expected)

    with seaweed.proxying(s3_server) as counting:
        place = new_place()
        place.write()
        assert place.call(variables=counting.environment).codes == [0]
        num_requests = len(counting.seen)
    schedules = [(nth, PROXY_HOWS[nth % len(PROXY_HOWS)]) for nth in range(1, num_requests + 1)]
    sweep(some(schedules, short=2), attempt, share=0.08)
