"""Checkpoints as folders: how they are called, which are there, and their plain values, for whoever reads them without
torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ManifestError

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
    return "No checkpoint was written yet, and nothing is lost but the steps since the start: --resume begins anew."


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written after."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def digests_of(checkpoint: Path) -> dict[str, str | None]:
    """sha256 of a checkpoint's files, by name; None for those of relabel up to 0.1, which noted none.

    Raises:
        OSError, ValueError, AttributeError: they can't be read.
    """
    file = checkpoint / DIGESTS
    if not file.exists():
        return dict.fromkeys((WEIGHTS, OPTIMIZER, RANDOM, STATE))
    return dict(json.loads(file.read_text(encoding="utf-8")).items())


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
