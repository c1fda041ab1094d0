"""Tiny random encoders and decoders, pairs whose grades follow from words, and labels of them; all made here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.labelers.graph_grpo import GraphGrpo
from relabel.manifests.files import Storage
from relabel.manifests.labels import LABELS, label_schema
from relabel.manifests.phi import DEFAULT_PHI
from tests.engines.conftest import CHATML, make_tokenizer

NODES = {column.name: column.kind for column in GraphGrpo.columns}

SUBJECTS = ["shoe", "lamp", "tent", "mug", "rope", "chair", "drum", "kite"]
ATTRIBUTES = ["red", "blue", "green", "small", "tall", "soft"]
FILLER = ["the", "new", "best", "of", "and", "with", "size", "for"]
MARKS = ["fits", "misses", "matches", "differs"]
"""Words that give the scores, since a tiny random model learns words in a few steps and comparisons in none."""
NUM_QUERIES = 24
DOCS_PER_QUERY = 6


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def word_tokenizer(*, has_types: bool) -> Any:
    """Whole words, `[CLS] a [SEP] b [SEP]`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *SUBJECTS, *ATTRIBUTES, *FILLER, *MARKS, *"abcdefghijklmnopqrstuvwxyz[]"]
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(dict.fromkeys(words))}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    ids = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if has_types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=names,
        model_max_length=64,
    )


def tiny_encoder(kind: str, vocab_size: int, width: int = 32) -> Any:
    import torch
    import transformers as tf

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(3)
    if kind == "bert":
        return tf.BertModel(tf.BertConfig(**shape))
    if kind == "xlm-roberta":
        return tf.XLMRobertaModel(tf.XLMRobertaConfig(**{**shape, "max_position_embeddings": 66}, type_vocab_size=1))
    if kind == "deberta-v2":
        return tf.DebertaV2Model(
            tf.DebertaV2Config(**shape, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0)
        )
    special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return tf.ModernBertModel(tf.ModernBertConfig(**shape, **special, local_attention=16, attn_implementation="sdpa"))


@pytest.fixture(scope="session")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str = "bert") -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            tokenizer = word_tokenizer(has_types=kind == "bert")
            tokenizer.save_pretrained(folder)
            tiny_encoder(kind, len(tokenizer)).save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture(scope="session")
def decoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str | None, Path] = {}

    def make(*, template: str | None = CHATML) -> Path:
        if template not in made:
            import torch
            from transformers import Qwen2Config, Qwen2ForCausalLM

            folder = tmp_path_factory.mktemp("qwen2")
            tokenizer = make_tokenizer(template=template)
            tokenizer.save_pretrained(folder)
            torch.manual_seed(3)
            config = Qwen2Config(
                vocab_size=len(tokenizer) + 5,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                tie_word_embeddings=True,
            )
            Qwen2ForCausalLM(config).save_pretrained(folder)
            made[template] = folder
        return made[template]

    return make


def make_pairs(seed: int = 5) -> list[dict[str, Any]]:
    """Pairs with subject and attribute scores that follow from marks in the document, and the grade that φ makes of
    them.
    """
    chance = np.random.default_rng(seed)
    rows = []
    for query in range(NUM_QUERIES):
        subject, attribute = SUBJECTS[query % len(SUBJECTS)], ATTRIBUTES[query % len(ATTRIBUTES)]
        for doc in range(DOCS_PER_QUERY):
            has_subject, has_attribute = doc % 2 == 0, doc % 3 == 0
            named = [subject, MARKS[0 if has_subject else 1], attribute, MARKS[2 if has_attribute else 3]]
            words = [*named, *chance.choice(FILLER, size=int(chance.integers(1, 8)))]
            scores = 4 if has_subject else 1, 4 if has_attribute else 2
            rows.append(
                {
                    "query_id": f"q{query:02d}",
                    "query": f"{attribute} {subject}",
                    "doc_id": f"d{doc}",
                    "document": " ".join(map(str, words)),
                    "subject": scores[0],
                    "attribute": scores[1],
                    "grade": DEFAULT_PHI[scores[0]][scores[1]],
                }
            )
    return rows


def softened(grade: int, width: int, sure: float = 0.8) -> list[float]:
    return [sure if place == grade else (1 - sure) / (width - 1) for place in range(width)]


def label_rows(
    pairs: list[dict[str, Any]], *, has_nodes: bool = True, has_probs: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    rows = []
    for number, pair in enumerate(pairs):
        nodes: dict[str, Any] = {}
        if has_nodes:
            nodes = {"subject": pair["subject"], "attribute": pair["attribute"]}
            if has_probs:
                nodes |= {f"{name}_probs": softened(pair[name], 5) for name in ("subject", "attribute")}
        row: dict[str, Any] = dict.fromkeys(LABELS.names) | {
            "row_id": number,
            "query_id": pair["query_id"],
            "doc_id": pair["doc_id"],
            "status": "ok",
            "grade": pair["grade"],
            "probs": softened(pair["grade"], 3) if has_probs else None,
            "outside_mass": 0.1 if has_probs else None,
            **nodes,
            "evidence": [],
            "flags": [],
            "prompt_tokens": 1,
            "output_tokens": 1,
            "reused": False,
        }
        rows.append(row | changes)
    return rows


def write_labels(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=label_schema(NODES)), path)
    return path


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(make_pairs()), path)
    return path


@pytest.fixture(scope="session")
def labels_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels") / "labels.parquet", label_rows(make_pairs()))


@pytest.fixture(scope="session")
def small_spec(encoder_dir: Callable[..., Path], labels_file: Path, pairs_file: Path) -> Callable[..., dict[str, Any]]:
    """Plain values of a small spec; sections are merged, other keys replaced. `output` has no default."""

    def make(**changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = {
            "name": "tiny",
            "labels": [{"path": str(labels_file), "pairs": {"path": str(pairs_file)}}],
            "student": {"kind": "encoder", "model": str(encoder_dir())},
            "train": {"epochs": 2, "batch_size": 16, "learning_rate": 3e-3, "max_tokens": 32, "seed": 7},
            "split": {"dev": 0.2, "test": 0.2},
        }
        for key, value in changes.items():
            values[key] = (
                {**values[key], **value} if isinstance(value, dict) and isinstance(values.get(key), dict) else value
            )
        return values

    return make


@pytest.fixture
def spec(tmp_path: Path, small_spec: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`small_spec` whose output is `out` in the test's own folder, unless another is named."""

    def make(**changes: Any) -> dict[str, Any]:
        return small_spec(**{"output": str(tmp_path / "out"), **changes})

    return make


@pytest.fixture
def run(spec: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Distill a small spec in this process."""
    from relabel.distill.students.distillation import distill
    from relabel.distill.students.spec import DistillSpec
    from relabel.manifests.specs import validate_spec

    def go(start: Any = "new", say: Callable[[str], None] = lambda _: None, **changes: Any) -> Any:
        return distill(
            validate_spec(DistillSpec, spec(**changes), where="student.yaml"), Storage(), start=start, report=say
        )

    return go
