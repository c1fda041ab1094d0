"""kill -9 in a merge, the first one or one that follows its sources; the same command again ends as one that nobody
disturbed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest

from tests.faults import forks
from tests.faults.conftest import IS_FULL, Places, Sweep, some
from tests.faults.forks import Setup
from tests.faults.places import Place
from tests.faults.test_kill import armed

STALL_S = 200.0
"""On object storage a killed merge's lease lives on for a minute."""
ON_S3 = 3


def sources(place: Place) -> tuple[str, str]:
    return place.output, f"{place.root}/other"


def merge(place: Place, *, setup: Setup | None = None) -> forks.Ended:
    return forks.call(
        ["merge", *sources(place), "--to", f"{place.root}/merged"], variables=place.variables, setup=setup
    )


def prepared(place: Place, *, is_second: bool) -> Place:
    """Two outputs of one job, the second of them retried; merged once before that, if so wanted. Returns where they are
    merged.
    """
    place.write()
    other = sources(place)[1]
    ended = place.call("run", f"run --set output={other}")
    assert ended.codes == [0, 0], ended
    if is_second:
        assert merge(place).codes == [0]
    ended = place.call(f"retry --set output={other}")
    assert ended.codes == [0], ended
    return Merged(place.folder, place.root, place.variables)


class Merged(Place):
    """The place, to look at what was merged."""

    @property
    def output(self) -> str:
        return f"{self.root}/merged"


@pytest.mark.full("s3")
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_killed_at_every_failpoint_and_merged_again_equals_an_undisturbed_merge(
    new_place: Places, where: str, sweep: Sweep, *, is_second: bool
) -> None:
    whole = new_place()
    looked = prepared(whole, is_second=is_second)
    log = whole.folder / "hits"
    assert merge(whole, setup=Setup("tests.faults.children", "note_hits", (str(log),))).codes == [0]
    expected = looked.committed()
    hits = Counter(log.read_text().split())
    assert set(hits) >= {"before_receipt", "after_receipt", "before_manifest", "after_manifest"}
    schedules = [
        (name, hit) for hit in ((1, 2, 4) if IS_FULL else (1, 3)) for name, most in hits.items() if hit <= most
    ]
    schedules = some(schedules, short=2) if where == "local" else schedules[-ON_S3:]  # each of them waits for a lease

    def attempt(schedule: tuple[str, int]) -> str | None:
        place = new_place()
        merged = prepared(place, is_second=is_second)
        killed = merge(place, setup=armed(f"{schedule[0]}:{schedule[1]}"))
        if killed.code != -signal.SIGKILL:
            return f"not killed: {killed}"
        deadline = time.monotonic() + STALL_S
        while (ended := merge(place)).codes == [75] and time.monotonic() < deadline:
            time.sleep(1.0)
        if ended.codes not in ([0], [10]):
            return f"the second merge did not end well: {ended}"
        verified = forks.call(["verify", merged.output], variables=place.variables)
        return merged.differs(expected) if verified.codes == [0] else f"does not verify: {verified}"

    sweep(schedules, attempt)
