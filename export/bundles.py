"""A bundle: a folder with a student ready to deploy, sealed by its `manifest.json`. The names that its files may have,
and how it takes its place atomically and is recovered after a kill."""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.bundle_store import MAX_RECORD_BYTES
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import FileLock, held_temp, remove_abandoned, translate_errors
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import canonical_json, readable_json, sha256_bytes, sha256_file
from relabel.manifests.store import LocalRunStore, sync_folder

# ------------------------------------------------------------------------------
# Files of a bundle as its manifest names them, and JSON that says each key once.


class BundleFile(NamedTuple):
    """A file of a bundle: its name relative to the folder, size in bytes, sha256 of its bytes."""

    path: str
    size_bytes: int
    sha256: str


def read_files(held: Any, where: str) -> tuple[BundleFile, ...]:
    """A list of files as JSON holds it; names are not checked yet.

    Raises:
        ManifestError: an item is not a path, a size and a digest.
    """
    if not isinstance(held, list):
        raise ManifestError(f"{where}: `files` is not a list.")
    return tuple(_file(item, f"{where}: `files.{number}`") for number, item in enumerate(held))


def strict_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object with no key twice and no NaN, as a signature needs it: two readers must not see two things.

    Raises:
        ManifestError: it is none.
    """

    def refuse(value: str) -> Any:
        raise ValueError(f"{value} is not a JSON number")

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        held = json.loads(data, object_pairs_hook=once, parse_constant=refuse)
        canonical_json(held)  # what JSON can hold and a signature or a terminal can't: half a surrogate pair, 1e999
    except (ValueError, RecursionError) as exc:
        raise ManifestError(f"{where}: not readable as JSON ({type(exc).__name__}).") from exc
    if not isinstance(held, dict):
        raise ManifestError(f"{where}: not a JSON object.")
    return held


def is_sha256(value: object) -> bool:
    """Whether a value is a digest as we write it: 64 lower-case hex digits."""
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def _file(held: Any, where: str) -> BundleFile:
    if not isinstance(held, dict) or held.keys() != set(BundleFile._fields):
        raise ManifestError(f"{where} is not a path, size_bytes and sha256.")
    file = BundleFile(**held)
    is_size = type(file.size_bytes) is int and 0 <= file.size_bytes < 2**53
    if not isinstance(file.path, str) or not is_sha256(file.sha256) or not is_size:
        raise ManifestError(f"{where} is not a path, a size in bytes and a sha256 of 64 hex digits.")
    return file


# ------------------------------------------------------------------------------
# What lies in a bundle's folder, and that nothing else does.


def entries_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Name and state of all that lies below a folder: files, links, special files, and folders that are empty.

    Python's caches of modules (`__pycache__`) are passed over: whoever imports a bundle's `load.py` leaves one there.
    """
    pending = [folder]
    while pending:
        current = pending.pop()
        with os.scandir(current) as entries:
            held = [entry for entry in entries if entry.name != "__pycache__"]
        if not held and current != folder:
            yield current.relative_to(folder).as_posix(), current.stat()
        for entry in held:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                pending.append(Path(entry.path))
            else:
                yield Path(entry.path).relative_to(folder).as_posix(), found


def names_in(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted.

    Raises:
        ManifestError: a link, a socket or an empty folder lies among them: no manifest can say what it must be.
    """
    found = []
    with translate_errors("list", folder):
        for name, held in entries_in(folder):
            if stat.S_ISDIR(held.st_mode):
                raise ManifestError(f"{folder / name}: an empty folder has no place in a bundle. Remove it.")
            if not stat.S_ISREG(held.st_mode):
                raise ManifestError(
                    f"{folder / name}: a link or a special file has no place in a bundle. Put the file itself there."
                )
            found.append(name)
    return sorted(found)


# ------------------------------------------------------------------------------
# Names of files in a bundle: relative, plain, and the same file on every system that may unpack them.
#
# A manifest comes from a store that others can write to. A name that climbs out of its folder, means a device on
# Windows, or falls together with another on a disk that folds case or Unicode is refused before anything is made.


MAX_FILES = 10_000
MAX_NAME_BYTES = 512
MAX_STEP_BYTES = 200
MAX_DEPTH = 16
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³")}
_FORBIDDEN_CHARACTERS = set('\\:*?"<>|')
_FORBIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Control, format (which can turn a name's reading direction), surrogate, private, unassigned, line and paragraph
separators.
"""


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse names that could write outside their folder, or over one another.

    Args:
        names: relative, steps parted by `/`.
        where: whose names these are, for the message.
    Raises:
        ManifestError: names the first that is off, and how.
    """
    if len(names) > MAX_FILES:
        raise ManifestError(f"{where}: lists {len(names):,} files; more than {MAX_FILES:,} are refused.")
    files: set[str] = set()
    folders: dict[str, str] = {}
    for name in names:
        if fault := _fault(name):
            raise ManifestError(f"{where}: refuses the file name {name!r}: {fault}.")
        key = _folded(name)
        if key in files:
            raise ManifestError(
                f"{where}: refuses the file name {name!r}: another file has that name, or one that differs in case "
                "alone."
            )
        files.add(key)
        steps = name.split("/")
        for depth in range(1, len(steps)):
            folder = "/".join(steps[:depth])
            if folders.setdefault(_folded(folder), folder) != folder:
                raise ManifestError(f"{where}: refuses the file name {name!r}: its folder is spelled in two ways.")
    if both := files & folders.keys():
        raise ManifestError(
            f"{where}: refuses the file name {folders[min(both)]!r}: it is a file and a folder at once."
        )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _fault(name: object) -> str | None:
    """What is off with one name; None if nothing is."""
    if not isinstance(name, str) or not name:
        return "it is not text"
    if any(unicodedata.category(letter) in _FORBIDDEN_CATEGORIES for letter in name):
        return "it holds a control or invisible character"
    if bad := _FORBIDDEN_CHARACTERS & set(name):
        return f"it holds {min(bad)!r}, which is a path or a drive on some systems"
    if unicodedata.normalize("NFC", name) != name:
        return "it is not in Unicode's composed form (NFC)"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    steps = name.split("/")
    if len(steps) > MAX_DEPTH:
        return f"it is deeper than {MAX_DEPTH} folders"
    return next((fault for step in steps if (fault := _step_fault(step))), None)


def _step_fault(step: str) -> str | None:
    if step in ("", ".", ".."):
        return "it is absolute or leaves its folder"
    if step[-1] in " ." or step[0] == " ":
        return "a step of it begins or ends in a blank, or ends in a dot"
    if step.partition(".")[0].casefold() in _WINDOWS_DEVICES:
        return "a step of it is a device on some systems"
    if len(step.encode()) > MAX_STEP_BYTES:
        return f"a step of it is longer than {MAX_STEP_BYTES} bytes"
    return None


# ------------------------------------------------------------------------------
# A bundle: one folder with a student ready to deploy, and `manifest.json`, which says what every file in it must be.
#
# `seal_bundle` writes the manifest last, `open_bundle` believes a folder only after each name, size and digest was held
# against it. The manifest holds no time, so that the same files and facts make the same bytes, and so the same version.


MANIFEST_NAME = "manifest.json"
BUNDLE_FORMAT = 1
OWN_KEYS = ("kind", "format", "files")
"""Keys of the manifest that `seal_bundle` writes itself."""
VERSION_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder that was held against its manifest.

    Args:
        folder: where it lies.
        facts: the whole manifest.
        files: what it lists; the manifest itself is not among them.
        manifest: the manifest as a file.
    """

    folder: Path
    facts: Mapping[str, Any]
    files: tuple[BundleFile, ...]
    manifest: BundleFile

    @property
    def name(self) -> str:
        """What the bundle calls itself, the default of where it is published."""
        return str(self.facts["name"])

    @property
    def own_facts(self) -> dict[str, Any]:
        """The manifest but for what `seal_bundle` writes itself: to seal the bundle anew with whatever it holds."""
        return {key: value for key, value in self.facts.items() if key not in OWN_KEYS}

    @property
    def version(self) -> str:
        """Its version by default: the first digits of its manifest's sha256."""
        return self.manifest.sha256[:VERSION_DIGITS]

    @property
    def all_files(self) -> tuple[BundleFile, ...]:
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
    LocalRunStore(folder).sweep("")
    names = [name for name in names_in(folder) if name != MANIFEST_NAME]
    check_names([*names, MANIFEST_NAME], str(folder))
    files = [BundleFile(name, (folder / name).stat().st_size, sha256_file(folder / name)) for name in names]
    held = {"kind": "bundle", "format": BUNDLE_FORMAT, **facts, "files": [file._asdict() for file in files]}
    try:
        data = readable_json(held)
    except (TypeError, ValueError) as exc:
        raise ManifestError(f"{folder}: a fact of the bundle can't be written as JSON ({exc}).") from exc
    read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    LocalRunStore(folder).put(MANIFEST_NAME, data)
    return open_bundle(folder, check_bytes=False)


def open_bundle(folder: Path, *, check_bytes: bool = True) -> Bundle:
    """Hold a folder against its manifest: the same files, no more and no fewer, each with its size and digest.

    Args:
        check_bytes: also read every file and compare its sha256; otherwise names and sizes alone.
    Raises:
        ManifestError: says what is missing, strange or damaged.
    """
    data = _manifest_bytes(folder)
    facts, files = read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    listed = {file.path: file for file in files}
    with translate_errors("look into", folder):
        found = names_in(folder)
    if missing := sorted(listed.keys() - set(found)):
        raise ManifestError(
            f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more. Export or pull the bundle again."
        )
    if strange := sorted(set(found) - listed.keys() - {MANIFEST_NAME}):
        raise ManifestError(
            f"{folder}: {strange[0]} is not in the manifest, and {len(strange) - 1} more. Move it away, or seal the "
            "bundle again."
        )
    for file in files:
        check_file(folder / file.path, file, check_bytes=check_bytes)
    manifest = BundleFile(MANIFEST_NAME, len(data), sha256_bytes(data))
    return Bundle(folder, facts, files, manifest)


def check_file(path: Path, file: BundleFile, *, check_bytes: bool) -> None:
    """Hold one file against what is written of it.

    Raises:
        ManifestError: it is another file.
    """
    with translate_errors("read", path):
        size = path.stat().st_size
        if size != file.size_bytes:
            raise ManifestError(
                f"{path}: {size:,} bytes, its manifest says {file.size_bytes:,}. Export or pull the bundle again."
            )
        if check_bytes and (found := sha256_file(path)) != file.sha256:
            raise ManifestError(
                f"{path}: sha256 {found[:16]}…, its manifest says {file.sha256[:16]}…. Export or pull the bundle again."
            )


def read_manifest(data: bytes, where: str) -> tuple[dict[str, Any], tuple[BundleFile, ...]]:
    """A manifest's facts and files, everything checked that can be without the files.

    Raises:
        ManifestError: it is damaged, hostile, or of another format.
    """
    held = strict_json(data, where)
    if held.get("kind") != "bundle":
        raise ManifestError(f"{where}: not the manifest of a bundle (kind {held.get('kind')!r}).")
    if held.get("format") != BUNDLE_FORMAT:
        raise ManifestError(f"{where}: a bundle of format {held.get('format')!r}; this relabel reads {BUNDLE_FORMAT}.")
    name = held.get("name")
    if not isinstance(name, str) or not name:
        raise ManifestError(f"{where}: `name` is missing: what the bundle is called.")
    if not isinstance(held.get("lineage"), dict):
        raise ManifestError(f"{where}: `lineage` is missing: what the bundle was made of.")
    files = read_files(held.get("files"), where)
    check_names([*(file.path for file in files), MANIFEST_NAME], where)
    return held, files


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST_NAME
    try:
        with translate_errors("read", path, is_missing_fine=True):
            if not path.is_file() and path.exists():
                raise ManifestError(f"{path}: is not a plain file. Export or pull the bundle again.")
            if path.stat().st_size > MAX_RECORD_BYTES:
                raise ManifestError(f"{path}: too big to be a manifest.")
            return path.read_bytes()
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{folder}: no {MANIFEST_NAME} there, so no bundle. Give the folder that an export wrote."
        ) from exc


# ------------------------------------------------------------------------------
# A bundle's place: how one that is made ready beside it takes it, who may, and how it comes back after a kill.
#
# The switch is two renames, old one away and new one in, since no rename replaces a folder that holds something. A
# process that is killed between them leaves no bundle at the place and the old one beside it, whole, under a hidden
# name; `put_back` brings it home, and whoever works on the place next calls that first. All names beside the place are
# ours alone: nobody's `bundle.old` is touched.
#
# What is made anew lies in a folder of its maker's own (`made_beside`); what is changed, with the place locked, in one
# that all share (`linked_copy`). Either is on the disk, and not only in its cache, before it takes the place.


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
