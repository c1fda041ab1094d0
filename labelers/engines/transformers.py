"""The transformers engine: runs a teacher in this process, on a CPU or one GPU, batch by batch without barriers.

It gives exact distributions at decisions, answers that a grammar holds to their format, and runs what prompts share
only once. Importing this file loads neither torch nor transformers; the constructor does. It also holds what engines
share: formats as grammars, a checkpoint's files, its tokenizer. Read on: `tokens.py` (prompts), `batching.py` (what
runs when, and the model).
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field

from relabel.labelers.engines.tokens import (
    DecisionPlaces,
    Prompt,
    PromptEncoder,
    TokenSequence,
    admit,
    quotable,
    special_ids,
    stage_remarks,
)
from relabel.manifests.asks import (
    MOST_INDICES,
    MOST_OPTION_LINES,
    POLL_S,
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Engine,
    EngineFacts,
    Fragment,
    Indices,
    JsonIndices,
    JsonTexts,
    Lines,
    OptionLines,
    Request,
    Section,
    Text,
    closing_of,
    opening_of,
)
from relabel.manifests.errors import ConfigError, EngineCrashError, MissingExtraError, ModelError
from relabel.manifests.models import (
    TOKENIZER_FILES,
    ResolvedModel,
    check_tokenizer_files,
    default_cache_dir,
    directory_digest,
    read_tokenizer,
    read_weights,
    resolve_model,
)
from relabel.manifests.process import cpu_flags, multiplies_bfloat16, require
from relabel.manifests.records import sha256_file
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText

if TYPE_CHECKING:
    import torch

    from relabel.labelers.engines.batching import Batch

# ------------------------------------------------------------------------------
# An answer's format as the text of a grammar, in llguidance's dialect of Lark.


_JSON_PLAIN = r'[^"\\\x00-\x1f]'
_JSON_VISIBLE = r'[^"\\\s\x00-\x1f]'
"""A character of a JSON string that needs no escape, and one that is no white space."""


def render_grammar(answer_format: AnswerFormat, *, prefill: str = "", fragment_source: str | None = None) -> str:
    """The Lark grammar of what is still to be written once `prefill` is there.

    Args:
        answer_format: the sections.
        prefill: how the answer begins. A closed section in it is done with; a section that is open goes on with its
            content.
        fragment_source: the document that constrained fragments quote; None leaves them free.
    Raises:
        ConfigError: the prefill does not begin an answer of this format.
    """
    sections, open_content = _remaining(answer_format, prefill)
    row: list[str] = []
    rules: list[str] = []
    for number, section in enumerate(sections):
        is_open, name = number == 0 and open_content is not None, f"s{number}"
        before = [] if is_open or not section.tag else [_literal(opening_of(section))]
        row += [*before, name, *([_literal(closing_of(section))] if section.tag else [])]
        rules += _rules(section, name, (open_content or "") if is_open else "", fragment_source)
    return "start: " + (" ".join(row) if row else '""') + "\n" + "\n".join(rules) + "\n"


def _rules(section: Section, name: str, content: str, source: str | None) -> list[str]:
    if isinstance(section, Choice):
        left = [option[len(content) :] for option in section.options if option.startswith(content)]
        if not left:
            raise ConfigError(
                f"the prefill opens <{section.tag}> with {content!r}, which begins none of {list(section.options)}."
            )
        return [f"{name}: " + " | ".join(_literal(option) for option in left)]
    if isinstance(section, Text):
        pattern = "[^<]*" if section.may_be_empty or content.strip() else r"[^<\s][^<]*"
        return [f"{name}[max_tokens={section.max_tokens}]: /{pattern}/"]
    if isinstance(section, JsonIndices):
        row: list[str] = []
        for number, (key, most) in enumerate(zip(section.keys, section.mosts, strict=True)):
            row += [
                _literal(f"{', ' if row else '{'}{json.dumps(key)}: ["),
                *([f"{name}k{number}"] if most else []),
                '"]"',
            ]
        rules = [f"{name}k{n}: {_number_list(most, most + 1)}" for n, most in enumerate(section.mosts) if most]
        return [f"{name}: {' '.join(row)} {_literal('}')}", *rules]
    if isinstance(section, JsonTexts):
        text = f"{name}t"
        more = f'(", " {text}){{0,{section.most - 1}}}'
        return [
            f'{name}: "[]" | "[" {text} {more} "]"',
            f'{text}: "\\"" {name}c "\\""',
            f"{name}c[max_tokens={section.max_text_tokens}]: /{_JSON_VISIBLE}{_JSON_PLAIN}*/",
        ]
    if isinstance(section, OptionLines):
        if not section.options:
            return [f"{name}: {_literal(section.alone)}"]
        return [
            f'{name}: {_literal(section.alone)} | {name}l ("\\n" {name}l){{0,{MOST_OPTION_LINES - 1}}}',
            f"{name}l: " + " | ".join(map(_literal, section.options)),
        ]
    if isinstance(section, Indices):
        return [f"{name}: " + (_number_list(section.most, MOST_INDICES) if section.most else '""')]
    if isinstance(section, Lines):
        more = f'("\\n" {name}l){{{section.least - 1},{section.most - 1}}}' if section.most > 1 else ""
        return [f"{name}: {name}l {more}", f"{name}l[max_tokens={section.max_line_tokens}]: /[^<\\s][^<\\n]*/"]
    free = f"{name}[max_tokens={section.max_tokens}]"
    if content:
        return [f"{free}: /[^<]*/"]
    if not section.is_constrained or source is None:
        return [f"{free}: /[^<\\s][^<]*/"]
    if not re.search(r"[^<\s]", source):
        return [f'{name}: "none"']
    term = f"SOURCE{name[1:]}"
    return [
        f'{name}: "none" | {name}q',
        f"{name}q[max_tokens={section.max_tokens}]: {term}Q",
        f"{term}Q: /[^<\\s][^<]*/ & {term}",
        f'{term}: %regex {{ "substring_chars": {json.dumps(source)} }}',
    ]


def _number_list(most: int, longest: int) -> str:
    one = _numbers(most)
    return f"/(({one})(, ?({one})){{0,{longest - 1}}})?/"


def _numbers(most: int) -> str:
    """A regular expression of the numbers from 1 to `most`, as they are written without leading zeros."""
    digits = str(most)
    found = [f"[1-9]{_digits(length - 1)}" for length in range(1, len(digits))]
    for place, digit in enumerate(digits):  # as `most` before this place, and less at it
        least = 1 if place == 0 else 0
        if int(digit) > least:
            found.append(f"{digits[:place]}[{least}-{int(digit) - 1}]{_digits(len(digits) - place - 1)}")
    return "|".join([*found, digits])


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _remaining(answer_format: AnswerFormat, prefill: str) -> tuple[Sequence[Section], str | None]:
    """Sections that are not closed in the prefill, and the content so far of the first of them, or None if it is not
    open.
    """
    rest, sections = prefill, answer_format.sections
    if "think" not in {section.tag for section in sections}:
        # an empty thought put before the answer, as templates of thinking models do
        rest = re.sub(r"\A\s*<think>.*?</think>", "", rest, flags=re.DOTALL)
    for number, section in enumerate(sections):
        rest = rest.lstrip()
        opening = f"<{section.tag}>"
        if not rest:
            return sections[number:], None
        if not rest.startswith(opening):
            raise ConfigError(
                f"the prefill {prefill!r} does not begin an answer of {''.join(map(opening_of, sections))}: "
                f"{rest!r} is not {opening}…"
            )
        content, closing, after = rest[len(opening) :].partition(f"</{section.tag}>")
        if not closing:
            return sections[number:], content
        rest = after
    if rest.strip():
        raise ConfigError(f"the prefill {prefill!r} continues after the answer's last section.")
    return (), None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ------------------------------------------------------------------------------
# Answer formats as llguidance grammars: while it decodes, the model can't leave the format, and its thinking ends in
# time.
#
# Sections follow each other with nothing between them. Two choices, both because llguidance's lexer never goes back: a
# free text holds no `<` at all (else a closing tag would be read as text up to its last character, and then there is no
# way on), which also keeps every tag unique in the answer; and a constrained fragment is a run of the document without
# `<` that begins with something visible. A cap in tokens ends a text wherever it is, and the closing tag is then the
# only way on.


LEXER_FUEL = 20_000_000
"""llguidance's own limit of a million refuses quotations from documents above some 60,000 characters."""


logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles formats for one tokenizer, and hands out matchers at their start.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: width of the model's logits; often larger than the tokenizer's vocabulary.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._ll = require("llguidance", extra="cpu", purpose="Constrained decoding")
        self.tokenizer = _grammar_tokenizer(self._ll, tokenizer, vocab_size=vocab_size, eos_ids=list(eos_ids))
        """llguidance's own view of it."""
        self.eos_ids = frozenset(eos_ids)
        self._silent_ids = self.eos_ids | special_ids(tokenizer)
        self.token_bytes = functools.cache(self._token_bytes)
        """The bytes of a token in an answer: none for control tokens and those that end it."""
        # formats are a handful; constrained ones come once a document and are not kept
        self._compiled = functools.lru_cache(maxsize=64)(
            lambda format, prefill: self._compile(render_grammar(format, prefill=prefill))
        )

    @property
    def vocab_size(self) -> int:
        """Width of the masks that the matchers make."""
        return int(self.tokenizer.vocab_size)

    def _token_bytes(self, token: int) -> bytes:
        is_text = token not in self._silent_ids and token < self.vocab_size
        return bytes(self.tokenizer.decode_bytes([token])) if is_text else b""

    def matcher(self, answer_format: AnswerFormat, *, prefill: str = "", fragment_source: str | None = None) -> Any:
        """A matcher that is at the start of what is still to be written.

        A document that llguidance can't take as a source leaves fragments free for that one answer: the reader checks
        them in any case.

        Raises:
            ModelError: llguidance refuses the grammar.
            ConfigError: the prefill does not begin an answer of this format.
        """
        if fragment_source is not None and any(
            isinstance(s, Fragment) and s.is_constrained for s in answer_format.sections
        ):
            try:
                return self._compile(render_grammar(answer_format, prefill=prefill, fragment_source=fragment_source))
            except ModelError as exc:
                logger.warning(
                    "a document of %d characters can't bind its quotation, which stays free: %s",
                    len(fragment_source),
                    exc,
                )
        return self._compiled(answer_format, prefill).deep_copy()

    def bind(self, ask: Ask, prompt: Prompt) -> Any:
        """The matcher of an ask with a format, for its prompt as the model will see it."""
        assert ask.format is not None
        return self.matcher(ask.format, prefill=prompt.begins, fragment_source=quotable(ask, prompt))

    def _compile(self, grammar: str) -> Any:
        matcher = self._ll.LLMatcher(
            self.tokenizer,
            self._ll.LLMatcher.grammar_from_lark(grammar),
            log_level=0,
            limits=self._ll.LLParserLimits(initial_lexer_fuel=LEXER_FUEL),
        )
        if matcher.is_error():
            raise ModelError(f"llguidance refuses the grammar of an answer format: {matcher.get_error()}")
        return matcher


def _grammar_tokenizer(library: Any, tokenizer: Any, *, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's view of a tokenizer.

    llguidance 1.9 takes any added token in angle brackets for a control token, `</think>` among them, yet proposes it
    where that text is forced, and then refuses it. Where there are such tokens, it is given the vocabulary as bytes,
    with only the special ones marked.
    """
    hf = require("llguidance.hf", extra="cpu", purpose="Constrained decoding")
    plain, added = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids), tokenizer.added_tokens_decoder
    if not any(plain.is_special_token(token) and not kind.special for token, kind in added.items()):
        return plain
    return library.LLTokenizer(
        library.TokenizerWrapper(_ByteVocabulary(tokenizer, plain, vocab_size)), eos_token=eos_ids
    )


class _ByteVocabulary:
    """A tokenizer as llguidance's wrapper wants it: the bytes of every id, the special ids, and a call that encodes
    text.
    """

    def __init__(self, tokenizer: Any, plain: Any, vocab_size: int) -> None:
        known = len(tokenizer)
        unused = range(known, vocab_size)  # logits are often padded to a round width
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.tokens = [plain.decode_bytes([token]) for token in range(known)] + [
            f"<|unused_{token}|>".encode() for token in unused
        ]
        self.special_token_ids = sorted(special_ids(tokenizer) | set(unused))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("takes text, not bytes")  # llguidance tries both
        return cast("list[int]", self._backend.encode(text, add_special_tokens=False).ids)


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
    if pickled := sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in adapter.glob(kind)):
        raise ModelError(
            f"engine.args.lora: {lora!r} holds {pickled[0]}, which is pickle. Save the adapter as safetensors and "
            "remove the file."
        )
    return adapter


def is_kept_in_16_bits(folder: Path) -> bool:
    """Whether config.json says that the weights are bfloat16 or float16, so that bfloat16 loses little or nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sections = [config, config.get("text_config") or {}]
        named = [section.get("dtype") or section.get("torch_dtype") for section in sections]
    except (OSError, ValueError, AttributeError):
        return False  # the engine says what is wrong with the file when it reads it
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
    ids = sorted(one for one in {*listed, tokenizer.eos_token_id} if one is not None)
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
        self._spec, self._args = spec, args
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
            found = encoder.encode(ask, max_prompt_tokens=spec.max_prompt_tokens)
            return len(found.ids) if isinstance(found, Prompt) else 0  # a prompt that does not fit is not asked

        return count

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, compile every grammar, and check whether each stage builds on the one before."""
        for ask in asks:
            self._admit(Request(0, ask, 0))
        return stage_remarks(self._encoder, asks, self._max_prompt)

    def rendered(self, ask: Ask) -> list[str]:
        return self._encoder.shown(ask)

    def _admit(self, request: Request) -> TokenSequence | Answer:
        return admit(
            request,
            self._encoder,
            self._places,
            max_prompt_tokens=self._max_prompt(request.ask),
            bind=self._compiler.bind if self._args.constrain else None,
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
        self._torch = torch = require("torch", extra="cpu", purpose=PURPOSE)
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
        model = _load_model(library, self._resolved, args, self._dtype, self._device, attention)
        forward = Forward(model, self._device)
        batch_size = args.batch_size
        if not forward.check():
            batch_size = 1
            self._remarks.append(
                "this model answers a row by the others of its batch, so each is run alone (engine.args.batch_size: 1)"
            )
        self._set_prompts(
            tokenizer,
            overlong,
            vocab_size=forward.vocab_size,
            eos_ids=end_ids(model.generation_config.eos_token_id, tokenizer),
            context=int(
                getattr(model.config.get_text_config(), "max_position_embeddings", None) or spec.max_prompt_tokens * 2
            ),
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
        """Packages and device, without loading the model."""
        torch = require("torch", extra="cpu", purpose=PURPOSE)
        for module in ("transformers", "llguidance", "safetensors"):
            require(module, extra="cpu", purpose=PURPOSE)
        _device(torch, TransformersArgs.of(spec).device)

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return [*self._remarks, *super().prepare(asks)]

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

    def poll(self) -> list[Answer]:
        batch = self._open_batch()
        answers, self._ready = self._ready, []
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
    return cast("torch.device", torch.device(wanted if wanted != "auto" else "cuda" if has_gpu else "cpu"))


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
        peft = require("peft", extra="gpu", purpose="engine.args.lora")
        try:
            model = peft.PeftModel.from_pretrained(model, args.lora).merge_and_unload()
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"engine.args.lora: {args.lora!r} does not fit the model {resolved.reference!r}.") from exc
    return model.eval() if args.quantization is not None else model.eval().to(device)
