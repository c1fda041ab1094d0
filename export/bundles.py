"""A bundle: a folder with a student ready to deploy, sealed by its `manifest.json`. The names that its files may have,
and how it takes its place atomically and is recovered after a kill."""

import glob
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from relabel.manifests.files import (
    FileLock,
    absence_of,
    held_temp,
    open_to_readers,
    remove_abandoned,
    translate_errors,
)
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import differences, readable_json
from relabel.manifests.store import LocalStore, sync_folder

MANIFEST_NAME = MANIFEST
HUB_RECORD_NAME = "relabel.json"
"""In a folder for Hugging Face's libraries: its recipe, its lineage, and what was measured."""
RecordT = TypeVar("RecordT")
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


# A bundle: one folder with a student ready to deploy, and `manifest.json`, which lists what every file in it must be.
#
# `seal_bundle` writes the manifest last; `open_bundle` believes a folder only after it checked each name, size and
# digest. The manifest holds no time, so that the same files and facts make the same bytes, and so the same version.


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder that was checked against its manifest.

    Args:
        folder: where it lies.
        facts: the whole manifest.
        all_files: every file, the manifest last.
    """

    folder: Path
    facts: Mapping[str, Any]
    all_files: tuple[File, ...]

    @property
    def name(self) -> str:
        """What the bundle calls itself, the default of where it is published."""
        return str(self.facts["name"])

    @property
    def own_facts(self) -> dict[str, Any]:
        """The manifest but for what `seal_bundle` writes itself: to seal the bundle again."""
        return {key: value for key, value in self.facts.items() if key not in ("kind", "format", "files")}

    @property
    def manifest(self) -> File:
        """The manifest as a file."""
        return self.all_files[-1]

    @property
    def version(self) -> str:
        """Its version by default: the first digits of its manifest's sha256."""
        return self.manifest.sha256[:16]


def seal_bundle(folder: Path, facts: Mapping[str, Any]) -> Bundle:
    """Write the manifest over what lies in a folder; an earlier manifest is replaced.

    Args:
        facts: `name` and `lineage`, and any further sections (heads, inputs, parity, licence …), as plain JSON
            values without times.
    Raises:
        ManifestError: a file's name, or something other than a plain file, cannot be in a bundle; a fact is missing.
    """
    LocalStore(folder).sweep("")
    with translate_errors("list", folder):
        files = [
            File(path.relative_to(folder).as_posix(), path.lstat().st_size, puller.sha256_of(path))
            for path in sorted(entries_in(folder))
            if path != folder / MANIFEST_NAME
        ]
    LocalStore(folder).put(
        MANIFEST_NAME,
        readable_json({"kind": "bundle", "format": 1, **facts, "files": [file._asdict() for file in files]}),
    )
    return open_bundle(folder)


def open_bundle(folder: Path) -> Bundle:
    """Check a folder against its manifest: the same files, no more and no fewer, each with its size and digest. A
    process reads the bytes of a file that did not change once.

    Links in the folder are followed, wherever they lead, as those of a hub's cache: what counts are the bytes.

    Raises:
        ManifestError: names what is missing, strange or damaged; or says what else the folder is.
    """
    path = folder / MANIFEST_NAME
    try:
        if not os.path.lexists(path):
            raise ManifestError(
                f"{folder}: no {MANIFEST_NAME} there, so no bundle. Give the folder that an export wrote."
            )
        with translate_refusals(), translate_errors("read", path):
            facts, files = puller.read_manifest(path.read_bytes(), str(path))
            fault = fault_among(folder, files, follows=True)
            if fault:
                raise ManifestError(f"{fault}. Export or pull the bundle again.")
    except RelabelError:
        _refuse_other_outputs(folder)
        raise
    return Bundle(folder, facts, tuple(files))


def kind_of(folder: Path) -> Any:
    """What a folder's manifest says it is: `bundle`, `student`, `teacher`; None where none can be read."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # what reads the manifest reports its damage
        return json.loads((folder / MANIFEST_NAME).read_bytes()).get("kind")
    return None


def _refuse_other_outputs(folder: Path) -> None:
    """
    Raises:
        ManifestError: there is none, or another command made it; says which, and how a bundle comes of it.
    """
    if absent := absence_of(folder):
        raise ManifestError(absent)
    if (folder / puller.VERSIONS).is_dir():
        raise ManifestError(f"{folder}: bundles are pulled there. Name the active one: {folder}/current")
    path = folder / MANIFEST_NAME
    kind = kind_of(folder)
    if kind == "bundle":
        return
    from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME  # brings pyarrow, which a bundle does without

    export = f"relabel export {shlex.quote(str(folder))} --to BUNDLE"
    if any((folder / name).exists() for name in (PLAN_NAME, ROUNDS_NAME)):
        raise ManifestError(
            f"{folder}: holds labels or scores, and no bundle. Train a student on labels (`relabel distill`), and make "
            "a bundle of it: relabel export STUDENT --to BUNDLE"
        )
    if kind == "student":
        raise ManifestError(f"{folder}: a student, and no bundle. Make one of it: {export}")
    if kind == "teacher":
        raise ManifestError(
            f"{folder}: a teacher, of which there is no bundle. It labels as a job's engine.model; bundles are made of "
            "students, by `relabel export`."
        )
    if (folder / HUB_RECORD_NAME).exists():
        raise ManifestError(
            f"{folder}: a folder for sentence-transformers or transformers (`relabel export --format`), and no bundle. "
            "Make one of its student: relabel export STUDENT --to BUNDLE"
        )
    if (folder / "checkpoints").is_dir() and not path.exists():
        raise ManifestError(
            f"{folder}: a training that is not finished. Call its command again with --resume, and make a bundle of "
            f"the student: {export}"
        )


@translate_refusals()
def read_manifest(data: bytes, where: str) -> dict[str, Any]:
    """A manifest, everything checked that can be without the files.

    Raises:
        ManifestError: it is damaged, hostile, or of another format.
    """
    return puller.read_manifest(data, where)[0]


# ------------------------------------------------------------------------------
# A bundle's place: a new bundle is made in a hidden folder next to it and switched in, under a lock.
#
# The switch is two renames, old one away and new one in, since no rename replaces a folder that holds something. A kill
# between them leaves the old bundle whole under a hidden name, which `put_back` brings back. What is new is on the
# disk, not only in its cache, before it takes the place.


ABANDONED_S = 86400.0
"""Age at which what another machine was making is nobody's any more, seconds: no engine takes that long to build."""


def _hidden(folder: Path, ending: str) -> Path:
    """A hidden name of ours next to a bundle: `.bundle.relabel-old`."""
    return folder.with_name(f".{folder.name}.relabel-{ending}")


def put_back(folder: Path) -> None:
    """Bring back a bundle that a kill within `switch` left next to its place; nothing where the place is taken.

    Raises:
        LockHeldError: a live process is switching just now.
        StoreError: the folder above can't be written.
    """
    old = _hidden(folder, "old")
    if old.is_dir() and not folder.exists():
        with FileLock(_hidden(folder, "lock"), f"The bundle {folder}").held(), translate_errors("put back", folder):
            if not folder.exists() and old.is_dir():
                old.rename(folder)


class Recipe(NamedTuple):
    """What an export is made by.

    Args:
        digest: equal where it need not be made again.
        options: those that a user gives, for messages.
    """

    digest: Any
    options: Mapping[str, Any]


def made_before(
    target: Path, read: Callable[[Path], tuple[RecordT, Recipe]], recipe: Recipe, *, is_replacing: bool, what: str
) -> RecordT | None:
    """What is at a place already, if this very recipe made it; None where it may be made. Brings back what a kill
    within `switch` left next to the place.

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
    except FileNotFoundError as exc:
        missing = Path(exc.filename).name
        raise StaleRunError(
            f"{target}: holds something that is no {what}: there is no {missing}. Name another --to, or move it away."
        ) from exc
    except (ManifestError, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StaleRunError(
            f"{target}: holds something that is no whole {what} ({exc}). Name another --to, or move it away."
        ) from exc
    if made_by.digest == recipe.digest:
        return found
    if not is_replacing:
        changed = "; ".join(differences(made_by.options, recipe.options)) or "its student, its pairs or relabel changed"
        raise StaleRunError(
            f"{target}: holds another {what} ({changed}). Name another --to, or replace it with --replace."
        )
    return None


@contextmanager
def new_folder_for(folder: Path, *, is_replacing: bool = True) -> Iterator[Path]:
    """An empty folder next to a bundle's place, to make a bundle in. It takes the place when the body ends well, and is
    gone otherwise. Its name is this call's alone; what killed processes left there goes.

    Args:
        is_replacing: take the place of what is there by then.
    Raises:
        StaleRunError: something is there.
        StoreError: the folder above can't be written.
    """
    making = _hidden(folder, "making")
    for left in folder.parent.glob(f"{glob.escape(making.name)}-*"):
        remove_abandoned(left, older_s=ABANDONED_S)
    with ExitStack() as stack:
        with translate_errors("write", making):
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, _ = stack.enter_context(held_temp(folder.parent, f"{making.name}-", is_folder=True))
        yield part
        open_to_readers(part)
        with FileLock(_hidden(folder, "lock"), f"The bundle {folder}").held():
            if folder.exists() and not is_replacing:
                raise StaleRunError(f"{folder}: exists already. Name another --to.")
            switch(part, folder)


def switch(part: Path, folder: Path) -> None:
    """Let what was made ready take the place of what is there, if anything does. The place's lock is held.

    Raises:
        KeyboardInterrupt: an interruption came while it was made.
    """
    check_interrupted()
    old = _hidden(folder, "old")
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
