"""kill -9 and SIGTERM amid `run` of a cascade, `score`, `merge`, `distill`, `train`, `export`, `report`, `convert`,
`compare`, `audit` and `review`: the same command then ends right.

At failpoints, at each call about a file, and at random instants. After each kill what has a final name is whole and
what is the user's is as it was; after the same command again the files are those of an undisturbed call, byte for byte
where bytes are promised.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults import forks
from tests.faults.command_lines import inside, write_world
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
"""tests/score, tests/distill, tests/teachers and tests/publish have the ordinary suite's kills."""


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
