"""The transformers engine: runs a teacher in this process, on a CPU or one GPU, batch by batch without barriers.

It gives exact distributions at decisions, answers that a grammar holds to their format, and runs what prompts share
only once. Importing this file loads neither torch nor transformers; the constructor does.
Read on: `tokens.py` (prompts), `grammars.py` (formats), `batch.py` (what runs when), `forward.py` (the model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from relabel.labelers.engines.checkpoints import (
    cache_bytes,
    checkpoint_token_counter,
    digest_with_adapter,
    end_ids,
    is_kept_in_16_bits,
    load_tokenizer,
    resolve_checkpoint,
    special_ids,
)
from relabel.labelers.engines.decisions import DecisionPlaces, TokenSequence, admit, stage_remarks
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.asks import POLL_S, Answer, Ask, Engine, EngineFacts, Request
from relabel.manifests.errors import EngineCrashError, MissingExtraError, ModelError
from relabel.manifests.models import ResolvedModel, read_weights
from relabel.manifests.process import cpu_flags, multiplies_bfloat16, require
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText

if TYPE_CHECKING:
    import torch

    from relabel.labelers.engines.batching import Batch

WAITING_PER_ROW = 4
"""Requests taken beyond the batch, per row: enough to find others of like length and like beginning among them."""


class TransformersArgs(EngineArgs):
    """Options of the transformers engine."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {"batch_size", "num_threads", "prefix_cache", "kv_cache_gib", "prefill_tokens", "attention", "cache_dir"}
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers of weights and activations. `auto`: bfloat16 on a GPU, and on a CPU that multiplies it (AMX or
    AVX512-BF16) if the checkpoint is kept in 16 bits; else float32. The first worker of an output decides, the others
    do as it did. Distributions are float32 in any case.
    """
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."""
    batch_size: int = Field(16, ge=1, le=4096)
    """Most rows in flight. 16 keeps two CPU cores busy; a GPU wants 64 and more."""
    constrain: bool = True
    """Hold answers to their format while decoding (llguidance). Off: the model writes freely until the last closing
    tag.
    """
    prefix_cache: bool = True
    """Run what several waiting prompts begin with only once."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory for keys and values of rows in flight, GiB; shared prefixes take up to a quarter more.
    Default: 4 on a CPU, 60 % of what is free on a GPU once the weights are there."""
    prefill_tokens: int | None = Field(None, ge=16)
    """Most tokens of one prefill. Default: 1024 on a CPU, 16384 on a GPU."""
    attention: Literal["grouped", "sdpa", "eager"] = "grouped"
    """Attention code: ours, which shares keys among query heads, or one of transformers' own, to rule ours out when in
    doubt.
    """
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of torch. Default: OMP_NUM_THREADS, else one a core. On cores that others use, fewer are faster:
    threads wait for each other at every layer.
    """
    quantization: Literal["8bit", "4bit"] | None = None
    """Weights quantized on loading by bitsandbytes; GPU only."""
    lora: PathText | None = None
    """Directory with a PEFT adapter to lay over the model; its files enter the digest."""
    cache_dir: PathText | None = None
    """Where fetched models are kept. Default: `~/.cache/relabel`."""


class Transformers(Engine):
    """Engine over a causal language model of transformers.

    Args:
        spec: the job's `engine`.
        overlong: what happens to a prompt that is too long.
    Raises:
        ModelError: the model or its tokenizer can't be loaded, or is of a kind that this engine can't run.
        MissingExtraError: a package is absent, or a GPU is wanted and there is none.
    """

    Args: ClassVar[type[EngineArgs]] = TransformersArgs

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"] = "truncate") -> None:
        torch = require("torch", extra="cpu", purpose="The transformers engine")
        library = require("transformers", extra="cpu", purpose="The transformers engine")
        library.utils.logging.disable_progress_bar()  # progress is the command's to show
        from relabel.labelers.engines.batching import Batch, BatchLimits, BatchVocabulary
        from relabel.labelers.engines.forward import GROUPED, Forward

        args = TransformersArgs.of(spec)
        self._spec, self._args, self._torch, self._version = (
            spec,
            args,
            torch,
            f"{library.__version__}+torch-{torch.__version__}",
        )
        self._resolved = resolve_checkpoint(spec, args.cache_dir)
        self._device = _device(torch, args.device)
        self._dtype = args.dtype if args.dtype != "auto" else _auto_dtype(self._resolved, self._device)
        self._remarks: list[str] = []
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        if self._device.type == "cpu" and self._dtype == "bfloat16" and not multiplies_bfloat16(cpu_flags()):
            self._remarks.append(
                "this CPU has neither AMX nor AVX512-BF16: bfloat16 is emulated, and slower than float32 would be"
            )
        tokenizer = load_tokenizer(library, self._resolved)
        attention = GROUPED if args.attention == "grouped" else args.attention
        model = _load_model(library, self._resolved, args, self._dtype, self._device, attention)
        forward = Forward(model, self._device)
        if not forward.check():
            args = args.model_copy(update={"batch_size": 1})
            self._remarks.append(
                "this model answers a row by the others of its batch, so each is run alone (engine.args.batch_size: 1)"
            )
        self._encoder = PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)
        self._eos_ids = end_ids(model.generation_config.eos_token_id, tokenizer)
        self._compiler = GrammarCompiler(tokenizer, vocab_size=forward.vocab_size, eos_ids=self._eos_ids)
        self._context = int(
            getattr(model.config.get_text_config(), "max_position_embeddings", None) or spec.max_prompt_tokens * 2
        )
        vocabulary = BatchVocabulary(
            self._compiler.token_bytes, frozenset(self._eos_ids), special_ids(tokenizer), self._encoder.encode_text
        )
        self._batch: Batch | None = Batch(forward, vocabulary, BatchLimits(*_limits(torch, model, self._device, args)))
        self._capacity = args.batch_size * (1 + WAITING_PER_ROW)
        self._places = DecisionPlaces(self._encoder, tokenizer_name=self._resolved.reference)
        self._ready: list[Answer] = []

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the model's files, and of the adapter's where there is one."""
        args = TransformersArgs.of(spec)
        return digest_with_adapter(resolve_checkpoint(spec, args.cache_dir), lora=args.lora, cache_dir=args.cache_dir)

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]:
        """The dtype, on a CPU."""
        args = TransformersArgs.of(spec)
        device = _device(require("torch", extra="cpu", purpose="The transformers engine"), args.device)
        if args.dtype != "auto" or device.type != "cpu":
            return {}
        return {"dtype": _auto_dtype(resolve_checkpoint(spec, args.cache_dir), device)}

    @staticmethod
    def token_counter(spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Callable[[Ask], int]:
        """Tokens of a prompt, without the weights."""
        return checkpoint_token_counter(spec, overlong=overlong, cache_dir=TransformersArgs.of(spec).cache_dir)

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages and device, without loading the model."""
        torch = require("torch", extra="cpu", purpose="The transformers engine")
        for module in ("transformers", "llguidance", "safetensors"):
            require(module, extra="cpu", purpose="The transformers engine")
        _device(torch, TransformersArgs.of(spec).device)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, compile every grammar, and check whether each stage builds on the one before."""
        for ask in asks:
            self._admit(Request(0, ask, 0))
        return [*self._remarks, *stage_remarks(self._encoder, asks, self._max_prompt)]

    @property
    def capacity(self) -> int:
        return max(self._capacity - len(self._open_batch()) - len(self._ready), 0)

    def submit(self, request: Request) -> None:
        batch = self._open_batch()
        admitted = self._admit(request)
        if isinstance(admitted, TokenSequence):
            batch.add(admitted)
        else:
            self._ready.append(admitted)

    def _admit(self, request: Request) -> TokenSequence | Answer:
        return admit(
            request,
            self._encoder,
            self._places,
            max_prompt_tokens=self._max_prompt(request.ask),
            bind=self._compiler.bind if self._args.constrain else None,
        )

    def poll(self) -> list[Answer]:
        batch = self._open_batch()
        answers, self._ready = self._ready, []
        until = time.perf_counter() + POLL_S
        try:
            while not answers and len(batch) and time.perf_counter() < until:
                answers += [sequence.answer() for sequence in batch.step()]
        except (RuntimeError, MemoryError) as exc:
            is_full = isinstance(exc, (self._torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(
                exc
            )
            if not is_full and not str(exc).startswith("CUDA"):
                raise  # a fault of ours would only come again
            raise EngineCrashError(
                f"the transformers engine failed on {self._device}: "
                f"{'memory ran out' if is_full else str(exc).split(chr(10), 1)[0]}. Committed chunks are safe. Lower "
                "engine.args.batch_size or engine.args.kv_cache_gib, and run the same command again."
            ) from exc
        return answers

    def rendered(self, ask: Ask) -> list[str]:
        return self._encoder.shown(ask)

    def facts(self) -> EngineFacts:
        return EngineFacts(
            family="transformers",
            version=self._version,
            model=self._resolved.reference,
            model_digest=digest_with_adapter(self._resolved, lora=self._args.lora, cache_dir=self._args.cache_dir),
            device=str(self._device),
            dtype=self._dtype if self._args.quantization is None else f"{self._args.quantization} ({self._dtype})",
            details={"eos_ids": self._eos_ids, "context": self._context, "constrain": self._args.constrain},
        )

    def close(self) -> None:
        if self._batch is None:
            return
        self._batch.close()
        self._batch = None
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _open_batch(self) -> Batch:
        if self._batch is None:
            raise EngineCrashError("the transformers engine is closed; start another one.")
        return self._batch

    def _max_prompt(self, ask: Ask) -> int:
        return min(self._spec.max_prompt_tokens, self._context - ask.max_tokens)


def _device(torch: Any, wanted: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if wanted.startswith("cuda") and not has_gpu:
        raise MissingExtraError(
            f"engine.args.device is {wanted!r} and torch finds no GPU here; use `auto` or `cpu`, or a node with a GPU."
        )
    if wanted == "auto":
        wanted = "cuda" if has_gpu else "cpu"
    device: torch.device = torch.device(wanted)
    return device


def _auto_dtype(resolved: ResolvedModel, device: torch.device) -> Literal["float32", "bfloat16"]:
    if device.type != "cpu":
        return "bfloat16"
    return "bfloat16" if is_kept_in_16_bits(resolved.path) and multiplies_bfloat16(cpu_flags()) else "float32"


def _load_model(
    library: Any, resolved: ResolvedModel, args: TransformersArgs, dtype: str, device: torch.device, attention: str
) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if args.quantization is not None:
        require("bitsandbytes", extra="gpu", purpose="engine.args.quantization")
        quantized = library.BitsAndBytesConfig(**{f"load_in_{args.quantization}": True})
        options |= {"quantization_config": quantized, "device": {"": str(device)}}
    model = read_weights(library.AutoModelForCausalLM, resolved.path, f"model {resolved.reference!r}", **options)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if attention != "eager" and (softcap or not model._supports_sdpa):
        # attention with sinks or a cap on its logits: only the model's own code knows how
        model.set_attn_implementation("eager")
    if args.lora is not None:
        peft = require("peft", extra="gpu", purpose="engine.args.lora")
        try:
            model = peft.PeftModel.from_pretrained(model, args.lora).merge_and_unload()
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"engine.args.lora: {args.lora!r} does not fit the model {resolved.reference!r}.") from exc
    return model.eval() if args.quantization is not None else model.eval().to(device)


def _limits(torch: Any, model: Any, device: torch.device, args: TransformersArgs) -> tuple[int, int, int, bool]:
    column_bytes = cache_bytes(model.config, model.dtype.itemsize)
    if args.kv_cache_gib is not None:
        budget = args.kv_cache_gib * 2**30
    else:
        budget = 4 * 2**30 if device.type == "cpu" else 0.6 * torch.cuda.mem_get_info(device)[0]
    prefill_tokens = args.prefill_tokens or (1024 if device.type == "cpu" else 16384)
    return args.batch_size, int(budget // column_bytes), prefill_tokens, args.prefix_cache
