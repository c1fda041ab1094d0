"""The active version is what was pulled: whatever happens to a file or to the link, pull repairs it; verify and show
name it and touch nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.bundles import seal_bundle
from relabel.export.publishing import roll_back
from relabel.manifests.files import Storage
from relabel.manifests.store import LocalStore, open_bundle_store
from tests.faults.conftest import IS_FULL
from tests.killing import killed
from tests.publish.conftest import publish_to, pull_from, write_bundle

Relabel = Callable[..., Any]
FILES = (
    "model.onnx",
    "triton/ecom-fp32/1/model.onnx",
    "tokenizer/tokenizer.json",
    "README.md",
    "load.py",
    "manifest.json",
)


def flip(path: Path) -> None:
    """One bit, in place: as a disk or a slip of the hand does it."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def flip_unseen(path: Path) -> None:
    """One bit, with size and time of the last write as they were."""
    held = path.stat()
    flip(path)
    os.utime(path, ns=(held.st_atime_ns, held.st_mtime_ns))


def link_away(path: Path) -> None:
    """A link to the very bytes that must be there, which may change any time."""
    elsewhere = path.parents[len(path.parts) - 4] / f"elsewhere-{path.name}"
    shutil.copy(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "flipped": flip,
    "flipped unseen": flip_unseen,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "a link": link_away,
    "a folder": make_folder,
    "a pipe": make_pipe,
    "mode 000": lambda path: path.chmod(0),
    "an unlisted file": lambda path: path.with_name(path.name + ".more").write_text("more"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a loader and a model that it holds under two names, as exports with `--triton` do."""
    folder = write_bundle(tmp_path_factory.mktemp("source") / "ecom", "one", size=5000)
    (folder / "load.py").write_text("VERSION = 1\n")
    (folder / "triton/ecom-fp32/1").mkdir(parents=True)
    shutil.copy(folder / "model.onnx", folder / "triton/ecom-fp32/1/model.onnx")
    seal_bundle(folder, {"name": "ecom", "lineage": {"student": "one"}})
    return folder


@pytest.fixture
def store(tmp_path: Path, source: Path) -> LocalStore:
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    assert isinstance(bundle_store, LocalStore)
    publish_to(bundle_store, source)
    return bundle_store


def digests(folder: Path) -> dict[str, str]:
    """sha256 by name of all files below a folder, taken from their bytes."""
    files = (path for path in folder.resolve().rglob("*") if not path.is_dir())
    return {
        path.relative_to(folder.resolve()).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def state_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """What reading a folder must not change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        held = path.lstat()
        found[str(path)] = (held.st_mode, held.st_ino, held.st_size, held.st_mtime_ns, held.st_ctime_ns)
    return found


def test_whatever_happens_to_a_file_that_serves_pull_repairs_it_and_verify_and_show_name_it(
    relabel: Relabel, store: LocalStore, source: Path, tmp_path: Path
) -> None:
    pull_from(store, tmp_path / "settled")
    every = list(itertools.product(HARMS, ("pull", "verify", "show"), FILES))
    for number, (harm, command, name) in enumerate(every if IS_FULL else every[:: len(FILES) - 1]):
        # each harm and command, files in turn
        size = (source / name).stat().st_size
        dest, what = tmp_path / str(number), f"{name} {harm}, {command}"
        # a copy with links and modes; its files are new ones, so that all are read
        shutil.copytree(tmp_path / "settled", dest, symlinks=True)
        HARMS[harm]((dest / "current").resolve() / name)
        if command == "pull":
            done = relabel("pull", f"{store.url}/ecom", str(dest), "--output", "json")
            assert done.code == 0, (what, done)
            assert any(name in fault for fault in done.json["repaired"]), (what, done.json)
            # under another name, or for its owner alone
            is_here = name.endswith("model.onnx") or harm in (
                "mode 000",
                "an unlisted file",
            )
            assert done.json["fetched_bytes"] in ((0, size) if harm == "mode 000" else (0 if is_here else size,)), what
            assert digests(dest / "current") == digests(source), what
            assert relabel("pull", f"{store.url}/ecom", str(dest)).code == 10, what
            assert relabel("verify", str(dest)).code == 0, what
        else:
            before = state_of(dest)
            done = relabel(command, str(dest))
            assert done.code == 3, (what, done)
            assert name in done.out + done.err, (what, done)
            assert state_of(dest) == before, what
        shutil.rmtree(dest)


def test_pythons_caches_next_to_a_loader_are_no_damage(store: LocalStore, tmp_path: Path) -> None:
    """A server that imports `load.py` leaves them; a pull that repaired that would switch each time."""
    dest = tmp_path / "dest"
    pull_from(store, dest)
    cache = (dest / "current").resolve() / "__pycache__"
    cache.mkdir()
    (cache / "load.cpython-311.pyc").write_bytes(b"code")
    assert not pull_from(store, dest).has_switched


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_store_and_destination_share_no_file_so_damage_to_one_never_reaches_the_other(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    """A local store on the same disk, whose files somebody linked, too."""
    shutil.copytree(tmp_path / "store", tmp_path / "linked", copy_function=os.link)
    linked, dest = open_bundle_store(str(tmp_path / "linked"), Storage()), tmp_path / "dest"
    pull_from(linked, dest)
    publish_to(linked, write_bundle(tmp_path / "two", "two"))
    pull_from(linked, dest)
    roll_back(linked, "ecom", "stable", None)
    pull_from(linked, dest)
    flip((dest / "current").resolve() / "load.py")
    pull_from(linked, dest)
    kept = [inodes(folder) for folder in (dest / ".versions").iterdir()]
    assert not set.union(*kept) & (inodes(tmp_path / "store") | inodes(tmp_path / "linked") | inodes(source))
    assert sum(map(len, kept)) == len(set.union(*kept)), "two versions that share a file share its damage"
    for path in (dest / "current").resolve().rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    for file in (path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    pull_from(linked, dest)
    assert digests(dest / "current") == digests(source)


def test_a_repair_killed_before_any_change_is_ended_by_the_next_pull(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    for number in range(1, 200, 1 if IS_FULL else 9):
        dest = tmp_path / str(number)
        pull_from(store, dest)
        for name in ("load.py", "README.md"):
            flip((dest / "current").resolve() / name)
        was_killed = killed(lambda dest=dest: pull_from(store, dest), before_change=number)
        pull_from(store, dest)
        assert digests(dest / "current") == digests(source)
        assert not pull_from(store, dest).has_switched
        assert len(list((dest / ".versions").iterdir())) == 1
        if not was_killed:
            assert number > 20
            return
    raise AssertionError("it never ended")
