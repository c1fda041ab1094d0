"""A long text is cut before it is tokenized, and nothing shows it: token ids are those of the uncut text, whatever
is at the cut.
"""

import functools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from relabel.export.loader import Encoder, load_tokenizer
from tests.faults.conftest import count

PROSE = (
    "the red shoe, size 42, of running leather; new blue lamps cost 1299.50 and the best small tents of 2024 don't. "
    "Füße naïve 鞋店 "
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GROUPED = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Digits in groups of three from the right, as some recent models have them: what follows a number
regroups all of it.
"""


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    lines = [
        PROSE * 3,
        " " * 40 + "\n" * 20 + "aaaaaaaaaaaaaaaa" * 4,
        "👟🔥 " * 9,
        "1234567890 " * 5,
        ("\n" + " " * 8) * 20,
    ]
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    return trained(
        made,
        trainers.WordPieceTrainer(
            vocab_size=250, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )


def byte_level(pattern: str | None, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer = (
        level if pattern is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    )
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    return trained(
        made,
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=specials, show_progress=False),
    )


def pieces() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    return trained(
        made, trainers.UnigramTrainer(vocab_size=180, special_tokens=specials, unk_token="[UNK]", show_progress=False)
    )


def without_words() -> Tokenizer:
    """As older models have it: no rule parts words, so every token may hang on the whole text."""
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer = normalizers.Replace(" ", "▁")
    return trained(
        made,
        trainers.BpeTrainer(vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False),
    )


TOKENIZERS = {
    "WordPiece": word_piece,
    "byte-level BPE": lambda: byte_level(None),
    "BPE as Qwen has it": lambda: byte_level(QWEN, normalizers.NFC()),
    "BPE with digits grouped from the right": lambda: byte_level(GROUPED),
    "Unigram": pieces,
    "BPE without words": without_words,
}


KNOW_LONG_WORDS = ("WordPiece", "Unigram")
"""To these whole words of our own were added."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind, a folder with a `tokenizer.json` that closes pairs as BERT does."""
    found = {}
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        cls, sep = (tokenizer.token_to_id(text) for text in ("[CLS]", "[SEP]"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
        )
        if name in KNOW_LONG_WORDS:
            tokenizer.add_tokens(
                [
                    AddedToken("<tool_call>", normalized=False),
                    AddedToken("<|fim a b c d e|>", lstrip=True, normalized=False),
                ]
            )
        found[name] = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(found[name] / "tokenizer.json"))
    return found


def contract(kind: str, max_tokens: int, side: str = "right") -> dict[str, Any]:
    return {
        "kind": kind,
        "tokenizer": "tokenizer.json",
        "max_tokens": max_tokens,
        "names": ["input_ids", "attention_mask"],
        "padding_side": "right",
        "pad_id": 0,
        "pad_type_id": 0,
        "truncation_side": side,
        "prompt_ids": [[5], [6], [7]] if kind == "decoder" else [],
    }


@functools.cache
def whole_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "tokenizer.json")


def uncut(folder: Path, kind: str, max_tokens: int, pair: tuple[str, str], side: str = "right") -> list[int]:
    """Token ids of the whole texts, cut afterwards: what training does."""
    tokenizer = whole_tokenizer(folder)
    if kind == "encoder":
        tokenizer.enable_truncation(max_tokens, strategy="longest_first", direction=side)
        return list(tokenizer.encode(*pair).ids)
    tokenizer.no_truncation()
    query, document = (tokenizer.encode(text, add_special_tokens=False).ids for text in pair)
    room = max_tokens - 3
    return [5, *query[:room], 6, *document[: room - len(query[:room])], 7]


words = st.sampled_from(
    [
        *PROSE.split(),
        "don't",
        "I'll",
        "<tool_call>",
        "<tool_",
        "<|fim a b c d e|>",
        "<|fim a b",
        "[SEP]",
        "E=mc²",
        "Ⅷ",
        "½",
    ]
)
blanks = st.text(st.sampled_from(" \n\t\r\u3000\u00a0"), min_size=1, max_size=120)
marks = st.text(st.sampled_from("\u0301\u0316\u0327\u0345\u200d\ufe0f\u0338"), max_size=60)
emoji = st.sampled_from(["👟", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "🇩🇪", "👍🏽"])
numbers = st.text(st.sampled_from("0123456789٣۴"), min_size=1, max_size=90)
long_words = st.builds(
    lambda letters, times: letters * times,
    st.sampled_from(["a", "ab", "xyz", "é", "鞋", "e\u0301"]),
    st.integers(1, 150),
)
texts = st.lists(
    st.one_of(words, words, st.just(" "), blanks, marks, emoji, numbers, long_words, st.text(max_size=9)), max_size=60
).map("".join)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_of_a_text_that_is_cut_first_are_those_of_the_whole_text(
    folders: dict[str, Path], name: str, kind: str
) -> None:
    @settings(
        max_examples=count(full=200, short=20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(query=st.one_of(words, texts), document=texts, max_tokens=st.integers(4, 24))
    def holds(query: str, document: str, max_tokens: int) -> None:
        encoder = Encoder(folders[name], contract(kind, max_tokens))
        for pair in ((query, document), (document, query)):
            clean = tuple(text.encode("utf-8", "replace").decode() for text in pair)
            assert encoder.encode([pair])[0][0] == uncut(folders[name], kind, max_tokens, (clean[0], clean[1]))

    holds()


SEAMS = {
    "blanks": " " * 70 + "\n" * 9,
    "newlines in blanks": " \n" + " " * 70 + "\n  \n",
    "marks": "e" + "\u0345\u0301\u0316" * 20,
    "one word": "ab" * 60,
    "a word of the vocabulary's limit": "s" * 130,
    "digits": "12345678912" * 6,
    "an added token": "<|fim a b c d e|>",
    "blanks before an added token": " " * 40 + "<|fim a b c d e|>",
    "emoji": "👩\u200d👩\u200d👧\u200d👦" * 5,
    "no blanks": "鞋店红" * 20,
}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_whatever_lies_at_the_cut_ids_are_those_of_the_whole_text(
    folders: dict[str, Path], name: str, kind: str
) -> None:
    """Each seam lies around the first cut, after about as many tokens as are wanted."""
    turn, max_tokens = random.Random(5), 12
    encoder = Encoder(folders[name], contract(kind, max_tokens))
    pairs = []
    for seam in SEAMS.values():
        for _ in range(count(full=200, short=15)):
            before = " " * turn.randrange(110) + "a " * turn.randrange(14)
            pairs.append(("red", before.rstrip(turn.choice([" ", "x"])) + seam + " red shoe" * 30))
    for pair, (ids, _) in zip(pairs, encoder.encode(pairs), strict=True):
        assert ids == uncut(folders[name], kind, max_tokens, pair), pair


@pytest.mark.parametrize("max_tokens", [8, 9])
def test_where_both_texts_are_too_long_the_longer_one_keeps_the_odd_token(
    folders: dict[str, Path], max_tokens: int
) -> None:
    encoder = Encoder(folders["WordPiece"], contract("encoder", max_tokens))
    for num_query in range(7, 40, 3):
        for num_document in range(7, 40, 3):
            pair = ("red " * num_query, ("shoe" + " " * 40) * num_document)
            assert encoder.encode([pair])[0][0] == uncut(folders["WordPiece"], "encoder", max_tokens, pair), (
                num_query,
                num_document,
            )


def test_a_student_that_keeps_the_end_of_texts_sees_the_end(folders: dict[str, Path]) -> None:
    pair = ("red shoe", "lamp " * 2000 + "tent")
    ids = Encoder(folders["WordPiece"], contract("encoder", 12, "left")).encode([pair])[0][0]
    assert ids == uncut(folders["WordPiece"], "encoder", 12, pair, "left")


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "BPE without words"])
def test_a_document_of_ten_megabytes_is_read_no_further_than_its_student_reads(
    folders: dict[str, Path], name: str, kind: str
) -> None:
    encoder, document = Encoder(folders[name], contract(kind, 64)), PROSE * (10_000_000 // len(PROSE))
    start = time.process_time()
    encoder.encode([("red shoe", document)])
    assert time.process_time() - start < 0.5  # takes some milliseconds; to tokenize all of it takes seconds


@pytest.mark.parametrize("bad", [None, float("nan"), b"red"])
@pytest.mark.parametrize("part", [0, 1])
def test_text_that_is_no_string_is_an_error_that_names_the_row(folders: dict[str, Path], bad: Any, part: int) -> None:
    pair: list[Any] = ["red", "shoe"]
    pair[part] = bad
    with pytest.raises(TypeError, match=f"^row 2: the {('query', 'document')[part]} is "):
        Encoder(folders["WordPiece"], contract("encoder", 9)).encode([("a", "b"), ("c", np.str_("d")), tuple(pair)])  # type: ignore[list-item]
