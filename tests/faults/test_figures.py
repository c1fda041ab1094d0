"""What a run reports is what its output holds: a row counts once, whichever worker asks it again, and lost work
is counted apart.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.faults.conftest import IS_FULL, Places
from tests.faults.forks import Ended, Setup
from tests.faults.places import ROWS, Place

SMALL = [(400, 100, 3), (10, 256, 8)]
CREWS = [*SMALL, (400, 100, 1), (400, 100, 2), (400, 100, 4), (200, 256, 3)] if IS_FULL else SMALL
"""Rows, rows a chunk, workers that are started by hand at the same time: small jobs on many workers."""


def result_of(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next(line for line in ended.text.splitlines() if line.startswith('{"exit_code"'))
    )
    return found


def committed(place: Place) -> dict[str, Counter[str]]:
    """By execution, rows and requests of its receipts."""
    found: dict[str, Counter[str]] = {}
    for name in place.store().etags("receipts"):
        held = json.loads(place.store().read(name))
        counts = found.setdefault(held["execution"], Counter())
        counts.update(
            pairs=held["rows"], chunks_committed=1, requests=sum(stage["asks"] for stage in held["stages"].values())
        )
    return found


def wrong(did: dict[str, Any], counts: Counter[str]) -> dict[str, tuple[int, int]]:
    return {
        name: (did[name], counts[name])
        for name in ("pairs", "requests", "chunks_committed")
        if did[name] != counts[name]
    }


@pytest.mark.full("s3")
@pytest.mark.parametrize(("rows", "chunk_rows", "workers"), CREWS)
def test_each_of_several_workers_on_one_output_counts_its_own_rows_and_no_row_twice(
    new_place: Places, rows: int, chunk_rows: int, workers: int
) -> None:
    place = new_place()
    place.write(
        rows=rows, shards=1, run={"chunk_rows": chunk_rows}, args={"p_slow": 1.0, "slow_s": 0.002, "capacity": 32}
    )
    assert place.call("plan").codes == [0]
    ended = [worker.wait() for worker in [place.start() for _ in range(workers)]]
    assert all(worker.code in (0, 10, 20, 75) for worker in ended), ended
    did = [result_of(worker)["this_run"] for worker in ended]
    assert sum(one["pairs"] for one in did) == rows
    assert sum(sum(one["statuses"].values()) for one in did) == rows
    by_execution = committed(place)
    assert not wrong(
        dict(sum((Counter({k: one[k] for k in ("pairs", "requests", "chunks_committed")}) for one in did), Counter())),
        sum(by_execution.values(), Counter()),
    )
    lost = [json.loads(place.store().read(name)) for name in place.store().etags("lost")]
    assert sum(one["in_vain"]["pairs"] for one in did) == sum(held["rows"] for held in lost)
    assert sum(one["chunks_lost"] for one in did) == len(lost)


@pytest.mark.full("s3")
def test_a_run_that_goes_on_after_a_kill_counts_its_own_rows_alone(new_place: Places) -> None:
    place = new_place()
    place.write()
    killed = place.call(setup=Setup("tests.faults.children", "arm", ("after_receipt:4",)))
    assert killed.code == -9
    (before,) = committed(place).values()
    ended = place.call()
    did = result_of(ended)["this_run"]
    assert did["pairs"] == ROWS - before["pairs"] > 0
    own = [counts for counts in committed(place).values() if counts != before]
    assert [wrong(did, counts) for counts in own] == [{}]
    assert did["in_vain"] == {
        "pairs": 0,
        "requests": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "cost": None,
    }
    assert result_of(place.call())["this_run"]["pairs"] == 0
