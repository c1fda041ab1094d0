"""Where a model is trained and where it is written: local folders and URLs, checkpoint folders, the mark in a stored
manifest, and errors raised when a disk refuses a write."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from relabel.manifests import failpoints
from relabel.manifests.bundle_store import BundleStore, Held, open_bundle_store
from relabel.manifests.errors import (
    ConfigError,
    DiskFullError,
    LockHeldError,
    ManifestError,
    StaleRunError,
    StoreError,
    TrainingError,
)
from relabel.manifests.files import FileLock, Storage, is_url, scheme_of
from relabel.manifests.manifest import MANIFEST_NAME
from relabel.manifests.records import checked, read_record, sha256_file
from relabel.manifests.store import Lock, open_run_store, sync_folder

# ------------------------------------------------------------------------------
# The `manifest.json` of a trained model as far as whoever makes one has to look at another: what it is, and of which
# spec.


ManifestT = TypeVar("ManifestT")


class Product(NamedTuple):
    """What a command trains.

    Args:
        kind: `student`; as manifests and messages have it.
        command: the one that trains it, `distill`.
        model_key: of its spec, that names the model to start from.
        data_keys: that name what is learned from.
        undecided: keys on which its fingerprint does not hang, or only through digests of data and model; as pydantic
            excludes them.
    """

    kind: str
    command: str
    model_key: str
    data_keys: tuple[str, ...]
    undecided: Mapping[str, Any]


@dataclass(frozen=True)
class BaseModelUsed:
    """The model that a training starts from."""

    reference: str
    digest: str
    type: str | None = None


@dataclass(frozen=True)
class _Mark:
    kind: str
    fingerprint: str


class StoredManifest(NamedTuple):
    """A manifest that lies somewhere, known to be of the kind that was looked for; the rest of it may be of another
    version.
    """

    data: bytes
    where: str
    fingerprint: str


def read_manifest(data: bytes, where: str, cls: type[ManifestT], *, kind: str) -> ManifestT:
    """The whole of a manifest, as a record.

    Raises:
        ManifestError: it is damaged, or of another version.
    """
    what = f"not as this relabel writes a {kind}'s manifest"
    return read_record(cls, data, where, what, "Restore it from a copy, or train again.")


def stored_manifest(data: bytes, where: str, *, kind: str) -> StoredManifest:
    """What a `manifest.json` is, without a look at more than its kind and fingerprint.

    Raises:
        ManifestError: it is not of that kind.
    """
    try:
        held = json.loads(data)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not readable as a {kind}'s manifest. Move it away, or name another output."
        ) from exc
    try:
        mark = checked(_Mark, held)
        if mark.kind != kind:
            raise ValueError(f"it is of a {mark.kind}")
    except ValueError as exc:
        raise ManifestError(
            f"{where}: is not a {kind}'s manifest; the folder belongs to something else. Name another output."
        ) from exc
    return StoredManifest(data, where, mark.fingerprint)


# ------------------------------------------------------------------------------
# Where a model is trained and where it goes: one folder, or a folder of work here and a URL that the finished model
# is copied to.
#
# Training writes checkpoints, and loaders map files: both want a disk. So a model whose `output` is a URL is trained in
# the cache, in a folder of its own that hangs on the URL alone (the same spec called again with --resume finds it), and
# copied when it is finished: the manifest of the model that it replaces goes first, its own comes last. At the URL lies
# a whole model or, to every reader, none. Then the folder of work is removed.


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


# ------------------------------------------------------------------------------
# Checkpoints as folders: how they are called, which are there, and their plain values, for whoever reads them without
# torch.


_NAME = re.compile(r"checkpoint-(\d+)")
WEIGHTS, OPTIMIZER, RANDOM, STATE = "weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"
DIGESTS = "digests.json"


def checkpoint_name(step: int) -> str:
    """Name of a step's checkpoint; sorts by step."""
    return f"checkpoint-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def how_it_goes_on(checkpoints: Path) -> str:
    """What is kept of a training that ends early, and what to do, as a message says it."""
    kept = list_checkpoints(checkpoints)
    if kept:
        return f"{kept[-1].name} is kept: --resume goes on from it."
    return "No checkpoint was written yet, and nothing is lost but the steps since the start: --resume begins anew."


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written after."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def digests_of(checkpoint: Path) -> dict[str, str | None]:
    """sha256 of a checkpoint's files, by name; None for those of relabel up to 0.1, which noted none.

    Raises:
        OSError, ValueError, AttributeError: they can't be read.
    """
    file = checkpoint / DIGESTS
    if not file.exists():
        return dict.fromkeys((WEIGHTS, OPTIMIZER, RANDOM, STATE))
    return dict(json.loads(file.read_text(encoding="utf-8")).items())


def damaged(checkpoint: Path, fault: str) -> ManifestError:
    """What a checkpoint that can't be gone on with is refused with."""
    return ManifestError(f"{checkpoint}: a damaged checkpoint ({fault}). Remove it to resume from the one before.")


def join_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    """What `checkpoints.split_tensors` took apart; tuples come back as lists."""
    (kind, inner), *_ = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: join_tensors(one, tensors) for key, one in inner}
    if kind == "list":
        return [join_tensors(one, tensors) for one in inner]
    return inner


# ------------------------------------------------------------------------------
# What a disk refuses while a model or a checkpoint is written, in our words; who may read the files, and when they are
# on the disk.


_FULL = (errno.ENOSPC, errno.EDQUOT)
_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def writing(folder: Path, checkpoints: Path | None) -> Iterator[None]:
    """Turn refusals of the disk into ours, whoever meets them: safetensors has an error of its own, tokenizers raises a
    bare Exception, both with the system's number in its text.

    Args:
        checkpoints: folder of the training's, for the message; None where it is not known.
    Raises:
        DiskFullError: no space is left.
        StoreError: anything else that the operating system says.
    """
    try:
        yield
    except StoreError:  # ours already, and an OSError too
        raise
    except Exception as exc:
        number = exc.errno if isinstance(exc, OSError) else _told_errno(exc)
        if number is None:
            raise
        kept = "--resume goes on from the last checkpoint, if there is one."
        kept = kept if checkpoints is None else how_it_goes_on(checkpoints)
        if number in _FULL:
            raise DiskFullError(f"{folder}: no space left to write it. Free some space. {kept}") from exc
        raise StoreError(f"{folder}: can't be written ({exc}). Fix this. {kept}") from exc


def _told_errno(exc: Exception) -> int | None:
    is_theirs = type(exc) is Exception or type(exc).__name__ == "SafetensorError"
    found = _NUMBER.search(str(exc)) if is_theirs else None
    return int(found[1]) if found else None


def sync_files(folder: Path, *names: str) -> None:
    """Put files of a folder on the disk, all or those named, and their names: what is committed after it names nothing
    that a loss of power takes.
    """
    for file in [folder / name for name in names] or sorted(filter(Path.is_file, folder.iterdir())):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def open_to_readers(folder: Path) -> None:
    """Give the files of a folder the mode that any new file has here (0666 without the umask); safetensors leaves its
    own at 0600.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in filter(Path.is_file, folder.iterdir()):
        if stat.S_IMODE(file.stat().st_mode) != mode:
            file.chmod(mode)


# ------------------------------------------------------------------------------
# Where a training keeps its checkpoints, and what it says of the rows that it can't go on with.


ROWS_NAMED = 20


@dataclass
class TrainingPlace:
    """Where a training keeps its checkpoints, and whom it talks to.

    Args:
        folder: of the checkpoints.
        keep: how many of them stay, the best one beside them.
        say: called with progress, a line each.
        names: where each row comes from, `(source, row_id)`.
        report_to: services that the curve is sent to.
        title: of the curve's plot, which then lies beside the checkpoints, with the curve, as far as the last one goes.
    """

    folder: Path
    keep: int
    say: Callable[[str], None]
    names: Sequence[tuple[str, int]]
    report_to: Sequence[str] = ()
    title: str | None = None

    def not_finite(self, what: str, rows: Sequence[int], *, step: int) -> TrainingError:
        """The error for a number that is none.

        Args:
            rows: that it came of.
            step: that it is of.
        """
        rows = list(dict.fromkeys(rows))
        named = ", ".join(f"{source}:{row_id}" for source, row_id in (self.names[row] for row in rows[:ROWS_NAMED]))
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        kept = list_checkpoints(self.folder)
        last = f"The last checkpoint is {kept[-1]}" if kept else "No checkpoint was written yet"
        return TrainingError(
            f"step {step}: {what}. Rows of the batch, as source:row_id: {named}{more}. "
            f"{last}. Look at these rows; if they are fine, train again with --restart and a lower train.learning_rate "
            "or train.precision: fp32 (another spec doesn't go on from these checkpoints)."
        )
