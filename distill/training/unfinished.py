"""A training that is not finished, as somebody sees it who did not start it: what is trained, and how far its last
whole checkpoint goes. Takes no lock, writes nothing, loads no torch: the training may go on meanwhile.

    checkpoints/record.json      what is trained here: the spec, and digests of data and model
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relabel.distill.training.checkpoint_folders import (
    STATE,
    damaged,
    digests_of,
    join_tensors,
    list_checkpoints,
    step_of,
)
from relabel.distill.training.curves import Point
from relabel.distill.training.model_manifests import BaseModelUsed
from relabel.manifests.digests import readable_json, sha256_bytes
from relabel.manifests.models.references import ResolvedModel
from relabel.manifests.records import checked, plain
from relabel.manifests.specs import Spec
from relabel.manifests.storage.local_run_store import LocalRunStore

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
