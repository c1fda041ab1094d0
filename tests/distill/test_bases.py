"""No part of what a student starts from, or answers by, is random in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from distill.students.bases import check_base
from distill.students.embedding import Embedder
from distill.students.specs import DistillSpec
from distill.students.students import load_student
from manifests.errors import ModelError
from manifests.models.references import ResolvedModel

Damage = Callable[[Path], Any]


def renamed(change: Callable[[str], str | None]) -> Damage:
    def go(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        names = {name: change(name) for name in held}
        kept = {new: held[name] for name, new in names.items() if new}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return go


def configured(**changes: Any) -> Damage:
    def go(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**held, **changes}))

    return go


def saved_as(name: str, **changes: Any) -> Damage:
    """By another class, from the same config."""

    def go(folder: Path) -> None:
        torch.manual_seed(1)
        config = tf.AutoConfig.from_pretrained(folder)
        for key, value in changes.items():
            setattr(config, key, value)
        getattr(tf, name)(config).save_pretrained(folder)

    return go


BEHIND = r"tensors are not in its weights, {} among them; they carry the prefix '{}'"


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("encoder", renamed("module.{}".format), BEHIND.format(r"embeddings\..+", "module.")),
        ("encoder", renamed("_orig_mod.bert.{}".format), BEHIND.format(r"embeddings\..+", "_orig_mod.bert.")),
        ("decoder", renamed("module.{}".format), BEHIND.format(r"lm_head.+", "module.")),
        (
            "encoder",
            renamed(lambda name: name if "layer.1.output.dense.b" not in name else None),
            "1 tensors are not in",
        ),
        ("encoder", configured(num_hidden_layers=1), r"have no place .*encoder\.layer\.1\."),
        ("encoder", configured(num_hidden_layers=3), r"tensors are not in .*encoder\.layer\.2\."),
        ("encoder", configured(intermediate_size=64), "another shape than config.json says"),
        ("encoder", lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "its weights can't be loaded"),
        ("encoder", saved_as("BertForMaskedLM"), None),
        ("encoder", saved_as("BertForSequenceClassification"), None),
        (
            "decoder",
            saved_as("Qwen2ForSequenceClassification", tie_word_embeddings=False, pad_token_id=0),
            r"1 tensors are not .*lm_head\.weight .*a classifier has no lm_head",
        ),
        ("decoder", saved_as("Qwen2ForSequenceClassification", pad_token_id=0), None),
        ("decoder", configured(model_type="llama"), "tensors of layers in its weights have no place"),
        ("decoder", saved_as("Qwen2Model"), None),
    ],
)
def test_a_base_whose_tensors_are_missing_is_refused_before_it_is_trained(
    kind: str,
    damage: Damage,
    words: str | None,
    spec: Callable[..., dict[str, Any]],
    encoder_dir: Callable[..., Path],
    decoder_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(encoder_dir() if kind == "encoder" else decoder_dir(), folder)
    damage(folder)
    train = {"max_tokens": 32 if kind == "encoder" else 200}
    values = DistillSpec.model_validate(spec(student={"kind": kind, "model": str(folder)}, train=train))
    if words is None:
        check_base(values, ResolvedModel(folder, "0", "the-model"))
        return
    with pytest.raises(ModelError, match=words):
        check_base(values, ResolvedModel(folder, "0", "the-model"))
    if kind == "encoder":
        with pytest.raises(ModelError, match=words):
            Embedder(folder, max_tokens=None, batch_tokens=None, device="cpu")
        record = {"version": 1, "kind": kind, "name": "a", "heads": {"relevance": 2}, "max_tokens": 8}
        (folder / "student.json").write_text(json.dumps({**record, "columns": {}, "temperature": {}}))
        with pytest.raises(ModelError, match=words):
            load_student(folder)


def test_distill_says_so(run: Callable[..., Any], encoder_dir: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(encoder_dir(), tmp_path / "base")
    renamed("module.{}".format)(tmp_path / "base")
    with pytest.raises(ModelError, match=r"prefix 'module\.'"):
        run(student={"model": str(tmp_path / "base")})
    assert not (tmp_path / "out" / "student.json").exists()
