"""Tokenizers as bases have them: whatever one says of padding, cutting and inputs, a student's folder is loaded as it
was trained, and all that is made of it answers as it does, short and long pairs together: its score, its bundle, and
its folders in transformers and in sentence-transformers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec
from relabel.export.loader import Student
from relabel.manifests.files import Storage
from tests.architectures.test_matrix import BASES, DECODER, OFFSET, SIZES, Base, write_base
from tests.distill.conftest import label_rows, make_pairs, softened, write_labels

Relabel = Callable[..., Any]
APART = 1e-5
PAIRS = [*((row["query"], row["document"]) for row in make_pairs(seed=9)[:20]), ("red shoe", "a shoe " * 99)]
PAD = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}


class Kind(NamedTuple):
    """A base.

    Args:
        base: its architecture.
        config: keys of its tokenizer_config.json; None takes one out.
        tokenizer: keys of its tokenizer.json.
    """

    base: Base
    config: Mapping[str, Any] = MappingProxyType({})
    tokenizer: Mapping[str, Any] = MappingProxyType({})


BERT = Base("encoder", "Bert", SIZES)
KINDS = {
    "pads on the left": Kind(BERT, {"padding_side": "left"}),
    "cuts on the left": Kind(BERT, {"truncation_side": "left"}),
    "pads and cuts at its own lengths": Kind(
        BERT,
        tokenizer={
            "padding": {"strategy": {"Fixed": 96}, "direction": "Left", **PAD},
            "truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 2},
        },
    ),
    "cuts on the left by its tokenizer.json alone": Kind(
        BERT,
        tokenizer={"truncation": {"direction": "Left", "max_length": 9, "strategy": "OnlyFirst", "stride": 0}},
    ),
    "calls of others": Kind(
        BERT,
        {"max_length": 8, "stride": 3, "truncation_strategy": "only_first", "pad_to_multiple_of": 16, "padding": True},
    ),
    "a chat template": Kind(BERT, {"chat_template": "{% for m in messages %}{{ m['content'] }} lamp {% endfor %}"}),
    "types of a BERT for a RoBERTa of one": Kind(
        Base("encoder", "Roberta", OFFSET), {"model_input_names": None, "tokenizer_class": "BertTokenizer"}
    ),
    "no token types": Kind(BERT, {"model_input_names": ["input_ids", "attention_mask"]}),
    "only input ids are named": Kind(BERT, {"model_input_names": ["input_ids"]}),
    "no length": Kind(BERT, {"model_max_length": None}),
    "modernbert that pads on the left": Kind(BASES["modernbert"], {"padding_side": "left"}),
    "decoder that pads and cuts on the left": Kind(
        Base("decoder", "Qwen2", DECODER), {"padding_side": "left", "truncation_side": "left"}
    ),
}
EVERY_DAY = ("pads on the left", "types of a BERT for a RoBERTa of one")


def changed(file: Path, changes: Mapping[str, Any]) -> None:
    values = json.loads(file.read_bytes()) | dict(changes)
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None or key == "padding"}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pairs_file: Path) -> Callable[[str], Path]:
    """`trained(kind)`: a student of a base of that kind, which says something else of each pair."""
    students: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name in students:
            return students[name]
        kind, folder = KINDS[name], tmp_path_factory.mktemp("kind")
        base = write_base(kind.base, folder / "base", spread=8.0)
        changed(base / "tokenizer_config.json", kind.config)
        changed(base / "tokenizer.json", kind.tokenizer)
        rows = label_rows(make_pairs(), has_nodes=False)
        two = [{**row, "grade": min(row["grade"], 1), "probs": softened(min(row["grade"], 1), 2)} for row in rows]
        labels = write_labels(folder / "labels.parquet", two)
        is_encoder = kind.base.kind == "encoder"
        # a loud head, so that answers differ from pair to pair
        own = {"max_tokens": 48, "head_learning_rate": 0.1} if is_encoder else {"max_tokens": 200}
        spec = DistillSpec(
            name="tiny",
            labels=[{"path": str(labels), "pairs": {"path": str(pairs_file)}}],
            student={"kind": kind.base.kind, "model": str(base), **({"pooling": "cls"} if is_encoder else {})},
            train={"max_steps": 4, "batch_size": 8, "learning_rate": 3e-3, **own},
            split={"dev": 0.2, "test": 0.2},
            output=str(folder / "student"),
        )  # type: ignore[arg-type]
        distill(spec, Storage())
        students[name] = folder / "student"
        return students[name]

    return train


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.full) for name in KINDS]
)
def test_all_that_is_made_of_a_student_answers_as_it_does(
    relabel: Relabel, trained: Callable[[str], Path], folder: Path, name: str
) -> None:
    cross_encoders = pytest.importorskip("sentence_transformers")
    path = trained(name)
    student = load_student(path)
    want = student.probabilities(PAIRS)["relevance"]
    alone = np.concatenate([student.probabilities([pair])["relevance"] for pair in PAIRS])
    assert np.abs(want - alone).max() <= APART
    assert want.std(0).max() > 1e-3
    done = relabel("export", str(path), "--to", "bundle", "--precisions", "fp32", "--set", "parity.min_pairs=8")
    assert done.code == 0, done
    assert np.abs(Student(folder / "bundle", provider="cpu").probabilities(PAIRS)["relevance"] - want).max() <= APART
    for form in ("hf", "rerank"):
        done = relabel("export", str(path), "--to", form, "--format", form, "--output", "json")
        assert done.code == 0, done
        assert all("from the student" in check for check in done.json["checks"]), done.json
        model = cross_encoders.CrossEncoder(form, device="cpu", local_files_only=True)
        answers = model.predict(PAIRS, apply_softmax=form == "hf", batch_size=5, show_progress_bar=False)
        assert np.abs(answers - (want if form == "hf" else want[:, 1])).max() <= APART, form
        raw = json.loads(next(Path(form).rglob("tokenizer.json")).read_bytes())
        assert raw["padding"] is None
        assert raw["truncation"] is None
