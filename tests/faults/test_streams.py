"""Stdout and stderr that are full, closed, or read by nobody: every command exits as it would, and leaves what it
would.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.jobs.logs import SAYS_ONLY
from relabel.jobs.root_help import COMMANDS
from tests.faults import forks
from tests.faults.command_lines import LINES, inside, tree, write_world
from tests.faults.conftest import IS_FULL, Sweep, some

SPOILT = [(name, how) for name in ("stdout", "stderr") for how in ("full", "closed", "broken")]
# the demo starts processes of its own
NAMES = [name for name in COMMANDS if IS_FULL or (LINES[name].parent == "light" and name != "demo")]


def test_every_command_has_a_line() -> None:
    assert LINES.keys() == COMMANDS.keys()
    assert COMMANDS.keys() > SAYS_ONLY


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "world"
    write_world(folder, is_heavy=IS_FULL)
    return folder


@pytest.fixture
def new_world(world: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(world, tmp_path / name, symlinks=True))


def test_a_stream_that_fails_changes_neither_the_exit_code_nor_the_files(
    new_world: Callable[[str], Path], sweep: Sweep
) -> None:
    def call(name: str, place: str, *spoilt: str) -> tuple[forks.Ended, dict[str, str]]:
        folder = new_world(place)
        setup = inside(folder, "spoil_stream", *spoilt) if spoilt else inside(folder)
        ended = forks.call(LINES[name].text.split(), setup=setup, parent=LINES[name].parent)
        found = tree(folder)
        shutil.rmtree(folder)
        return ended, found

    chosen = some([(name, *spoilt) for name in NAMES for spoilt in SPOILT], short=3)
    usual: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for name, *_ in chosen):
        ended, usual[name] = call(name, f"{name}-usual")
        assert ended.codes == [LINES[name].code], f"{name}: {ended}"
        again = call(name, f"{name}-again")[1] if IS_FULL else {}
        assert not IS_FULL or again.keys() == usual[name].keys(), name  # names of data hold digests of their bytes

    def attempt(schedule: tuple[str, str, str]) -> str | None:
        name, stream, how = schedule
        ended, found = call(name, "-".join(schedule), stream, how)
        is_lost = (stream, how) == ("stdout", "full") and name in SAYS_ONLY and LINES[name].code == 0
        if ended.codes != [20 if is_lost else LINES[name].code]:
            return str(ended)
        if "Traceback" in ended.text:
            return ended.text
        if (stream, how, LINES[name].code) == ("stdout", "full", 0) and "can't be written" not in ended.text:
            return f"not a word of what was lost: {ended}"
        return (
            None if found.keys() == usual[name].keys() else f"other files: {sorted(found.keys() ^ usual[name].keys())}"
        )

    sweep(chosen, attempt, share=0.1)
