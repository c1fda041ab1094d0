"""kill -9 anywhere, run again: nothing lost, nothing doubled, labels and quarantine byte for byte those of an
undisturbed run.

Most victims are forks of one warm parent (`forks.py`), some are a real `relabel run` in a fresh interpreter. The loop
over `FAILPOINTS` covers a new failpoint at birth.
"""

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.manifests.failpoints import FAILPOINTS
from tests.faults.conftest import IS_FULL, Places, Sweep, count, instants, seconds_of_a_run, some, undisturbed
from tests.faults.forks import Setup
from tests.faults.places import FAULTY, ROWS, SLOW, Place, pairs
from tests.trees import with_trees


def armed(place: str) -> Setup:
    return Setup("tests.faults.children", "arm", (place,))


def command(place: Place, *more: str, verb: str = "run") -> list[str]:
    return [sys.executable, "-m", "relabel", verb, str(place.job), "--output", "json", *more]


def hits_of_a_run(place: Place) -> Counter[str]:
    """How often an undisturbed run passes each failpoint."""
    place.write()
    log = place.folder / "hits"
    assert place.call(setup=Setup("tests.faults.children", "note_hits", (str(log),))).code == 0
    return Counter(log.read_text().split())


def test_killed_at_every_failpoint_and_run_again_equals_an_undisturbed_run(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    # an object has no temporary file
    names = [name for name in FAILPOINTS if where == "local" or not name.startswith("before_temp")]
    times = hits_of_a_run(new_place())
    assert not set(names) - times.keys(), "an undisturbed run passes every one of them"
    schedules = [(name, hit) for hit in ((1, 2, 5, 8) if IS_FULL else (1,)) for name in names if hit <= times[name]]

    def attempt(schedule: tuple[str, int]) -> str | None:
        place = new_place()
        place.write()
        name, hit = schedule
        killed = place.call(setup=armed(f"{name}:{hit}"))
        return place.finish(expected) if killed.code == -signal.SIGKILL else f"not killed: {killed}"

    sweep(some(schedules, short=13 if where == "local" else 2), attempt, share=0.08)


@pytest.mark.full("s3")
def test_killed_at_a_random_instant_and_run_again_equals_an_undisturbed_run(
    new_place: Places, where: str, expected: dict[str, str], sweep: Sweep
) -> None:
    run_s = seconds_of_a_run(new_place)
    found: Counter[str] = Counter()

    def attempt(instant: float) -> str | None:
        place = new_place()
        place.write(args=SLOW)
        victim = place.start()
        time.sleep(instant * run_s)
        victim.send(signal.SIGKILL)
        ended = victim.wait()
        if ended.code not in (-signal.SIGKILL, 0):
            return f"it ended by itself: {ended}"
        found[place.state()] += 1
        place.write()  # the engine's speed is no part of a label
        return place.finish(expected)

    sweep(instants(count(full=200, short=4)), attempt, share=0.1 if where == "local" else 0.3)
    print(dict(found))


@pytest.mark.parametrize(
    ("labeler", "samples"),
    [("direct", 1), ("r3a", 3), ("umbrela", 1), ("route", 2)],
)
def test_labelers_without_shared_asks_and_many_samples_survive_a_kill(
    local_place: Places, labeler: str, samples: int
) -> None:
    """Those that share asks are killed in test_shared_asks.py."""
    options = {"name": labeler, "attempts": 2, "samples": samples, "temperature": 0.0 if samples == 1 else 0.8}
    whole, place = local_place(), local_place()
    for one in (whole, place):
        one.write(labeler=options)
        if labeler == "route":
            pq.write_table(with_trees(pairs(ROWS)), f"{one.root}/pairs.parquet")
    assert whole.call().codes == [0]
    assert place.call(setup=armed("after_receipt:4")).code == -signal.SIGKILL
    assert place.finish(whole.committed()) is None


def test_a_second_ctrl_c_stops_at_once_with_130_and_what_was_committed_stays(local_place: Places) -> None:
    expected = undisturbed(local_place())
    place = local_place()
    place.write(args={**FAULTY, "p_slow": 0.5, "slow_s": 30.0, "capacity": 8})
    process = subprocess.Popen(command(place), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while "makes its answers up" not in (line := process.stderr.readline()) and line:
        pass  # the engine's own remark: the run has begun
    second = Path(place.output, "leases", "shard-00001.lock")
    while not second.exists() and process.poll() is None:
        time.sleep(0.01)  # it is opened once the first one's chunks are asked: before, there is nothing to drain
    process.send_signal(signal.SIGINT)
    while "Ctrl-C" not in (line := process.stderr.readline()) and line:
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stderr.close()
    place.write()
    assert place.finish(expected) is None


def test_more_shards_than_files_may_be_open_can_be_run(local_place: Places) -> None:
    place = local_place()
    place.write()
    rows = range(300)
    table = {
        "query_id": [f"q{row}" for row in rows],
        "query": ["socks"] * 300,
        "doc_id": ["d"] * 300,
        "document": ["wool socks"] * 300,
    }
    pq.write_table(pa.table(table), Path(place.root, "pairs.parquet"))
    place.job.write_text(yaml.safe_dump({**yaml.safe_load(place.job.read_text()), "shards": 300}))
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *command(place)]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert place.call("verify").codes == [0]
