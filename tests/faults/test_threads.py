"""Two threads of CPython 3.11 that turn source text into a tree at a time can end in a SystemError, "AST constructor
recursion depth mismatch" (python/cpython#106905); pydantic does so for every record that it gets to know. So only the
main thread may.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines_openai.scripted_server import MODEL, ScriptedServer
from tests.engines_openai.test_run import JOB, r3a
from tests.faults.command_lines import LINES, Line, write_world
from tests.faults.conftest import IS_FULL

CALLS = {name: LINES[name] for name in (LINES if IS_FULL else ("run", "merge"))}
CALLS |= {"pool": Line("run new.yaml --workers 2"), "server": Line("run served.yaml")}
HOOK = "from tests.faults.children import note_trees; note_trees({!r})"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world") / "world"
    write_world(folder, is_heavy=IS_FULL)
    server = ScriptedServer(r3a)
    engine = {"name": "openai", "args": {"served_model": MODEL, "base_url": server.url}}
    (folder / "served.yaml").write_text(json.dumps({**JOB, "engine": engine, "run": {"max_failed_fraction": 1}}))
    yield folder
    server.close()


@pytest.mark.parametrize("name", CALLS)
def test_no_thread_but_the_main_one_builds_a_syntax_tree(name: str, world: Path, tmp_path: Path) -> None:
    """In fresh interpreters, where nothing is built yet; nor the check of a record, whatever pydantic does for it."""
    if name == "server":
        pytest.importorskip("httpx", reason="the openai extra is not installed")
    folder, noted = tmp_path / "world", tmp_path / "noted"
    shutil.copytree(world, folder, symlinks=True)
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


def test_the_checks_of_what_threads_of_an_object_store_read_are_built_with_their_modules() -> None:
    code = """
from relabel.manifests import records
from relabel.manifests.records import BatchRecord
from relabel.manifests.leases import LeaseRecord
built = records._adapter.cache_info().misses
assert records._adapter(LeaseRecord) and records._adapter(BatchRecord)
assert records._adapter.cache_info().misses == built
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
