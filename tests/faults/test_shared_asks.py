"""Asks that rows of a query share, under kills, races, retries, chunks that are done again and merges: every row has
one state, an ask is counted once for what is committed, and no query has rows of two answers.

The engine answers otherwise in each of its lives (`Fickle`), so that rows of two answers can't look alike. What a run
that nobody disturbs leaves is compared with the fake engine's.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.failpoints import FAILPOINTS
from tests.faults.conftest import Places, Sweep, count, some
from tests.faults.forks import Ended, Setup
from tests.faults.places import FAULTY, Place
from tests.faults.shared_jobs import SHARED, WHOLE_QUERY, faults_of, receipts_of, write

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
            meeting = self.place.folder / f"meeting-{self.rng.random()}"
            meeting.mkdir()
            setup = Setup("tests.faults.odd_engine", "register_and", ("race", str(meeting)))
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
        receipts = [one.id for one in receipts_of(self.place) if one.id[:2] == chunk[:2]]
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


@pytest.mark.full
def test_whatever_becomes_of_a_job_no_query_has_rows_of_two_answers(local_place: Places, sweep: Sweep) -> None:
    seeds = [(name, seed) for seed in range(count(full=12, short=1)) for name in SHARED]

    def attempt(schedule: tuple[str, int]) -> str | None:
        return Story(local_place(), *schedule).tell()

    sweep(seeds, attempt, share=0.06)


@pytest.mark.parametrize("name", WHOLE_QUERY)
def test_merged_parts_hold_each_querys_rows_of_one_answer(local_place: Places, name: str) -> None:
    """Two parts of one run that both did a shard, and the one that was retried since."""
    first, second = local_place(), local_place()
    log = first.folder / "log"
    for place in (first, second):
        write(place, name, engine=engine(log), input={"path": f"{first.root}/pairs.parquet"})
    assert call(first, "run --shard 0/3", "run --shard 1/3").codes == [0, 0]
    assert call(second, "run --shard 1/3", "run --shard 2/3").codes == [0, 0]
    merged = Place(first.folder, str(first.folder), disk=first.folder / "merged")
    for verb in ("verify", "retry"):
        assert call(second, verb).codes[0] in (0, 3, 20, 30)
        ended = merge(first.output, second.output, to=merged.output)
        assert ended.codes in ([0], [30]), ended
        assert faults_of(merged, name, log) is None


def merge(*outputs: str, to: str) -> Ended:
    from tests.faults import forks

    setup = Setup("tests.faults.odd_engine", "register")
    return forks.call(["merge", *outputs, "--to", to, "--output", "json"], setup=setup)


@pytest.mark.full("s3")
@pytest.mark.parametrize("name", SHARED)
def test_killed_at_a_failpoint_and_run_again_equals_an_undisturbed_run(
    new_place: Places, name: str, sweep: Sweep
) -> None:
    whole = new_place()
    write(whole, name, engine={"args": FAULTY})
    assert whole.call("run", "verify").codes == [0, 0]
    expected = whole.committed()

    def attempt(failpoint: str) -> str | None:
        place = new_place()
        write(place, name, engine={"args": FAULTY})
        killed = place.call(setup=Setup("tests.faults.children", "arm", (failpoint,)))
        if killed.code not in (-signal.SIGKILL, 0):
            return f"not killed: {killed}"
        return place.finish(expected)

    points = ["after_labels:3", "after_answers:2", "before_receipt:1", "after_receipt:4", "before_manifest:1"]
    sweep(some(points, short=1), attempt, share=0.012)
