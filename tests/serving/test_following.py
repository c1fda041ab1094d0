"""`docs/deploy/serving/rerank.py` serves the version that DEST/current points to, after a pull too."""

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


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
    server = SimpleNamespace(scorer=SimpleNamespace(student=rerank.open_student(tmp_path)))
    students = [server.scorer.student]
    stop = threading.Event()
    following = threading.Thread(target=rerank.follow, args=[server, tmp_path, tmp_path / "v1", stop, 0.05])
    following.start()
    try:
        point(tmp_path, "v2")
        deadline = time.monotonic() + 60
        while server.scorer.student is students[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.scorer.student is not students[0]
        assert server.version == server.scorer.student.version
        students.append(server.scorer.student)
        point(tmp_path, "v3")
        text = ""
        while "can't be served" not in text and time.monotonic() < deadline:
            time.sleep(0.05)
            text += capsys.readouterr().err
        assert f"{tmp_path / 'v3'} can't be served" in text
        assert server.scorer.student is students[1]
    finally:
        stop.set()
        following.join()
    assert version_served(serve(server.scorer.student)) == students[1].version


def test_a_version_that_was_published_under_a_name_is_served_under_it(
    tmp_path: Path, bundle: Path, rerank: Any
) -> None:
    named = tmp_path / ".versions/two"
    shutil.copytree(bundle, named)
    student = rerank.open_student(named)
    assert rerank.version_of(named, student) == f"two ({student.version})"
    assert rerank.version_of(tmp_path / ".versions" / student.version, student) == student.version
    assert rerank.version_of(bundle, student) == student.version
