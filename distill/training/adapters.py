"""Low-rank adapters beside a language model's linear layers, through peft."""

from __future__ import annotations

from typing import Any

from distill.training.sections import LoraSpec
from manifests.errors import ModelError
from manifests.extras import require


def adapted(lm: Any, lora: LoraSpec, *, seed: int, key: str, extra: str) -> Any:
    """The model behind peft's wrapper, all but the adapters frozen; `merge_and_unload` gives it back with them added.

    Args:
        seed: what the adapters are drawn from; the process's own generator is left alone.
        key: the spec's, for errors.
        extra: the one that brings peft.
    Raises:
        MissingExtraError: peft is absent.
        ModelError: it finds no such layers.
    """
    import torch

    peft = require("peft", extra=extra, purpose=key)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return peft.get_peft_model(lm, config)
    except ValueError as exc:
        raise ModelError(f"{key}: {str(exc).splitlines()[0]}") from exc
