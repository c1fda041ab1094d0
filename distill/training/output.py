"""Writing a model's folder: the training record, which training a folder of checkpoints belongs to, resume and restart,
and the manifest, which is written last: a folder without one holds no finished model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from relabel.distill.training.curves import CURVES_NAME, PLOT_NAME, Point
from relabel.distill.training.locations import (
    RECORD_NAME,
    STATE,
    BaseModelUsed,
    OutputFolder,
    Product,
    StoredManifest,
    damaged,
    digests_of,
    join_tensors,
    list_checkpoints,
    step_of,
    sync_files,
    writing,
)
from relabel.manifests import failpoints
from relabel.manifests.errors import ConfigError, LockHeldError, StaleRunError
from relabel.manifests.manifest import MANIFEST_NAME
from relabel.manifests.models import ResolvedModel
from relabel.manifests.plan import differing
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import checked, digest_of, plain, readable_json, sha256_bytes
from relabel.manifests.specs import Spec
from relabel.manifests.store import LocalRunStore

CARD_NAME = "README.md"
RECORD_VERSION = 1
MOST_CHANGES = 10
READ_ATTEMPTS = 3
"""How often a checkpoint that was replaced while it was read is looked up again before it is called damaged."""

Start = Literal["new", "resume", "restart"]
"""`new` refuses to touch what an earlier training left; `resume` continues it, and begins where there is nothing;
`restart` deletes it first.
"""

ManifestT = TypeVar("ManifestT")

# ------------------------------------------------------------------------------
# What is trained in a folder.


@dataclass(frozen=True)
class TrainingRecord:
    """What is trained in a folder, and what its fingerprint was made of: `training.json`.

    Args:
        kind: `teacher` or `student`.
        data: digest of all training data.
        spec: the resolved spec.
    """

    version: int
    kind: str
    relabel: str
    fingerprint: str
    model: BaseModelUsed
    data: str
    spec: dict[str, Any]


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
    """What is trained here; None where nothing is, or the record can't be read: then the checkpoints are nobody's."""
    try:
        return checked(TrainingRecord, json.loads((checkpoints / RECORD_NAME).read_bytes()))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------
# How far an unfinished training is, read without a lock and without torch while it may go on.


@dataclass(frozen=True)
class StepReached:
    """How far a training's last whole checkpoint goes.

    Args:
        step: the optimizer step that it was written after.
        written: when.
        curve: points up to there.
        own: plain values that its trainer keeps.
    """

    step: int
    written: datetime
    curve: list[Point]
    own: dict[str, Any]


def read_step_reached(checkpoints: Path) -> StepReached | None:
    """How far the last whole checkpoint goes; None where there is none.

    Raises:
        ManifestError: it is damaged.
    """
    for attempt in range(READ_ATTEMPTS):
        kept = list_checkpoints(checkpoints)
        if not kept:
            return None
        try:
            return _read_step(kept[-1])
        except FileNotFoundError as exc:
            if attempt == READ_ATTEMPTS - 1:
                raise damaged(kept[-1], f"{Path(exc.filename or exc.args[0]).name} is missing") from exc
    raise AssertionError("the last attempt returns or raises")


def _read_step(checkpoint: Path) -> StepReached:
    """
    Raises:
        FileNotFoundError: the checkpoint was deleted meanwhile, or was never whole.
    """
    try:
        digests = digests_of(checkpoint)
        for name in {STATE: None, **digests}:
            if not (checkpoint / name).is_file():  # opening a pipe would wait for a writer
                raise FileNotFoundError(name)
        with (checkpoint / STATE).open("rb") as handle:
            written = datetime.fromtimestamp(int(os.fstat(handle.fileno()).st_mtime), UTC)
            data = handle.read()
        if digests[STATE] != sha256_bytes(data):
            raise ValueError("it is not as it was written")
        held = join_tensors(json.loads(data), defaultdict(lambda: None))
        curve = [(int(step), str(split), str(name), float(value)) for step, split, name, value in held["curve"]]
        return StepReached(step_of(checkpoint), written, curve, dict(held["own"]))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as exc:
        raise damaged(checkpoint, f"{STATE} can't be read") from exc


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


def find_finished(output: OutputFolder, record: TrainingRecord, start: Start) -> StoredManifest | None:
    """The manifest of this training's model, if it is finished and stays.

    Raises:
        StaleRunError: the folder holds another model.
    """
    held = None if start == "restart" else output.manifest()
    if held is not None and held.fingerprint != record.fingerprint:
        known = "; ".join(changes(output.product, record, spec=held.spec)) or f"fingerprint {held.fingerprint[:12]}"
        raise StaleRunError(
            f"{output.output}: holds a {output.product.kind} of another spec, model or data ({known}). Name another "
            "`output`, or replace it with --restart."
        )
    return held


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
        if find_finished(output, record, start) is not None:  # while this call read its data
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
