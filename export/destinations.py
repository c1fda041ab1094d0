"""Folders that bundles are pulled to: versions side by side, the link to the one that serves, and proof that each is
whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from relabel.export.bundles import MANIFEST_NAME, BundleFile, entries_in, is_sha256, read_manifest
from relabel.export.store import OBJECTS, is_name
from relabel.manifests import failpoints
from relabel.manifests.errors import InputError, ManifestError, StoreError
from relabel.manifests.files import FileLock, translate_errors
from relabel.manifests.records import BLOCK_BYTES, checked, fault_of, readable_json, sha256_file
from relabel.manifests.store import LocalRunStore, sync_folder

# ------------------------------------------------------------------------------
# Whether a folder that serves is still what was pulled: each file held against the manifest, by its stamp or by its
# bytes.
#
# A stamp is what the file system says of a file: size, inode, time of the last write, and of the last change of any
# kind. The last one (ctime) can't be set by hand, so a write that puts size and mtime back shows all the same. Bytes
# that were proven are believed for as long as their stamp stays; a disk that rots without a write is found by reading
# all bytes alone (`pull --check`, `relabel verify`).


YOUNG_NS = 100_000_000
"""A file that changed less than this ago gets no stamp, ns: within a tick of the file system's clock it could change
again unseen.
"""

Stamps = Mapping[str, Sequence[int]]
"""By name: size, inode, mtime and ctime in ns, as they were when the bytes were proven."""


class Fault(NamedTuple):
    """What is wrong with one file; the name is relative to the folder that was looked at."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    Args:
        faults: none where the folder is whole.
        stamps: of every file whose bytes are proven, now or earlier.
    """

    faults: list[Fault] = field(default_factory=list)
    stamps: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, what: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(name, what))


def prove(folder: Path, manifest_sha256: str, stamps: Stamps) -> Proof:
    """Hold a folder against the manifest that it was pulled with; writes nothing.

    Args:
        stamps: of an earlier proof; empty to read all bytes.
    """
    proof = Proof()
    if folder.is_symlink() or not folder.is_dir():
        proof.add(folder.name, "is not a folder" if os.path.lexists(folder) else "is missing")
        return proof
    try:
        found = dict(entries_in(folder))
    except OSError as exc:
        proof.add(folder.name, f"can't be listed ({exc.strerror})")
        return proof
    _prove_file(proof, folder, BundleFile(MANIFEST_NAME, -1, manifest_sha256), found, stamps)
    if proof.faults:
        return proof
    try:
        _, files = read_manifest((folder / MANIFEST_NAME).read_bytes(), f"{folder}/{MANIFEST_NAME}")
    except (ManifestError, OSError) as exc:
        proof.add(MANIFEST_NAME, f"is not a manifest ({exc})")
        return proof
    for file in files:
        _prove_file(proof, folder, file, found, stamps)
    listed = {MANIFEST_NAME, *(file.path for file in files)}
    for name in sorted(found.keys() - listed):
        proof.add(name, "is not in the manifest")
    for above in sorted({parent for name in listed for parent in Path(name).parents}):
        if (folder / above).is_dir() and (folder / above).stat().st_mode & 0o500 != 0o500:
            proof.add(above.as_posix(), "can't be entered (its mode)")
    return proof


def stamp_of(found: os.stat_result) -> list[int]:
    """What is kept of a file that was proven."""
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _prove_file(
    proof: Proof, folder: Path, file: BundleFile, found: Mapping[str, os.stat_result], stamps: Stamps
) -> None:
    """Note a file's fault, or its stamp. A size below 0 is not known."""
    name, held = file.path, found.get(file.path)
    if held is None:
        proof.add(name, "is missing")
    elif not stat.S_ISREG(held.st_mode):
        proof.add(name, "is not a plain file")
    elif not held.st_mode & stat.S_IRUSR:
        proof.add(name, "can't be read (its mode)")
    elif 0 <= file.size_bytes != held.st_size:
        proof.add(name, f"has {held.st_size:,} bytes, its manifest says {file.size_bytes:,}")
    elif list(stamps.get(name, ())) == stamp_of(held):
        proof.stamps[name] = stamp_of(held)
    else:
        try:
            sha256, stamp = _digest(folder / name)
        except OSError as exc:
            proof.add(name, f"can't be read ({exc.strerror})")
            return
        if sha256 != file.sha256:
            proof.add(name, f"has sha256 {sha256[:16]}…, it was pulled with {file.sha256[:16]}…")
        elif stamp is not None:
            proof.stamps[name] = stamp


def _digest(path: Path) -> tuple[str, list[int] | None]:
    """sha256 of a file, and the stamp that these bytes have; None where they may have changed under the reader."""
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 (of a descriptor)
        before, now_ns = os.fstat(file.fileno()), time.time_ns()
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        is_settled = stamp_of(os.fstat(file.fileno())) == stamp_of(before) and now_ns - before.st_ctime_ns > YOUNG_NS
    return digest.hexdigest(), stamp_of(before) if is_settled else None


# ------------------------------------------------------------------------------
# Where bundles are pulled to: versions side by side in a folder, and one link that says which of them serves.
#
#     DEST/current              → .versions/VERSION, replaced in one step; what a server opens
#     DEST/.versions/VERSION    bundles, each whole and proven before it got its name
#     DEST/.pull.json           what was seen of each channel, and the order in which versions served
#     DEST/.stamps.json         what the file system said of each file when its bytes were last proven
#     DEST/.partial/            downloads under way, resumed by the next pull
#
# Two locks: one for the whole of a pull, one for the moment of a switch, so that a rollback never waits for a download.


LINK = "current"
VERSIONS = ".versions"
PARTIAL = ".partial"
STATE_NAME = ".pull.json"
STATE_FORMAT = 1
STAMPS_NAME = ".stamps.json"
_TRASH_PREFIX = ".trash-"
_LINK_PREFIX = ".link-"


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest that was seen of a channel: refused is whatever is older, or another version
    under the same sequence.
    """

    sequence: int
    version_sha256: str


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that served here.

    Args:
        folder: its name in `.versions`.
        version_sha256: digest of the version's body.
        manifest_sha256: of its `manifest.json`.
        channel: by which it came, None if it was asked for by its version.
    """

    folder: str
    version: str
    version_sha256: str
    manifest_sha256: str
    channel: str | None
    sequence: int | None


@dataclass(frozen=True, slots=True)
class State:
    """What a destination remembers.

    Args:
        name: of the bundle that is pulled here; one destination holds versions of one bundle.
        seen: by channel.
        served: newest first; the first serves now.
        held: by channel, the sequence from which somebody rolled back: up to that one no pull of the channel switches.
        left: by channel, the versions that it left by a rollback as far as was seen, by digest: nobody rolls back to
            them unless by name.
    """

    name: str
    seen: dict[str, Seen] = field(default_factory=dict)
    served: tuple[ServedVersion, ...] = ()
    held: dict[str, int] = field(default_factory=dict)
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def leavers(self, served: ServedVersion) -> list[str]:
        """Channels that left a version by a rollback."""
        return sorted(channel for channel, versions in self.left.items() if served.version_sha256 in versions)


def is_destination(path: Path) -> bool:
    """Whether bundles were pulled to a folder."""
    return (path / STATE_NAME).exists() or (path / VERSIONS).is_dir()


class Destination:
    """A folder to pull to.

    Args:
        folder: made at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = LocalRunStore(folder)

    def state(self) -> State | None:
        """What it remembers, None before the first pull.

        Raises:
            ManifestError: the state file is damaged.
        """
        try:
            data = self._store.read(STATE_NAME)
        except FileNotFoundError:
            return None
        where = f"{self.folder}/{STATE_NAME}"
        try:
            held = json.loads(data)
            if held.pop("format") != STATE_FORMAT:
                raise ManifestError(f"{where}: written by another relabel. Pull to a new folder.")
            state = checked(State, held)
            _check_state(state, held)
            return state
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            if isinstance(exc, ManifestError):
                raise
            raise ManifestError(
                f"{where}: not what pull writes ({fault_of(exc)}). The served version stays. Move the file away and "
                "pull again; the sequences that were seen are then forgotten."
            ) from exc

    def write(self, state: State) -> None:
        """Make the state durable; the switch lock is held."""
        self._store.put(STATE_NAME, readable_json({"format": STATE_FORMAT, **asdict(state)}))

    def refuse_foreign(self) -> None:
        """Called before anything is written: a pull into what serves (`DEST/current`) would make it a bundle that
        nobody loads.

        Raises:
            InputError: the folder is a bundle, a command's output or a store.
        """
        for name in (MANIFEST_NAME, OBJECTS):
            if (self.folder / name).exists():
                raise InputError(
                    f"{self.folder}: holds {name}, so it is a bundle, an output or a store. Pull to a folder of its "
                    f"own; programs load from {LINK} in it."
                )

    def serving(self) -> Path | None:
        """The folder that serves: the link, followed; None if there is none."""
        link = self.folder / LINK
        with translate_errors("look at", link):
            if link.is_symlink():
                return self.folder / link.readlink()
            if link.exists():
                raise InputError(f"{link}: is not a link that a pull made. Move it away, or pull to another folder.")
            return None

    def path_of(self, served: ServedVersion) -> Path:
        """Where a version lies."""
        return self.folder / VERSIONS / served.folder

    def prove(self, served: ServedVersion, *, checks_bytes: bool) -> Proof:
        """Hold what serves against what was pulled: the link, and every file; writes nothing.

        Args:
            checks_bytes: read all files, those too whose stamp is as it was when they were last proven.
        """
        folder = self.path_of(served)
        proof = prove(folder, served.manifest_sha256, {} if checks_bytes else self._stamps().get(served.folder, {}))
        if self.serving() != folder:
            proof.faults.insert(
                0,
                Fault(LINK, "is missing" if self.serving() is None else f"does not lead to {VERSIONS}/{served.folder}"),
            )
        return proof

    def look(self, *, checks_bytes: bool) -> tuple[State, Proof]:
        """What serves, and whether it is whole; writes nothing and waits for nobody.

        Raises:
            ManifestError: nothing was pulled here, or nobody knows what.
        """
        while True:
            state = self.reconciled()
            if state is None or not state.served:
                raise ManifestError(
                    f"{self.folder}/{STATE_NAME}: is missing or names no version. Pull: relabel pull URL/NAME "
                    f"{self.folder}."
                )
            proof = self.prove(state.served[0], checks_bytes=checks_bytes)
            if not proof.faults or self.reconciled() == state:
                # else a pull switched and tidied up while files were read
                return state, proof

    def remember(self, state: State, served: ServedVersion, proof: Proof) -> None:
        """Note the stamps of what was proven, and forget those of versions that are kept no more; the pull lock is
        held.
        """
        was = self._stamps()
        held = {one.folder: was[one.folder] for one in state.served if one.folder in was} | {
            served.folder: proof.stamps
        }
        if held != was:
            failpoints.hit("before_stamps")
            self._store.put(STAMPS_NAME, readable_json({"format": STATE_FORMAT, "versions": held}))

    def _stamps(self) -> dict[str, dict[str, list[int]]]:
        """Stamps by version's folder and file; none where the file is damaged or not to be read, and all bytes are read
        instead.
        """
        try:
            held = json.loads(self._store.read(STAMPS_NAME))
            return checked(dict[str, dict[str, list[int]]], held["versions"] if held["format"] == STATE_FORMAT else {})
        except (FileNotFoundError, StoreError, ValueError, KeyError, TypeError):
            return {}

    @contextlib.contextmanager
    def pulling(self) -> Iterator[None]:
        """Keep other pulls out.

        Raises:
            LockHeldError: another pull is at work.
        """
        lock = FileLock(self.folder / ".locks" / "pull.lock", f"a pull to {self.folder}")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Keep other switches out, for the moment that one takes; waits for its turn."""
        lock = FileLock(self.folder / ".locks" / "switch.lock", f"a switch in {self.folder}")
        lock.acquire(waits=True)
        try:
            yield
        finally:
            lock.release()

    def switch(self, state: State, to: ServedVersion, keep: int) -> State:
        """Let a version serve that lies here whole; the switch lock is held.

        Args:
            keep: versions that stay, this one included.
        """
        failpoints.hit("before_switch")
        link = self.folder / f"{_LINK_PREFIX}{secrets.token_hex(4)}"
        with translate_errors("switch", self.folder / LINK):
            link.symlink_to(Path(VERSIONS) / to.folder)
            link.replace(self.folder / LINK)
            sync_folder(self.folder)
        failpoints.hit("after_switch")
        others = (one for one in state.served if one.folder != to.folder and one.version_sha256 != to.version_sha256)
        served = (to, *others)
        state = replace(state, served=served[:keep])
        self.write(state)
        failpoints.hit("after_pull_state")
        return state

    def roll_back(self, to: str | None = None) -> ServedVersion:
        """Let the version serve that did before, but for those that a channel left by a rollback; needs no network.

        Args:
            to: a version that is kept here, whatever the channels say of it.
        Raises:
            InputError: there is none; says what is kept.
            ManifestError: what is kept is not whole.
        """
        self._pulled()  # before a lock makes a folder of what is none
        with translate_errors("roll back in", self.folder), self.switching():
            state = self._pulled()
            place = self._place_to_go_back_to(state, to)
            target = state.served[place]
            path = self.path_of(target)
            if faults := prove(path, target.manifest_sha256, self._stamps().get(target.folder, {})).faults:
                raise ManifestError(
                    f"{path}: {faults[0]}. Another one that is kept: --to VERSION; or pull it again: "
                    f"URL/NAME@{target.version}."
                )
            held = {**state.held, **{channel: seen.sequence for channel, seen in state.seen.items()}}
            left = replace(state, served=state.served[place:], held=held)
            self.switch(left, target, keep=len(left.served))
            return target

    def _pulled(self) -> State:
        state = self.reconciled()
        if state is None or not state.served:
            raise InputError(
                f"{self.folder}: no version was pulled here. Pull one: relabel pull URL/NAME {self.folder}."
            )
        return state

    def _place_to_go_back_to(self, state: State, to: str | None) -> int:
        """Where it is in `state.served`."""
        for place, one in enumerate(state.served):
            if one.version == to or (to is None and place > 0 and not state.leavers(one)):
                return place
        wanted = f"version {to} is not kept" if to is not None else "keeps no version to go back to"
        kept = [
            one.version + _note("serves" if one is state.served[0] else "", state.leavers(one)) for one in state.served
        ]
        raise InputError(
            f"{self.folder}: {wanted}. Here are: {'; '.join(kept)}. Name one of them: --to VERSION; or pull another: "
            f"relabel pull URL/{state.name}@VERSION {self.folder}."
        )

    def reconciled(self) -> State | None:
        """The state, put right by the link: a pull killed between the switch and the state's
        writing left them apart.
        """
        state = self.state()
        serving = self.serving()
        if state is None or serving is None or not state.served or serving == self.path_of(state.served[0]):
            return state
        if serving.parent != self.folder / VERSIONS:
            # a link that no pull made: the state is believed, and the link is a fault
            return state
        known = next((one for one in state.served if one.folder == serving.name), None)
        if known is not None:
            return replace(state, served=state.served[state.served.index(known) :])
        try:
            manifest_sha256 = sha256_file(serving / MANIFEST_NAME)
        except OSError:
            return state
        unknown = ServedVersion(serving.name, serving.name.partition("~")[0], "", manifest_sha256, None, None)
        return replace(state, served=(unknown, *state.served))

    def free_name(self, version: str) -> str:
        """A folder name in `.versions` that is not taken; `~2` where a damaged folder of that version is in the
        way.
        """
        names = [version, *(f"{version}~{number}" for number in range(2, 100))]
        return next(name for name in names if not (self.folder / VERSIONS / name).exists())

    def tidy(self, state: State) -> None:
        """Remove versions that are kept no more, and what killed pulls left; the pull lock is held."""
        kept = {one.folder for one in state.served}
        serving = self.serving()
        kept |= {serving.name} if serving else set()
        versions = self.folder / VERSIONS
        with translate_errors("tidy", self.folder):
            for path in versions.iterdir() if versions.is_dir() else ():
                if path.name not in kept:
                    _remove(path)
            _remove(self.folder / PARTIAL)
            for path in self.folder.glob(f"{_TRASH_PREFIX}*"):
                _remove(path)
            for path in self.folder.glob(f"{_LINK_PREFIX}*"):
                path.unlink(missing_ok=True)
        self._store.sweep("")


def _check_state(state: State, held: Mapping[str, Any]) -> None:
    """A state as it is written: a byte that changed must not name another folder or lift a hold.

    Raises:
        ValueError: it is none.
    """
    served = state.served
    names = [state.name, *(one.version for one in served), *(one.channel for one in served if one.channel is not None)]
    digests = [one.manifest_sha256 for one in served] + [one.version_sha256 for one in served if one.version_sha256]
    digests += [one.version_sha256 for one in state.seen.values()] + [one for few in state.left.values() for one in few]
    numbers = [one.sequence for one in state.seen.values()] + [one.sequence or 0 for one in served]
    numbers += state.held.values()
    are_right = all(map(is_name, names)) and all(map(is_sha256, digests)) and all(0 <= one < 2**53 for one in numbers)
    again = json.loads(readable_json(asdict(state)))
    holds_more = any(again[key] != value for key, value in held.items() if key in again)
    if not are_right or holds_more or any(not one.folder or "/" in one.folder for one in served):
        raise ValueError("a name, digest or number in it is none")


def _note(first: str, leavers: Sequence[str]) -> str:
    """` (serves, stable left it by a rollback)`."""
    notes = [first, *(f"{channel} left it by a rollback" for channel in leavers)]
    return f" ({', '.join(filter(None, notes))})" if any(notes) else ""


def _remove(path: Path) -> None:
    """Remove a folder, or what lies in its place; its name goes first, so that nobody finds half of it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.exists():
        return
    trash = path if path.name.startswith(_TRASH_PREFIX) else path.with_name(f"{_TRASH_PREFIX}{secrets.token_hex(4)}")
    if trash != path:
        os.rename(path, trash)  # noqa: PTH104 (as in rename(2): atomic, and no copy)
    try:
        shutil.rmtree(trash)
    except PermissionError:  # somebody took its owner's rights from a folder in it
        trash.chmod(0o700)
        for top, folders, _ in os.walk(trash):
            for folder in (Path(top, name) for name in folders):
                if not folder.is_symlink():
                    folder.chmod(0o700)
        shutil.rmtree(trash)
