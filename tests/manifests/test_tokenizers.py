"""What a tokenizer loses is found where it is loaded: class against file, words against one word, ids against the
embedding table.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from relabel.distill.students.model import load_student
from relabel.distill.students.networks import Embedder, check_base
from relabel.distill.students.spec import DistillSpec
from relabel.labelers.engines.transformers import load_tokenizer
from relabel.manifests.errors import ModelError
from relabel.manifests.models import ResolvedModel
from relabel.manifests.weights import PLAIN, read_tokenizer

TEXT = f"{' '.join(PLAIN)} Café grade the document for the query"
PROMPT = "Grade the document:\n\nRed shoes,  size 40 (für Damen) 红鞋"


def byte_level() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def metaspace() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    return made


def uncased_words() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    return made


def unigram() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    )
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    return made


def without_spaces() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


TRAINERS = {"BPE": "BpeTrainer", "WordPiece": "WordPieceTrainer", "Unigram": "UnigramTrainer"}
SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<unk>"]


def write(folder: Path, make: Callable[[], Any], *, named: str | None = None, beyond: int = 0) -> Path:
    """A tokenizer's folder, and a config whose table lacks the last `beyond` tokens."""
    backend = make()
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if make is byte_level:
        options["initial_alphabet"] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if make is unigram:
        options |= {"unk_token": "<unk>", "vocab_size": 60}
    backend.train_from_iterator(
        [TEXT] * 30, getattr(tokenizers.trainers, TRAINERS[type(backend.model).__name__])(**options)
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>", chat_template="{{ messages }}"
    )
    made.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": named or config["tokenizer_class"]})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(made) - beyond}))
    return folder


def read(folder: Path) -> Any:
    return read_tokenizer(transformers, folder, "the-model")


@pytest.mark.parametrize("named", ["LlamaTokenizer", "BertTokenizer"])
def test_a_class_that_loses_text_gives_way_to_the_file(named: str, tmp_path: Path) -> None:
    found = read(write(tmp_path, byte_level, named=named))
    own = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert found.encode(PROMPT) == own.encode(PROMPT)
    assert found.decode(found.encode(PROMPT)) == PROMPT
    assert (found.eos_token, found.pad_token, found.chat_template) == ("</s>", "[PAD]", "{{ messages }}")
    found.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").encode(PROMPT) == own.encode(PROMPT)


@pytest.mark.parametrize(
    ("make", "named"),
    [(byte_level, None), (metaspace, None), (uncased_words, "BertTokenizer"), (unigram, "LlamaTokenizer")],
)
def test_a_tokenizer_that_changes_case_or_blanks_lawfully_is_left_alone(
    make: Callable[[], Any], named: str | None, tmp_path: Path
) -> None:
    found = read(write(tmp_path, make, named=named))
    usual = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(found) is type(usual)
    assert found.encode(PROMPT) == usual.encode(PROMPT)


def test_a_tokenizer_without_spaces_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the-model.*spaces are lost.*published"):
        read(write(tmp_path, without_spaces))


def test_tokens_that_the_model_has_no_row_for_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level)
    own = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rows = len(own)
    own.add_tokens(["<relevant>", "<irrelevant>"])
    own.save_pretrained(folder)
    with pytest.raises(
        ModelError, match=rf"{rows} rows, and 2 tokens .*'<relevant>' \(id {rows}\).*resize_token_embeddings"
    ):
        read(folder)


def test_a_placeholder_of_pictures_needs_no_row(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level)
    own = transformers.PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens={"image_token": "<image>"})
    assert max(own.get_vocab().values()) == json.loads((folder / "config.json").read_text())["vocab_size"]
    own.save_pretrained(folder)
    assert read(folder).image_token == "<image>"


def test_a_class_that_makes_tokens_up_gives_way_to_the_file(tmp_path: Path) -> None:
    found = read(write(tmp_path, byte_level, named="Qwen2Tokenizer"))
    assert max(found.get_vocab().values()) < json.loads((tmp_path / "config.json").read_text())["vocab_size"]


def of_an_engine(folder: Path) -> None:
    load_tokenizer(transformers, ResolvedModel(folder, "0", "the-model"))


def of_a_base(folder: Path) -> None:
    spec = {
        "name": "a",
        "output": "out",
        "labels": ["l"],
        "student": {"kind": "decoder", "model": str(folder)},
    }
    check_base(DistillSpec.model_validate(spec), ResolvedModel(folder, "0", "the-model"))


def of_a_student(folder: Path) -> None:
    record = {
        "version": 1,
        "kind": "encoder",
        "name": "a",
        "heads": {"relevance": 2},
        "max_tokens": 8,
        "columns": {},
        "temperature": {},
    }
    (folder / "student.json").write_text(json.dumps(record))
    load_student(folder)


def of_an_embedder(folder: Path) -> None:
    Embedder(folder, max_tokens=None, batch_tokens=None, device="cpu")


@pytest.mark.parametrize("load", [of_an_engine, of_a_base, of_a_student, of_an_embedder])
def test_all_that_load_a_tokenizer_look(load: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path, byte_level, beyond=1)
    with pytest.raises(ModelError, match="embedding table"):
        load(tmp_path)
