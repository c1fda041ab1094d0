"""The transformers engine: runs a teacher in this process, on a CPU or one GPU, batch by batch without barriers.

It gives exact distributions at decisions, answers that a grammar holds to their format, and runs what prompts share
only once. Importing this file loads neither torch nor transformers; the constructor does. It also holds what engines
share: a checkpoint's files and its tokenizer. Read on: `tokens.py` (prompts), `grammars.py`, `batching.py` (what
runs when, and the model).
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import (
    DecisionPlaces,
    Prompt,
    PromptEncoder,
    TokenSequence,
    admit_all,
    stage_remarks,
)
from relabel.manifests.asks import (
    POLL_S,
    Answer,
    Ask,
    Engine,
    EngineFacts,
    Request,
)
from relabel.manifests.errors import EngineCrashError, MissingExtraError, ModelError
from relabel.manifests.models import ResolvedModel, default_cache_dir, directory_digest, resolve_model
from relabel.manifests.process import cpu_flags, multiplies_bfloat16, require
from relabel.manifests.records import sha256_file
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText
from relabel.manifests.weights import TOKENIZER_FILES, check_tokenizer_files, read_tokenizer, read_weights

if TYPE_CHECKING:
    import torch

    from relabel.labelers.engines.batching import Batch

# ------------------------------------------------------------------------------
# A model's directory as an engine sees it: its tokenizer, the tokens that end a turn, and the digest with an adapter
# laid over it.


def resolve_checkpoint(spec: EngineSpec, cache_dir: str | None) -> ResolvedModel:
    """The directory that `engine.model` names.

    Raises:
        ModelError: it names none.
    """
    if not spec.model:
        raise ModelError(f"the {spec.name} engine needs a model: set engine.model.")
    return resolve_model(spec.model, cache_dir=Path(cache_dir) if cache_dir else None)


def check_language_model(spec: EngineSpec, cache_dir: str | None) -> None:
    """Refuse, before anything is loaded, a model that by its config.json generates no text.

    Raises:
        ModelError: names its class.
    """
    resolved = resolve_checkpoint(spec, cache_dir)
    try:
        config = json.loads((resolved.path / "config.json").read_bytes())
        architecture = str((config.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError):
        return  # the engine reports what is wrong with the file when it reads it
    if architecture and not architecture.endswith(GENERATING):
        raise ModelError(
            f"model {spec.model!r}: {architecture} generates no text, so it can't judge. Rerankers and students give "
            "their scores by `relabel score`."
        )


GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What the names of classes end in whose models generate text."""


def digest_with_adapter(resolved: ResolvedModel, *, lora: str | None, cache_dir: str | None) -> str:
    """Digest of the model's files, and of the adapter's where there is one.

    Raises:
        ModelError: `lora` is not a directory with a PEFT adapter.
    """
    if lora is None:
        return resolved.digest
    adapter = directory_digest(adapter_dir(lora), cache_dir=Path(cache_dir) if cache_dir else default_cache_dir())
    return hashlib.sha256(f"{resolved.digest}+{adapter}".encode()).hexdigest()


def adapter_dir(lora: str) -> Path:
    """The directory of a PEFT adapter.

    Raises:
        ModelError: it holds none, or one whose weights are pickled, which peft and vLLM would read.
    """
    adapter = Path(lora).expanduser()
    if not (adapter / "adapter_config.json").is_file():
        raise ModelError(
            f"engine.args.lora: {lora!r} holds no adapter_config.json; expected a directory with a PEFT adapter."
        )
    pickled = sorted(file.name for file in adapter.iterdir() if file.name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        raise ModelError(
            f"engine.args.lora: {lora!r} holds {pickled[0]}, which is pickle. Save the adapter as safetensors and "
            "remove the file."
        )
    return adapter


def is_kept_in_16_bits(folder: Path) -> bool:
    """Whether by config.json the weights are bfloat16 or float16, so that bfloat16 loses little or nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sections = [config, config.get("text_config") or {}]
        named = [section.get("dtype") or section.get("torch_dtype") for section in sections]
    except (OSError, ValueError, AttributeError):
        return False  # the engine reports what is wrong with the file when it reads it
    return next((name for name in named if name), None) in ("bfloat16", "float16")


def load_tokenizer(library: Any, resolved: ResolvedModel | TokenizerFolder) -> Any:
    """The directory's fast tokenizer.

    Args:
        library: transformers.
    Raises:
        ModelError: `read_tokenizer` refuses it, or it has no fast version.
    """
    tokenizer = read_tokenizer(library, resolved.path, resolved.reference)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"model {resolved.reference!r}: its tokenizer has no fast version (tokenizer.json), which this engine "
            "needs."
        )
    return tokenizer


def end_ids(named: int | list[int] | None, tokenizer: Any) -> list[int]:
    """All tokens that end a turn: the generation config may name several (`named`), and the tokenizer one more.

    Raises:
        ModelError: there is none.
    """
    listed = named if isinstance(named, list) else [named]
    ids = sorted(token for token in {*listed, tokenizer.eos_token_id} if token is not None)
    if not ids:
        raise ModelError(
            "the model names no end-of-text token, neither in generation_config.json nor in its tokenizer."
        )
    return ids


def cache_bytes(config: Any, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers, for a model of that config of transformers; one without
    attention keeps none.

    Args:
        itemsize: bytes of a number.
    """
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * itemsize)


# ------------------------------------------------------------------------------
# The tokenizer that `engine.model` names for a server's model: where it lies, its digest, and the thing itself; never
# weights.


_FILES = (
    *TOKENIZER_FILES,
    *(
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
)


class TokenizerFolder(NamedTuple):
    """A tokenizer that is here."""

    path: Path
    reference: str

    @property
    def digest(self) -> str:
        """Over the tokenizer's files and chat template alone, 64 hex digits."""
        lines = [
            f"{name}\0{sha256_file(self.path / name)}\n" for name in sorted(_FILES) if (self.path / name).is_file()
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def load(self, purpose: str = "The tokens mode of the openai engine") -> Any:
        """The tokenizer.

        Args:
            purpose: who needs it, for the message where transformers is not there.
        Raises:
            ModelError: it can't be loaded, or has no fast version.
            MissingExtraError: transformers is not installed.
        """
        return load_tokenizer(require("transformers", extra="cpu", purpose=purpose), self)

    def control_texts(self) -> frozenset[str]:
        """Texts that this tokenizer makes control tokens of."""
        tokenizer = self.load()
        added = (str(kind) for kind in tokenizer.added_tokens_decoder.values() if kind.special or str(kind).strip())
        return frozenset([*tokenizer.all_special_tokens, *added])


def tokenizer_folder(reference: str, cache_dir: str | None = None) -> TokenizerFolder:
    """The folder that a model reference names; a local one may hold a tokenizer alone.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    path = Path(reference).expanduser()
    if not path.is_dir():
        path = resolve_model(reference, cache_dir=Path(cache_dir) if cache_dir else None).path
    check_tokenizer_files(path, reference)
    return TokenizerFolder(path, reference)


def prompt_encoder(
    spec: EngineSpec, folder: TokenizerFolder, *, overlong: Literal["truncate", "quarantine"] = "truncate"
) -> PromptEncoder:
    """What makes prompts of asks, without the model's weights.

    Raises:
        ModelError, ConfigError: it has none, or its chat template can't be used.
        MissingExtraError: transformers is absent.
    """
    return PromptEncoder(
        folder.load("Rendering prompts"), overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs
    )


# ------------------------------------------------------------------------------
# What engines share that run a checkpoint.


class CheckpointEngine(Engine):
    """An engine that runs a checkpoint in this process. Its options are `lora`, `constrain` and `cache_dir` among
    others; its start ends with `_set_prompts`.
    """

    spare_tokens: ClassVar[int] = 0
    """Tokens of the context that prompt and answer leave free."""

    def __init__(self, spec: EngineSpec) -> None:
        args: Any = self.Args.of(spec)
        self._spec = spec
        self._args = args
        self._resolved = resolve_checkpoint(spec, args.cache_dir)
        self._ready: list[Answer] = []

    def _set_prompts(
        self,
        tokenizer: Any,
        overlong: Literal["truncate", "quarantine"],
        *,
        vocab_size: int,
        eos_ids: list[int],
        context: int,
    ) -> None:
        self._encoder = PromptEncoder(
            tokenizer, overlong=overlong, chat_template_kwargs=self._spec.chat_template_kwargs
        )
        self._compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._places = DecisionPlaces(self._encoder, tokenizer_name=self._resolved.reference)
        self._details = {"eos_ids": eos_ids, "context": context, "constrain": self._args.constrain}
        self._context = context

    @classmethod
    def model_digest(cls, spec: EngineSpec) -> str:
        """Digest of the model's files, and of the adapter's where there is one."""
        args: Any = cls.Args.of(spec)
        return digest_with_adapter(resolve_checkpoint(spec, args.cache_dir), lora=args.lora, cache_dir=args.cache_dir)

    @classmethod
    def token_counter(cls, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Callable[[Ask], int]:
        """Tokens of a prompt, cut where it would be cut, without the weights."""
        args: Any = cls.Args.of(spec)
        resolved = resolve_checkpoint(spec, args.cache_dir)
        encoder = prompt_encoder(spec, TokenizerFolder(resolved.path, resolved.reference), overlong=overlong)

        def count(ask: Ask) -> int:
            prompt = encoder.encode(ask, max_prompt_tokens=spec.max_prompt_tokens)
            return len(prompt.ids) if isinstance(prompt, Prompt) else 0  # a prompt that does not fit is not asked

        return count

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, compile every grammar, and check whether each stage builds on the one before."""
        for ask in asks:
            self._admit([Request(0, ask, 0)])
        return stage_remarks(self._encoder, asks, self._max_prompt)

    def rendered(self, ask: Ask) -> list[str]:
        return self._encoder.shown(ask)

    def _admit(
        self, requests: Sequence[Request], each: Callable[..., Iterable[Any]] = map
    ) -> list[TokenSequence | Answer]:
        return admit_all(
            requests,
            self._encoder,
            self._places,
            max_prompt_tokens=self._max_prompt,
            bind=self._compiler.bind if self._args.constrain else None,
            each=each,
        )

    def _max_prompt(self, ask: Ask) -> int:
        return min(self._spec.max_prompt_tokens, self._context - ask.max_tokens - self.spare_tokens)

    def _facts(self, family: str, version: str, device: str, dtype: str, **details: Any) -> EngineFacts:
        return EngineFacts(
            family=family,
            version=version,
            model=self._resolved.reference,
            model_digest=digest_with_adapter(self._resolved, lora=self._args.lora, cache_dir=self._args.cache_dir),
            device=device,
            dtype=dtype,
            details=self._details | details,
        )


# ------------------------------------------------------------------------------
# The transformers engine.


PURPOSE = "The transformers engine"


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


class Transformers(CheckpointEngine):
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
        torch = require("torch", extra="cpu", purpose=PURPOSE)
        self._torch = torch
        library = require("transformers", extra="cpu", purpose=PURPOSE)
        library.utils.logging.disable_progress_bar()  # progress is the command's to show
        from relabel.labelers.engines.batching import GROUPED, Batch, Forward

        super().__init__(spec)
        args: TransformersArgs = self._args
        self._version = f"{library.__version__}+torch-{torch.__version__}"
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
        model = _load_model(
            library=library,
            resolved=self._resolved,
            args=args,
            dtype=self._dtype,
            device=self._device,
            attention=attention,
        )
        forward = Forward(model, self._device)
        batch_size = args.batch_size
        if not forward.check():
            batch_size = 1
            self._remarks.append(
                "this model answers a row by the others of its batch, so each is run alone (engine.args.batch_size: 1)"
            )
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._set_prompts(
            tokenizer,
            overlong,
            vocab_size=forward.vocab_size,
            eos_ids=end_ids(model.generation_config.eos_token_id, tokenizer),
            context=int(context or spec.max_prompt_tokens * 2),
        )
        is_cpu = self._device.type == "cpu"
        default = 4.0 if is_cpu else 0.6 * torch.cuda.mem_get_info(self._device)[0] / 2**30
        memory = (args.kv_cache_gib or default) * 2**30
        self._batch: Batch | None = Batch(
            forward,
            self._compiler,
            self._encoder.encode_text,
            max_sequences=batch_size,
            max_columns=int(memory // cache_bytes(model.config, model.dtype.itemsize)),
            prefill_tokens=args.prefill_tokens or (1024 if is_cpu else 16384),
            shares_prefixes=args.prefix_cache,
        )
        self._capacity = batch_size * 5  # enough waiting to find others of like length and like beginning among them

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]:
        """The dtype, on a CPU."""
        args = TransformersArgs.of(spec)
        device = _device(require("torch", extra="cpu", purpose=PURPOSE), args.device)
        if args.dtype != "auto" or device.type != "cpu":
            return {}
        return {"dtype": _auto_dtype(resolve_checkpoint(spec, args.cache_dir), device)}

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages, device and the model's class, without loading it."""
        torch = require("torch", extra="cpu", purpose=PURPOSE)
        for module in ("transformers", "llguidance", "safetensors"):
            require(module, extra="cpu", purpose=PURPOSE)
        args = TransformersArgs.of(spec)
        _device(torch, args.device)
        check_language_model(spec, args.cache_dir)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return [*self._remarks, *super().prepare(asks)]

    @property
    def capacity(self) -> int:
        return max(self._capacity - len(self._open_batch()) - len(self._ready), 0)

    def submit(self, request: Request) -> None:
        batch = self._open_batch()
        (admitted,) = self._admit([request])
        if isinstance(admitted, TokenSequence):
            batch.add(admitted)
        else:
            self._ready.append(admitted)

    def poll(self) -> list[Answer]:
        batch = self._open_batch()
        answers = self._ready
        self._ready = []
        until = time.perf_counter() + POLL_S
        try:
            while not answers and len(batch) and time.perf_counter() < until:
                answers += [sequence.answer() for sequence in batch.step()]
        except (RuntimeError, MemoryError) as exc:
            no_memory = (self._torch.OutOfMemoryError, MemoryError)
            is_full = isinstance(exc, no_memory) or "can't allocate memory" in str(exc)
            if not is_full and not str(exc).startswith("CUDA"):
                raise  # a fault of ours would only come again
            why = "memory ran out" if is_full else str(exc).split("\n", 1)[0]
            raise EngineCrashError(
                f"the transformers engine failed on {self._device}: {why}. Committed chunks are safe. Lower "
                "engine.args.batch_size or engine.args.kv_cache_gib, and run the same command again."
            ) from exc
        return answers

    def facts(self) -> EngineFacts:
        bits = self._args.quantization
        dtype = self._dtype if bits is None else f"{bits} ({self._dtype})"
        return self._facts("transformers", self._version, str(self._device), dtype)

    def close(self) -> None:
        self._batch = None
        gc.collect()  # model and cache refer to each other
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _open_batch(self) -> Batch:
        if self._batch is None:
            raise EngineCrashError("the transformers engine is closed; start another one.")
        return self._batch


def _device(torch: Any, wanted: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if wanted.startswith("cuda") and not has_gpu:
        raise MissingExtraError(
            f"engine.args.device is {wanted!r} and torch finds no GPU here; use `auto` or `cpu`, or a node with a GPU."
        )
    if wanted == "auto":
        wanted = "cuda" if has_gpu else "cpu"
    return cast("torch.device", torch.device(wanted))


def _auto_dtype(resolved: ResolvedModel, device: torch.device) -> Literal["float32", "bfloat16"]:
    is_fast = device.type != "cpu" or (is_kept_in_16_bits(resolved.path) and multiplies_bfloat16(cpu_flags()))
    return "bfloat16" if is_fast else "float32"


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
        peft = require("peft", extra="cpu", purpose="engine.args.lora")
        try:
            model = peft.PeftModel.from_pretrained(model, args.lora).merge_and_unload()
        except (OSError, ValueError, KeyError, RuntimeError) as exc:
            if isinstance(exc, RuntimeError) and "size mismatch" not in str(exc):
                raise
            raise ModelError(
                f"engine.args.lora: {args.lora!r} does not fit the model {resolved.reference!r}: an adapter goes with "
                "the model that it was trained on."
            ) from exc
    if args.quantization is not None:
        return model.eval()
    return model.eval().to(device)
