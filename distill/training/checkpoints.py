"""Checkpoints without pickle, committed by one rename: weights, optimizer and random states, with FSDP
shards gathered and scattered."""

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from relabel.distill.training.output import (
    WEIGHTS,
    Curve,
    TrainingPlace,
    checkpoint_name,
    list_checkpoints,
    step_of,
    sync_files,
    write_curves,
    writing,
)
from relabel.manifests import failpoints
from relabel.manifests.errors import ManifestError, TrainingError
from relabel.manifests.files import open_to_readers
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import fault_of, first_changed, sha256_file
from relabel.manifests.store import sync_folder

# ------------------------------------------------------------------------------
# Weights, gradients and moments cut into one shard a process (FSDP), and whole tensors gathered from shards or cut
# into them.
#
# A shard is a `DTensor`: the rows of a tensor that belong to this process. Whatever gathers is called by all processes
# alike, in the same order. Any other tensor is already whole, so that the same code serves one process and DDP.
#
# Source: Zhao et al. 2023, PyTorch FSDP (arXiv:2304.11277); `fully_shard` is PyTorch's second implementation of it.


def shard(module: Any, device: torch.device, layers: Iterable[Any]) -> None:
    """Cut a model's parameters over all processes and move them to the device, layer by layer, so that no device has
    to hold them all.

    A layer's weights are gathered where it is computed, forward and again backward; the rest (embeddings, last norm,
    heads) for the whole step. They travel in float32, and autocast casts them as it does without shards: with weights
    that arrive in bf16, norms and the sums from layer to layer would be bf16 too, and the student another one.

    Args:
        layers: of the module.
    """
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_sharded(module: Any) -> bool:
    """Whether `shard` cut it, or what it wraps."""
    return _outermost_shards(module) is not None


def _outermost_shards(module: Any) -> FSDPModule | None:
    """The module that `shard` was given; peft wraps it in others."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            return part
    return None


def trained_parameters(module: Any) -> list[tuple[str, Any]]:
    """Names and parameters that training changes, as shards where it is sharded; a shared one comes once."""
    return [(name, parameter) for name, parameter in own_parameters(module).items() if parameter.requires_grad]


def own_parameters(module: Any) -> dict[str, Any]:
    """Parameters by name, or this process's shards of them."""
    shards = _outermost_shards(module)
    if shards is not None:
        shards.reshard()  # an evaluation, unlike a step, leaves the outermost part gathered
    return dict(module.named_parameters())


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the shards of all processes put together, on its device."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(module: Any, into: Any) -> None:
    """Copy what training changes of a sharded model into one that is whole, in all processes alike."""
    own = dict(into.named_parameters())
    with torch.no_grad():
        for name, parameter in trained_parameters(module):
            own[name].copy_(whole(parameter))


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor that every process has, if `like` is a shard; else the tensor itself."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def cut_moments(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, of what `load_state` gives: cut as its parameters are; a count of steps
    has no shards.
    """
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    moments: dict[int, dict[str, Any]] = {}
    for key, values in state["state"].items():
        number = int(key)
        own = parameters[number]
        moments[number] = {}
        for name, value in values.items():
            is_moment = isinstance(value, Tensor) and value.shape == own.shape
            moments[number][name] = cut(value, own) if is_moment else value
    return {**state, "state": moments}


# ------------------------------------------------------------------------------
# Checkpoints without pickle: weights, optimizer and random states as safetensors and JSON, committed by one
# rename.
#
#     checkpoints/checkpoint-000120/weights.safetensors      trained weights (all, or the adapters' alone)
#                                   optimizer.safetensors    tensors of the optimizer, and states of torch's generators
#                                   state.json               plain values of all of these, and the curve
#                                   digests.json             sha256 of each of these
#                 curves.parquet, curves.svg                 of a teacher, as far as its last checkpoint goes
#
# A checkpoint is written under another name and renamed when all its bytes are on the disk, so that one that bears its
# name is whole; it is resumed from only if each file still has its digest.


OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
DIGESTS = "digests.json"


def last_checkpoint(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The last whole checkpoint, which is announced; None where a training begins.

    Raises:
        ManifestError: it is damaged.
    """
    whole = list_checkpoints(folder)
    if not whole:
        return None
    last = whole[-1]
    check_digests(last)
    report(f"resuming from {last.name}")
    return last


def check_digests(checkpoint: Path) -> None:
    """Read every byte of a checkpoint.

    Raises:
        ManifestError: a file is missing, or not as it was written.
    """
    try:
        bad = first_changed(checkpoint, json.loads((checkpoint / DIGESTS).read_bytes()))
        fault = None if bad is None else f"{bad} is missing, or not as it was written"
    except (OSError, ValueError, AttributeError) as exc:
        fault = fault_of(exc)
    if fault is not None:
        raise ManifestError(
            f"{checkpoint}: a damaged checkpoint ({fault}). Remove it to resume from the one before, or train again "
            "with --restart."
        )


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


def save_weights(module: Any, file: Path | None) -> None:
    """Write the tensors that training changes, whole; a tensor that two names share is written once.

    Args:
        file: None in a process that only takes part in gathering a sharded module.
    Raises:
        TrainingError: one of them contains NaN or Inf.
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


def save_state(folder: Path | None, values: dict[str, Any]) -> None:
    """Write nested plain values and tensors: tensors to `OPTIMIZER`, whole; the rest to `STATE`, where each of them is
    `{"tensor": name}`. Tuples come back as lists, and keys as text.

    Args:
        folder: None in a process that only takes part in gathering shards.
    """
    tensors: dict[str, Tensor] = {}

    def moved_out(tensor: Tensor) -> dict[str, str]:
        gathered = whole(tensor.detach())
        name = str(len(tensors))
        tensors[name] = gathered.cpu().contiguous() if folder is not None else torch.empty(0)
        return {"tensor": name}

    plain = json.dumps(values, default=moved_out)
    if folder is not None:
        save_file(tensors, folder / OPTIMIZER)
        (folder / STATE).write_text(plain, encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read them, of a checkpoint whose digests were checked."""
    tensors = load_file(folder / OPTIMIZER)
    return json.loads(  # type: ignore[no-any-return]
        (folder / STATE).read_text(encoding="utf-8"),
        object_hook=lambda values: tensors[values["tensor"]] if values.keys() == {"tensor"} else values,
    )


def random_states() -> dict[str, Any]:
    """States of the generators of this process: those of torch, numpy and Python."""
    name, keys, *rest = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def restore_random(states: dict[str, Any]) -> None:
    """Put the generators back into these states."""
    torch.set_rng_state(states["cpu"])
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words), gauss_next))


def write_checkpoint(
    place: TrainingPlace,
    step: int,
    module: Any,
    state: dict[str, Any],
    *,
    is_writer: bool = True,
    best: int | None = None,
) -> None:
    """Write and commit a step's checkpoint, and drop old ones. All processes call it for a sharded module.

    Args:
        state: what it keeps in addition to the weights; the points of the `curve` among it.
        is_writer: False in a process that only takes part in gathering.
        best: the step whose checkpoint is kept in addition to the last ones.
    Raises:
        TrainingError: a weight is not finite.
        DiskFullError, StoreError: the disk refuses.
    """
    final = place.folder / checkpoint_name(step)
    scratch = place.folder / f".part-{final.name}"
    with writing(place.folder, place.folder):
        if not is_writer:
            save_weights(module, None)
            save_state(None, state)
            return
        shutil.rmtree(scratch, ignore_errors=True)  # a write that failed may have left any of the files
        scratch.mkdir(parents=True)
        save_weights(module, scratch / WEIGHTS)
        save_state(scratch, state)
        digests = {path.name: sha256_file(path) for path in sorted(scratch.iterdir())}
        (scratch / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        if place.title is not None:
            write_curves(place.folder, Curve(state["curve"]), title=place.title)
        failpoints.hit("before_checkpoint")
        commit(scratch, final)
        failpoints.hit("after_checkpoint")
        for path in list_checkpoints(place.folder)[: -place.keep]:
            if step_of(path) != best:
                shutil.rmtree(path)
        for path in place.folder.glob(".part-*"):  # of killed writers
            shutil.rmtree(path, ignore_errors=True)
