"""The folder that a trained model owns: checkpoints while it is trained, then the model, with a manifest written last;
resume and restart, and errors raised when a disk refuses a write. Importing it does not load torch."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml

from relabel.distill.training.curves import CURVES_NAME, PLOT_NAME, TrainingFacts
from relabel.manifests import failpoints
from relabel.manifests.errors import (
    ConfigError,
    DiskFullError,
    LockHeldError,
    ManifestError,
    StaleRunError,
    StoreError,
    TrainingError,
)
from relabel.manifests.files import FileLock
from relabel.manifests.models import ResolvedModel
from relabel.manifests.plan import differing
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import LEFT_OUT, checked, digest_of, plain, read_record, readable_json
from relabel.manifests.run import MANIFEST_NAME
from relabel.manifests.specs import Spec
from relabel.manifests.store import LocalRunStore, sync_folder

CARD_NAME = "README.md"
RECORD_VERSION = 1
MOST_CHANGES = 10

Start = Literal["new", "resume", "restart"]
"""`new` refuses to touch what an earlier training left; `resume` continues it, and begins where there is nothing;
`restart` deletes it first.
"""

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


@dataclass(frozen=True, kw_only=True)
class ManifestMark:
    """The part of a manifest that says whose it is; the rest of it may be of another version.

    Args:
        kind: `teacher` or `student`.
        spec: the resolved spec.
    """

    kind: str
    fingerprint: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(ManifestMark):
    """What is trained in a folder: `training.json`.

    Args:
        data: digest of all training data.
    """

    version: int
    relabel: str
    model: BaseModelUsed
    data: str


@dataclass(frozen=True, kw_only=True)
class TrainedManifest(ManifestMark):
    """What the manifest of any trained model says; fields that JSON may do without are None there.

    Args:
        versions: of the libraries.
        files: sha256 by name of the files that decide what the model answers.
    """

    version: int
    relabel: str
    name: str
    model: BaseModelUsed
    training: TrainingFacts
    notes: list[str]
    versions: dict[str, str]
    files: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


def read_manifest(data: bytes, where: str, cls: type[ManifestT], *, kind: str) -> ManifestT:
    """The whole of a manifest, as a record.

    Raises:
        ManifestError: it is damaged, or of another version.
    """
    what = f"not as this relabel writes a {kind}'s manifest"
    return read_record(cls, data, where, what, "Restore it from a copy, or train again.")


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
            ConfigError: it is a file, or a broken link.
            StaleRunError: it holds files of something else, or the other command trains there.
        """
        others = [path.stem for path in self.checkpoints.glob("*.lock") if path.name != self.lock_name]
        if others:
            raise StaleRunError(
                f"{self.output}: `relabel {others[0]}` trains or trained there, and would lose its checkpoints. Name "
                f"another `output`; or, if that training is not wanted any more, remove {self.checkpoints}."
            )
        there = self._nearest
        if not there.is_dir():
            raise ConfigError(f"`output` = {self.output}: {there} is a file, or a broken link. Name a folder.")
        if (
            not self.folder.is_dir()
            or (self.folder / MANIFEST_NAME).exists()
            or (self.checkpoints / RECORD_NAME).exists()
        ):
            return
        held, begun = (sorted(path.name for path in folder.glob("[!.]*")) for folder in (self.folder, self.checkpoints))
        if held == [CHECKPOINTS] and set(begun) <= {self.lock_name}:
            return  # killed before it began, or while it wrote the record
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

    def mark(self) -> ManifestMark | None:
        """Whose manifest is here; None where there is none.

        Raises:
            ManifestError: what is here is not such a model's.
        """
        file, kind = self.folder / MANIFEST_NAME, self.product.kind
        what = f"is not a {kind}'s manifest"
        advice = "The folder may belong to something else: name another output."
        try:
            found = read_record(ManifestMark, file.read_bytes(), str(file), what, advice)
        except FileNotFoundError:
            return None
        if found.kind != kind:
            raise ManifestError(f"{file}: {what} (it is of a {found.kind}). {advice}")
        return found

    def manifest(self, cls: type[ManifestT]) -> ManifestT:
        """The whole manifest of the finished model.

        Raises:
            ManifestError: it is damaged, or of another version.
        """
        file = self.folder / MANIFEST_NAME
        return read_manifest(file.read_bytes(), str(file), cls, kind=self.product.kind)


# ------------------------------------------------------------------------------
# Checkpoints as folders: their names, which are there, and their plain values, read without torch.


_NAME = re.compile(r"checkpoint-(\d+)")
WEIGHTS = "weights.safetensors"


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
    """What is kept of a training that ends early, and how to continue, for a message."""
    kept = list_checkpoints(checkpoints)
    if kept:
        return f"{kept[-1].name} is kept: --resume goes on from it."
    return "No checkpoint was written yet, and nothing is lost but the steps since the start: --resume starts again."


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written after."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


# ------------------------------------------------------------------------------
# Errors of the disk while a model or a checkpoint is written, as ours; the mode of the files, and when they are
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
    """Where a training keeps its checkpoints, and where its progress goes.

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


# ------------------------------------------------------------------------------
# What is trained in a folder.


def training_record(product: Product, spec: Spec, model: ResolvedModel, data: str, *, version: int) -> TrainingRecord:
    """The record of a training; its fingerprint is the digest of the spec's choices, the data and the model.

    Args:
        data: digest of all training data.
        version: of the model's manifest.
    """
    values = spec.model_dump(mode="json")
    decided = {"spec": decisive(values, product.undecided), "data": data, "model": model.digest, "version": version}
    return TrainingRecord(
        version=RECORD_VERSION,
        kind=product.kind,
        relabel=importlib.metadata.version("relabel-ir"),
        fingerprint=digest_of(decided),
        model=BaseModelUsed(model.reference, model.digest),
        data=data,
        spec=values,
    )


def decisive(spec: Mapping[str, Any], undecided: Collection[str], prefix: str = "") -> dict[str, Any]:
    """A spec's plain values without the keys that do not change the model, given as dotted paths."""
    return {
        key: decisive(value, undecided, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in spec.items()
        if f"{prefix}{key}" not in undecided
    }


def changes(
    product: Product, now: TrainingRecord, *, spec: Mapping[str, Any], model: str | None = None, data: str | None = None
) -> list[str]:
    """What another training differs in: keys, with both values where these are numbers (texts may be secrets).

    Args:
        spec, model, data: of the other one; digests of its model and data where they are known.
    """
    both = differing(decisive(spec, product.undecided), decisive(now.spec, product.undecided))
    found = [
        f"{path}: was {was}, is {is_now}" if isinstance(was, int | float) and isinstance(is_now, int | float) else path
        for path, was, is_now in both
    ]
    if model not in (None, now.model.digest):
        found.append(f"the model that `{product.model_key}` names")
    if data not in (None, now.data):
        found.append(f"the data ({', '.join(f'`{key}`' for key in product.data_keys if now.spec.get(key))})")
    return found if len(found) <= MOST_CHANGES else [*found[:MOST_CHANGES], f"and {len(found) - MOST_CHANGES} more"]


def read_training_record(checkpoints: Path) -> TrainingRecord | None:
    """What is trained here; None where nothing is, or the record can't be read."""
    try:
        return checked(TrainingRecord, json.loads((checkpoints / RECORD_NAME).read_bytes()))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------
# Training into a folder: an earlier training of the same spec, data and model is found or resumed, others are refused.


def refuse_own_base(output: OutputFolder, base: ResolvedModel, *, key: str) -> None:
    """
    Args:
        key: of the spec, that names the base.
    Raises:
        ConfigError: the model would be written over, or into, the one that it starts from.
    """
    folder, own = output.folder.resolve(), base.path.resolve()
    if folder == own:
        raise ConfigError(f"`output` and `{key}` are the same folder ({output.output}). Name another `output`.")
    if own in folder.parents:
        raise ConfigError(f"`output` ({output.output}) lies in `{key}`, the model to start from. Name another place.")


def is_finished(output: OutputFolder, record: TrainingRecord, start: Start) -> bool:
    """Whether this training's model is there, and stays.

    Raises:
        StaleRunError: the folder holds another model.
    """
    held = None if start == "restart" else output.mark()
    if held is not None and held.fingerprint != record.fingerprint:
        known = "; ".join(changes(output.product, record, spec=held.spec)) or f"fingerprint {held.fingerprint[:12]}"
        raise StaleRunError(
            f"{output.output}: holds a {output.product.kind} of another spec, model or data ({known}). Name another "
            "`output`, or replace it with --restart."
        )
    return held is not None


def check_checkpoints(output: OutputFolder, record: TrainingRecord, start: Start) -> None:
    """Check that the checkpoints may be resumed; a --restart deletes them.

    Raises:
        StaleRunError: they are of another training, or of this one and neither --resume nor --restart was given.
    """
    left = sorted(path.name for path in output.checkpoints.glob("checkpoint-*"))
    if not left or start == "restart":
        return
    begun = read_training_record(output.checkpoints)
    if begun is None or begun.fingerprint != record.fingerprint:
        found = begun and changes(output.product, record, spec=begun.spec, model=begun.model.digest, data=begun.data)
        known = f" ({'; '.join(found)})" if found else ""
        raise StaleRunError(
            f"{output.checkpoints}: {left[-1]} is of another spec, model or data{known}. Restore what changed and give "
            "--resume, name another `output`, or start over with --restart, which deletes it."
        )
    if start == "new":
        raise StaleRunError(
            f"{output.checkpoints}: an unfinished training left {left[-1]}. Continue with --resume, or start over with "
            "--restart."
        )


@contextmanager
def training_in(output: OutputFolder, record: TrainingRecord, start: Start) -> Iterator[None]:
    """Hold the folder while a model is trained and written there; checkpoints are removed at the end.

    Raises:
        LockHeldError: another process trains there.
        StaleRunError: another call finished this model meanwhile, or checkpoints of another one are there.
    """
    with output.locked():
        if is_finished(output, record, start):  # while this call read its data
            raise StaleRunError(
                f"{output.output}: another call finished this {output.product.kind} meanwhile. The same command "
                "again finds it."
            )
        checkpoints = output.checkpoints
        if start == "restart":
            _write_record(checkpoints, replace(record, fingerprint=""))  # a kill here leaves nothing to resume from
            for path in filter(Path.is_dir, checkpoints.iterdir()):
                shutil.rmtree(path)
            (output.folder / MANIFEST_NAME).unlink(missing_ok=True)
        check_checkpoints(output, record, start)
        if not list_checkpoints(checkpoints):
            for name in (CURVES_NAME, PLOT_NAME):
                (checkpoints / name).unlink(missing_ok=True)
        _write_record(checkpoints, record)
        yield
        shutil.rmtree(checkpoints)


def _write_record(checkpoints: Path, record: TrainingRecord) -> None:
    with writing(checkpoints, checkpoints):
        LocalRunStore(checkpoints).put(RECORD_NAME, readable_json(plain(record)))


def write_finished(output: OutputFolder, write: Callable[[Path], ManifestT]) -> ManifestT:
    """Write the model's folder, the manifest last.

    Args:
        write: writes all files but the manifest, and returns that as a record.
    """
    failpoints.hit("before_model")
    with writing(output.folder, output.checkpoints):
        manifest = write(output.folder)
        sync_files(output.folder)
    check_interrupted()
    LocalRunStore(output.folder).put(MANIFEST_NAME, readable_json(plain(manifest)))
    return manifest


def remove_leftovers(output: OutputFolder, record: TrainingRecord) -> None:
    """Remove the checkpoints of a finished model, whose training was killed before it could."""
    if not output.checkpoints.is_dir():
        return
    begun = read_training_record(output.checkpoints)
    if begun is None or begun.fingerprint in (record.fingerprint, ""):
        with contextlib.suppress(LockHeldError), output.locked():
            shutil.rmtree(output.checkpoints)


def spec_section(spec: dict[str, Any]) -> list[str]:
    """The spec that a model was trained by, as the last lines of its card."""
    written = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120).rstrip()
    return ["## Spec", "", "```yaml", written, "```", ""]
