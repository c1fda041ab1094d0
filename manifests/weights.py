"""What loads from a model's directory: its weights, and its tokenizer.

A folder states twice what its tokenizer is: by a class in tokenizer_config.json, which builds normalisation and word
splitting from the vocabulary, and by tokenizer.json, which holds both. Where the two disagree, the class may lose every
space (`LlamaTokenizerFast` over a byte-level file, as published with distilled models), or add tokens that the model
has no embedding for. So what a tokenizer keeps of plain text is checked, and that the embedding table has a row for
each of its ids.
"""

import re
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ModelError
from relabel.manifests.models import _read_json, config_file, logger, own_code
from relabel.manifests.process import require

OF_A_CONFIG = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What a model is built from is not checked before: numbers of any size, libraries that are not here."""
_IN_A_STACK = re.compile(r"(.+?)\.\d+\.")
"""A tensor of one of several equal layers."""
_CONSTANT = re.compile(r"\.(attn|attention)\.bias$|\.masked_bias$|\.causal_mask$|\.inv_freq$")
"""Masks and frequencies that old versions wrote among the weights (GPT-2, GPT-J, Falcon); the config has the same."""


def read_weights(kind: Any, path: Path, where: str, *, device: Any = None, **options: Any) -> Any:
    """A model of a directory, from safetensors only.

    Args:
        kind: an Auto class of transformers.
        where: what the message begins with: the model as the user knows it.
        device: transformers' `device_map`; on `meta` it has shapes alone: the heads of its files are read, no tensor.
        options: of `from_pretrained`.
    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    damaged = require("safetensors", extra="cpu", purpose="A model").SafetensorError
    try:
        model, loading = kind.from_pretrained(
            path,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device,
            ignore_mismatched_sizes=True,  # they are reported by name below
            **options,
        )
    except (*OF_A_CONFIG, OSError, RuntimeError, damaged) as exc:
        words = (str(exc).splitlines() or [""])[0]
        raise ModelError(
            f"{where}: its weights can't be loaded from {path} ({type(exc).__name__}: {words})"
            f"{own_code(config_file(path))}."
        ) from exc
    check_loading(model, loading, where)
    return model


def check_loading(model: Any, loading: dict[str, Any], where: str) -> None:
    """
    Args:
        loading: what `from_pretrained` reports of it (`output_loading_info`).
    Raises:
        ModelError: tensors are missing, have another shape, or are of layers that the model does not have.
    """
    # A student reads the last layer: a pooler that transformers adds to it answers nothing.
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
    unexpected = sorted(name for name in loading["unexpected_keys"] if not _CONSTANT.search(name))
    if missing:
        example = f", such as {unexpected[0]}" if unexpected else ""
        raise ModelError(
            f"{where}: {len(missing)} tensors are not in its weights, {', '.join(missing[:3])} among them, and "
            f"{len(unexpected)} in them are not the model's{example}. "
            "The files are incomplete, config.json is another model's, the model was saved with what wraps it, or "
            f"another class was saved than {type(model).__name__} (a classifier has no lm_head)."
        )
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        name, shape, wanted = mismatched[0]
        raise ModelError(
            f"{where}: {len(mismatched)} tensors in its weights have another shape than config.json says; {name} has "
            f"{tuple(shape)}, not {tuple(wanted)}."
        )
    stacks = tuple({_stack_of(name) for name in model.state_dict()} - {""})
    surplus = [name for name in unexpected if _stack_of(name).endswith(stacks)]
    if surplus and getattr(model, "hf_quantizer", None) is None:  # scales of packed weights have names of their own
        raise ModelError(
            f"{where}: {len(surplus)} tensors of layers in its weights have no place in what config.json describes, "
            f"{surplus[0]} among them: it is another model's, or was cut."
        )


def _stack_of(name: str) -> str:
    """The layers that a tensor is of one of, as `.model.layers`; empty where it is of none."""
    match = _IN_A_STACK.match(name)
    return f".{match[1]}" if match else ""


PLAIN = ("red shoes for women", "size 40\nred")
"""Lower-case words: a tokenizer may lawfully change case, accents and runs of blanks, so none of these is in question.
"""
SPACED = "q z x j k"
JOINED = "qzxjk"
"""Letters that no vocabulary merges: a tokenizer that keeps no spaces makes the same of both; all others distinguish
them, if by the number of unknown tokens alone.
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these makes a tokenizer."""


def read_tokenizer(library: Any, path: Path, reference: str) -> Any:
    """The tokenizer of a model's directory: as its class builds it, or as tokenizer.json has it where the class loses
    more of plain text, adds tokens that the model does not know, or can't be built.

    Args:
        library: transformers.
        reference: what the user calls the model.
    Raises:
        ModelError: it can't be loaded, loses the spaces between words, or has ids beyond the embedding table.
    """
    check_tokenizer_files(path, reference)
    config = _read_json(config_file(path))
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    rows = text_config.get("vocab_size", config.get("vocab_size"))
    if not isinstance(rows, int):
        rows = None
    tokenizer, fault = _load(library.AutoTokenizer, path)
    quality = _quality(tokenizer, rows)
    if quality < (True, True, len(PLAIN)) and (path / "tokenizer.json").is_file():
        settings = _read_json(path / "tokenizer_config.json")
        # 5's default; 4.57's has token_type_ids too, and a student fed with segments that it never saw would answer
        # otherwise
        names = settings.get("model_input_names", ["input_ids", "attention_mask"])
        own, _ = _load(library.PreTrainedTokenizerFast, path, model_input_names=names)
        own_quality = _quality(own, rows)
        if own_quality > quality:
            if tokenizer is not None:
                logger.warning(
                    "model %r: the tokenizer class %s changes what tokenizer.json says; the file is used as it is",
                    reference,
                    settings.get("tokenizer_class"),
                )
            tokenizer = own
            quality = own_quality
    if tokenizer is None:
        raise ModelError(f"model {reference!r}: its tokenizer can't be loaded from {path}.") from fault
    keeps_spaces, fits_table, _ = quality
    if not keeps_spaces:
        raise ModelError(
            f"model {reference!r}: its tokenizer makes the same tokens of {SPACED!r} and {JOINED!r}: spaces are lost. "
            f"Replace the tokenizer's files in {path} by those that the model was published with."
        )
    if not fits_table:
        beyond = [f"{token!r} (id {number})" for number, token in _beyond(tokenizer, rows)]
        raise ModelError(
            f"model {reference!r}: its embedding table has {rows} rows, and {len(beyond)} tokens of its tokenizer have "
            f"ids beyond it: {', '.join(beyond[:3])}. They were added and the table was not resized: take the "
            "tokenizer that it was published with, or call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    return tokenizer


def check_tokenizer_files(path: Path, reference: str) -> None:
    """
    Raises:
        ModelError: the directory holds no tokenizer; transformers would make an empty one up.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES) and not any(path.glob("*.model")):
        raise ModelError(
            f"model {reference!r}: {path} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}."
        )


def _load(kind: Any, path: Path, **options: Any) -> tuple[Any, Exception | None]:
    try:
        return kind.from_pretrained(path, **options), None
    except Exception as exc:  # noqa: BLE001 (a class raises whatever it meets in a file that is not its own)
        return None, exc


def _quality(tokenizer: Any, rows: int | None) -> tuple[bool, bool, int]:
    """What a tokenizer does with plain text; the greater is the better: whether words with and without spaces get
    different ids, whether no id lies beyond the embedding table, and how many of `PLAIN` come back as they were.
    """
    try:
        spaced = tokenizer.encode(SPACED, add_special_tokens=False)
        joined = tokenizer.encode(JOINED, add_special_tokens=False)
        # a vocabulary without any of these letters shows nothing
        keeps_spaces = spaced != joined or not spaced
        num_back = 0
        for text in PLAIN:
            ids = tokenizer.encode(text, add_special_tokens=False)
            back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            num_back += back == text
        return keeps_spaces, not _beyond(tokenizer, rows), num_back
    except Exception:  # noqa: BLE001 (there is none, or it can't use this vocabulary: the library raises Exception itself)
        return False, False, 0


def _beyond(tokenizer: Any, rows: int | None) -> list[tuple[int, str]]:
    """Ids without a row, with their tokens; without placeholders of pictures and sound, which no text gives rise to
    (Gemma 3 has one in models of text alone).
    """
    if rows is None:
        return []
    placeholders = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    beyond = [(number, token) for token, number in tokenizer.get_vocab().items() if number >= rows]
    return sorted((number, token) for number, token in beyond if token not in placeholders)
