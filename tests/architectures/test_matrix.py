"""Bases as they come: each architecture of the table is distilled at the longest text that it can read, exported in
three precisions and answered by `load.py` as by the student; `conform` finds that its folder for rerank endpoints
answers as the bundle. The next architecture is one line here and one of `docs/distill.md`. Tiny random weights,
tokenizers made here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec
from relabel.export.conform import conform
from relabel.export.exporting import export_bundle
from relabel.export.huggingface import export_to_hub_folder
from relabel.export.loader import Student
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import Storage
from tests.distill.conftest import label_rows, make_pairs, softened, word_tokenizer, write_labels
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
OFFSET = {**SIZES, "max_position_embeddings": 65, "type_vocab_size": 1}
"""Positions of tokens begin after that of the padding token, 0 here."""
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None}
LONGEST = {"encoder": 64, "decoder": 256}
"""Of a text, tokens."""
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
    "roberta": Base("encoder", "Roberta", OFFSET, False),
    "xlm-roberta": Base("encoder", "XLMRoberta", OFFSET),
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


def write_base(base: Base, folder: Path, *, spread: float = 1.0) -> Path:
    """A model's directory; `spread` makes its weights so many times as large, so that answers differ more."""
    import torch
    import transformers

    torch.manual_seed(3)
    is_decoder = base.kind == "decoder"
    tokenizer = make_tokenizer(template=base.template) if is_decoder else word_tokenizer(has_types=base.has_types)
    tokenizer.model_max_length = 10**30  # as where no file says it
    config = getattr(transformers, f"{base.name}Config")(vocab_size=len(tokenizer), **base.config)
    tokenizer.save_pretrained(folder)
    model = getattr(transformers, f"{base.name}{'ForCausalLM' if is_decoder else 'Model'}")(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(spread)
    model.save_pretrained(folder)
    return folder


EVERY_DAY = ("distilbert", "gemma2 without a system role")
"""Each needed something of its own; the others are in `make full`."""


class Reranker:
    """A folder for rerank endpoints, as sentence-transformers loads it, for a server."""

    api = "made here"

    def __init__(self, folder: Path) -> None:
        self._model = pytest.importorskip("sentence_transformers").CrossEncoder(str(folder), device="cpu")

    def scores(self, query: str, documents: list[str]) -> np.ndarray:
        return np.asarray(self._model.predict([(query, document) for document in documents]), float)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.full) for name in BASES]
)
def test_an_architecture_goes_the_whole_way(name: str, tmp_path: Path, pairs_file: Path) -> None:
    base, rows = BASES[name], label_rows(make_pairs(), has_nodes=False)
    two = [{**row, "grade": min(row["grade"], 1), "probs": softened(min(row["grade"], 1), 2)} for row in rows]
    labels = write_labels(tmp_path / "labels.parquet", two)
    spec = DistillSpec(
        name="tiny",
        labels=[{"path": str(labels), "pairs": {"path": str(pairs_file)}}],
        student={"kind": base.kind, "model": str(write_base(base, tmp_path / "base"))},
        train={"max_steps": 2, "batch_size": 8, "learning_rate": 1e-3, "max_tokens": LONGEST[base.kind]},
        split={"dev": 0.2, "test": 0.2},
        output=str(tmp_path / "student"),
    )  # type: ignore[arg-type]
    longer = spec.model_copy(update={"train": spec.train.model_copy(update={"max_tokens": LONGEST[base.kind] + 1})})
    with pytest.raises(ConfigError, match=f"reads at most {LONGEST[base.kind]} tokens"):
        distill(longer, Storage())
    distill(spec, Storage())
    loose = {"int8_max_f1_loss": 100, "fp16_max_flips": 1.0, "fp16_min_tau": -1.0, "fp16_max_ndcg_loss": 1.0}
    export = ExportSpec(precisions="fp32,fp16,int8", parity=loose)  # type: ignore[arg-type]
    export_bundle(tmp_path / "student", tmp_path / "bundle", export, Storage(), provider="cpu")
    pairs = [*((pair["query"], pair["document"]) for pair in make_pairs(seed=9)[:12]), ("red shoe", "a shoe " * 999)]
    student = load_student(tmp_path / "student")
    wanted = student.probabilities(pairs)["relevance"]
    assert max(len(row.ids) for row in student.texts.encode(pairs)) == LONGEST[base.kind]
    for precision, most in (("fp32", 1e-5), ("fp16", 1e-2), ("int8", 5e-2)):
        served = Student(tmp_path / "bundle", provider="cpu", precision=precision)
        assert np.abs(served.probabilities(pairs)["relevance"] - wanted).max() < most, precision
    for form in ("hf", "rerank"):
        export_to_hub_folder(
            tmp_path / "student", tmp_path / form, form, storage=Storage(), licence=None, is_replacing=False
        )
    found = conform(tmp_path / "bundle", Reranker(tmp_path / "rerank"))
    assert found.verdict == "equal", found


def test_the_page_on_distilling_lists_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/distill.md").read_text(encoding="utf-8")
    for kind in LONGEST:
        assert f"| {kind} | {', '.join(name for name, base in BASES.items() if base.kind == kind)} |" in page
