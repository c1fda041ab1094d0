"""Asks that rows of a query share, under kills, races, retries and chunks that are done again: every row has
one state, an ask is counted once for what is committed, and no query has rows of two answers.

The engine answers otherwise in each of its lives (`Fickle`), so that rows of two answers can't look alike. What a run
that nobody disturbs leaves is compared with the fake engine's.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

from relabel.manifests.failpoints import FAILPOINTS
from tests.faults.conftest import IS_FULL, Places, Sweep, count
from tests.faults.forks import Ended, Setup
from tests.faults.places import Place
from tests.faults.shared_jobs import SHARED, faults_of, receipts_of, write

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
