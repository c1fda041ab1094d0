"""A model's tokenizer, wherever one is loaded: what it keeps of plain text is checked, and that the embedding table has
a row for each of its ids.

A folder says twice what its tokenizer is: by a class in tokenizer_config.json, which builds normalisation and word
splitting anew from the vocabulary, and by tokenizer.json, which holds both. Where the two disagree, the class may lose
every space (`LlamaTokenizerFast` over a byte-level file, as published with distilled models), or add tokens that the
model has no embedding for.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.errors import ModelError
from relabel.manifests.models.model_dirs import config_file

logger = logging.getLogger(__name__)

PLAIN = ("red shoes for women", "size 40\nred")
"""Lower-case words: a tokenizer may lawfully change case, accents and runs of blanks, so none of these is in question.
"""
SPACED, JOINED = "q z x j k", "qzxjk"
"""Letters that no vocabulary merges: one that keeps no spaces makes the same of both; all others tell them apart, if by
the number of unknown tokens alone.
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Any of these makes a tokenizer."""


class _Kept(NamedTuple):
    """What a tokenizer does with plain text; the greater is the better.

    Args:
        tells_spaces: words with and without spaces get different ids.
        fits_table: no id lies beyond the embedding table.
        texts: how many of `PLAIN` come back as they were.
    """

    tells_spaces: bool
    fits_table: bool
    texts: int


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
    rows = _table_rows(path)
    tokenizer, fault = _load(library.AutoTokenizer, path)
    kept = _kept(tokenizer, rows)
    if kept < _Kept(True, True, len(PLAIN)) and (path / "tokenizer.json").is_file():
        held = _read_json(path / "tokenizer_config.json")
        # 5's default; 4.57's has token_type_ids too, and a student fed with segments that it never saw would answer
        # otherwise
        names = held.get("model_input_names", ["input_ids", "attention_mask"])
        own, _ = _load(library.PreTrainedTokenizerFast, path, model_input_names=names)
        own_kept = _kept(own, rows)
        if tokenizer is not None and own_kept > kept:
            named = held.get("tokenizer_class")
            logger.warning(
                "model %r: the tokenizer class %s changes what tokenizer.json says; the file is used as it is",
                reference,
                named,
            )
        if tokenizer is None or own_kept > kept:
            tokenizer, kept = own, own_kept
    if tokenizer is None:
        raise ModelError(f"model {reference!r}: its tokenizer can't be loaded from {path}.") from fault
    if not kept.tells_spaces:
        raise ModelError(
            f"model {reference!r}: its tokenizer makes the same tokens of {SPACED!r} and {JOINED!r}: spaces are lost. "
            f"Replace the tokenizer's files in {path} by those that the model was published with."
        )
    if not kept.fits_table:
        beyond = _beyond(tokenizer, rows)
        named = ", ".join(f"{token!r} (id {number})" for number, token in beyond[:3])
        raise ModelError(
            f"model {reference!r}: its embedding table has {rows} rows, and {len(beyond)} tokens of its tokenizer have "
            f"ids beyond it: {named}. They were added and the table was not resized: take the tokenizer that the model "
            "was published with, or call model.resize_token_embeddings(len(tokenizer)) and save both."
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


def _kept(tokenizer: Any, rows: int | None) -> _Kept:
    try:
        ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in (SPACED, JOINED, *PLAIN)}
        back = (
            tokenizer.decode(ids[text], skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
            for text in PLAIN
        )
        texts = sum(back)
        is_fitting = not _beyond(tokenizer, rows)
    except Exception:  # noqa: BLE001 (there is none, or it can't use this vocabulary: the library raises Exception itself)
        return _Kept(False, False, 0)
    # a vocabulary without any of these letters shows nothing
    is_apart = ids[SPACED] != ids[JOINED] or not ids[SPACED]
    return _Kept(is_apart, is_fitting, texts)


def _beyond(tokenizer: Any, rows: int | None) -> list[tuple[int, str]]:
    """Ids without a row, with their tokens; without placeholders of pictures and sound, which no text gives rise to
    (Gemma 3 has one in models of text alone).
    """
    placeholders = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    found = ((number, token) for token, number in tokenizer.get_vocab().items() if rows is not None and number >= rows)
    return sorted((number, token) for number, token in found if token not in placeholders)


def _table_rows(path: Path) -> int | None:
    """Rows of the model's embedding table as its config says; None where it does not."""
    config = _read_json(config_file(path))
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    return rows if isinstance(rows, int) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever needs the file says what is wrong with it
    return loaded if isinstance(loaded, dict) else {}
