"""A run that takes labels over and asks a canary first, killed at a failpoint: the next run ends it as an undisturbed
one ends.
"""

from __future__ import annotations

from tests.faults.conftest import Places, Sweep, some, undisturbed
from tests.faults.forks import Setup
from tests.faults.places import Place

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
