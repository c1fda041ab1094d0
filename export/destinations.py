"""Where bundles are pulled to: versions side by side in a folder, and one link that says which of them serves.

    DEST/current              → .versions/VERSION, replaced in one step; what a server opens
    DEST/.versions/VERSION    bundles, each whole and proven before it got its name
    DEST/.pull.json           what was seen of each channel, and the order in which versions served
    DEST/.partial/            downloads under way, resumed by the next pull

Two locks: one for the whole of a pull, one for the moment of a switch, so that a rollback never waits for a download.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from export.bundles import MANIFEST_NAME, open_bundle
from manifests import failpoints
from manifests.digests import readable_json, sha256_file
from manifests.disk_errors import told
from manifests.errors import GateError, InputError, ManifestError
from manifests.file_locks import FileLock
from manifests.local_store import LocalStore, sync_folder
from manifests.records import checked, fault_of

LINK = "current"
VERSIONS = ".versions"
PARTIAL = ".partial"
STATE_NAME = ".pull.json"
STATE_FORMAT = 1
_TRASH_PREFIX = ".trash-"
_LINK_PREFIX = ".link-"


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest that was seen of a channel: refused is whatever is older, or another version under the same sequence."""

    sequence: int
    version_sha256: str


@dataclass(frozen=True, slots=True)
class Served:
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
    """

    name: str
    seen: dict[str, Seen] = field(default_factory=dict)
    served: tuple[Served, ...] = ()
    held: dict[str, int] = field(default_factory=dict)


class Destination:
    """A folder to pull to.

    Args:
        folder: made at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = LocalStore(folder)

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
            return checked(State, held)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            if isinstance(exc, ManifestError):
                raise
            raise ManifestError(
                f"{where}: not what pull writes ({fault_of(exc)}). What serves goes on. Move the file away and pull again, "
                "and know that with it goes the memory of the sequences that were seen."
            ) from exc

    def write(self, state: State) -> None:
        """Make the state durable; the switch lock is held."""
        self._store.put(STATE_NAME, readable_json({"format": STATE_FORMAT, **asdict(state)}))

    def serving(self) -> Path | None:
        """The folder that serves: the link, followed; None if there is none."""
        link = self.folder / LINK
        with told("look at", link):
            if link.is_symlink():
                return self.folder / link.readlink()
            if link.exists():
                raise InputError(f"{link}: is no link that a pull made. Move it away, or pull to another folder.")
            return None

    def path_of(self, served: Served) -> Path:
        """Where a version lies."""
        return self.folder / VERSIONS / served.folder

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

    def switch(self, state: State, to: Served, keep: int) -> State:
        """Let a version serve that lies here whole; the switch lock is held.

        Args:
            keep: versions that stay, this one included.
        """
        failpoints.hit("before_switch")
        link = self.folder / f"{_LINK_PREFIX}{secrets.token_hex(4)}"
        with told("switch", self.folder / LINK):
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

    def roll_back(self) -> Served:
        """Let the version serve that did before; needs no network and reads no file of the bundle but its manifest.

        Raises:
            GateError: nothing earlier is kept.
            ManifestError: what is kept is not whole.
        """
        with told("roll back in", self.folder), self.switching():
            state = self.reconciled()
            if state is None or len(state.served) < 2:
                raise GateError(
                    f"{self.folder}: keeps no earlier version to go back to. Pull one: relabel pull URL/NAME@VERSION {self.folder}."
                )
            target = state.served[1]
            path = self.path_of(target)
            if open_bundle(path, check_bytes=False).manifest.sha256 != target.manifest_sha256:
                raise ManifestError(f"{path}: its manifest is not the one that was pulled. Pull a version: URL/NAME@VERSION.")
            held = {**state.held, **{channel: seen.sequence for channel, seen in state.seen.items()}}
            left = replace(state, served=state.served[1:], held=held)
            self.switch(left, target, keep=len(left.served))
            return target

    def reconciled(self) -> State | None:
        """The state, put right by the link: a pull killed between the switch and the state's writing left them apart."""
        state = self.state()
        serving = self.serving()
        if state is None or serving is None or not state.served or serving.name == state.served[0].folder:
            return state
        known = next((one for one in state.served if one.folder == serving.name), None)
        if known is not None:
            return replace(state, served=state.served[state.served.index(known) :])
        try:
            manifest_sha256 = sha256_file(serving / MANIFEST_NAME)
        except OSError:
            return state
        unknown = Served(serving.name, serving.name.partition("~")[0], "", manifest_sha256, None, None)
        return replace(state, served=(unknown, *state.served))

    def free_name(self, version: str) -> str:
        """A folder name in `.versions` that is not taken; `~2` where a damaged folder of that version stands in the way."""
        names = [version, *(f"{version}~{number}" for number in range(2, 100))]
        return next(name for name in names if not (self.folder / VERSIONS / name).exists())

    def tidy(self, state: State) -> None:
        """Remove versions that are kept no more, and what killed pulls left; the pull lock is held."""
        kept = {one.folder for one in state.served}
        serving = self.serving()
        kept |= {serving.name} if serving else set()
        versions = self.folder / VERSIONS
        with told("tidy", self.folder):
            for path in versions.iterdir() if versions.is_dir() else ():
                if path.name not in kept:
                    _remove(path)
            _remove(self.folder / PARTIAL)
            for path in self.folder.glob(f"{_TRASH_PREFIX}*"):
                _remove(path)
            for path in self.folder.glob(f"{_LINK_PREFIX}*"):
                path.unlink(missing_ok=True)
        self._store.sweep("")


def _remove(folder: Path) -> None:
    """Remove a folder; its name goes first, so that nobody finds half of it."""
    if not folder.exists():
        return
    trash = folder if folder.name.startswith(_TRASH_PREFIX) else folder.with_name(f"{_TRASH_PREFIX}{secrets.token_hex(4)}")
    if trash != folder:
        os.rename(folder, trash)  # noqa: PTH104 (as in rename(2): atomic, and no copy)
    shutil.rmtree(trash)
