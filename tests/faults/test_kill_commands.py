"""kill -9 and SIGTERM amid `score`, `distill`, `train`, `export`, `report`, `convert` and `compare`: the same command
then ends right.

At failpoints, at each call about a file, and at random instants. After each kill what has a final name is whole and
what is the user's is as it was; after the same command again the files are those of an undisturbed call, byte for byte
where bytes are promised.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from relabel.manifests.records import sha256_file
from tests.faults import forks
from tests.faults.command_lines import LINES, inside, write_world
from tests.faults.conftest import Sweep, count, instants
from tests.faults.kill_bench import CASES, Bench, undisturbed_bench
from tests.faults.teaching_world import write_teachings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills") / "world"
    write_world(folder, is_heavy=True)
    write_teachings(folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return undisturbed_bench(request.param, world, tmp_path_factory.mktemp(request.param))


pytestmark = pytest.mark.full
"""tests/score, tests/distill, tests/publish and test_teaching_faults.py have the ordinary suite's kills."""


def test_killed_at_a_failpoint_the_same_command_ends_right(bench: Bench, sweep: Sweep) -> None:
    def attempt(schedule: tuple[str, int]) -> str | None:
        name, hit = schedule
        folder = bench.new(f"point-{name}-{hit}")
        ended = bench.start(folder, inside(folder, "arm", f"{name}:{hit}")).wait()
        if ended.code != -signal.SIGKILL and (hit == 1 or (name == "after_training_step" and bench.case.steps)):
            return f"not killed: {ended}"
        return bench.judge(folder, ended)

    schedules = bench.case.schedules()
    if not schedules:
        pytest.skip("it passes no failpoint: killed at every call about a file instead")
    sweep(schedules, attempt, share=0.07 if bench.case.steps else 0.03)


HOWS = ("kill before", "kill after", "error before", "full before")


def test_killed_at_any_call_about_a_file_the_same_command_ends_right(bench: Bench, sweep: Sweep) -> None:
    def call(nth: int, how: str) -> tuple[Path, forks.Ended, str]:
        folder = bench.new(f"call-{nth}-{how.replace(' ', '-')}")
        log = folder.with_suffix(".log")
        ended = bench.start(folder, inside(folder, "fail_file_call", str(folder), nth, how, str(log))).wait()
        return folder, ended, log.read_text() if log.exists() else "no call"

    _, ended, said = call(10**9, "kill before")
    assert ended.codes == [0], ended
    num_calls = int(said.removeprefix("calls "))

    def attempt(schedule: tuple[int, str]) -> str | None:
        folder, ended, said = call(*schedule)
        was_killed = schedule[1].startswith("kill") and ended.code == -signal.SIGKILL
        if not was_killed and ended.codes[:1] not in ([0], [3], [20]):
            return f"({said}) {ended}"
        wrong = bench.judge(folder, ended)
        return None if wrong is None else f"({said}) {wrong}"

    every = [(nth, how) for nth in range(1, num_calls + 1) for how in HOWS]
    random.Random(41).shuffle(every)
    sweep(every[: count(full=30, short=1, long=150)], attempt, share=0.04)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_a_random_instant_the_same_command_ends_right(
    bench: Bench, number: signal.Signals, sweep: Sweep
) -> None:
    def attempt(instant: float) -> str | None:
        folder = bench.new(f"instant-{number.name}-{instant:.4f}")
        victim = bench.start(folder)
        time.sleep(instant * bench.seconds)
        victim.send(number)
        ended = victim.wait()
        if ended.code not in (-number, 0, 20, 130):
            return f"it ended otherwise: {ended}"
        return bench.judge(folder, ended)

    sweep(instants(count(full=12, short=1, long=40), seed=42), attempt, share=0.03)


@pytest.mark.parametrize("name", ["report", "compare", "convert"])
def test_a_page_or_table_that_is_replaced_stays_whole(name: str, world: Path, tmp_path: Path, sweep: Sweep) -> None:
    """What was there before stays until the new one is there."""
    more = [] if name == "report" else ["--force"]
    place = Path(shutil.copytree(world, tmp_path / "first", symlinks=True))
    line, target = LINES[name].text.split(), CASES[name].target
    assert forks.call(line, setup=inside(place), parent="heavy").codes == [0]
    before = sha256_file(place / target)

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        folder = Path(shutil.copytree(place, tmp_path / f"again-{nth}-{how.replace(' ', '-')}", symlinks=True))
        failing = inside(folder, "fail_file_call", str(folder), nth, how, str(folder.with_suffix(".log")))
        ended = forks.call([*line, *more], setup=failing, parent="heavy")
        if wrong := CASES[name].torn(folder / target):
            return f"{wrong}: {ended}"
        if ended.codes[:1] == [3] and sha256_file(folder / target) != before and "error before" in how:
            return f"refused, and another page: {ended}"
        again = forks.call([*line, *more], setup=inside(folder), parent="heavy")
        return None if again.codes == [0] and CASES[name].torn(folder / target) is None else f"again: {again}"

    schedules = [(nth, how) for nth in range(1, 60) for how in HOWS]
    sweep(random.Random(43).sample(schedules, count(full=16, short=1, long=100)), attempt, share=0.02)
