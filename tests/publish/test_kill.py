"""kill -9 anywhere in a publish or a pull: every channel points to a whole version, the active version is whole, the
same command ends the work.

Most are killed in forks of this process, which are warm and so cheap; some in fresh processes, and on S3.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.export.store import check_whole, load_channel, load_version, object_name
from relabel.manifests import failpoints
from relabel.manifests.errors import InputError
from relabel.manifests.failpoints import PUBLISH_FAILPOINTS
from relabel.manifests.files import Storage
from relabel.manifests.store import Store, open_bundle_store
from tests.faults.conftest import IS_FULL
from tests.killing import die_before_change
from tests.publish.conftest import publish_to, pull_from, roll_back_in, served_text, write_bundle

WRITE_FAILPOINTS = ("before_temp_sync", "before_temp_rename")
SIZE = 3 << 20


def killed(
    work: Callable[[], object],
    failpoint: str = "",
    hits: int = 1,
    *,
    after_s: float | None = None,
    before_change: int | None = None,
) -> bool:
    """Do the work in a fork that dies at a failpoint, before a change of the disk or after a time; whether it died."""
    child = os.fork()
    if child == 0:
        failpoints._armed, failpoints._hits_left = failpoint, hits
        if before_change is not None:
            die_before_change(before_change)
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    if after_s is not None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    assert os.WEXITSTATUS(status) == 0, "the work failed before it was killed"
    return False


def check_all_channels(bundle_store: Store, *texts: str) -> str | None:
    """Every object that a channel needs is there with the right bytes; the text that stable points to."""
    try:
        head = load_channel(bundle_store, "ecom", "stable").head
    except InputError:
        return None
    version = load_version(bundle_store, "ecom", head.version)
    check_whole(bundle_store, version)
    for file in version.files:
        assert bundle_store.digest(object_name(file.sha256), lambda _: None) == (file.size_bytes, file.sha256)
    return head.version


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {text: write_bundle(folder / text, text, size=SIZE) for text in ("one", "two")}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize(
    ("failpoint", "hits"),
    [
        *((name, 1) for name in PUBLISH_FAILPOINTS),
        ("before_object", 2),
        ("after_object", 2),
        *((name, hits) for name in WRITE_FAILPOINTS for hits in (1, 2)),
    ],
)
def test_a_publish_killed_at_a_failpoint_leaves_channels_whole_and_is_ended_by_the_same_command(
    tmp_path: Path, bundles: dict[str, Path], failpoint: str, hits: int, is_first: bool
) -> None:
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    earlier = None if is_first else publish_to(bundle_store, bundles["one"]).version.version
    assert killed(lambda: publish_to(bundle_store, bundles["two"]), failpoint, hits)
    pointed = check_all_channels(bundle_store)
    assert pointed == earlier or failpoint == "after_channel"
    done = publish_to(bundle_store, bundles["two"])
    assert check_all_channels(bundle_store) == done.version.version
    pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"
    assert not publish_to(bundle_store, bundles["two"]).has_changed


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_a_pull_killed_before_any_change_leaves_what_serves_whole_and_is_ended_by_the_same_command(
    tmp_path: Path, bundles: dict[str, Path], is_first: bool
) -> None:
    """Calls that change the disk, each in turn, are the last (every third, or all by `make faults`)."""
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    for number in range(1, 200, 1 if IS_FULL else 3):
        target = tmp_path / str(number)
        if not is_first:
            publish_to(bundle_store, bundles["one"])
            pull_from(bundle_store, target)
        publish_to(bundle_store, bundles["two"])
        was_killed = killed(lambda target=target: pull_from(bundle_store, target), before_change=number)
        if (target / "current").exists():
            assert served_text(target) in (("two",) if is_first else ("one", "two"))
        else:
            assert is_first
        pull_from(bundle_store, target)
        assert served_text(target) == "two"
        assert not pull_from(bundle_store, target).has_switched
        assert {path.name for path in target.iterdir()} == {"current", ".versions", ".locks", ".pull.json"}
        assert len(list((target / ".versions").iterdir())) == (1 if is_first else 2)
        if not is_first:
            roll_back_in(target)
            assert served_text(target) == "one"
        if not was_killed:
            assert number > 20
            return
    raise AssertionError("it never ended")


def test_a_rollback_killed_before_any_change_leaves_one_of_the_two_serving_and_can_be_called_again(
    tmp_path: Path, bundles: dict[str, Path]
) -> None:
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    for number in range(1, 20):
        target = tmp_path / str(number)
        for text in ("one", "two"):
            publish_to(bundle_store, bundles[text])
            pull_from(bundle_store, target)
        was_killed = killed(lambda target=target: roll_back_in(target), before_change=number)
        if served_text(target) == "two":
            roll_back_in(target)
        assert served_text(target) == "one"
        if not was_killed:
            assert number > 4
            return
    raise AssertionError("it never ended")


def test_a_pull_killed_over_and_over_ends_at_last(tmp_path: Path, bundles: dict[str, Path]) -> None:
    """A machine that dies after every block still gets on by a block each time."""
    bundle_store, target = open_bundle_store(str(tmp_path / "store"), Storage()), tmp_path / "dest"
    version = publish_to(bundle_store, write_bundle(tmp_path / "big", "big", size=30 << 20)).version
    deaths = 0
    while killed(lambda: pull_from(bundle_store, target), "during_download", 2):
        deaths += 1
        assert deaths < 20
    assert deaths >= 3
    assert served_text(target) == "big"
    assert version.size_bytes > 30 << 20


@pytest.mark.parametrize("seed", range(12))
def test_publish_and_pull_killed_at_a_random_instant(tmp_path: Path, bundles: dict[str, Path], seed: int) -> None:
    turn = random.Random(seed)
    bundle_store, target = open_bundle_store(str(tmp_path / "store"), Storage()), tmp_path / "dest"
    publish_to(bundle_store, bundles["one"])
    pull_from(bundle_store, target)
    killed(lambda: publish_to(bundle_store, bundles["two"]), after_s=turn.uniform(0, 0.06))
    check_all_channels(bundle_store)
    killed(lambda: pull_from(bundle_store, target), after_s=turn.uniform(0, 0.06))
    assert served_text(target) in ("one", "two")
    publish_to(bundle_store, bundles["two"])
    pull_from(bundle_store, target)
    assert served_text(target) == "two"


def command(*arguments: str | Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RELABEL_FAILPOINT": failpoint}
    call = [sys.executable, "-m", "relabel", *map(str, arguments)]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "failpoint",
    [
        "during_upload",
        "after_version",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("after_objects", "after_channel")),
    ],
)
def test_a_real_publish_killed_is_ended_by_the_same_command(
    url: str, tmp_path: Path, bundles: dict[str, Path], failpoint: str
) -> None:
    bundle_store = open_bundle_store(url, Storage())
    publish_to(bundle_store, bundles["one"])
    call = ("publish", bundles["two"], url, "--channel", "stable")
    assert command(*call, failpoint=failpoint).returncode == -signal.SIGKILL
    check_all_channels(bundle_store)
    assert command(*call).returncode == (10 if failpoint == "after_channel" else 0)
    pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def test_a_real_pull_killed_is_ended_by_the_same_command(url: str, tmp_path: Path, bundles: dict[str, Path]) -> None:
    bundle_store, target = open_bundle_store(url, Storage()), tmp_path / "dest"
    publish_to(bundle_store, bundles["one"])
    pull_from(bundle_store, target)
    publish_to(bundle_store, bundles["two"])
    assert command("pull", f"{url}/ecom@stable", target, failpoint="during_download").returncode == -signal.SIGKILL
    assert served_text(target) == "one"
    assert command("pull", f"{url}/ecom@stable", target).returncode == 0
    assert served_text(target) == "two"
