"""`docs/deploy/serving/rerank.py` serves the version that DEST/current points to, after a pull too."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.conftest import FILE


def version_served(url: str) -> str:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        return str(json.load(reply)["version"])


def point(dest: Path, version: str) -> None:
    """As a pull does it: the link is replaced, never edited."""
    (dest / "new").symlink_to(version)
    (dest / "new").replace(dest / "current")


def test_a_new_version_is_served_and_a_damaged_one_is_not(
    tmp_path: Path, bundle: Path, serve: Callable[..., str], rerank: Any, capsys: Any
) -> None:
    for version in ("v1", "v2", "v3"):
        shutil.copytree(bundle, tmp_path / version)
    (tmp_path / "v3" / "manifest.json").unlink()
    point(tmp_path, "v1")
    first = rerank.open_student(tmp_path)
    server = SimpleNamespace(scorer=SimpleNamespace(served=rerank.Served(first, first.version)))
    stop = threading.Event()
    following = threading.Thread(target=rerank.follow, args=[server, tmp_path, tmp_path / "v1", stop, 0.05])
    following.start()
    try:
        point(tmp_path, "v2")
        deadline = time.monotonic() + 60
        while server.scorer.served.student is first and time.monotonic() < deadline:
            time.sleep(0.05)
        second = server.scorer.served
        assert second.student is not first
        assert second.version == second.student.version
        point(tmp_path, "v3")
        text = ""
        while "can't be served" not in text and time.monotonic() < deadline:
            time.sleep(0.05)
            text += capsys.readouterr().err
        assert f"{tmp_path / 'v3'} can't be served" in text
        assert server.scorer.served is second
    finally:
        stop.set()
        following.join()
    assert version_served(serve(second.student)) == second.version


def test_an_answer_names_the_version_that_its_scores_are_of(serve: Callable[..., str]) -> None:
    url = serve(SimpleNamespace(version="986d2365f1cf285c", score=lambda pairs: [0.5] * len(pairs)))
    asked = json.dumps({"query": "shoe", "documents": ["A shoe", "A lamp"]}).encode()
    with urllib.request.urlopen(f"{url}/rerank", data=asked, timeout=10) as reply:
        assert reply.headers["X-Relabel-Version"] == "986d2365f1cf285c"
        assert len(json.load(reply)["results"]) == 2


@pytest.mark.parametrize("program", ["rerank.py", "grader.py"])
def test_a_folder_without_a_bundle_is_a_usage_error_in_a_line(tmp_path: Path, program: str) -> None:
    (tmp_path / "served").mkdir()
    for dest in ("absent", "served"):
        rest = [] if program == "rerank.py" else ["shoe", "A shoe"]
        command = [sys.executable, str(FILE.with_name(program)), dest, *rest]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{dest}: ")
        assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_named_in_a_line(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, str(FILE), str(bundle), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"127.0.0.1:{port}: can't listen there (Address already in use). ")
    assert done.stderr.count("\n") == 1


def test_a_grader_that_is_given_current_names_the_folder_above_it(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/current").symlink_to(bundle)
    command = [sys.executable, str(FILE.with_name("grader.py")), "served/current", "shoe", "A shoe"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith("which has `current`: served\n")


def test_a_version_that_was_published_under_a_name_is_served_under_it(
    tmp_path: Path, bundle: Path, rerank: Any
) -> None:
    named = tmp_path / ".versions/two"
    shutil.copytree(bundle, named)
    student = rerank.open_student(named)
    assert rerank.version_of(named, student) == f"two ({student.version})"
    assert rerank.version_of(tmp_path / ".versions" / student.version, student) == student.version
    assert rerank.version_of(bundle, student) == student.version
