"""Where a model is trained and where it goes: one folder, or a folder of work here and a URL that the finished model
is copied to.

Training writes checkpoints, and loaders map files: both want a disk. So a model whose `output` is a URL is trained in
the cache, in a folder of its own that hangs on the URL alone (the same spec called again with --resume finds it), and
copied when it is finished: the manifest of the model that it replaces goes first, its own comes last. At the URL lies
a whole model or, to every reader, none. Then the folder of work is removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from relabel.distill.training.model_manifests import Product, StoredManifest, stored_manifest
from relabel.manifests import failpoints
from relabel.manifests.digests import sha256_file
from relabel.manifests.errors import ConfigError, LockHeldError, ManifestError, StaleRunError, StoreError
from relabel.manifests.runs.run_manifest import MANIFEST_NAME
from relabel.manifests.storage.bundle_store_ports import BundleStore, Held
from relabel.manifests.storage.bundle_stores import open_bundle_store
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.file_locks import FileLock
from relabel.manifests.storage.filesystems import is_url, scheme_of
from relabel.manifests.storage.run_store_ports import Lock
from relabel.manifests.storage.run_stores import open_run_store

CHECKPOINTS = "checkpoints"
CLAIM_NAME = "training.json"
"""In the checkpoints' folder: whose they are, and whether a --restart began them."""
LOCKS = ".locks"
LEASE_S = 10.0
"""A killed training's lease is dead so soon that the next call waits for it."""
LOOK_S = 0.5


@dataclass(frozen=True)
class OutputLocation:
    """A trained model's place.

    Args:
        product: what is trained there.
        output: as the spec names it.
        folder: where it is trained, and where it stays unless `url` says otherwise.
        storage: how the URL is reached.
        url: where it goes in the end.
    """

    product: Product
    output: str
    folder: Path
    storage: Storage
    url: str | None = None

    @property
    def lock_name(self) -> str:
        """Of the file that whoever trains there holds."""
        return f"{self.product.command}.lock"

    @property
    def checkpoints(self) -> Path:
        """What an unfinished training leaves."""
        return self.folder / CHECKPOINTS

    def check_free(self) -> None:
        """Make sure that the folder holds nothing, or what an earlier call left: writing there replaces files, and
        removes checkpoints.

        Raises:
            ConfigError: there is a file in its place, or a link that leads nowhere.
            StaleRunError: it holds files of something else, or the other command trains there, behind another lock.
        """
        others = [path.stem for path in self.checkpoints.glob("*.lock") if path.name != self.lock_name]
        if others:
            raise StaleRunError(
                f"{self.output}: `relabel {others[0]}` trains or trained there, and would lose its checkpoints. Name "
                f"another `output`; or, if that training is not wanted any more, remove {self.checkpoints}."
            )
        if self.url is not None:  # the folder of work is nobody else's
            return
        there = self._nearest
        if not there.exists():
            raise ConfigError(f"`output` = {self.output}: {there} is a link that leads nowhere. Mend it, or remove it.")
        if not there.is_dir():
            raise ConfigError(f"`output` = {self.output}: {there} is a file. Name a folder.")
        if (
            not self.folder.is_dir()
            or (self.folder / MANIFEST_NAME).exists()
            or (self.checkpoints / CLAIM_NAME).exists()
        ):
            return
        held = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if held == [CHECKPOINTS] and {path.name for path in self.checkpoints.iterdir()} <= {self.lock_name}:
            return  # one that was killed before it began
        if held:
            named = ", ".join(held[:5]) + (" …" if len(held) > 5 else "")
            raise StaleRunError(
                f"{self.output}: holds {named}, which no {self.product.kind} of ours left there. Name another "
                "`output`, or empty it."
            )

    def check_writable(self) -> None:
        """
        Raises:
            StoreError: nothing can be written where it is trained.
        """
        if not os.access(self._nearest, os.W_OK | os.X_OK):
            raise StoreError(
                f"{self.output}: {self._nearest} can't be written to. Check its permissions, or name another `output`."
            )

    @property
    def _nearest(self) -> Path:
        """The folder, or what there is of the way to it."""
        return next(path for path in (self.folder, *self.folder.absolute().parents) if os.path.lexists(path))

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Nobody else trains this model meanwhile, on this machine or, where it goes to a URL, on any.

        Yields:
            What makes sure of it again before the model is delivered: a lease may have been lost on the way, to a
            network that was down.
        Raises:
            LockHeldError: somebody does.
        """
        what = f"the {self.product.kind} in {self.output}"
        lock = FileLock(self.checkpoints / self.lock_name, what)
        lock.acquire()
        leases: list[Lock] = []

        def make_sure() -> None:
            if self.url is None or (leases and not leases[-1].is_lost):
                return
            parent, name = _split(self.url)
            lease = open_run_store(f"{parent}/{LOCKS}", replace(self.storage, lease_s=LEASE_S)).lock(
                f"{self.product.command}-{name}", what
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
        """The manifest of a model that is finished here, whether or not it has gone where it goes.

        Raises:
            ManifestError: what is here is not such a model's.
        """
        file = self.folder / MANIFEST_NAME
        try:
            return stored_manifest(file.read_bytes(), str(file), kind=self.product.kind)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ManifestError(
                f"{file}: can't be read ({exc.strerror}). Move it away, or name another output."
            ) from exc

    def manifest(self) -> StoredManifest | None:
        """The manifest of the model that is where it belongs.

        Raises:
            ManifestError: what is there is not such a model's.
        """
        if self.url is None:
            return self.local_manifest()
        try:
            data = open_bundle_store(self.url, self.storage).read(MANIFEST_NAME).data
        except FileNotFoundError:
            return None
        return stored_manifest(data, f"{self.url}/{MANIFEST_NAME}", kind=self.product.kind)

    def deliver(self, *, is_replacing: bool) -> None:
        """Copy the model that is finished here to where it goes, if that is elsewhere, and remove what there was to
        its making.

        Call it while `locked`: what the URL holds is looked at once, before the first file is written.

        Args:
            is_replacing: take the place of another one there.
        Raises:
            StaleRunError: there is another one, which is left as it is; or somebody put one there while this one
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
                    raise self._is_taken(bundle_store, name)
                bundle_store.delete(f"{name}/{MANIFEST_NAME}")
            self._copy(bundle_store, name, data, is_replacing=is_replacing)
        self.forget()

    def forget(self) -> None:
        """Remove the folder of work behind a URL; its model last, since checkpoints alone would be gone on with."""
        if self.url is not None:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            shutil.rmtree(self.folder)

    def _copy(self, bundle_store: BundleStore, name: str, data: bytes, *, is_replacing: bool) -> None:
        """Files, then the manifest, to a place that has none."""
        files = sorted(file for file in self.folder.iterdir() if file.is_file() and not file.name.startswith("."))
        for file in files:
            if file.name != MANIFEST_NAME:
                failpoints.hit("before_model_upload")
                bundle_store.upload(
                    f"{name}/{file.name}", file, Held(file.stat().st_size, sha256_file(file)), lambda _: None
                )
        if is_replacing:
            _remove_others(bundle_store, name, {file.name for file in files})
        failpoints.hit("before_model_manifest")
        if (
            not bundle_store.create(f"{name}/{MANIFEST_NAME}", data)
            and _record(bundle_store, f"{name}/{MANIFEST_NAME}") != data
        ):
            raise self._is_taken(bundle_store, name)
        failpoints.hit("after_model_manifest")

    def _is_taken(self, bundle_store: BundleStore, name: str) -> StaleRunError:
        return StaleRunError(
            f"{bundle_store.url}/{name}/{MANIFEST_NAME}: another {self.product.kind} was put there while this one was "
            "trained. Look at it; --restart replaces it."
        )


def output_location_of(product: Product, output: str, storage: Storage, *, cache_dir: Path) -> OutputLocation:
    """The output location behind a spec's `output`.

    Raises:
        ConfigError: a URL that no model can go to.
    """
    folder = training_folder(output, cache_dir=cache_dir)
    if not is_url(output) or scheme_of(output) in ("file", "local"):
        return OutputLocation(product, output, folder, storage)
    url = output.rstrip("/")
    if scheme_of(url) != "s3":
        raise ConfigError(f"`output` = {output}: {product.kind}s go to local folders and to s3://. Name one of these.")
    if not _split(url)[0].partition("://")[2]:
        raise ConfigError(
            f"`output` = {output}: names a whole bucket. Name a folder in it, which the {product.kind} then owns."
        )
    return OutputLocation(product, output, folder, storage, url)


def training_folder(output: str, *, cache_dir: Path) -> Path:
    """Where a model is trained: in its output, or in the cache where that is at a URL."""
    scheme, _, rest = output.partition("://")
    if not is_url(output):
        return Path(output)
    if scheme.lower() in ("file", "local"):
        return Path(rest)
    return cache_dir / "training" / hashlib.sha256(output.rstrip("/").encode()).hexdigest()[:24]


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


def _remove_others(bundle_store: BundleStore, name: str, kept: set[str]) -> None:
    """Files of the model that was there and that the new one does not have: a loader would take them for its own."""
    for entry in list(bundle_store.entries(name)):
        if entry.name.partition("/")[2] not in kept:
            bundle_store.delete(entry.name)
