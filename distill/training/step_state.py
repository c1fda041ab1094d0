"""What a checkpoint keeps beside the weights, and how one is written, whoever trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoint_folders import RANDOM, WEIGHTS, checkpoint_name
from relabel.distill.training.curves import Curve, write_curves
from relabel.distill.training.disk_errors import writing
from relabel.distill.training.training_place import TrainingPlace
from relabel.manifests import failpoints


@dataclass
class StepState:
    """Plain values and tensors.

    Args:
        optimizer: its `state_dict`, with whole tensors.
        random: generators of Python and numpy; torch's are in a file of their own.
        curve: its points.
        scheduler: of trainers whose learning rate has a state.
        scaler: with fp16.
        own: what one trainer alone keeps.
    """

    optimizer: dict[str, Any]
    curve: list[Any]
    random: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(checkpoint: str | Path) -> StepState:
        """
        Raises:
            ManifestError: the checkpoint is damaged.
        """
        return StepState(**checkpoints.load_state(Path(checkpoint)))

    def restore_curve(self, curve: Curve) -> None:
        """Put the points into a curve."""
        curve.points = [(int(step), split, name, value) for step, split, name, value in self.curve]

    def restore_random(self, checkpoint: str | Path) -> None:
        """Put all generators back, torch's from their file."""
        checkpoints.restore_random(load_file(Path(checkpoint) / RANDOM), self.random)


def write_checkpoint(
    place: TrainingPlace,
    step: int,
    module: Any,
    state: StepState,
    *,
    is_writer: bool,
    best: int | None = None,
    write_more: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write and commit a step's checkpoint, and drop old ones. All processes call it for a sharded module.

    Args:
        is_writer: False in a process that only takes part in gathering.
        best: the step whose checkpoint is kept beside the last ones.
        write_more: writes further files into the folder.
    Raises:
        TrainingError: a weight is not finite.
        DiskFullError, StoreError: the disk refuses.
    """
    final = place.folder / checkpoint_name(step)
    scratch = place.folder / f".part-{final.name}"
    with writing(place.folder, place.folder):
        if not is_writer:
            checkpoints.save_weights(module, None)
            return
        if scratch.exists():  # a write that failed may have left any of the files
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
        checkpoints.save_weights(module, scratch / WEIGHTS)
        tensors, state.random = checkpoints.random_states()
        save_file(tensors, scratch / RANDOM)
        checkpoints.save_state(scratch, vars(state))
        write_more(scratch)
        checkpoints.write_digests(scratch)
        if place.title is not None:
            write_curves(place.folder, Curve(state.curve), title=place.title)
        failpoints.hit("before_checkpoint")
        checkpoints.commit(scratch, final)
        failpoints.hit("after_checkpoint")
        kept = place.folder / checkpoint_name(best) if best else None
        checkpoints.drop_old(place.folder, keep=place.keep, best=kept)
