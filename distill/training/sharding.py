"""Weights, gradients and moments cut into one shard a process (FSDP), and whole tensors gathered from shards or cut
into them.

A shard is a `DTensor`: the rows of a tensor that belong to this process. Whatever gathers is called by all processes
alike, in the same order. Any other tensor is already whole, so that the same code serves one process and DDP.

Source: Zhao et al. 2023, PyTorch FSDP (arXiv:2304.11277); `fully_shard` is PyTorch's second implementation of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from relabel.manifests.errors import ConfigError


def refuse_other_sharding(*, instead: str) -> None:
    """accelerate's own FSDP and DeepSpeed write pickle, and on a CPU it leaves them out without a word.

    Args:
        instead: what to do, for the message.
    Raises:
        ConfigError: its config asks for one of them.
    """
    for name, variable in (("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")):
        if parse_flag_from_env(variable):
            raise ConfigError(
                f"accelerate's config asks for {name} ({variable}), whose checkpoints are pickle. {instead}"
            )


def shard(module: Any, device: torch.device) -> None:
    """Cut a student's parameters over all processes and move them to the device, layer by layer, so that no device has
    to hold them all.

    A layer's weights are gathered where it is computed, forward and again backward; the rest (embeddings, last norm,
    heads) for the whole step. They travel in float32, and autocast casts them as it does without shards: with weights
    that arrive in bf16, norms and the sums from layer to layer would be bf16 too, and the student another one.

    Args:
        module: an `EncoderStudent` or `DecoderStudent`.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_sharded(module: Any) -> bool:
    """Whether `shard` cut it."""
    return isinstance(module, FSDPModule)


def trained_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and parameters that training changes, as shards where it is sharded; one that two
    names share comes once.
    """
    seen: set[int] = set()
    for name, parameter in own_parameters(module).items():
        # a shard's address is no address
        key = id(parameter) if isinstance(parameter, DTensor) else parameter.data_ptr()
        if parameter.requires_grad and key not in seen:
            seen.add(key)
            yield name, parameter


def copy_trained(trained: Any, other: Any) -> None:
    """Copy what training changed, whole, from a module to another one that is not sharded."""
    into = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in trained_parameters(trained):
            into[name].copy_(whole(parameter))


def own_parameters(module: Any) -> dict[str, Any]:
    """Parameters by name, or this process's shards of them."""
    if is_sharded(module):
        module.reshard()  # a look at dev, unlike a step, leaves the outermost part gathered
    return dict(module.named_parameters())


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the shards of all processes put together, on its device."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor that every process has, if `like` is a shard; else the tensor itself."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_moments(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """An optimizer's `state_dict` with whole tensors, on the CPU.

    Args:
        keep: False in a process that only takes part in the gathering; its own tensors are left out.
    """
    moments: dict[int, dict[str, Any]] = {}
    for place, values in state["state"].items():
        moments[place] = {}
        for name, value in values.items():
            gathered = whole(value) if isinstance(value, Tensor) else value
            if keep:
                moments[place][name] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
    return {**state, "state": moments}


def cut_moments(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """The other way round: what `optimizer.load_state_dict` takes, cut as its parameters are; a count of steps has no
    shards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        place: {
            name: cut(value, parameters[place]) if _is_moment(value, parameters[place]) else value
            for name, value in values.items()
        }
        for place, values in state["state"].items()
    }
    return {**state, "state": moments}


def _is_moment(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
