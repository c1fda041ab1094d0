"""A tiny student with random weights and its three heads, the folder and commands of tests/jobs, and the pairs that it
scores.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluate.conftest import random_rows, write_rows  # noqa: F401
from tests.jobs.conftest import committed, folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401

WORDS = ("red", "shoe", "running", "blue", "kind", "of", "a", "size", "the", "for", "number", *map(str, range(30)))


def write_tiny_student(
    path: Path, *, heads: dict[str, int] | None = None, max_tokens: int = 24, seed: int = 0, **record: Any
) -> Path:
    """A student folder: BERT of two layers and 16 dimensions, loud heads, so that grades differ; and the manifest that
    names its files.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from relabel.distill.students.model import student_files, write_student
    from relabel.distill.students.networks import EncoderStudent
    from relabel.distill.students.spec import StudentRecord

    heads = heads or {"relevance": 3, "subject": 5, "attribute": 5}
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    module = EncoderStudent(BertModel(config, add_pooling_layer=False), heads, seed=seed).eval()
    for head in module.heads.values():
        head.weight.data.mul_(100)
    held: dict[str, Any] = {
        "version": 1,
        "kind": "encoder",
        "name": "tiny",
        "heads": heads,
        "max_tokens": max_tokens,
        "columns": {"query_id": "query_id", "query": "query", "doc_id": "doc_id", "document": ["title", "body"]},
        "temperature": dict.fromkeys(heads, 1.5),
    }
    write_student(path, StudentRecord(**held | record), module, tokenizer)
    (path / "manifest.json").write_text(json.dumps({"version": 1, "files": student_files(path)}))
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny student for all tests that only read it."""
    return write_tiny_student(tmp_path_factory.mktemp("students") / "tiny")


@pytest.fixture
def score(relabel: Callable[..., Any], tiny: Path) -> Callable[..., Any]:  # noqa: F811
    """`score("--shard", "0/2")`: the tiny student on the folder's pairs, eight rows a chunk, into out/scores."""

    def call(*more: str, student: str | Path = tiny, to: str = "out/scores") -> Any:
        return relabel(
            "score", str(student), "--input", "pairs.parquet", "--to", to, "--chunk-rows", "8", "--shards", "2", *more
        )

    return call
