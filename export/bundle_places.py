"""A bundle's place: how one that is made ready beside it takes it, who may, and how it comes back after a kill.

The switch is two renames, old one away and new one in, since no rename replaces a folder that holds something. A
process that is killed between them leaves no bundle at the place and the old one beside it, whole, under a hidden name;
`put_back` brings it home, and whoever works on the place next calls that first. All names beside the place are ours
alone: nobody's `bundle.old` is touched.

What is made anew lies in a folder of its maker's own (`made_beside`); what is changed, with the place locked, in one
that all share (`linked_copy`). Either is on the disk, and not only in its cache, before it takes the place.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.manifests.digests import sha256_file
from relabel.manifests.errors import ManifestError
from relabel.manifests.interruptions import check_interrupted
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.file_locks import FileLock
from relabel.manifests.storage.local_run_store import sync_folder
from relabel.manifests.storage.temp_files import held_temp, remove_abandoned

PART, OLD, LOCK, MAKING = "relabel-part", "relabel-old", "relabel-lock", "relabel-making"
ABANDONED_S = 86400.0
"""Age at which what another machine was making is nobody's any more, seconds: no engine takes that long to build."""


def beside(folder: Path, ending: str) -> Path:
    """A hidden name of ours beside a bundle: `.bundle.relabel-old`."""
    return folder.with_name(f".{folder.name}.{ending}")


@contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold a bundle's place. The lock's file stays when it is let go: a name that comes and goes would lock nothing.

    Args:
        waits: until its holder lets go, instead of failing at once.
    Raises:
        LockHeldError: a live process holds it.
        StoreError: the folder above can't be written.
    """
    lock = FileLock(beside(folder, LOCK), f"The bundle {folder}")
    lock.acquire(waits=waits)
    try:
        yield
    finally:
        lock.release()


def put_back(folder: Path) -> None:
    """Bring back a bundle that a kill within `switch` left beside its place; nothing where the place is taken.

    Raises:
        LockHeldError: a live process is switching just now.
        StoreError: the folder above can't be written.
    """
    old = beside(folder, OLD)
    if folder.exists() or not old.is_dir():
        return
    with locked(folder), translate_errors("put back", folder):
        if not folder.exists() and old.is_dir():
            old.rename(folder)


@contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """An empty folder beside a bundle's place, to make a bundle in and to `switch` it from; gone when the body ends,
    however it does.

    Its name is this call's alone, so that two who make at one place share nothing. What killed processes left there
    goes.

    Raises:
        StoreError: the folder above can't be written.
    """
    making = beside(folder, MAKING)
    for left in folder.parent.glob(f"{glob.escape(making.name)}-*"):
        remove_abandoned(left, older_s=ABANDONED_S)
    with ExitStack() as held:
        with translate_errors("write", making):
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, _ = held.enter_context(held_temp(folder.parent, f"{making.name}-", is_folder=True))
        yield part


def linked_copy(folder: Path, *, leaves_out: frozenset[str]) -> Path:
    """A copy of a bundle beside it, its files linked where the disk can; what an earlier process left there goes.

    Args:
        leaves_out: names at its top that are not copied.
    """
    part = beside(folder, PART)
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(
        folder, part, copy_function=link_or_copy, ignore=lambda at, _: leaves_out if Path(at) == folder else frozenset()
    )
    return part


def switch(part: Path, folder: Path) -> None:
    """Let what was made ready take the place of what is there, if anything does. To be called with the place
    `locked`.

    Raises:
        KeyboardInterrupt: an interruption came while it was made.
    """
    check_interrupted()
    old = beside(folder, OLD)
    for top, _, names in os.walk(part):
        for name in names:
            sync_folder(Path(top, name))
        sync_folder(Path(top))
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        part.rename(folder)
    except BaseException:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_unchanged(bundle: Bundle, sealed: Bundle, *, written: Collection[str]) -> None:
    """Hold a copy that was sealed against the bundle that was opened, before it takes that one's place.

    Args:
        bundle: as it was opened.
        sealed: the copy beside it.
        written: names of files that are ours to write and to remove.
    Raises:
        ManifestError: a file of the bundle is another one than when it was opened, so what was found out then is not
            true of it.
    """
    was, now = ({file.path: file for file in one.files if file.path not in written} for one in (bundle, sealed))
    changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    manifest = bundle.folder / MANIFEST_NAME
    if not manifest.is_file() or sha256_file(manifest) != bundle.manifest.sha256:
        changed.append(MANIFEST_NAME)
    if changed:
        raise ManifestError(
            f"{bundle.folder}: {changed[0]} changed since the bundle was opened, and {len(changed) - 1} more; nothing "
            "was written into it. Export or pull the bundle again unless an export or a pull just did, then run the "
            "same command again."
        )


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """A second name for a file, or a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)
