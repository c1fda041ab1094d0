"""No part of what a student starts from, or answers by, is random in silence, and no row is answered by its batch."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from relabel.distill.students.bases import Embedder, build_module, check_base, make_record
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec
from relabel.manifests.errors import ModelError
from relabel.manifests.labels import DEFAULT_PHI
from relabel.manifests.models import ResolvedModel
from relabel.manifests.specs import Columns

Damage = Callable[[Path], Any]


def renamed(change: Callable[[str], str | None]) -> Damage:
    def go(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        names = {name: change(name) for name in held}
        kept = {new: held[name] for name, new in names.items() if new}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return go


def with_tensor(name: str) -> Damage:
    def go(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        save_file({**held, name: torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})

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


PREFIXED = r"tensors are not in its weights, {} among them; they carry the prefix '{}'"


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("encoder", renamed("module.{}".format), PREFIXED.format(r"embeddings\..+", "module.")),
        ("decoder", renamed("module.{}".format), PREFIXED.format(r"lm_head.+", "module.")),
        (
            "encoder",
            renamed(lambda name: name if "layer.1.output.dense.b" not in name else None),
            "1 tensors are not in",
        ),
        ("encoder", configured(num_hidden_layers=1), r"have no place .*encoder\.layer\.1\."),
        ("encoder", configured(intermediate_size=64), "another shape than config.json says"),
        ("encoder", lambda folder: (folder / "model.safetensors").write_bytes(b"1234"), "its weights can't be loaded"),
        ("encoder", saved_as("BertForMaskedLM"), None),
        ("decoder", with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq"), None),
        (
            "decoder",
            saved_as("Qwen2ForSequenceClassification", tie_word_embeddings=False, pad_token_id=0),
            r"1 tensors are not .*lm_head\.weight .*a classifier has no lm_head",
        ),
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


def with_code_of_its_own(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    code = "import transformers, pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    (folder / "own.py").write_text(code + "class Own(transformers.PretrainedConfig):\n    model_type = 'own'\n")


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def without_padding(folder: Path) -> None:
    held = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**held, "pad_token": None}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (with_code_of_its_own, r"config\.json can't be loaded"),
        (only_an_adapter, r"holds an adapter .*merge_and_unload"),
        (without_padding, "no padding token"),
    ],
)
def test_a_base_that_no_student_can_start_from_is_refused_by_what_it_is(
    damage: Damage,
    words: str,
    run: Callable[..., Any],
    encoder_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`y` from a pipe does not run a model's own code."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(encoder_dir(), tmp_path / "base")
    damage(tmp_path / "base")
    with pytest.raises(ModelError, match=words):
        run(student={"model": str(tmp_path / "base")})
    assert not list(tmp_path.rglob("ran"))


SHAPES: dict[str, dict[str, Any]] = {
    "convbert": {"embedding_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "mamba": {"num_hidden_layers": 2},
    "opt": {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
}


@pytest.mark.parametrize(
    ("kind", "model_type", "batching", "is_refused"),
    [
        ("encoder", "convbert", None, True),
        ("decoder", "mamba", "packed", True),
        ("decoder", "opt", "packed", True),
        ("decoder", "opt", "padded", False),
        ("decoder", "qwen2", "packed", False),
    ],
)
def test_a_model_that_mixes_the_rows_of_a_batch_is_refused(
    kind: str,
    model_type: str,
    batching: str | None,
    is_refused: bool,
    spec: Callable[..., dict[str, Any]],
    encoder_dir: Callable[..., Path],
    decoder_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder, likeness = tmp_path / "base", encoder_dir() if kind == "encoder" else decoder_dir()
    rows = json.loads((likeness / "config.json").read_text())["vocab_size"]
    config = tf.AutoConfig.for_model(model_type, vocab_size=rows, hidden_size=32, **SHAPES[model_type])
    torch.manual_seed(5)
    auto = tf.AutoModel if kind == "encoder" else tf.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    for file in (*likeness.glob("tokenizer*"), *likeness.glob("chat_template*")):
        shutil.copy(file, folder)
    student = {"kind": kind, "model": str(folder)} | ({} if batching is None else {"batching": batching})
    values = DistillSpec.model_validate(spec(student=student, train={"max_tokens": 64 if kind == "encoder" else 200}))
    base = check_base(values, ResolvedModel(folder, "0", "the-model"))
    record = make_record(values, base, {"relevance": 3}, DEFAULT_PHI, Columns())
    if not is_refused:
        build_module(values, base, record)
        return
    says = r"its answer to a row changes with the other rows .*--batch-tokens"
    with pytest.raises(ModelError, match=f"the-model.*{says}"):
        build_module(values, base, record)
    if kind == "encoder":
        with pytest.raises(ModelError, match=says):
            Embedder(folder, max_tokens=None, batch_tokens=None, device="cpu")
