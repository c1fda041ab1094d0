"""Tiny random models with tokenizers made here by hand: real code paths, no downloads."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.labelers.engines.tokens import TokenSequence
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Choice, Fragment, Message, Request, Text
from relabel.manifests.specs import EngineSpec

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = [
    "the",
    "re",
    "ed",
    "ing",
    " the",
    " a",
    " of",
    "and",
    "th",
    "in",
    "er",
    " s",
    "sh",
    "oe",
    " shoe",
    "</",
    "score",
    " 2",
    " 1",
    "think",
]
MERGED = [">2", ">1", ">0", "e>"]

THINK_SCORE = AnswerFormat((Text("think", 8), Choice("score", ("0", "1", "2"))))
QUOTE_SCORE = AnswerFormat((Text("think", 6), Fragment("extract", 6, True), Choice("score", ("0", "1", "2"))))


def make_tokenizer(*, merged: bool = False, template: str | None = CHATML, normalizer: Any = None) -> Any:
    """A byte-level BPE of 256 bytes and a few merges; `merged` has tokens such as `>2` that straddle a marker's end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS + (MERGED if merged else []):
        spelled = word.replace(" ", "Ġ")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merged)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    is_normalized = normalizer is not None
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=is_normalized) for text in special])
    backend.add_tokens(
        [AddedToken("</think>", normalized=is_normalized), AddedToken("<tool_call>", normalized=is_normalized)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind: str, vocab_size: int) -> Any:
    """A random decoder, spread widely enough that its distributions are far from uniform."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "eos_token_id": None,
    }
    torch.manual_seed(7)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=24)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # two threads on busy cores wait for each other, up to six times as long


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, bool], Path] = {}

    def make(kind: str = "qwen2", *, merged: bool = False) -> Path:
        if (kind, merged) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{merged}")
            tokenizer = make_tokenizer(merged=merged)
            tokenizer.save_pretrained(folder)
            make_model(kind, len(tokenizer) + 5).save_pretrained(folder)  # wider than the tokenizer, as real ones are
            made[kind, merged] = folder
        return made[kind, merged]

    return make


def write_job(folder: Path, model: Path, *, rows: int = 8, **changes: Any) -> str:
    """A job of so many pairs, two to a query, that this model labels on the CPU; `changes` are laid over it."""
    pairs = [
        {"query_id": f"q{n // 2}", "query": f"red shoe {n // 2}", "doc_id": f"d{n}", "document": f"a shoe, kind {n}"}
        for n in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(pairs), folder / "pairs.parquet")
    job: dict[str, Any] = {
        "name": "tiny",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": {"name": "direct"},
        "engine": {"name": "transformers", "model": str(model), "args": {"device": "cpu"}},
        "output": str(folder / "out"),
        "shards": 2,
    }
    (folder / "job.yaml").write_text(json.dumps({**job, **changes}))
    return str(folder / "job.yaml")


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[TokenSequence]:
    """Every row that gave an answer, with its token ids."""
    rows: list[TokenSequence] = []
    plain = TokenSequence.answer

    def remember(row: TokenSequence) -> Any:
        rows.append(row)
        return plain(row)

    monkeypatch.setattr(TokenSequence, "answer", remember)
    return rows


@pytest.fixture
def start(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    from relabel.labelers.engines.transformers import Transformers

    started = []

    def make(
        kind: str = "qwen2",
        *,
        merged: bool = False,
        overlong: str = "truncate",
        max_prompt_tokens: int = 2048,
        **args: Any,
    ) -> Any:
        cache = tmp_path_factory.getbasetemp() / "relabel-cache"
        options = Transformers.Args(device="cpu", cache_dir=str(cache), **({"batch_size": 4} | args))
        folder = model_dir(kind, merged=merged)
        spec = EngineSpec(name="transformers", model=str(folder), max_prompt_tokens=max_prompt_tokens, args=options)
        started.append(Transformers(spec, overlong=overlong))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for engine in started:
        engine.close()


def ask_for(query: str, document: str, **changes: Any) -> Ask:
    system = Message(
        "system", ("You grade documents. Think, then write a score of 0, 1 or 2 and nothing else at all.",)
    )
    user = Message("user", ("Query: ", query, "\nDocument: ", document, "\nGrade it."), ("query", "document"))
    fields: dict[str, Any] = {"stage": "verdict", "messages": (system, user), "format": THINK_SCORE, "max_tokens": 96}
    return Ask(**(fields | changes))


def run_all(engine: Any, requests: list[Request]) -> list[Answer]:
    """Feed an engine as the run loop does, and put the answers back into the order of the requests."""
    todo, done, until = list(requests), {}, time.monotonic() + 200
    while len(done) < len(requests):
        while todo and engine.capacity:
            engine.submit(todo.pop(0))
        answers = engine.poll()
        assert time.monotonic() < until, "an engine with work in flight returned nothing more"
        done.update({answer.request_id: answer for answer in answers})
    return [done[request.id] for request in requests]
