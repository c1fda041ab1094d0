"""A training that is not finished, as a report reads it: its last whole checkpoint, and the rollouts up to there."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.teachers.rollout_files import PARTS, parts_of
from relabel.distill.training.checkpoint_folders import checkpoint_name, damaged
from relabel.distill.training.output_locations import CHECKPOINTS, CLAIM_NAME, training_folder
from relabel.distill.training.ownership import claimed
from relabel.distill.training.unfinished import StepReached, TrainingRecord, read_step_reached, read_training_record
from relabel.jobs.report.teachers import is_rollouts
from relabel.manifests.errors import ManifestError, TransientError
from relabel.manifests.models.references import default_cache_dir

UNFINISHED = "(not finished)"


@dataclass
class TrainingArtifact:
    """A training that is under way, or was stopped.

    Args:
        checkpoints: folder that they lie in.
        record: what is trained; None where that can't be told.
        name: says that it is not finished, too: it stands over every figure.
    """

    path: str
    checkpoints: Path
    record: TrainingRecord | None
    reached: StepReached
    name: str
    manifest: None = None

    @property
    def when(self) -> str:
        """The step that is shown, and when that was written."""
        return f"step {self.reached.step:,}, written {self.reached.written:%Y-%m-%d %H:%M:%S} UTC"

    def rollouts(self) -> Iterator[pq.ParquetFile]:
        """All that it wrote up to the checkpoint, where it is trained by reinforcement; a file a checkpoint, opened one
        by one.

        Raises:
            ManifestError: a part is not what the checkpoint names.
        """
        held = self.reached.own.get("log")
        parts = parts_of(held) if isinstance(held, dict) else {}
        return (self._part(name, digest) for name, digest in parts.items())

    def _part(self, name: str, digest: str | None) -> pq.ParquetFile:
        if name in ("", "..") or Path(name).name != name:
            raise damaged(self.checkpoints / checkpoint_name(self.reached.step), "it names rollouts elsewhere")
        path = self.checkpoints / PARTS / name
        try:
            if path.is_file():  # a pipe would be waited for
                handle = pa.OSFile(str(path))  # what is read is what was looked at, though the training goes on
                if digest in (None, hashlib.file_digest(handle, "sha256").hexdigest()):
                    found = pq.ParquetFile(handle)
                    if is_rollouts(found):
                        return found
        except (pa.ArrowException, OSError) as exc:
            raise self._changed(path) from exc
        raise self._changed(path)

    def _changed(self, path: Path) -> ManifestError:
        return ManifestError(
            f"{path}: rollouts that the last checkpoint names are missing, or not as they were written. If the "
            "training goes on, try again; else it can't go on from here either: train again with --restart."
        )


def unfinished_training(path: str, *, cache_dir: Path | None = None) -> TrainingArtifact | None:
    """The training whose output a path is, if it was begun and is not finished.

    Args:
        cache_dir: where models that go to a URL are trained; None for the default.
    Raises:
        TransientError: it has written no checkpoint yet.
        ManifestError: what it has written is damaged.
    """
    checkpoints = _checkpoints(path, cache_dir)
    if not (checkpoints / CLAIM_NAME).is_file():
        return None
    fingerprint, _ = claimed(checkpoints)
    reached = read_step_reached(checkpoints)
    if reached is None:
        raise TransientError(
            f"{path}: a training that has written no checkpoint yet, so there is nothing to show. If it is under way, "
            "try again once it has (train.save_every says how often it does); if it was stopped, its command with "
            "--resume begins anew."
        )
    record = read_training_record(checkpoints, fingerprint)
    name = str(record.spec.get("name")) if record is not None else path.rstrip("/").rpartition("/")[2] or path
    return TrainingArtifact(path, checkpoints, record, reached, f"{name} {UNFINISHED}")


def replacing_training(path: str, *, cache_dir: Path | None = None) -> list[TrainingArtifact]:
    """The training that a --restart began beside a finished model, once it has a checkpoint.

    Raises:
        ManifestError: what it has written is damaged.
    """
    _, is_replacing = claimed(_checkpoints(path, cache_dir))
    with contextlib.suppress(TransientError):
        found = unfinished_training(path, cache_dir=cache_dir) if is_replacing else None
        return [] if found is None else [found]
    return []


def _checkpoints(path: str, cache_dir: Path | None) -> Path:
    return training_folder(path, cache_dir=cache_dir or default_cache_dir()) / CHECKPOINTS
