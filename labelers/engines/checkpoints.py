"""Model directories as engines read them: tokenizer, end tokens, digests with adapters, and token counts without
loading weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from relabel.labelers.engines.openai_connections import OpenAiArgs, identity
from relabel.labelers.engines.tokens import Prompt, PromptEncoder
from relabel.manifests.asks import Ask
from relabel.manifests.errors import ModelError
from relabel.manifests.models import (
    TOKENIZER_FILES,
    ResolvedModel,
    check_tokenizer_files,
    default_cache_dir,
    directory_digest,
    read_tokenizer,
    resolve_model,
)
from relabel.manifests.process import require
from relabel.manifests.records import sha256_file
from relabel.manifests.specs import EngineSpec

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
    cache = Path(cache_dir) if cache_dir else default_cache_dir()
    return hashlib.sha256(
        f"{resolved.digest}+{directory_digest(adapter_dir(lora), cache_dir=cache)}".encode()
    ).hexdigest()


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


def load_tokenizer(library: Any, resolved: ResolvedModel) -> Any:
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
    listed = [] if named is None else named if isinstance(named, list) else [named]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = sorted({*listed, *own})
    if not ids:
        raise ModelError(
            "the model names no end-of-text token, neither in generation_config.json nor in its tokenizer."
        )
    return ids


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that are not text of an answer."""
    added = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
    return frozenset(added | set(tokenizer.all_special_ids))


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
        library = require("transformers", extra="cpu", purpose=purpose)
        return load_tokenizer(library, ResolvedModel(self.path, self.digest, self.reference))

    def control_texts(self) -> frozenset[str]:
        """Texts that this tokenizer makes control tokens of."""
        tokenizer = self.load()
        added = tokenizer.added_tokens_decoder.values()
        return frozenset(
            [*tokenizer.all_special_tokens, *(str(token) for token in added if token.special or str(token).strip())]
        )


def find_tokenizer(spec: EngineSpec, args: OpenAiArgs) -> TokenizerFolder | None:
    """The folder that `engine.model` names; None if it names nothing.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    return None if spec.model is None else tokenizer_folder(spec.model, args.cache_dir)


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


def served_digest(args: OpenAiArgs, folder: TokenizerFolder | None) -> str:
    """In place of a digest of the server's model: its name, the address's path, and the tokenizer, since the weights
    can't be digested from here.
    """
    tokenizer = folder.digest if folder is not None else "none"
    return hashlib.sha256(f"openai server: {identity(args)}; tokenizer: {tokenizer}".encode()).hexdigest()


# ------------------------------------------------------------------------------
# A model's prompts and their tokens, by its own tokenizer, without its weights: for `relabel plan --exact` and
# `relabel ask --dry-run`.


def prompt_encoder(
    spec: EngineSpec, folder: TokenizerFolder, *, overlong: Literal["truncate", "quarantine"] = "truncate"
) -> PromptEncoder:
    """What makes prompts of asks.

    Raises:
        ModelError, ConfigError: it has none, or its chat template can't be used.
        MissingExtraError: transformers is absent.
    """
    tokenizer = folder.load("Rendering prompts")
    return PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)


def checkpoint_token_counter(
    spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"], cache_dir: str | None
) -> Callable[[Ask], int]:
    """A function from an ask to the tokens that it is encoded as, cut where it would be cut.

    Raises:
        ModelError, ConfigError, MissingExtraError: no model is named, or see `prompt_encoder`.
    """
    resolved = resolve_checkpoint(spec, cache_dir)
    encoder = prompt_encoder(spec, TokenizerFolder(resolved.path, resolved.reference), overlong=overlong)

    def count(ask: Ask) -> int:
        found = encoder.encode(ask, max_prompt_tokens=spec.max_prompt_tokens)
        return len(found.ids) if isinstance(found, Prompt) else 0  # a prompt that does not fit is not asked

    return count
