"""Writing a model's folder: the training record, the claim of a folder by one training, resume and restart, and the
manifest that is written last."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from relabel.distill.training.curves import CURVES_NAME, PLOT_NAME, Point
from relabel.distill.training.locations import (
    CLAIM_NAME,
    STATE,
    BaseModelUsed,
    OutputLocation,
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
from relabel.manifests.records import checked, plain, readable_json, sha256_bytes
from relabel.manifests.secrets import shortened
from relabel.manifests.specs import Spec
from relabel.manifests.store import LocalRunStore

# ------------------------------------------------------------------------------
# A training that is not finished, as somebody sees it who did not start it: what is trained, and how far its last
# whole checkpoint goes. Takes no lock, writes nothing, loads no torch: the training may go on meanwhile.
#
#     checkpoints/record.json      what is trained here: the spec, and digests of data and model


RECORD_NAME = "record.json"
RECORD_VERSION = 1
LOOKS = 3
"""At a folder whose checkpoints go while they are read, before one is called damaged."""


@dataclass(frozen=True)
class TrainingRecord:
    """What is trained in a folder, and what its fingerprint was made of.

    Args:
        kind: `teacher` or `student`.
        data: digest of all that is learned from.
        spec: the resolved spec.
    """

    version: int
    kind: str
    relabel: str
    fingerprint: str
    model: BaseModelUsed
    data: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class StepReached:
    """How far a training's last whole checkpoint goes.

    Args:
        step: the optimizer step that it was written after.
        written: when.
        curve: points up to there.
        own: what its trainer keeps, plain values alone.
    """

    step: int
    written: datetime
    curve: list[Point]
    own: dict[str, Any]


def training_record(kind: str, spec: Spec, fingerprint: str, model: ResolvedModel, data: str) -> TrainingRecord:
    """The record of a training of a spec, `name` among its keys."""
    return TrainingRecord(
        version=RECORD_VERSION,
        kind=kind,
        relabel=importlib.metadata.version("relabel-ir"),
        fingerprint=fingerprint,
        model=BaseModelUsed(model.reference, model.digest),
        data=data,
        spec=spec.model_dump(mode="json"),
    )


def note_record(checkpoints: Path, record: TrainingRecord) -> None:
    """Write what is trained here."""
    LocalRunStore(checkpoints).put(RECORD_NAME, readable_json(plain(record)))


def read_training_record(checkpoints: Path, fingerprint: str) -> TrainingRecord | None:
    """What is trained here; None where that can't be told: relabel 0.1 left no record, or what lies there is another
    training's.

    Args:
        fingerprint: of the training that the checkpoints belong to.
    """
    file = checkpoints / RECORD_NAME
    try:
        found = checked(TrainingRecord, json.loads(file.read_bytes())) if file.is_file() else None
    except (OSError, ValueError):
        return None
    return found if found is not None and found.fingerprint == fingerprint else None


def read_step_reached(checkpoints: Path) -> StepReached | None:
    """How far the last whole checkpoint goes; None where there is none.

    Raises:
        ManifestError: it is damaged.
    """
    for look in range(LOOKS):
        kept = list_checkpoints(checkpoints)
        if not kept:
            return None
        try:
            return _read(kept[-1])
        except FileNotFoundError as exc:
            if look == LOOKS - 1:
                raise damaged(kept[-1], f"{exc.args[0]} is missing") from exc
    raise AssertionError("the last look returns or raises")


def _read(checkpoint: Path) -> StepReached:
    """What a checkpoint holds, if its bytes are those that were written.

    Raises:
        FileNotFoundError: it is going, or was never whole.
    """
    try:
        digests = digests_of(checkpoint)
        for name in {STATE: None, **digests}:
            if not (checkpoint / name).is_file():  # a pipe would be waited for
                raise FileNotFoundError(name)
        with (checkpoint / STATE).open("rb") as handle:
            written = datetime.fromtimestamp(int(os.fstat(handle.fileno()).st_mtime), UTC)
            data = handle.read()
        if digests[STATE] not in (None, sha256_bytes(data)):
            raise ValueError("it is not as it was written")
        held = join_tensors(json.loads(data), defaultdict(lambda: None))
        curve = [(int(step), str(split), str(name), float(value)) for step, split, name, value in held["curve"]]
        return StepReached(step_of(checkpoint), written, curve, dict(held.get("own") or {}))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as exc:
        raise damaged(checkpoint, f"{STATE} can't be read") from exc


# ------------------------------------------------------------------------------
# What changed between a training that was begun and one that is to go on in its place, in a phrase each.


MOST = 10
"""Changes that are told; of more, their number."""
SHOWN_CHARS = 100
PROMPT = "prompt"


@dataclass(frozen=True)
class _Finished:
    model: BaseModelUsed
    spec: dict[str, Any]


def changes(
    spec: Mapping[str, Any], model: BaseModelUsed, data: str | None, now: TrainingRecord, product: Product
) -> list[str]:
    """What the other training differs in from `now`, secrets, prompts and long texts left out; nothing where that can't
    be told.

    Args:
        spec, model, data: of the other one; the digest of its data is None where it is not known.
    """
    both = differing(_deciding(spec, product.undecided), _deciding(now.spec, product.undecided))
    # keys that only one of them has last: another method brings many
    found = [_phrase(*one) for one in sorted(both, key=lambda one: None in one)]
    if model.digest != now.model.digest:
        found.append(
            f"{product.model_key}: was {_text(model.reference)}, is {_text(now.model.reference)}"
            if model.reference != now.model.reference
            else f"the files of the model that `{product.model_key}` names have changed"
        )
    if data != now.data and (data is not None or not found):
        keys = product.data_keys
        was_named, named = ({key: one.get(key) for key in keys} for one in (spec, now.spec))
        told = [one for one in (_phrase(*one) for one in differing(was_named, named)) if one not in found]
        listed = ", ".join(f"`{key}`" for key in keys if named[key] is not None)
        found += told or [f"what is learned from ({listed}) is not what it was"]
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def manifest_changes(manifest: bytes, now: TrainingRecord, product: Product) -> list[str]:
    """`changes` against a finished model's manifest, which may be of another version."""
    try:
        held = checked(_Finished, json.loads(manifest))
    except ValueError:
        return []
    return changes(held.spec, held.model, None, now, product)


def _deciding(spec: Mapping[str, Any], undecided: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without the keys on which no fingerprint hangs, as pydantic's `exclude` leaves them out."""
    return dict(_kept(spec, undecided))


def _kept(spec: Mapping[str, Any], undecided: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in spec.items():
        left_out = undecided.get(key)
        if left_out is True:
            continue
        inner = left_out if isinstance(left_out, Mapping) else dict.fromkeys(left_out or (), True)
        yield key, _deciding(value, inner) if isinstance(value, dict) else value


def _phrase(path: str, was: Any, now: Any) -> str:
    is_text = isinstance(was, str) and isinstance(now, str)
    if is_text and (PROMPT in path.split(".") or max(len(was), len(now)) > SHOWN_CHARS or "\n" in was + now):
        return f"{path}: was a text of {len(was):,} characters, is another of {len(now):,}"
    if PROMPT in path.split("."):
        return f"{path}: differs"
    return f"{path}: was {_text(was)}, is {_text(now)}"


def _text(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), SHOWN_CHARS)


# ------------------------------------------------------------------------------
# Whose a folder is: a training of the same spec, data and model goes on where it was, others are refused.


_REPLACING = "restart"


def finished(
    held: StoredManifest | None, record: TrainingRecord, start: str, location: OutputLocation, where: str
) -> StoredManifest | None:
    """The manifest that is there, if it is this very training's.

    Raises:
        StaleRunError: it is another one's.
    """
    if held is None or start == "restart":
        return None
    if held.fingerprint != record.fingerprint:
        changed = manifest_changes(held.data, record, location.product)
        known = "; ".join(changed) or f"fingerprint {held.fingerprint[:12]}, this one's is {record.fingerprint[:12]}"
        raise StaleRunError(
            f"{where}: holds a {location.product.kind} of another spec, model or data ({known}). Name another "
            "`output`, or replace it with --restart."
        )
    return held


def claim(location: OutputLocation, record: TrainingRecord, start: str, *, is_replacing: bool) -> None:
    """Make the checkpoints' folder ours, or say whose it is.

    Args:
        is_replacing: note that the model which is at the end of the way is to be replaced: a --resume then knows.
    Raises:
        StaleRunError: checkpoints of another spec, or of this one and nobody said what to do with them.
    """
    folder = location.checkpoints
    if start == "restart":
        if location.url is not None:
            (location.folder / MANIFEST_NAME).unlink(missing_ok=True)
        # nobody's while they go, and the folder is still known as ours
        note_claim(folder, "", is_replacing=False)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    check_claim(location, record, start)
    if not list_checkpoints(folder):
        for name in (CURVES_NAME, PLOT_NAME):  # of a training that does not go on
            (folder / name).unlink(missing_ok=True)
    note_claim(folder, record.fingerprint, is_replacing=is_replacing)
    note_record(folder, record)


def check_claim(location: OutputLocation, record: TrainingRecord, start: str) -> None:
    """Look whether the checkpoints that are there may be gone on with; a --restart deletes them.

    Raises:
        StaleRunError: they are of another spec, or of this one and nobody said what to do with them.
    """
    if start == "restart":
        return
    folder = location.checkpoints
    held, _ = claimed(folder)
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    if left and held != record.fingerprint:
        begun = read_training_record(folder, held)
        changed = [] if begun is None else changes(begun.spec, begun.model, begun.data, record, location.product)
        known = f" ({'; '.join(changed)})" if changed else ""
        raise StaleRunError(
            f"{folder}: {left[-1]} is of another spec, model or data{known}. Restore what changed and give --resume, "
            "name another `output`, or start over with --restart, which deletes it."
        )
    if left and start == "new":
        raise StaleRunError(
            f"{folder}: an unfinished training left {left[-1]}. Continue with --resume, or start over with --restart."
        )


def note_claim(folder: Path, fingerprint: str, *, is_replacing: bool) -> None:
    """Write whose checkpoints these are."""
    with writing(folder, folder):
        (folder / CLAIM_NAME).write_text(fingerprint + "\n" + f"{_REPLACING}\n" * is_replacing, encoding="utf-8")


def claimed(folder: Path) -> tuple[str, bool]:
    """The fingerprint that a folder of checkpoints belongs to, if any, and whether its model replaces another one."""
    file = folder / CLAIM_NAME
    text = file.read_bytes().decode(errors="replace") if file.is_file() else ""  # damaged, it is nobody's
    held, _, rest = text.partition("\n")
    return held, rest.strip() == _REPLACING


def tidy(location: OutputLocation, fingerprint: str) -> None:
    """Remove the checkpoints of a model that is finished: whoever made it was killed while it removed them."""
    if location.url is not None or not location.checkpoints.is_dir():
        return
    if claimed(location.checkpoints) in ((fingerprint, False), ("", False)):
        with contextlib.suppress(LockHeldError), location.locked():
            shutil.rmtree(location.checkpoints)


# ------------------------------------------------------------------------------
# Making a model in a place of its own: one that is finished is found, what is another's is refused, and what is made
# is whole or not there. `manifest.json` is written last: a folder without one holds no finished model.


Start = Literal["new", "resume", "restart"]
"""`new` refuses to touch what an earlier training left; `resume` goes on with it, and begins where there is nothing;
`restart` throws it away.
"""

ManifestT = TypeVar("ManifestT")


@dataclass(frozen=True)
class Left:
    """What earlier calls left.

    Args:
        done: manifest of this spec's model where it belongs.
        waiting: manifest of this spec's model where it was trained, if it goes elsewhere and that is still to be done.
        is_replacing: whether another model may be replaced, because this call is a --restart or goes on with one.
    """

    done: StoredManifest | None
    waiting: StoredManifest | None
    is_replacing: bool

    @property
    def found(self) -> StoredManifest | None:
        """The manifest of this spec's model, if it is finished."""
        return self.done or self.waiting


def refuse_own_base(location: OutputLocation, base: ResolvedModel, *, key: str) -> None:
    """
    Args:
        key: the spec's, that names the base.
    Raises:
        ConfigError: the model would be written over the one that it starts from; killed on the way, neither would be
            left. Or into it: that would change its digest, and a killed training could not go on.
    """
    folder, own = location.folder.resolve(), base.path.resolve()
    if folder == own:
        raise ConfigError(f"`output` and `{key}` are the same folder ({location.output}). Name another `output`.")
    if own in folder.parents:
        raise ConfigError(f"`output` ({location.output}) lies in `{key}`, the model to start from. Name another place.")


def look(location: OutputLocation, record: TrainingRecord, start: Start) -> Left:
    """See what an earlier call left.

    Raises:
        StaleRunError: the model of another spec, which this call may not replace.
    """
    # here first: what is delivered between the two looks is found by the second
    here = location.local_manifest() if location.url else None
    waiting = finished(here, record, start, location, str(location.folder))
    is_ours = claimed(location.checkpoints) == (record.fingerprint, True) and (start == "resume" or waiting is not None)
    done = location.manifest()
    if is_ours and done is not None and (waiting is None or done.data != waiting.data):
        done = None  # the one that a --restart is to replace: it was killed, and goes on
    done = finished(done, record, start, location, location.output)
    return Left(done, waiting, is_replacing=is_ours or start == "restart")


def foresee(location: OutputLocation, record: TrainingRecord, start: Start) -> StoredManifest | None:
    """What `making` would come upon, without a lock and without a trace: the finished model, or nothing in its way.

    Raises:
        StaleRunError: the model or checkpoints of another spec, or checkpoints that nobody said what to do with.
        StoreError: nothing can be written there.
    """
    found = look(location, record, start).found
    if found is None:
        check_claim(location, record, start)
        location.check_writable()
    return found


def conclude(location: OutputLocation, left: Left, record: TrainingRecord, start: Start, *, is_writer: bool) -> Left:
    """End without training: the model is where it belongs, or only waits here to be copied there.

    Args:
        is_writer: False in all but the first of several processes that train together.
    Raises:
        StaleRunError: another call started over meanwhile.
    """
    if left.waiting is None:
        if is_writer:
            tidy(location, record.fingerprint)
        return left
    if not is_writer:
        return left
    with location.locked():
        now = look(location, record, start)  # again: somebody may have had the lock until now
        if now.found is None:
            raise StaleRunError(
                f"{location.folder}: another call started over there meanwhile. Try again when it has ended."
            )
        if now.waiting is not None and now.done is None:
            location.deliver(is_replacing=now.is_replacing)
        elif now.waiting is not None:
            location.forget()
    return now


@contextmanager
def making(location: OutputLocation, record: TrainingRecord, start: Start) -> Iterator[None]:
    """Hold the place while a model is trained and written there; then bring it to where it goes.

    Raises:
        LockHeldError: another process trains there.
        StaleRunError: another call finished this model meanwhile, or checkpoints of another one are there.
    """
    with location.locked() as make_sure:
        left = look(location, record, start)  # again: somebody may have finished one meanwhile
        if left.found is not None:
            raise StaleRunError(
                f"{location.output}: another call finished this {location.product.kind} meanwhile. The same command "
                "again finds it."
            )
        claim(location, record, start, is_replacing=left.is_replacing)
        yield
        make_sure()
        location.deliver(is_replacing=left.is_replacing)


def finish(location: OutputLocation, fingerprint: str, write: Callable[[Path], ManifestT]) -> ManifestT:
    """Write the folder: the manifest of a model that is replaced goes first, the new one comes last.

    Args:
        write: writes all files but the manifest, and returns that as a record.
    """
    failpoints.hit("before_model")
    folder = location.folder
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    if location.url is None:  # nothing is left to be replaced: the next manifest here is this model's
        note_claim(location.checkpoints, fingerprint, is_replacing=False)
    with writing(folder, location.checkpoints):
        manifest = write(folder)
        sync_files(folder)
    check_interrupted()
    LocalRunStore(folder).put(MANIFEST_NAME, readable_json(plain(manifest)))
    return manifest


# ------------------------------------------------------------------------------
# What the cards of students and teachers have in common.


CARD_NAME = "README.md"


def spec_section(spec: dict[str, Any]) -> list[str]:
    """The spec that a model was trained by, as the last lines of its card."""
    written = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120).rstrip()
    return ["## Spec", "", "```yaml", written, "```", ""]
