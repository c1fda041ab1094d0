"""An engine that misbehaves: every row ends labelled or quarantined, or the run ends with the right exit code and the
next one ends it.
"""

from __future__ import annotations

import io
import itertools
import json
import random
from collections import Counter
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.faults.conftest import Places, Sweep, count, some
from tests.faults.forks import Setup
from tests.faults.odd_engine import HARMLESS, HOWS, LOST
from tests.faults.places import FAULTY, ROWS, Place

ODD = Setup("tests.faults.odd_engine", "register")
ASK_TIMEOUT_S = 3.0
CODES = {"exit": 66, "raises": 1}
"""Exit code by how the engine was lost; 20 where nothing else is reported. An error that no engine may raise is a fault
of the program.
"""
STATUSES = {"ok", "format", "truncated", "refused", "overlong", "engine"}


def write(place: Place, nth: int = 0, how: str = "") -> None:
    engine = {"name": "odd", "args": {**FAULTY, "batch": 4, "nth": nth, "how": how}}
    place.write(engine=engine, run={"ask_timeout_s": ASK_TIMEOUT_S})


def rows(place: Place) -> dict[int, dict[str, Any]]:
    """All committed rows by row id, once each."""
    store = place.store()
    found = [row for name in place.committed() for row in pq.read_table(io.BytesIO(store.read(name))).to_pylist()]
    by_id = {row["row_id"]: row for row in found}
    assert len(by_id) == len(found) == ROWS
    return by_id


def test_whatever_one_answer_is_the_run_ends_whole_or_says_why_and_the_next_one_does(
    local_place: Places, sweep: Sweep
) -> None:
    whole = local_place()
    write(whole)
    ended = whole.call("run", "verify", setup=ODD)
    assert ended.codes == [0, 0], ended
    expected, expected_rows = whole.committed(), rows(whole)
    num_asks = json.loads(next(line for line in ended.text.splitlines() if line.startswith('{"exit_code"')))[
        "this_run"
    ]["requests"]

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        place = local_place()
        write(place, nth, how)
        ended = place.call(setup=ODD)
        if ended.code != (CODES.get(how, 20) if how in LOST else 0):
            return str(ended)
        write(place)
        again = place.call("run", "verify", setup=ODD)
        if again.codes[0] not in (0, 10) or again.codes[1:] != [0]:
            return f"the second run: {again}"
        if how in (*LOST, *HARMLESS):
            return place.differs(expected)
        found = rows(place)
        if not {row["status"] for row in found.values()} <= STATUSES:
            return f"statuses {Counter(row['status'] for row in found.values())}"
        changed = [row_id for row_id, row in found.items() if row != expected_rows[row_id]]
        # the row itself, or the rows of the query where the spoilt answer was one that they share
        queries = {expected_rows[row_id]["query_id"] for row_id in changed}
        most = 2 if how == "other asks answer" else 1
        return f"rows {changed} of queries {queries} changed" if len(queries) > most else None

    per_way = count(full=4, short=1)
    rng = random.Random(16)
    schedules = [(rng.randrange(2, num_asks), how) for how, _ in itertools.product(HOWS, range(per_way))]
    sweep(some(schedules, short=len(HOWS)), attempt)


@pytest.mark.parametrize(
    ("args", "statuses"),
    [
        ({"p_garbage": 1.0}, {"format"}),
        ({"p_truncated": 1.0}, {"truncated", "format"}),
        ({"p_refused": 1.0}, {"refused"}),
    ],
)
def test_an_engine_that_never_answers_well_quarantines_every_row_and_the_run_ends_with_30(
    local_place: Places, args: dict[str, float], statuses: set[str]
) -> None:
    place = local_place()
    place.write(args=args, run={"max_failed_fraction": 0.05})
    ended = place.call("run", "verify", "run")
    assert ended.codes == [30, 0, 30], ended
    assert place.row_ids() == Counter(range(ROWS))
    found = rows(place)
    assert {row["status"] for row in found.values()} <= statuses
    assert all("grade" not in row for row in found.values())


def test_an_engine_that_crashes_again_and_again_gets_every_row_done_over_many_runs(local_place: Places) -> None:
    place, whole = local_place(), local_place()
    whole.write()
    assert whole.call().codes == [0]
    codes = []
    for p_crash in (
        0.5,
        0.2,
        0.1,
        *[0.03] * 57,
    ):
        # one that goes down for certain, two that may commit something first, then on to the end
        place.write(args={**FAULTY, "p_crash": p_crash, "capacity": 8, "batch": 2})
        codes.append(place.call().code)
        if codes[-1] != 20:
            break
    assert codes[0] == 20, "no crash at all: the test tests nothing"
    assert place.finish(whole.committed()) is None
