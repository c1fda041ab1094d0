"""A bundle: a folder with a student ready to deploy, sealed by its `manifest.json`. The names that its files may have,
and how it takes its place atomically and is recovered after a kill."""

from __future__ import annotations

import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from relabel.export import puller
from relabel.export.puller import AGAIN as FULL
from relabel.export.puller import GATE, LOCKED, MANIFEST, MISSING, USAGE, File, Refused, entries_in, fault_among
from relabel.manifests.errors import (
    DiskFullError,
    GateError,
    LockHeldError,
    ManifestError,
    MissingExtraError,
    RelabelError,
    StaleRunError,
    UsageError,
)
from relabel.manifests.files import FileLock, held_temp, remove_abandoned, translate_errors
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import readable_json, sha256_file
from relabel.manifests.store import LocalStore, sync_folder

MANIFEST_NAME = MANIFEST
RecordT = TypeVar("RecordT")
OWN_KEYS = ("kind", "format", "files")
"""Keys of the manifest that `seal_bundle` writes itself."""
VERSION_DIGITS = 16
_ERRORS: dict[int, type[RelabelError]] = {
    USAGE: UsageError,
    MISSING: MissingExtraError,
    GATE: GateError,
    FULL: DiskFullError,
    LOCKED: LockHeldError,
}


@contextmanager
def translate_refusals(note: str = "") -> Iterator[None]:
    """Turn what the puller refuses into relabel's error of the same exit code; a note ends its message."""
    try:
        yield
    except Refused as exc:
        raise _ERRORS.get(exc.code, ManifestError)(exc.text + note) from exc


# A bundle: one folder with a student ready to deploy, and `manifest.json`, which says what every file in it must be.
#
# `seal_bundle` writes the manifest last; `open_bundle` believes a folder only after it checked each name, size and
# digest. The manifest holds no time, so that the same files and facts make the same bytes, and so the same version.


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder that was checked against its manifest.

    Args:
        folder: where it lies.
        facts: the whole manifest.
        files: what it lists; the manifest itself is not among them.
        manifest: the manifest as a file.
    """

    folder: Path
    facts: Mapping[str, Any]
    files: tuple[File, ...]
    manifest: File

    @property
    def name(self) -> str:
        """What the bundle calls itself, the default of where it is published."""
        return str(self.facts["name"])

    @property
    def own_facts(self) -> dict[str, Any]:
        """The manifest but for what `seal_bundle` writes itself: to seal the bundle again."""
        return {key: value for key, value in self.facts.items() if key not in OWN_KEYS}

    @property
    def version(self) -> str:
        """Its version by default: the first digits of its manifest's sha256."""
        return self.manifest.sha256[:VERSION_DIGITS]

    @property
    def all_files(self) -> tuple[File, ...]:
        """Every file to be moved, the manifest last."""
        return (*self.files, self.manifest)


def seal_bundle(folder: Path, facts: Mapping[str, Any]) -> Bundle:
    """Write the manifest over what lies in a folder; an earlier manifest is replaced.

    Args:
        facts: `name` and `lineage`, and any further sections (heads, inputs, parity, licence …), as plain JSON
            values without times.
    Raises:
        ManifestError: a file's name, or something other than a plain file, cannot be in a bundle; a fact is missing or
            not JSON.
    """
    if taken := [key for key in OWN_KEYS if key in facts]:
        raise ManifestError(f"{folder}: the key `{taken[0]}` of a bundle's manifest is not free.")
    LocalStore(folder).sweep("")
    names = [name for name in _names_in(folder) if name != MANIFEST_NAME]
    files = [File(name, (folder / name).stat().st_size, sha256_file(folder / name)) for name in names]
    held = {"kind": "bundle", "format": 1, **facts, "files": [file._asdict() for file in files]}
    try:
        data = readable_json(held)
    except (TypeError, ValueError) as exc:
        raise ManifestError(f"{folder}: a fact of the bundle can't be written as JSON ({exc}).") from exc
    read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    LocalStore(folder).put(MANIFEST_NAME, data)
    return open_bundle(folder, check_bytes=False)


def _names_in(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted; refuses what no manifest can describe."""
    with translate_errors("list", folder):
        found = list(entries_in(folder))
        if odd := [path for path in found if not stat.S_ISREG(path.lstat().st_mode)]:
            raise ManifestError(f"{odd[0]}: a link, a special file or an empty folder has no place in a bundle.")
    return sorted(path.relative_to(folder).as_posix() for path in found)


def open_bundle(folder: Path, *, check_bytes: bool = True) -> Bundle:
    """Check a folder against its manifest: the same files, no more and no fewer, each with its size and digest.

    Args:
        check_bytes: also read every file and compare its sha256; otherwise names and sizes alone.
    Raises:
        ManifestError: says what is missing, strange or damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        with translate_errors("read", path, is_missing_fine=True):
            data = path.read_bytes()
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{folder}: no {MANIFEST_NAME} there, so no bundle. Give the folder that an export wrote."
        ) from exc
    with translate_refusals(), translate_errors("read", folder):
        facts, files = puller.read_manifest(data, str(path))
        if fault := fault_among(folder, files, reads=check_bytes):
            raise ManifestError(f"{fault}. Export, seal or pull the bundle again.")
    return Bundle(folder, facts, tuple(files[:-1]), files[-1])


@translate_refusals()
def read_manifest(data: bytes, where: str) -> tuple[dict[str, Any], tuple[File, ...]]:
    """A manifest's facts, and the files that it lists, everything checked that can be without the files.

    Raises:
        ManifestError: it is damaged, hostile, or of another format.
    """
    facts, files = puller.read_manifest(data, where)
    return facts, tuple(files[:-1])


# ------------------------------------------------------------------------------
# A bundle's place: a new bundle is made in a hidden folder next to it and switched in, under a lock.
#
# The switch is two renames, old one away and new one in, since no rename replaces a folder that holds something. A kill
# between them leaves the old bundle whole under a hidden name; `put_back` brings it back, and every command that works
# on the place calls that first. What is new lies in a folder of its maker's own (`new_folder_for`), and is on the disk,
# not only in its cache, before it takes the place.


OLD, LOCK, MAKING = "relabel-old", "relabel-lock", "relabel-making"
ABANDONED_S = 86400.0
"""Age at which what another machine was making is nobody's any more, seconds: no engine takes that long to build."""


def hidden_name(folder: Path, ending: str) -> Path:
    """A hidden name of ours next to a bundle: `.bundle.relabel-old`."""
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
    lock = FileLock(hidden_name(folder, LOCK), f"The bundle {folder}")
    lock.acquire(waits=waits)
    try:
        yield
    finally:
        lock.release()


def put_back(folder: Path) -> None:
    """Bring back a bundle that a kill within `switch` left next to its place; nothing where the place is taken.

    Raises:
        LockHeldError: a live process is switching just now.
        StoreError: the folder above can't be written.
    """
    old = hidden_name(folder, OLD)
    if folder.exists() or not old.is_dir():
        return
    with locked(folder), translate_errors("put back", folder):
        if not folder.exists() and old.is_dir():
            old.rename(folder)


def made_before(
    target: Path, read: Callable[[Path], tuple[RecordT, Any]], recipe: Any, *, is_replacing: bool, what: str
) -> RecordT | None:
    """What is at a place already, if this very recipe made it; None where it may be made.

    Args:
        read: what is there, and the recipe that made it.
        what: is to be made, for messages.
    Raises:
        StaleRunError: something else is there.
    """
    put_back(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        found, made_by = read(target)
    except (ManifestError, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StaleRunError(
            f"{target}: holds something that is no whole {what} ({exc}). Name another --to, or move it away."
        ) from exc
    if made_by == recipe:
        return found
    if is_replacing:
        return None
    raise StaleRunError(f"{target}: holds another {what}. Name another --to, or replace it with --replace.")


@contextmanager
def new_folder_for(folder: Path) -> Iterator[Path]:
    """An empty folder next to a bundle's place, to make a bundle in and to `switch` it from; gone when the body ends,
    however it does.

    Its name is this call's alone, so that two who make at one place share nothing. What killed processes left there
    goes.

    Raises:
        StoreError: the folder above can't be written.
    """
    making = hidden_name(folder, MAKING)
    for left in folder.parent.glob(f"{glob.escape(making.name)}-*"):
        remove_abandoned(left, older_s=ABANDONED_S)
    with ExitStack() as held:
        with translate_errors("write", making):
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, _ = held.enter_context(held_temp(folder.parent, f"{making.name}-", is_folder=True))
        yield part


def switch(part: Path, folder: Path) -> None:
    """Let what was made ready take the place of what is there, if anything does. To be called with the place
    `locked`.

    Raises:
        KeyboardInterrupt: an interruption came while it was made.
    """
    check_interrupted()
    old = hidden_name(folder, OLD)
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


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """A second name for a file, or a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)
