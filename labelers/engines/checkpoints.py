"""A model's directory as an engine sees it: its tokenizer, the tokens that end a turn, and the digest with an adapter
laid over it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ModelError
from relabel.manifests.models.references import ResolvedModel, default_cache_dir, directory_digest, resolve_model
from relabel.manifests.models.tokenizers import read_tokenizer
from relabel.manifests.specs import EngineSpec


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
    """Tokens that are not text: they stand for nothing in an answer."""
    added = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def count_parameters(folder: Path) -> int | None:
    """Numbers in a model's safetensors, from the files' headers alone; None where they do not tell (packed weights,
    other formats).
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        if not files or "quantization_config" in config:  # several weights to a number
            return None
        counts = (
            math.prod(tensor["shape"])
            for file in files
            for name, tensor in _header(file).items()
            if name != "__metadata__"
        )
        return sum(int(count) for count in counts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None  # the engine says what is wrong with the files when it starts; here they only do not tell


def _header(file: Path) -> dict[str, Any]:
    """The JSON at the head of a safetensors file, after its length in eight bytes, little-endian."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"{file.name}: a header of {length} bytes does not fit into the file")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header


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
