"""The transformers engine: runs a teacher in this process, on a CPU or one GPU, batch by batch without barriers.

It gives exact distributions at decisions, answers that a grammar holds to their format, and runs what prompts share only once.
Importing this file loads neither torch nor transformers; the constructor does.
Read on: `tokens.py` (prompts), `grammars.py` (formats), `batch.py` (what runs when), `forward.py` (the model).
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from labelers.engines.decisions import resolve_labels
from labelers.engines.grammars import GrammarCompiler
from labelers.engines.rows import Place, Row
from labelers.engines.tokens import Overlong, Prompt, PromptEncoder, extends
from manifests.asks import POLL_S, Answer, Ask, Decision, EngineFacts, Request
from manifests.errors import EngineCrashError, MissingExtraError, ModelError
from manifests.extras import require
from manifests.models import ResolvedModel, default_cache_dir, directory_digest, resolve_model
from manifests.specs import EngineArgs, EngineSpec

if TYPE_CHECKING:
    import torch

    from labelers.engines.batch import Batch

WAITING_PER_ROW = 4
"""Requests taken beyond the batch, per row: enough to find others of like length and like beginning among them."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these makes a tokenizer."""


class TransformersArgs(EngineArgs):
    """Options of the transformers engine."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {"batch_size", "num_threads", "prefix_cache", "kv_cache_gib", "prefill_tokens", "attention", "cache_dir"}
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers of weights and activations. `auto`: float32 on a CPU, bfloat16 on a GPU. Distributions are float32 in any case."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."""
    batch_size: int = Field(16, ge=1, le=4096)
    """Most rows in flight. 16 keeps two CPU cores busy; a GPU wants 64 and more."""
    constrain: bool = True
    """Hold answers to their format while decoding (llguidance). Off: the model writes freely until the last closing tag."""
    prefix_cache: bool = True
    """Run what several waiting prompts begin with only once."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory for keys and values of rows in flight, GiB; shared prefixes take up to a quarter more.
    Default: 4 on a CPU, 60 % of what is free on a GPU once the weights are there."""
    prefill_tokens: int | None = Field(None, ge=16)
    """Most tokens of one prefill. Default: 1024 on a CPU, 16384 on a GPU."""
    attention: Literal["grouped", "sdpa", "eager"] = "grouped"
    """Attention code: ours, which shares keys among query heads, or one of transformers' own, to rule ours out when in doubt."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of torch. Default: torch's own choice, all cores; on cores that others use too, one less is often several times as fast,
    because threads wait for each other at every layer."""
    quantization: Literal["8bit", "4bit"] | None = None
    """Weights quantized on loading by bitsandbytes; GPU only."""
    lora: str | None = None
    """Directory with a PEFT adapter to lay over the model; its files enter the digest."""
    cache_dir: str | None = None
    """Where fetched models are kept. Default: `~/.cache/relabel`."""


class Transformers:
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
        from labelers.engines.batch import Batch, Limits, Vocabulary
        from labelers.engines.forward import GROUPED, Forward

        args = _args_of(spec)
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        self._spec, self._args, self._torch, self._version = spec, args, torch, f"{library.__version__}+torch-{torch.__version__}"
        self._resolved = _resolve(spec)
        self._device = _device(torch, args.device)
        self._dtype = args.dtype if args.dtype != "auto" else ("float32" if self._device.type == "cpu" else "bfloat16")
        tokenizer = _load_tokenizer(library, self._resolved)
        attention = GROUPED if args.attention == "grouped" else args.attention
        model = _load_model(library, self._resolved, args, self._dtype, self._device, attention)
        forward = Forward(model, self._device)
        forward.check()
        self._encoder = PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)
        self._eos_ids = _eos_ids(model, tokenizer)
        self._compiler = GrammarCompiler(tokenizer, vocab_size=forward.vocab_size, eos_ids=self._eos_ids)
        self._context = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or spec.max_prompt_tokens * 2)
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} | set(tokenizer.all_special_ids)
        vocabulary = Vocabulary(self._compiler.token_bytes, frozenset(self._eos_ids), frozenset(special), self._encoder.encode_text)
        self._batch: Batch | None = Batch(forward, vocabulary, Limits(*_limits(torch, model, self._device, args)))
        self._capacity = args.batch_size * (1 + WAITING_PER_ROW)
        self._places: dict[Decision, Place] = {}
        self._ready: list[Answer] = []

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the model's files, and of the adapter's where there is one."""
        return _digest(spec, _resolve(spec))

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages and device, without loading the model."""
        torch = require("torch", extra="cpu", purpose="The transformers engine")
        for module in ("transformers", "llguidance", "safetensors"):
            require(module, extra="cpu", purpose="The transformers engine")
        _device(torch, _args_of(spec).device)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, compile every grammar, and look whether each stage builds on the one before."""
        remarks = []
        prompts: list[Prompt | Overlong] = []
        for ask in asks:
            self._find_places(ask)
            if ask.format is not None and ask.max_tokens and self._args.constrain:
                self._compiler.matcher(ask.format, prefill=ask.prefill, fragment_source=ask.fragment_source)
            prompts.append(self._encoder.encode(ask, max_prompt_tokens=self._max_prompt(ask)))
            if isinstance(prompts[-1], Overlong):
                remarks.append(
                    f"Stage {ask.stage!r} has no room for a document: its instructions alone take {prompts[-1].num_tokens} tokens or more "
                    f"of {prompts[-1].max_prompt_tokens}; raise engine.max_prompt_tokens."
                )
        for earlier, later in itertools.pairwise(asks):
            if later.messages[: len(earlier.messages)] == earlier.messages and len(later.messages) > len(earlier.messages):
                remarks += self._check_extends(earlier, later)
        return remarks

    @property
    def capacity(self) -> int:
        return max(self._capacity - len(self._open_batch()) - len(self._ready), 0)

    def submit(self, request: Request) -> None:
        ask = request.ask
        batch = self._open_batch()
        prompt = self._encoder.encode(ask, max_prompt_tokens=self._max_prompt(ask))
        if isinstance(prompt, Overlong):
            room = f"{prompt.max_prompt_tokens} fit, and nothing but the document may be cut"
            detail = f"the prompt has {prompt.num_tokens} tokens or more, {room}"
            self._ready.append(Answer(request.id, "", "overlong", prompt_tokens=prompt.num_tokens, detail=detail))
            return
        is_bound = self._args.constrain and ask.format is not None and ask.max_tokens > 0
        batch.add(
            Row(
                request,
                np.array(prompt.ids, dtype=np.int64),
                ask.max_tokens,
                self._find_places(ask),
                prefill=ask.prefill.encode(),
                num_prefill=prompt.num_prefill,
                matcher=self._matcher(ask, prompt) if is_bound else None,
                closing=f"</{ask.format.sections[-1].tag}>".encode() if ask.format is not None and ask.format.sections else b"",
                flags=("document_truncated",) if prompt.cut_document is not None else (),
            )
        )

    def poll(self) -> list[Answer]:
        batch = self._open_batch()
        answers, self._ready = self._ready, []
        until = time.perf_counter() + POLL_S
        try:
            while not answers and len(batch) and time.perf_counter() < until:
                answers += [row.answer() for row in batch.step()]
        except (self._torch.OutOfMemoryError, RuntimeError, MemoryError) as exc:
            raise EngineCrashError(
                f"the transformers engine failed with {len(batch)} requests in flight on {self._device}: {type(exc).__name__}. "
                "If memory ran out, lower engine.args.batch_size or engine.args.kv_cache_gib."
            ) from exc
        return answers

    def facts(self) -> EngineFacts:
        return EngineFacts(
            family="transformers",
            version=self._version,
            model=self._resolved.reference,
            model_digest=_digest(self._spec, self._resolved),
            device=str(self._device),
            dtype=self._dtype if self._args.quantization is None else f"{self._args.quantization} ({self._dtype})",
            details={"eos_ids": self._eos_ids, "context": self._context, "constrain": self._args.constrain},
        )

    def rates(self) -> dict[str, float]:
        """Tokens per second of prefills and of decoding so far, and the seconds that they took."""
        return self._open_batch().rates()

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

    def _find_places(self, ask: Ask) -> list[Place]:
        for decision in ask.decisions:
            if decision not in self._places:
                label_ids = resolve_labels(self._encoder, decision, tokenizer_name=self._resolved.reference)
                self._places[decision] = Place(decision.name, decision.marker.encode(), label_ids)
        return [self._places[decision] for decision in ask.decisions]

    def _matcher(self, ask: Ask, prompt: Prompt) -> Any:
        assert ask.format is not None
        source, seen = ask.fragment_source, prompt.cut_document
        if source is not None and seen is not None and source.startswith(seen):
            source = seen  # a quotation has to come from what the model was shown
        return self._compiler.matcher(ask.format, prefill=ask.prefill, fragment_source=source)

    def _check_extends(self, earlier: Ask, later: Ask) -> list[str]:
        """Whether the later prompt begins with the earlier one and its answer, token for token."""
        turn = later.messages[len(earlier.messages)]
        first = self._encoder.encode_messages(earlier.messages)
        whole = first + self._encoder.encode_text(turn.text)
        second = self._encoder.encode_messages(later.messages)
        if extends(whole, second):
            return []
        dropped = "rewrites the turn before" if extends(first, second) else "renders the earlier turns anew"
        return [
            f"Stage {later.stage!r} does not continue the tokens of stage {earlier.stage!r}: the chat template {dropped} "
            "(thinking models' templates drop earlier thoughts), so the model does not see its own first answer as it wrote it."
        ]


def _args_of(spec: EngineSpec) -> TransformersArgs:
    if isinstance(spec.args, TransformersArgs):
        return spec.args
    return TransformersArgs(**spec.args.model_dump())


def _resolve(spec: EngineSpec) -> ResolvedModel:
    if not spec.model:
        raise ModelError("the transformers engine needs a model: set engine.model.")
    cache_dir = _args_of(spec).cache_dir
    return resolve_model(spec.model, cache_dir=Path(cache_dir) if cache_dir else None)


def _digest(spec: EngineSpec, resolved: ResolvedModel) -> str:
    args = _args_of(spec)
    if args.lora is None:
        return resolved.digest
    adapter = Path(args.lora).expanduser()
    if not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"engine.args.lora: {args.lora!r} holds no adapter_config.json; expected a directory with a PEFT adapter.")
    cache = Path(args.cache_dir) if args.cache_dir else default_cache_dir()
    return hashlib.sha256(f"{resolved.digest}+{directory_digest(adapter, cache_dir=cache)}".encode()).hexdigest()


def _device(torch: Any, wanted: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if wanted.startswith("cuda") and not has_gpu:
        raise MissingExtraError(f"engine.args.device is {wanted!r} and torch finds no GPU here; use `auto` or `cpu`, or a node with a GPU.")
    if wanted == "auto":
        wanted = "cuda" if has_gpu else "cpu"
    device: torch.device = torch.device(wanted)
    return device


def _load_tokenizer(library: Any, resolved: ResolvedModel) -> Any:
    if not any((resolved.path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make an empty one up
        raise ModelError(f"model {resolved.reference!r}: {resolved.path} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}.")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(resolved.path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as exc:
        raise ModelError(f"model {resolved.reference!r}: its tokenizer can't be loaded from {resolved.path}.") from exc
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"model {resolved.reference!r}: its tokenizer has no fast version (tokenizer.json), which this engine needs.")
    return tokenizer


def _load_model(library: Any, resolved: ResolvedModel, args: TransformersArgs, dtype: str, device: torch.device, attention: str) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "use_safetensors": True}
    if args.quantization is not None:
        require("bitsandbytes", extra="gpu", purpose="engine.args.quantization")
        options["quantization_config"] = library.BitsAndBytesConfig(**{f"load_in_{args.quantization}": True})
        options["device_map"] = {"": str(device)}
    damaged = require("safetensors", extra="cpu", purpose="The transformers engine").SafetensorError
    try:
        model, loading = library.AutoModelForCausalLM.from_pretrained(resolved.path, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, damaged) as exc:
        raise ModelError(f"model {resolved.reference!r} can't be loaded as a causal language model from {resolved.path}.") from exc
    if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers and only warns
        raise ModelError(
            f"model {resolved.reference!r}: {len(missing)} tensors are not in its weights, {missing[0]} among them; "
            "the files are incomplete, or config.json is another model's."
        )
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if attention != "eager" and (softcap or not model._supports_sdpa):
        model.set_attn_implementation("eager")  # attention with sinks or a cap on its logits: only the model's own code knows how
    if args.lora is not None:
        peft = require("peft", extra="gpu", purpose="engine.args.lora")
        try:
            model = peft.PeftModel.from_pretrained(model, args.lora).merge_and_unload()
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"engine.args.lora: {args.lora!r} does not fit the model {resolved.reference!r}.") from exc
    return model.eval() if args.quantization is not None else model.eval().to(device)


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """All tokens that end a turn: the generation config may name several, and the tokenizer one more."""
    named = model.generation_config.eos_token_id
    listed = [] if named is None else named if isinstance(named, list) else [named]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = sorted({*listed, *own})
    if not ids:
        raise ModelError("the model names no end-of-text token, neither in generation_config.json nor in its tokenizer.")
    return ids


def _limits(torch: Any, model: Any, device: torch.device, args: TransformersArgs) -> tuple[int, int, int, bool]:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    column_bytes = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    if args.kv_cache_gib is not None:
        budget = args.kv_cache_gib * 2**30
    else:
        budget = 4 * 2**30 if device.type == "cpu" else 0.6 * torch.cuda.mem_get_info(device)[0]
    prefill_tokens = args.prefill_tokens or (1024 if device.type == "cpu" else 16384)
    return args.batch_size, int(budget // column_bytes), prefill_tokens, args.prefix_cache
