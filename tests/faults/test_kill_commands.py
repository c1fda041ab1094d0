"""kill -9 and SIGTERM amid `score`, `distill`, `train`, `export`, `report`, `convert` and `compare`: the same command
then ends right.

At failpoints, at each call about a file, and at random instants. After each kill what has a final name is whole and
what is the user's is as it was; after the same command again the files are those of an undisturbed call, byte for byte
where bytes are promised.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distill.students.students import student_files
from export.bundles import open_bundle
from manifests.digests import sha256_file
from manifests.failpoints import FAILPOINTS, TRAINING_FAILPOINTS
from tests.faults import forks
from tests.faults.command_lines import LINES, inside, tree, write_world
from tests.faults.conftest import Sweep, count, instants
from tests.faults.forks import Setup

CALLS = 5
"""The same command is given so often at most until it has ended; each must get further or say what to do."""


def no_run_is_torn(target: Path) -> str | None:
    """A manifest names whole files."""
    if not (target / "manifest.json").exists():
        return None
    held = json.loads((target / "manifest.json").read_bytes())
    return next(
        (f"{file['path']} is torn" for file in held["labels"] if sha256_file(target / file["path"]) != file["sha256"]),
        None,
    )


def no_student_is_torn(target: Path) -> str | None:
    """A manifest names whole files."""
    if not (target / "manifest.json").exists():
        return None
    held = json.loads((target / "manifest.json").read_bytes())["files"]
    return None if held.items() <= student_files(target).items() else "the manifest is of other files"


def no_bundle_is_torn(target: Path) -> str | None:
    """A bundle is there whole or not at all."""
    if target.exists():
        open_bundle(target)
    return None


def no_page_is_torn(target: Path) -> str | None:
    """A page is there whole or not at all."""
    return None if not target.exists() or target.read_text().rstrip().endswith("</html>") else "the page is torn"


def no_table_is_torn(target: Path) -> str | None:
    """Lines are there whole or not at all."""
    return None if not target.exists() or target.read_text().count("\n") == 48 else "the table is torn"


@dataclass(frozen=True)
class Case:
    """A command whose work is killed.

    Args:
        target: what it makes.
        torn: what is wrong with a target that a killed call left, or None.
        points: failpoints that it passes.
        promised: suffixes of those files whose bytes are promised; others hold times.
    """

    target: str
    torn: Callable[[Path], str | None]
    points: tuple[str, ...] = ()
    promised: tuple[str, ...] = ("",)


TEMPORARY = ("before_temp_sync", "before_temp_rename")
CASES = {
    "score": Case(
        "out/scores",
        no_run_is_torn,
        tuple(name for name in FAILPOINTS if "quarantine" not in name and "answers" not in name),
        (".parquet",),
    ),
    "distill": Case("out/learnt", no_student_is_torn, (*TRAINING_FAILPOINTS, *TEMPORARY), (".safetensors",)),
    "train": Case("out/taught", no_student_is_torn, (*TRAINING_FAILPOINTS, *TEMPORARY), (".safetensors",)),
    "export": Case("out/bundle", no_bundle_is_torn, TEMPORARY),
    "report": Case("report.html", no_page_is_torn, (), ()),
    "convert": Case("labels.qrels", no_table_is_torn),
    "compare": Case("page.html", no_page_is_torn, (), ()),
}


@dataclass(frozen=True)
class Bench:
    """One command in worlds of its own, and what an undisturbed call leaves and takes."""

    name: str
    case: Case
    world: Path
    folder: Path
    expected: dict[str, str]
    seconds: float

    def new(self, name: str) -> Path:
        return Path(shutil.copytree(self.world, self.folder / name, symlinks=True))

    def start(self, folder: Path, setup: Setup | None = None, *more: str) -> forks.Child:
        return forks.start([*LINES[self.name].text.split(), *more], setup=setup or inside(folder), is_heavy=True)

    def made(self, folder: Path) -> dict[str, str]:
        """The files of the target by name; of those whose bytes are promised, the digests too."""
        target = folder / self.case.target
        found = tree(target) if target.is_dir() else {"": sha256_file(target)} if target.exists() else {}
        # what the first call expected: a call that finds the plan made expects nothing
        found.pop("estimate.json", None)
        return {name: digest if name.endswith(self.case.promised) else "any" for name, digest in found.items()}

    def others(self, folder: Path) -> dict[str, str]:
        """All that is not the target's."""
        return {name: digest for name, digest in tree(folder).items() if not name.startswith(self.case.target)}

    def judge(self, folder: Path, ended: forks.Ended) -> str | None:
        """What is wrong once a call was killed: with what it left, or with what the same command makes of that."""
        if wrong := self.case.torn(folder / self.case.target):
            return f"{wrong}, after {ended}"
        if self.others(folder) != self.others(self.world):
            return f"other files of the folder changed, after {ended}"
        more: tuple[str, ...] = ()
        for _ in range(CALLS):
            again = self.start(folder, None, *more).wait()
            # after a kill behind the last step the error says that the file is there; whether it is the right one is
            # looked at below
            is_refused = again.codes == [2] and "is there already" in again.text and bool(self.made(folder))
            if again.codes in ([0], [10]) or is_refused:
                break
            more = ("--resume",) if again.codes == [3] and "--resume" in again.text else more
        if again.codes not in ([0], [10]) and not is_refused:
            return f"the same command again: {again}"
        if self.others(folder) != self.others(self.world):
            return "other files of the folder changed"
        if (found := self.made(folder)) != self.expected:
            differ = sorted(
                name for name in found.keys() | self.expected.keys() if found.get(name) != self.expected.get(name)
            )
            return f"other files than an undisturbed call leaves: {differ}"
        shutil.rmtree(folder)
        return None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills") / "world"
    write_world(folder, is_heavy=True)
    return folder


@pytest.fixture(scope="module", params=CASES)
def bench(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A command that was called twice undisturbed: its promise of bytes is held to first."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    found, took = [], []
    for number in range(2):
        trial = Bench(name, CASES[name], world, folder, {}, 0.0)
        place, begun = trial.new(f"whole-{number}"), time.monotonic()
        ended = trial.start(place).wait()
        took.append(time.monotonic() - begun)
        assert ended.codes == [0], ended
        found.append(trial.made(place))
        assert trial.case.torn(place / trial.case.target) is None
        assert trial.others(place) == trial.others(world)
    assert found[0] == found[1] != {}
    return Bench(name, CASES[name], world, folder, found[0], statistics.mean(took))


pytestmark = pytest.mark.full
"""tests/score, tests/distill and tests/publish have the ordinary suite's kills."""


def test_killed_at_a_failpoint_the_same_command_ends_right(bench: Bench, sweep: Sweep) -> None:
    def attempt(schedule: tuple[str, int]) -> str | None:
        name, hit = schedule
        folder = bench.new(f"point-{name}-{hit}")
        ended = bench.start(folder, inside(folder, "arm", f"{name}:{hit}")).wait()
        if ended.code != -signal.SIGKILL and hit == 1:
            return f"not killed: {ended}"
        return bench.judge(folder, ended)

    schedules = [(name, hit) for hit in (1, 2, 4) for name in bench.case.points]
    if not schedules:
        pytest.skip("it passes no failpoint: killed at every call about a file instead")
    sweep(schedules, attempt, share=0.03)


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
    assert forks.call(line, setup=inside(place), is_heavy=True).codes == [0]
    before = sha256_file(place / target)

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        folder = Path(shutil.copytree(place, tmp_path / f"again-{nth}-{how.replace(' ', '-')}", symlinks=True))
        failing = inside(folder, "fail_file_call", str(folder), nth, how, str(folder.with_suffix(".log")))
        ended = forks.call([*line, *more], setup=failing, is_heavy=True)
        if wrong := CASES[name].torn(folder / target):
            return f"{wrong}: {ended}"
        if ended.codes[:1] == [3] and sha256_file(folder / target) != before and "error before" in how:
            return f"refused, and another page: {ended}"
        again = forks.call([*line, *more], setup=inside(folder), is_heavy=True)
        return None if again.codes == [0] and CASES[name].torn(folder / target) is None else f"again: {again}"

    schedules = [(nth, how) for nth in range(1, 60) for how in HOWS]
    sweep(random.Random(43).sample(schedules, count(full=16, short=1, long=100)), attempt, share=0.02)
