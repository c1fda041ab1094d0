"""Low-rank adapters beside a language model's linear layers, through peft."""

from __future__ import annotations

import copy
from typing import Any

from relabel.distill.training.sections import LoraSpec
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.extras import require


def check_targets(config: Any, lora: LoraSpec, *, key: str, reference: str) -> None:
    """Look whether the model has the layers that are to be adapted; its config says it, no weights are loaded. peft
    itself refuses only where none is found.

    Args:
        key: the spec's, for errors.
        reference: the model's, for errors.
    Raises:
        ConfigError: one of them is no layer of the model, or shares its weights with another layer.
        ModelError: the config describes no model.
    """
    if not lora.targets:
        return
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            modules = dict(AutoModelForCausalLM.from_config(copy.deepcopy(config)).named_modules())
    except (ValueError, TypeError, RuntimeError) as exc:
        raise ModelError(f"model {reference!r}: its config.json describes no model that can be built.") from exc
    layers = {name for name, module in modules.items() if getattr(getattr(module, "weight", None), "ndim", 0) > 1}
    for target in lora.targets:
        found = {name for name in modules if name == target or name.endswith(f".{target}")}
        own = [modules[name].weight for name in found & layers]
        if shared := sorted(name for name in layers - found if any(modules[name].weight is one for one in own)):
            raise ConfigError(
                f"{key}.targets: {target} of {reference!r} has its weights in common with {shared[0]}; what one of "
                "them learns would be added to both. Leave it out."
            )
        if found and found <= layers:
            continue
        fault = f"{target} of {reference!r} is no single layer of weights"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise ConfigError(
            f"{key}.targets: {fault if found else f'no layer of {reference!r} is called {target}'}; there are {known}. "
            "Name some of these, or leave `targets` out to adapt every linear layer but the output matrix."
        )


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
