"""An engine that misbehaves: every row ends labelled or quarantined, or the run ends with the right exit code and the
next one ends it.
"""

import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.jobs.root_help import COMMANDS
from tests.engines_openai.scripted_server import MODEL, ScriptedServer
from tests.engines_openai.test_run import JOB, r3a
from tests.faults import forks
from tests.faults.command_lines import LINES, Line, inside, tree, write_world
from tests.faults.conftest import IS_FULL, Places, Sweep, count, some
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


# Stdout and stderr that are full, closed, or read by nobody: every command exits as it would, and leaves what it
# would.


SPOILT = [(name, how) for name in ("stdout", "stderr") for how in ("full", "closed", "broken")]
# the demo starts processes of its own
NAMES = [name for name in COMMANDS if IS_FULL or (LINES[name].parent == "light" and name != "demo")]


def test_every_command_has_a_line() -> None:
    assert LINES.keys() == COMMANDS.keys()


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
        is_lost = (stream, how) == ("stdout", "full") and COMMANDS[name].only_prints and LINES[name].code == 0
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


# Two threads of CPython 3.11 that turn source text into a tree at a time can end in a SystemError, "AST constructor
# recursion depth mismatch" (python/cpython#106905); pydantic does so for every record that it gets to know. So only
# the main thread may.


CALLS = {name: LINES[name] for name in (LINES if IS_FULL else ("run", "merge"))}
CALLS |= {"pool": Line("run new.yaml --workers 2"), "server": Line("run served.yaml")}
HOOK = "from tests.faults.children import note_trees; note_trees({!r})"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def threads_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("threads_world") / "threads_world"
    write_world(folder, is_heavy=IS_FULL)
    server = ScriptedServer(r3a)
    engine = {"name": "openai", "args": {"served_model": MODEL, "base_url": server.url}}
    (folder / "served.yaml").write_text(json.dumps({**JOB, "engine": engine, "run": {"max_failed_fraction": 1}}))
    yield folder
    server.close()


@pytest.mark.parametrize("name", CALLS)
def test_no_thread_but_the_main_one_builds_a_syntax_tree(name: str, threads_world: Path, tmp_path: Path) -> None:
    """In fresh interpreters, where nothing is built yet; nor the check of a record, whatever pydantic does for it."""
    if name == "server":
        pytest.importorskip("httpx", reason="the openai extra is not installed")
    folder, noted = tmp_path / "threads_world", tmp_path / "noted"
    shutil.copytree(threads_world, folder, symlinks=True)
    (tmp_path / "sitecustomize.py").write_text(HOOK.format(str(noted)))  # which worker processes come by too
    ended = subprocess.run(
        [sys.executable, "-m", "relabel", *CALLS[name].text.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == CALLS[name].code, ended.stderr
    assert noted.read_text() == ""


def test_the_checks_of_what_threads_of_an_object_store_read_are_built_before_them() -> None:
    code = """
import contextlib
from relabel.manifests import records
from relabel.manifests.objects import LeaseRecord
records.build_checks()
records.TypeAdapter = None  # none is built any more
for kind in (LeaseRecord, records.BatchRecord):
    with contextlib.suppress(ValueError):
        records.checked(kind, {})
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
