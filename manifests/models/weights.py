"""A model's weights, wherever one is loaded: every tensor that it answers by comes from its files.

transformers fills what is missing with random numbers and only warns.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require

OF_A_CONFIG = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What a model is built from is not checked before: numbers of any size, libraries that are not here."""
_IN_A_STACK = re.compile(r"(.+?)\.\d+\.")
"""A tensor of one of several equal layers."""
_CONSTANT = re.compile(r"\.(attn|attention)\.bias$|\.masked_bias$|\.causal_mask$|\.inv_freq$")
"""Masks and frequencies that old versions wrote among the weights (GPT-2, GPT-J, Falcon); the config says the same."""


def read_weights(kind: Any, path: Path, where: str, *, device: str | None = None, **options: Any) -> Any:
    """A model of a directory, from safetensors only.

    Args:
        kind: an Auto class of transformers.
        where: what the message begins with: the model as the user knows it.
        device: on `meta` it has shapes alone: the heads of its files are read, no tensor.
        options: of `from_pretrained`.
    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    damaged = require("safetensors", extra="cpu", purpose="A model").SafetensorError
    try:
        model, loading = kind.from_pretrained(
            path,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device,
            ignore_mismatched_sizes=True,  # they are told by name below
            **options,
        )
    except (*OF_A_CONFIG, OSError, RuntimeError, damaged) as exc:
        words = (str(exc).splitlines() or [""])[0]
        raise ModelError(f"{where}: its weights can't be loaded from {path} ({type(exc).__name__}: {words}).") from exc
    check_loading(model, loading, where)
    return model


def check_loading(model: Any, loading: dict[str, Any], where: str) -> None:
    """
    Args:
        loading: what `from_pretrained` says of it (`output_loading_info`).
    Raises:
        ModelError: tensors are missing, have another shape, or are of layers that the model does not have.
    """
    # A student reads the last layer: a pooler that transformers adds to it answers nothing.
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
    unexpected = sorted(name for name in loading["unexpected_keys"] if not _CONSTANT.search(name))
    if missing:
        prefix = next((found for name in unexpected if (found := _prefix(name, set(missing)))), None)
        why = (
            f"they carry the prefix {prefix!r} there: save the model itself, without what wraps it."
            if prefix
            else "the files are incomplete, or config.json is another model's, or another class was saved than "
            f"{type(model).__name__} (a classifier has no lm_head)."
        )
        raise ModelError(
            f"{where}: {len(missing)} tensors are not in its weights, {', '.join(missing[:3])} among them; {why}"
        )
    if other := sorted(loading["mismatched_keys"]):
        name, held, wanted = other[0]
        raise ModelError(
            f"{where}: {len(other)} tensors in its weights have another shape than config.json says; {name} has "
            f"{tuple(held)}, not {tuple(wanted)}."
        )
    stacks = {match[1] for name in model.state_dict() if (match := _IN_A_STACK.match(name))}
    left = [name for name in unexpected if (match := _IN_A_STACK.match(name)) and _prefix(match[1], stacks) is not None]
    if left and getattr(model, "hf_quantizer", None) is None:  # scales of packed weights have names of their own
        raise ModelError(
            f"{where}: {len(left)} tensors of layers in its weights have no place in what config.json describes, "
            f"{left[0]} among them: it is another model's, or was cut."
        )


def _prefix(name: str, inner: Collection[str]) -> str | None:
    """What a dotted name has before one of `inner`; None where it does not end in one."""
    starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
    return next((name[:start] for start in starts if name[start:] in inner), None)
