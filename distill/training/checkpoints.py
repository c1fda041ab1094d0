"""Checkpoints without pickle: weights, optimizer, scheduler and random states as safetensors and JSON, committed by one
rename.

    checkpoints/checkpoint-000120/weights.safetensors      trained weights (all, or the adapters' alone)
                                  optimizer.safetensors    the optimizer's tensors, `<parameter>/<name>`
                                  random.safetensors       states of torch's generators, one set a process
                                  state.json               plain values of all of these, and the curve
                                  trainer_state.json       transformers' own, of a teacher
                                  digests.json             sha256 of each of these
                curves.parquet, curves.svg                 of a teacher, as far as its last checkpoint goes

A checkpoint is written under another name and renamed when all its bytes are on the disk, so that one that bears its
name is whole; it is gone on with only if each file still has its digest.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from relabel.distill.training.checkpoint_folders import (
    DIGESTS,
    OPTIMIZER,
    STATE,
    checkpoint_name,
    damaged,
    digests_of,
    join_tensors,
    list_checkpoints,
)
from relabel.distill.training.disk_errors import open_to_readers, sync_files
from relabel.distill.training.sharding import cut, own_parameters, trained_parameters, whole
from relabel.manifests.digests import first_changed, sha256_file
from relabel.manifests.errors import ManifestError, TrainingError
from relabel.manifests.interruptions import check_interrupted
from relabel.manifests.records import fault_of
from relabel.manifests.storage.local_run_store import sync_folder


def last_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The last whole checkpoint, which is announced; None where a training begins.

    Raises:
        ManifestError: it is damaged.
    """
    kept = list_checkpoints(folder)
    if not kept:
        return None
    check_digests(kept[-1])
    say(f"resuming from {kept[-1].name}")
    return kept[-1]


def best_checkpoint(folder: Path, step: int) -> Path:
    """The whole checkpoint of the best step.

    Raises:
        ManifestError: it is missing or damaged.
    """
    kept = folder / checkpoint_name(step)
    if not kept.is_dir():
        raise ManifestError(f"{kept}: the best step's checkpoint is missing. Train again with --restart.")
    check_digests(kept)
    return kept


def write_digests(folder: Path) -> None:
    """Write the digests of all files of a checkpoint."""
    found = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    (folder / DIGESTS).write_text(json.dumps(found), encoding="utf-8")


def check_digests(checkpoint: Path) -> None:
    """Read every byte of a checkpoint. One of relabel up to 0.1 has no digests, and is taken as it is, if all its files
    are there.

    Raises:
        ManifestError: a file is missing, or not as it was written.
    """
    try:
        bad = first_changed(checkpoint, digests_of(checkpoint))
    except (OSError, ValueError, AttributeError) as exc:
        raise damaged(checkpoint, fault_of(exc)) from exc
    if bad is not None:
        raise damaged(checkpoint, f"{bad} is missing, or not as it was written")


def commit(scratch: Path, final: Path) -> None:
    """Make a written folder durable under its name.

    Raises:
        KeyboardInterrupt: an interruption came while it was made.
    """
    check_interrupted()
    open_to_readers(scratch)
    sync_files(scratch)
    if final.exists():
        shutil.rmtree(final)
    scratch.rename(final)
    sync_folder(final.parent)


def drop_old(folder: Path, *, keep: int, best: Path | None) -> None:
    """Remove all but the last `keep` checkpoints and the best one, and what killed writers left."""
    for path in list_checkpoints(folder)[:-keep]:
        if best is None or path.name != best.name:
            shutil.rmtree(path)
    for path in folder.glob(".part-*"):
        shutil.rmtree(path, ignore_errors=True)


def save_weights(module: Any, file: Path | None) -> None:
    """Write the tensors that training changes, whole; a tensor that two names share is written once.

    Args:
        file: None in a process that only takes part in gathering a sharded module.
    Raises:
        TrainingError: one of them holds a number that is none.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trained_parameters(module):
        tensor = whole(parameter.detach())
        if file is not None:
            tensors[name] = tensor.cpu().contiguous()
            if not bool(tensors[name].isfinite().all()):
                raise TrainingError(
                    f"the weights are not finite any more ({name}), so no checkpoint of them is written. Lower "
                    "train.learning_rate, or set train.precision to fp32, and train again with --restart."
                )
    if file is not None:
        save_file(tensors, file)


def load_weights(module: Any, file: Path) -> None:
    """Put them back.

    Raises:
        ManifestError: the checkpoint is of another model.
    """
    held = load_file(file)
    own = own_parameters(module)
    if not held.keys() <= own.keys() or any(held[name].shape != own[name].shape for name in held):
        raise ManifestError(f"{file}: weights of another model than the spec's. Train again with --restart.")
    with torch.no_grad():
        for name, tensor in held.items():
            own[name].copy_(cut(tensor, own[name]))


def split_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A nest of dicts, lists and plain values with its tensors moved out to `tensors`; each leaves `{"tensor": path}`
    behind.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, split_tensors(inner, f"{path}/{key}", tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [split_tensors(inner, f"{path}/{place}", tensors) for place, inner in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a {type(value).__name__} can't be written to a checkpoint")


def save_state(folder: Path, values: dict[str, Any]) -> None:
    """Write nested plain values and tensors: tensors to `OPTIMIZER`, the rest to `STATE`."""
    tensors: dict[str, torch.Tensor] = {}
    plain = split_tensors(values, "state", tensors)
    save_file(tensors, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(plain), encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read them.

    Raises:
        ManifestError: the checkpoint is damaged.
    """
    try:
        plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
        found: dict[str, Any] = join_tensors(plain, load_file(folder / OPTIMIZER))
    except (OSError, ValueError, KeyError) as exc:
        raise damaged(folder, fault_of(exc)) from exc
    return found


def random_states() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """States of the generators of this process: torch's as tensors, Python's and numpy's as plain values."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda{device}": state for device, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, place, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    plain = {
        "numpy": [str(name), [int(key) for key in keys], int(place), int(has_gauss), float(gauss)],
        "python": [version, list(words), gauss_next],
    }
    return tensors, plain


def restore_random(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    """Put the generators back into these states."""
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            if f"cuda{device}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda{device}"], device)
    name, keys, place, has_gauss, gauss = plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    version, words, gauss_next = plain["python"]
    random.setstate((version, tuple(words), gauss_next))
