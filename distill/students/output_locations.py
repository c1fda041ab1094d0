"""Where a student is made and where it goes: one folder, or a folder of work here and a URL that the finished student
is copied to.

Training writes checkpoints, and loaders map files: both want a disk. So a student whose `output` is a URL is trained in
the cache, in a folder of its own that hangs on the URL alone (the same spec called again with --resume finds it), and
copied when it is finished: the manifest of the student that it replaces goes first, its own comes last. At the URL lies
a whole student or, to every reader, none. Then the folder of work is removed.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distill.students.student_manifest import StoredManifest, student_manifest_at
from manifests import failpoints
from manifests.digests import sha256_file
from manifests.errors import ConfigError, LockHeldError, ManifestError, StaleRunError
from manifests.runs.run_manifest import MANIFEST_NAME
from manifests.storage.bundle_store_ports import BundleStore, Held
from manifests.storage.bundle_stores import open_bundle_store
from manifests.storage.context import Storage
from manifests.storage.file_locks import FileLock
from manifests.storage.filesystems import is_url, scheme_of
from manifests.storage.run_store_ports import Lock
from manifests.storage.run_stores import open_run_store

CHECKPOINTS = "checkpoints"
CLAIM_NAME = "training.json"
"""In the checkpoints' folder: whose they are, and whether a --restart began them."""
LOCK_NAME = "distill.lock"
LOCKS = ".locks"
LEASE_S = 10.0
"""A killed training's lease is dead so soon that the next call waits for it."""
LOOK_S = 0.5


@dataclass(frozen=True)
class OutputLocation:
    """A student's place.

    Args:
        output: as the spec names it.
        folder: where it is trained, and where it stays unless `url` says otherwise.
        storage: how the URL is reached.
        url: where it goes in the end.
    """

    output: str
    folder: Path
    storage: Storage
    url: str | None = None

    @property
    def checkpoints(self) -> Path:
        """What an unfinished training leaves."""
        return self.folder / CHECKPOINTS

    def check_free(self) -> None:
        """Make sure that the folder holds nothing, or what an earlier call left: writing there replaces files, and
        removes checkpoints.

        Raises:
            StaleRunError: it holds files of something else.
        """
        if self.url is not None:  # the folder of work is nobody else's
            return
        if (
            not self.folder.is_dir()
            or (self.folder / MANIFEST_NAME).exists()
            or (self.checkpoints / CLAIM_NAME).exists()
        ):
            return
        held = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if held == [CHECKPOINTS] and {path.name for path in self.checkpoints.iterdir()} <= {LOCK_NAME}:
            return  # one that was killed before it began
        if held:
            named = ", ".join(held[:5]) + (" …" if len(held) > 5 else "")
            raise StaleRunError(
                f"{self.output}: holds {named}, which no student of ours left there. Name another `output`, or empty "
                "it."
            )

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Nobody else trains this student meanwhile, on this machine or, where it goes to a URL, on any.

        Yields:
            What makes sure of it again before the student is delivered: a lease may have been lost on the way, to a
            network that was down.
        Raises:
            LockHeldError: somebody does.
        """
        what = f"the student in {self.output}"
        lock = FileLock(self.checkpoints / LOCK_NAME, what)
        lock.acquire()
        leases: list[Lock] = []

        def make_sure() -> None:
            if self.url is None or (leases and not leases[-1].is_lost):
                return
            parent, name = _split(self.url)
            lease = open_run_store(f"{parent}/{LOCKS}", replace(self.storage, lease_s=LEASE_S)).lock(
                f"distill-{name}", what
            )
            _take(lease)
            leases.append(lease)

        try:
            make_sure()
            yield make_sure
        finally:
            for lease in leases:
                lease.release()
            lock.release()

    def local_manifest(self) -> StoredManifest | None:
        """The manifest of a student that is finished here, whether or not it has gone where it goes.

        Raises:
            ManifestError: what is here is not a student's.
        """
        file = self.folder / MANIFEST_NAME
        try:
            return student_manifest_at(file.read_bytes(), str(file))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ManifestError(
                f"{file}: can't be read ({exc.strerror}). Move it away, or name another output."
            ) from exc

    def manifest(self) -> StoredManifest | None:
        """The manifest of the student that is where it belongs.

        Raises:
            ManifestError: what is there is no student's.
        """
        if self.url is None:
            return self.local_manifest()
        try:
            return student_manifest_at(
                open_bundle_store(self.url, self.storage).read(MANIFEST_NAME).data, f"{self.url}/{MANIFEST_NAME}"
            )
        except FileNotFoundError:
            return None

    def deliver(self, *, is_replacing: bool) -> None:
        """Copy the student that is finished here to where it goes, if that is elsewhere, and remove what there was to
        its making.

        Call it while `locked`: what the URL holds is looked at once, before the first file is written.

        Args:
            is_replacing: take the place of another student there.
        Raises:
            StaleRunError: there is another student, which is left as it is; or somebody put one there while this one
                was copied.
        """
        if self.url is None:
            shutil.rmtree(self.checkpoints)
            return
        parent, name = _split(self.url)
        bundle_store = open_bundle_store(parent, self.storage)
        data = (self.folder / MANIFEST_NAME).read_bytes()
        held = _record(bundle_store, f"{name}/{MANIFEST_NAME}")
        if held != data:
            if held is not None:
                if not is_replacing:
                    raise _is_taken(bundle_store, name)
                bundle_store.delete(f"{name}/{MANIFEST_NAME}")
            self._copy(bundle_store, name, data, is_replacing=is_replacing)
        self.forget()

    def forget(self) -> None:
        """Remove the folder of work behind a URL; its student last, since checkpoints alone would be gone on with."""
        if self.url is not None:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            shutil.rmtree(self.folder)

    def _copy(self, bundle_store: BundleStore, name: str, data: bytes, *, is_replacing: bool) -> None:
        """Files, then the manifest, to a place that has none."""
        files = sorted(file for file in self.folder.iterdir() if file.is_file() and not file.name.startswith("."))
        for file in files:
            if file.name != MANIFEST_NAME:
                failpoints.hit("before_student_upload")
                bundle_store.upload(
                    f"{name}/{file.name}", file, Held(file.stat().st_size, sha256_file(file)), lambda _: None
                )
        if is_replacing:
            _remove_others(bundle_store, name, {file.name for file in files})
        failpoints.hit("before_student_manifest")
        if (
            not bundle_store.create(f"{name}/{MANIFEST_NAME}", data)
            and _record(bundle_store, f"{name}/{MANIFEST_NAME}") != data
        ):
            raise _is_taken(bundle_store, name)
        failpoints.hit("after_student_manifest")


def output_location_of(output: str, storage: Storage, *, cache_dir: Path) -> OutputLocation:
    """The output location behind a spec's `output`.

    Raises:
        ConfigError: a URL that no student can go to.
    """
    scheme, _, rest = output.partition("://")
    if is_url(output) and scheme.lower() in ("file", "local"):
        return OutputLocation(output, Path(rest), storage)
    if not is_url(output):
        return OutputLocation(output, Path(output), storage)
    url = output.rstrip("/")
    if scheme_of(url) != "s3":
        raise ConfigError(f"`output` = {output}: students go to local folders and to s3://. Name one of these.")
    if not _split(url)[0].partition("://")[2]:
        raise ConfigError(
            f"`output` = {output}: names a whole bucket. Name a folder in it, which the student then owns."
        )
    folder = cache_dir / "training" / hashlib.sha256(url.encode()).hexdigest()[:24]
    return OutputLocation(output, folder, storage, url)


def _take(lease: Lock) -> None:
    """Take a lease; one that nobody renews any more is waited for."""
    deadline = time.monotonic() + LEASE_S + 2.0  # its store counts in whole seconds
    while True:
        try:
            lease.acquire()
        except LockHeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
        else:
            return


def _split(url: str) -> tuple[str, str]:
    parent, _, name = url.rpartition("/")
    return parent.rstrip("/") if not parent.endswith("//") else parent, name


def _record(bundle_store: BundleStore, name: str) -> bytes | None:
    try:
        return bundle_store.read(name).data
    except FileNotFoundError:
        return None


def _is_taken(bundle_store: BundleStore, name: str) -> StaleRunError:
    return StaleRunError(
        f"{bundle_store.url}/{name}/{MANIFEST_NAME}: another student was put there while this one was trained. "
        "Look at it; --restart replaces it."
    )


def _remove_others(bundle_store: BundleStore, name: str, kept: set[str]) -> None:
    """Files of the student that was there and that the new one does not have: a loader would take them for its own."""
    for entry in list(bundle_store.entries(name)):
        if entry.name.partition("/")[2] not in kept:
            bundle_store.delete(entry.name)
