"""The folder that a trained model owns: what its manifest must say, names and digests of checkpoints, and errors raised
when a disk refuses a write. Importing it does not load torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from relabel.manifests.errors import (
    ConfigError,
    DiskFullError,
    ManifestError,
    StaleRunError,
    StoreError,
    TrainingError,
)
from relabel.manifests.files import FileLock
from relabel.manifests.manifest import MANIFEST_NAME
from relabel.manifests.records import checked, read_record
from relabel.manifests.store import sync_folder

ManifestT = TypeVar("ManifestT")


class Product(NamedTuple):
    """What a command trains.

    Args:
        kind: `student`; as manifests and messages have it.
        command: the one that trains it, `distill`.
        model_key: of its spec, that names the model to start from.
        data_keys: that name what is learned from.
        undecided: keys, as dotted paths, that are no part of its fingerprint: they change speed alone, or name data and
            models, whose digests are part of it.
    """

    kind: str
    command: str
    model_key: str
    data_keys: tuple[str, ...]
    undecided: frozenset[str]


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
    spec: dict[str, Any] = field(default_factory=dict)


class StoredManifest(NamedTuple):
    """A manifest of the kind that was expected; the rest of it may be of another version."""

    data: bytes
    where: str
    fingerprint: str
    spec: dict[str, Any]


def read_manifest(data: bytes, where: str, cls: type[ManifestT], *, kind: str) -> ManifestT:
    """The whole of a manifest, as a record.

    Raises:
        ManifestError: it is damaged, or of another version.
    """
    what = f"not as this relabel writes a {kind}'s manifest"
    return read_record(cls, data, where, what, "Restore it from a copy, or train again.")


def stored_manifest(data: bytes, where: str, *, kind: str) -> StoredManifest:
    """A `manifest.json` of which only kind, fingerprint and spec are checked.

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
    return StoredManifest(data, where, mark.fingerprint, mark.spec)


# ------------------------------------------------------------------------------
# The folder of one model: the finished model, and `checkpoints/` while it is trained.


CHECKPOINTS = "checkpoints"
RECORD_NAME = "training.json"
"""In the checkpoints' folder: the `TrainingRecord` of the training that they belong to."""


@dataclass(frozen=True)
class OutputFolder:
    """The folder that a trained model owns.

    Args:
        product: what is trained there.
        output: as the spec names it.
    """

    product: Product
    output: str

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def lock_name(self) -> str:
        return f"{self.product.command}.lock"

    @property
    def checkpoints(self) -> Path:
        """What an unfinished training leaves."""
        return self.folder / CHECKPOINTS

    def check_free(self) -> None:
        """Make sure that the folder is empty or holds what an earlier call left: training there replaces files.

        Raises:
            ConfigError: it is a file, or a link that leads nowhere.
            StaleRunError: it holds files of something else, or the other command trains there.
        """
        others = [path.stem for path in self.checkpoints.glob("*.lock") if path.name != self.lock_name]
        if others:
            raise StaleRunError(
                f"{self.output}: `relabel {others[0]}` trains or trained there, and would lose its checkpoints. Name "
                f"another `output`; or, if that training is not wanted any more, remove {self.checkpoints}."
            )
        there = self._nearest
        if not there.exists():
            raise ConfigError(f"`output` = {self.output}: {there} is a link that leads nowhere. Mend it, or remove it.")
        if not there.is_dir():
            raise ConfigError(f"`output` = {self.output}: {there} is a file. Name a folder.")
        if (
            not self.folder.is_dir()
            or (self.folder / MANIFEST_NAME).exists()
            or (self.checkpoints / RECORD_NAME).exists()
        ):
            return
        held = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if held == [CHECKPOINTS] and {path.name for path in self.checkpoints.iterdir()} <= {self.lock_name}:
            return  # killed before it began
        if held:
            named = ", ".join(held[:5]) + (" …" if len(held) > 5 else "")
            raise StaleRunError(
                f"{self.output}: holds {named}, which no {self.product.kind} of ours left there. Name another "
                "`output`, or empty it."
            )

    def check_writable(self) -> None:
        """
        Raises:
            StoreError: nothing can be written there.
        """
        if not os.access(self._nearest, os.W_OK | os.X_OK):
            raise StoreError(
                f"{self.output}: {self._nearest} can't be written to. Check its permissions, or name another `output`."
            )

    @property
    def _nearest(self) -> Path:
        """The folder, or its nearest parent that exists."""
        return next(path for path in (self.folder, *self.folder.absolute().parents) if os.path.lexists(path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process trains here meanwhile.

        Raises:
            LockHeldError: one does.
        """
        lock = FileLock(self.checkpoints / self.lock_name, f"the {self.product.kind} in {self.output}")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def manifest(self) -> StoredManifest | None:
        """The manifest of the finished model.

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


# ------------------------------------------------------------------------------
# Checkpoints as folders: their names, which are there, and their plain values, read without torch.


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
    return "No checkpoint was written yet, and nothing is lost but the steps since the start: --resume starts again."


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written after."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def digests_of(checkpoint: Path) -> dict[str, str]:
    """sha256 of a checkpoint's files, by name.

    Raises:
        OSError, ValueError, AttributeError: they can't be read.
    """
    return dict(json.loads((checkpoint / DIGESTS).read_text(encoding="utf-8")).items())


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
    """Turn errors of the disk into ours: safetensors has an error of its own, tokenizers raises a
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
        number = exc.errno if isinstance(exc, OSError) else _errno_of(exc)
        if number is None:
            raise
        kept = "--resume goes on from the last checkpoint, if there is one."
        kept = kept if checkpoints is None else how_it_goes_on(checkpoints)
        if number in _FULL:
            raise DiskFullError(f"{folder}: no space left to write it. Free some space. {kept}") from exc
        raise StoreError(f"{folder}: can't be written ({exc}). Fix this. {kept}") from exc


def _errno_of(exc: Exception) -> int | None:
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
        keep: how many of them stay, in addition to the best one.
        say: called with progress, a line each.
        names: where each row comes from, `(source, row_id)`.
        report_to: services that the curve is sent to.
        title: of the curve's plot, which is then written with each checkpoint, as is the curve.
    """

    folder: Path
    keep: int
    say: Callable[[str], None]
    names: Sequence[tuple[str, int]]
    report_to: Sequence[str] = ()
    title: str | None = None

    def not_finite(self, what: str, rows: Sequence[int], *, step: int) -> TrainingError:
        """The error for a value that is not finite.

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
            f"{last}. Read these rows; if they are fine, train again with --restart and a lower train.learning_rate "
            "or train.precision: fp32 (another spec doesn't go on from these checkpoints)."
        )
