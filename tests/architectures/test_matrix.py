"""Bases as they come: each architecture of the table is distilled, exported in three precisions, and answered by
`load.py` as by the student; `conform` names a fault planted in its server. The next architecture is one line of the
table. Tiny random weights, tokenizers made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec
from relabel.export.conform import conform
from relabel.export.exporting import export_bundle
from relabel.export.loader import Student
from relabel.export.specs import ExportSpec
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs, word_tokenizer
from tests.engines.conftest import CHATML, make_tokenizer

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DISTILBERT = {
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None}
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}


class Base(NamedTuple):
    """An architecture.

    Args:
        kind: of the student.
        name: the class of transformers without its ending.
        config: what its config says besides `vocab_size`.
        has_types: the tokenizer gives token types.
        template: a decoder's chat template.
    """

    kind: str
    name: str
    config: dict[str, Any]
    has_types: bool = True
    template: str | None = CHATML


BASES = {
    "bert": Base("encoder", "Bert", SIZES),
    "bert of one token type": Base("encoder", "Bert", {**SIZES, "type_vocab_size": 1}),
    "distilbert": Base("encoder", "DistilBert", DISTILBERT),
    "deberta-v2": Base("encoder", "DebertaV2", SIZES | DEBERTA),
    "electra": Base("encoder", "Electra", {**SIZES, "embedding_size": 32}),
    "albert": Base("encoder", "Albert", {**SIZES, "embedding_size": 16}),
    "roberta": Base("encoder", "Roberta", {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1}, False),
    "xlm-roberta": Base("encoder", "XLMRoberta", {**SIZES, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "mpnet": Base("encoder", "MPNet", {**SIZES, "max_position_embeddings": 66}, False),
    "modernbert": Base("encoder", "ModernBert", {**SIZES, **SPECIAL, "local_attention": 16}, False),
    "qwen2": Base("decoder", "Qwen2", DECODER),
    "qwen3": Base("decoder", "Qwen3", {**DECODER, "head_dim": 8}),
    "llama": Base("decoder", "Llama", DECODER),
    "mistral without a system role": Base(
        "decoder", "Mistral", {**DECODER, "sliding_window": None}, template=NO_SYSTEM
    ),
    "gemma2 without a system role": Base("decoder", "Gemma2", {**DECODER, "head_dim": 8}, template=NO_SYSTEM),
    "phi3": Base("decoder", "Phi3", {**DECODER, "pad_token_id": 0}),
}


def write_base(base: Base, folder: Path) -> Path:
    import torch
    import transformers

    torch.manual_seed(3)
    is_decoder = base.kind == "decoder"
    tokenizer = make_tokenizer(template=base.template) if is_decoder else word_tokenizer(has_types=base.has_types)
    config = getattr(transformers, f"{base.name}Config")(vocab_size=len(tokenizer), **base.config)
    tokenizer.save_pretrained(folder)
    getattr(transformers, f"{base.name}{'ForCausalLM' if is_decoder else 'Model'}")(config).save_pretrained(folder)
    return folder


EVERY_DAY = ("distilbert", "gemma2 without a system role")
"""Each needed something of its own; the others are in `make full`."""


class Swapped:
    """A server that takes the document for the query."""

    api = "made here"

    def __init__(self, student: Student) -> None:
        self._student = student

    def scores(self, query: str, documents: list[str]) -> np.ndarray:
        return np.array(self._student.score([(document, query) for document in documents]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.full) for name in BASES]
)
def test_an_architecture_goes_the_whole_way(name: str, tmp_path: Path, labels_file: Path, pairs_file: Path) -> None:
    base = BASES[name]
    spec = DistillSpec(
        name="tiny",
        labels=[{"path": str(labels_file), "pairs": {"path": str(pairs_file)}}],
        student={"kind": base.kind, "model": str(write_base(base, tmp_path / "base"))},
        train={
            "max_steps": 2,
            "batch_size": 8,
            "learning_rate": 1e-3,
            "max_tokens": 32 if base.kind == "encoder" else 200,
        },
        split={"dev": 0.2, "test": 0.2},
        output=str(tmp_path / "student"),
    )  # type: ignore[arg-type]
    distill(spec, Storage())
    loose = {"int8_max_f1_loss": 100, "fp16_max_flips": 1.0, "fp16_min_tau": -1.0, "fp16_max_ndcg_loss": 1.0}
    export = ExportSpec(precisions="fp32,fp16,int8", parity=loose)  # type: ignore[arg-type]
    export_bundle(tmp_path / "student", tmp_path / "bundle", export, Storage(), provider="cpu")
    pairs = [(pair["query"], pair["document"]) for pair in make_pairs(seed=9)[:12]]
    wanted = load_student(tmp_path / "student").probabilities(pairs)["relevance"]
    for precision, most in (("fp32", 1e-5), ("fp16", 1e-2), ("int8", 5e-2)):
        served = Student(tmp_path / "bundle", provider="cpu", precision=precision)
        assert np.abs(served.probabilities(pairs)["relevance"] - wanted).max() < most, precision
    found = conform(tmp_path / "bundle", Swapped(Student(tmp_path / "bundle", provider="cpu", precision="fp32")))
    assert found.reason == "query and document are swapped" or found.max_difference < 1e-4
