"""A local disk that fails: each call about the output in turn fails, or is the last before a kill; full disks; one
turned read-only.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import Places, Sweep, count, undisturbed
from tests.faults.forks import Setup
from tests.faults.places import Place

HOWS = ("error before", "error after", "full before", "kill before", "kill after")
ROOMY = "64m"


def failing(place: Place, nth: int, how: str, log: Path) -> Setup:
    return Setup("tests.faults.children", "fail_file_call", (place.output, nth, how, str(log)))


def test_every_call_about_the_output_may_fail_or_be_the_last_and_the_next_run_ends_whole(
    local_place: Places, sweep: Sweep, tmp_path: Path
) -> None:
    expected = undisturbed(local_place())
    place, log = local_place(), tmp_path / "calls"
    place.write()
    assert place.call(setup=failing(place, 10**9, "error before", log)).codes == [0]
    num_calls = int(log.read_text().removeprefix("calls "))
    assert num_calls > 100

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        place, log = local_place(), tmp_path / f"call-{nth}-{how.replace(' ', '-')}"
        place.write()
        ended = place.call(setup=failing(place, nth, how, log))
        where = f"({log.read_text() if log.exists() else 'no call'})"
        was_killed = how.startswith("kill") and ended.code == -signal.SIGKILL
        if not was_killed and ended.codes[:1] not in ([0], [3], [20]):
            return f"{where} {ended}"
        wrong = place.finish(expected)
        return None if wrong is None else f"{where} {wrong}"

    every = list(itertools.product(range(1, num_calls + 1), HOWS))
    chosen = random.Random(6).sample(every, min(len(every), count(full=300, short=5)))
    sweep(chosen, attempt, share=0.1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`disk("size=64k")`: a small tmpfs of its own, where mounting is allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "relabel-test", folder], capture_output=True, check=False
        )
        if done.returncode != 0:
            pytest.skip("a tmpfs can't be mounted here: it takes root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True, capture_output=True)


def test_a_full_disk_ends_the_run_with_exit_code_20_and_room_lets_it_go_on(
    local_place: Places, sweep: Sweep, tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    expected = undisturbed(local_place())
    rng = random.Random(9)
    sizes = sorted(rng.sample(range(2, 60), count(full=30, short=2)))
    inodes = sorted(rng.sample(range(3, 50), count(full=15, short=1)))
    limits = [f"size={4 * pages}k" for pages in sizes] + [f"nr_inodes={number}" for number in inodes]

    def attempt(limit: str) -> str | None:
        folder = disk(limit)
        place = replace(local_place(), disk=folder)
        place.write()
        ended = place.call()
        if ended.codes not in ([20], [0]):
            return str(ended)
        if ended.codes == [20] and "no space left" not in ended.text:
            return f"exit code 20, and not a word of the disk: {ended}"
        remount(folder, f"size={ROOMY},nr_inodes=100000")
        return place.finish(expected)

    sweep(limits, attempt, at_a_time=1)


def test_an_output_that_turns_read_only_ends_the_run_with_exit_code_3_and_loses_nothing(
    local_place: Places, disk: Callable[[str], Path]
) -> None:
    expected = undisturbed(local_place())
    folder = disk(f"size={ROOMY}")
    place = replace(local_place(), disk=folder)
    place.write()
    assert place.call("run --shard 0/3").codes == [0]
    before = sorted((folder / "out" / "receipts").rglob("*.json"))
    remount(folder, "ro")
    ended = place.call("run", "verify", "status")
    assert ended.codes[0] == 3, ended
    assert "an't" in ended.text
    assert ended.codes[2] == 0, ended  # looking needs no writing
    remount(folder, "rw")
    assert sorted((folder / "out" / "receipts").rglob("*.json")) == before
    assert place.finish(expected) is None
