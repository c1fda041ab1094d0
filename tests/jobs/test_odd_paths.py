"""Every command × every place a path may be in × paths that no system takes: a sentence and an exit code of the
user's, never ours.

Places come from the table of commands and the models of specs, as in `test_no_secret_shown.py`. `RELABEL_FAULTS=full`
tries every path at every place, an ordinary run one in turn.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.test_no_secret_shown import (
    BASES,
    FILES,
    World,
    _in_file,
    line_with,
    made,
    places,
    spec_keys,
    world,
)

__all__ = ["made", "world"]
IS_FULL = os.environ.get("RELABEL_FAULTS") in ("full", "long")

PATHS = {
    "nul": "a\0b.parquet",
    "surrogate": "caf\udce9.parquet",
    "lone": "caf\ud800.parquet",
    "name": "x" * 5000 + ".parquet",
    "deep": "/".join(["d" * 200] * 25) + ".parquet",
    "device": "/dev/zero",
    "under-device": "/dev/null/x.parquet",
}
REFUSED = ("nul", "surrogate", "lone")


def forms_for(index: int) -> list[str]:
    return list(PATHS) if IS_FULL else [list(PATHS)[index * 5 % len(PATHS)]]


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """What reads a device to its end fails, and takes nothing else with it."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("words", BASES)
def test_an_odd_path_at_any_argument_or_option_is_refused_in_a_sentence(world: World, words: str) -> None:
    wrong = []
    for index, (command, name) in enumerate(places()):
        if command == "demo" and name == "to":
            continue  # makes what it is asked to
        for form in forms_for(index) if command == words else ():
            if form == "lone":  # no system hands over such an argument
                continue
            shown = world.call(*line_with(words, name, PATHS[form], 5000 + index))
            if shown.code == 1 or "Traceback" in shown.text or (form in REFUSED and shown.code not in (2, 3)):
                wrong.append(f"{words} {name} as {form}: {shown.code}, {shown.text[-600:]}")
    assert not wrong, "\n".join(wrong)


def test_an_odd_path_at_any_key_of_a_spec_is_refused_in_a_sentence(world: World) -> None:
    wrong = []
    index = 0
    for command, keys in spec_keys():
        for key in keys:
            index += 1
            for form in forms_for(index):
                if form == "device" and key == "engine.args.replies":
                    continue
                value = PATHS[form]
                flag = [
                    command,
                    FILES[command],
                    "--set",
                    f"{key}={json.dumps(value)}",
                ]
                shown = world.call(*(flag if index % 2 else _in_file(world, command, key, value)))
                if shown.code == 1 or "Traceback" in shown.text or (form in REFUSED and shown.code not in (2, 3)):
                    wrong.append(f"{command} {key} as {form}: {shown.code}, {shown.text[-600:]}")
    assert not wrong, "\n".join(wrong)
