"""A distillation from end to end on tiny models: what is in the folder, and that a loaded student says what the trained
one said.
"""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from relabel.distill.students.model import load_student, student_digest, student_files
from relabel.distill.students.networks import Embedder, build_module, check_base, make_record
from relabel.distill.students.spec import DistillSpec, StudentManifest, read_student
from relabel.jobs.cli import main
from relabel.manifests.errors import ManifestError, ModelError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.models import ResolvedModel
from relabel.manifests.phi import DEFAULT_PHI
from relabel.manifests.records import plain, readable_json
from relabel.manifests.specs import Columns
from tests.distill.conftest import make_pairs

PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def assert_no_pickle(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            head = file.read_bytes()[:2]
            assert file.suffix not in PICKLE_SUFFIXES, file
            assert head != b"PK", f"{file}: a zip, as torch.save writes"
            assert not (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")), f"{file}: a pickle"


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, encoder_dir: Callable[..., Path], labels_file: Path, pairs_file: Path
) -> tuple[Path, Any, list[str]]:
    """A student with three heads that was trained long enough to have learned its tiny world."""
    from relabel.distill.students.distillation import distill

    output, said = tmp_path_factory.mktemp("student") / "out", []
    spec = DistillSpec(
        name="tiny",
        labels=[{"path": str(labels_file), "pairs": {"path": str(pairs_file)}}],
        gold={"path": str(pairs_file), "grade": "grade"},
        student={"kind": "encoder", "model": str(encoder_dir())},
        train={"epochs": 12, "batch_size": 16, "learning_rate": 5e-3, "max_tokens": 32},
        split={"dev": 0.2, "test": 0.2},
        require={"macro_f1": ">=0.5*teacher"},
        output=str(output),
    )  # type: ignore[arg-type]
    report = distill(spec, Storage(), report=said.append)
    return output, report, said


def test_the_folder_holds_weights_tokenizer_lineage_curves_and_a_card_and_no_pickle(
    trained: tuple[Path, Any, list[str]],
) -> None:
    output, report, _ = trained
    names = {file.name for file in output.iterdir()}
    assert {
        "student.json",
        "backbone.json",
        "model.safetensors",
        "heads.safetensors",
        "tokenizer.json",
        "manifest.json",
    } <= names
    assert {"curves.parquet", "curves.svg", "README.md"} <= names
    assert "checkpoints" not in names
    assert_no_pickle(output)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):  # it would answer by a head of random weights
        AutoModelForSequenceClassification.from_pretrained(output)
    data = (output / "manifest.json").read_bytes()
    assert readable_json(plain(report.manifest)) == data
    assert readable_json(plain(StudentManifest.read(data, "here"))) == data
    manifest = json.loads(data)
    assert manifest["kind"] == "student"
    assert manifest["heads"] == {"relevance": 3, "subject": 5, "attribute": 5}
    assert manifest["files"] == student_files(output)
    assert manifest["labels"][0]["rows_by_status"] == {"ok": 144}


def test_the_student_learns_and_passes_its_gate(trained: tuple[Path, Any, list[str]]) -> None:
    _, report, said = trained
    test = report.manifest.metrics.test
    assert test.judged_by == "gold"
    assert test.student["f1_macro"] > 0.6
    assert test.teacher["f1_macro"] == 1.0
    assert test.to_teacher["kl"] < 0.4
    low, high = test.intervals["accuracy"]
    assert low <= test.student["accuracy"] <= high
    assert test.baselines.constant["accuracy"] < test.student["accuracy"]
    assert test.baselines.random["ndcg@10"] < test.student["ndcg@10"] <= 1
    assert report.has_passed
    assert any(line.startswith("step ") and "dev:" in line for line in said)


def test_curves_tell_every_step_and_the_loss_falls(trained: tuple[Path, Any, list[str]]) -> None:
    output, report, _ = trained
    rows = pq.read_table(output / "curves.parquet").to_pylist()
    losses = [row["value"] for row in rows if (row["split"], row["name"]) == ("train", "loss")]
    assert len(losses) == report.manifest.training.steps
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert {row["name"] for row in rows if row["split"] == "train"} >= {
        "relevance",
        "subject",
        "attribute",
        "consistency",
        "learning_rate",
    }
    assert {row["name"] for row in rows if row["split"] == "dev"} >= {"loss", "f1_macro"}
    assert (output / "curves.svg").read_text().startswith("<?xml")


def test_a_loaded_student_gives_calibrated_rows_that_depend_on_no_batch(trained: tuple[Path, Any, list[str]]) -> None:
    output, report, _ = trained
    record = read_student(output)
    assert record.temperature == report.manifest.temperature
    assert record.temperature["relevance"] != 1.0
    student = load_student(output)
    pairs = [(row["query"], row["document"]) for row in make_pairs()[:17]]
    found = student.probabilities(pairs)
    assert {name: values.shape for name, values in found.items()} == {
        "relevance": (17, 3),
        "subject": (17, 5),
        "attribute": (17, 5),
    }
    np.testing.assert_allclose(found["relevance"].sum(1), 1.0, rtol=1e-6)
    one_by_one = np.concatenate([student.probabilities([pair])["relevance"] for pair in pairs])
    np.testing.assert_allclose(found["relevance"], one_by_one, atol=1e-6)
    tempered = np.exp(student.logits(pairs)["relevance"] / record.temperature["relevance"])
    np.testing.assert_allclose(found["relevance"], tempered / tempered.sum(1, keepdims=True), rtol=1e-5)
    assert student.probabilities([])["relevance"].shape == (0, 3)


def test_the_digest_names_the_student_and_not_its_story(trained: tuple[Path, Any, list[str]], tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    (copy / "README.md").write_text("another story")
    assert student_digest(copy) == student_digest(trained[0])
    record = json.loads((copy / "student.json").read_text())
    (copy / "student.json").write_text(json.dumps({**record, "temperature": {"relevance": 9.0}}))
    assert student_digest(copy) != student_digest(trained[0])


def test_a_folder_without_a_student_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"holds no student\.json"):
        load_student(tmp_path)


def test_hostile_text_opens_no_segment(trained: tuple[Path, Any, list[str]]) -> None:
    student = load_student(trained[0])
    clean, hostile = student.texts.encode([("red shoe", "blue lamp"), ("red shoe", "blue [SEP] lamp [CLS] [PAD]")])
    assert [clean.ids.count(token) for token in (2, 3)] == [1, 2]
    assert [hostile.ids.count(token) for token in (2, 3)] == [1, 2]
    assert hostile.ids.count(0) == 0


def test_the_same_spec_again_has_nothing_to_do_and_another_is_refused(run: Callable[..., Any]) -> None:
    first = run(train={"max_steps": 2})
    assert not first.was_done
    again = run(train={"max_steps": 2})
    assert again.was_done
    assert again.manifest.fingerprint == first.manifest.fingerprint
    left = first.output / "checkpoints"  # as of a call killed while it removed them
    (left / "checkpoint-000002").mkdir(parents=True)
    assert run(train={"max_steps": 2}).was_done
    assert not left.exists()
    with pytest.raises(StaleRunError, match="another spec"):
        run(train={"max_steps": 3})
    assert not run(start="restart", train={"max_steps": 3}).was_done


def test_gold_alone_trains_a_student(run: Callable[..., Any], pairs_file: Path) -> None:
    """The issue's second spec: no labels, gold with weight 1."""
    gold = {"path": str(pairs_file), "grade": "grade", "map": {0: 0, 1: 1, 2: 1}}
    report = run(labels=[], gold=gold, loss={"gold_weight": 1.0}, train={"max_steps": 3})
    assert report.manifest.heads == {"relevance": 2}
    assert report.manifest.metrics.test.judged_by == "gold"
    assert report.manifest.rows == {"all": 144, "labelled": 0, "gold_alone": 144}


def test_a_gate_that_fails_keeps_the_student_and_says_so(run: Callable[..., Any]) -> None:
    report = run(train={"max_steps": 1}, require={"macro_f1": ">=0.999"})
    assert not report.has_passed
    assert not report.manifest.gate.has_passed
    assert "FAILED" in (report.output / "README.md").read_text()
    assert load_student(report.output).record.name == "tiny"


def test_an_earlier_student_is_a_model_to_start_from_with_its_heads(run: Callable[..., Any], tmp_path: Path) -> None:
    """Two stages are two specs: hard labels first, then soft ones."""
    from safetensors.numpy import load_file

    first = run(loss={"targets": "hard"}, train={"max_steps": 3}, output=str(tmp_path / "one"))
    second = run(
        student={"model": str(first.output)},
        train={"max_steps": 1, "learning_rate": 1e-12},
        output=str(tmp_path / "two"),
    )
    heads = [load_file(report.output / "heads.safetensors")["relevance.weight"] for report in (first, second)]
    np.testing.assert_allclose(heads[0], heads[1], atol=1e-8)
    assert second.manifest.model.reference == str(first.output)


def test_early_stopping_keeps_the_best_step(run: Callable[..., Any]) -> None:
    report = run(
        train={
            "epochs": 30,
            "eval_every": 2,
            "learning_rate": 3e-2,
            "early_stopping": {"metric": "loss", "patience": 1},
            "warmup": 0.0,
        }
    )
    training = report.manifest.training
    rows = pq.read_table(report.output / "curves.parquet").to_pylist()
    dev = {row["step"]: row["value"] for row in rows if (row["split"], row["name"]) == ("dev", "loss")}
    assert training.best_step == min(dev, key=dev.__getitem__)
    assert training.steps < 30 * 6
    assert sum(step > training.best_step for step in dev) == 1


# No part of what a student starts from, or answers by, is random in silence, and no row is answered by its batch.


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


PREFIXED = r"tensors are not in its weights, {} among them, and .* such as {}"


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
        (with_code_of_its_own, r"config\.json can't be loaded .*base/config\.json asks .*own\.Own.* at a terminal"),
        (only_an_adapter, r"holds an adapter .*merge_and_unload"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), r"holds an adapter .*merge_and_unload"),
        (configured(quantization_config={"quant_method": "awq"}), r"weights are quantized \(awq\)"),
        (configured(quantization_config={"quant_method": "gptq"}), r"weights are quantized \(gptq\)"),
        (configured(quantization_config={"quant_method": "compressed-tensors"}), r"quantized \(compressed-tensors\)"),
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


def test_a_dry_run_says_each_note_and_what_makes_the_document_on_lines_of_their_own(
    spec: Callable[..., dict[str, Any]], tmp_path: Path, pairs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(pairs_file)
    table = table.rename_columns([{"document": "title"}.get(name, name) for name in table.column_names])
    pq.write_table(table.append_column("description", table["title"]), tmp_path / "gold.parquet")
    gold = {"path": str(tmp_path / "gold.parquet"), "grade": "grade"}
    held = spec(labels=[], gold=gold, loss={"gold_weight": 1.0}, split={"dev": 0.1, "test": 0.1})
    (tmp_path / "student.yaml").write_text(json.dumps(held))
    with pytest.raises(SystemExit) as end:
        main(["distill", str(tmp_path / "student.yaml"), "--dry-run"])
    assert not end.value.code
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    notes = [text for name, text in lines if name == "note"]
    assert [note.split(",")[0] for note in notes][:2] == ["the dev side", "the test side"]
    (document,) = [text for name, text in lines if name == "document"]
    assert "gold.parquet: document from title alone: there is no `body`" in document


def test_a_plan_warns_of_a_side_with_few_queries(spec: Callable[..., dict[str, Any]]) -> None:
    from relabel.distill.students.distillation import plan_student

    def notes(**split: float) -> list[str]:
        planned = plan_student(DistillSpec.model_validate(spec(split=split)), Storage())
        return [note for note in planned.notes if " side, which " in note]

    assert not notes(dev=0.3, test=0.4)
    few = notes(dev=0.1, test=0.1)
    assert [note.split(",")[0] for note in few] == ["the dev side", "the test side"]
    assert "raise split.test" in few[1]
