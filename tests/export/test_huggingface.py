"""A student as transformers and sentence-transformers load it: their own calls give the student's probabilities, and
nothing loads with a head that was not trained.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from relabel.distill.students.model import (
    grade_token_ids,
    load_student,
    render_prompt,
    softmax,
    student_files,
    write_student,
)
from relabel.distill.students.networks import DecoderStudent, EncoderStudent
from relabel.distill.students.spec import read_student
from relabel.export.hub_onnx import rename_data
from relabel.manifests.errors import ModelError
from relabel.manifests.records import sha256_file
from tests.distill.conftest import tiny_encoder, word_tokenizer
from tests.engines.conftest import CHATML, make_tokenizer
from tests.export.conftest import HOSTILE

Relabel = Callable[..., Any]
LONG = [("red shoe", "a red shoe of the size " * number) for number in (1, 3, 9, 30)]
APART = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, student: Path) -> Callable[..., Path]:
    """`made("bert", "cls")`: a student with loud weights, so that answers differ from pair to pair, and with the
    manifest of one that was trained.
    """
    done: dict[tuple[Any, ...], Path] = {}

    def make(kind: str, pooling: Any, grades: int = 3, width: int = 32, *, has_pieces: bool = False) -> Path:
        key = (kind, pooling, grades, width, has_pieces)
        if key in done:
            return done[key]
        tokenizer = word_tokenizer(has_types=kind == "bert")
        if has_pieces:  # BERT's own, which OpenVINO converts
            tokenizer = BertTokenizerFast(vocab=tokenizer.get_vocab(), model_max_length=32)
        backbone = tiny_encoder(kind, len(tokenizer), width)
        for weight in backbone.parameters():
            if weight.dim() > 1:
                weight.data.mul_(20)
        record = read_student(student)
        record = replace(record, pooling=pooling, heads={**record.heads, "relevance": grades})
        module = EncoderStudent(backbone, record.heads, pooling=pooling).eval()
        for head in module.heads.values():
            head.weight.data.mul_(20 if width == 32 else 2)
        path = tmp_path_factory.mktemp("student") / f"{kind}-{pooling}"
        write_student(path, record, module, tokenizer)
        held = json.loads((student / "manifest.json").read_bytes())
        (path / "manifest.json").write_text(json.dumps({**held, "files": student_files(path)}))
        done[key] = path
        return path

    return make


@pytest.fixture(scope="module")
def made_decoder(tmp_path_factory: pytest.TempPathFactory, student: Path) -> Callable[..., Path]:
    """`made_decoder(2)`: a decoder student of two grades, its prompt a chat, with the manifest of a trained one."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(grades: int, width: int = 32) -> Path:
        tokenizer = make_tokenizer(template=CHATML)
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
            eos_token_id=None,
        )  # fmt: skip
        user = "Query: {query}\nDocument: {document}\nGrade:"
        prompt = render_prompt(tokenizer, style="chat", system="", user=user, ending="")
        ids = grade_token_ids(tokenizer, grades, after=prompt[2])
        record = replace(
            read_student(student), kind="decoder", heads={"relevance": grades}, temperature={"relevance": 1.7},
            max_tokens=160, prompt=prompt, grade_ids=ids, packs=True,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("decoder") / "student"
        write_student(path, record, DecoderStudent(Qwen2ForCausalLM(config).eval(), ids), tokenizer)
        held = json.loads((student / "manifest.json").read_bytes())
        (path / "manifest.json").write_text(json.dumps({**held, "files": student_files(path)}))
        return path

    return make


def apart(student: Path, found: np.ndarray) -> float:
    want = load_student(student).probabilities(HOSTILE + LONG)["relevance"]
    assert want.std(0).max() > 0.01  # a student that says one thing would hide a wrong order
    return float(np.abs(found - want).max())


@pytest.mark.parametrize(
    ("kind", "pooling", "library"),
    [
        ("bert", "mean", "sentence-transformers"),
        ("bert", "cls", "transformers"),
        ("deberta-v2", "cls", "sentence-transformers"),
    ],
)
def test_sentence_transformers_gives_the_students_probabilities(
    relabel: Relabel, made: Callable[..., Path], folder: Path, kind: str, pooling: str, library: str
) -> None:
    """Also of what is too long, empty, in another script, or spells a control token."""
    cross_encoders = pytest.importorskip("sentence_transformers")
    student = made(kind, pooling)
    done = relabel("export", str(student), "--to", "hf", "--format", "hf", "--output", "json")
    assert (done.code, done.json["library"]) == (0, library), done
    model = cross_encoders.CrossEncoder("hf", device="cpu", local_files_only=True)
    assert apart(student, model.predict(HOSTILE + LONG, apply_softmax=True)) <= APART


def test_transformers_loads_a_student_that_pools_by_its_first_token_with_its_own_head(
    relabel: Relabel, made: Callable[..., Path], folder: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    student = made("bert", "cls")
    assert relabel("export", str(student), "--to", "hf", "--format", "hf").code == 0
    model, info = AutoModelForSequenceClassification.from_pretrained("hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.id2label == {0: "grade 0", 1: "grade 1", 2: "grade 2"}
    tokenizer = AutoTokenizer.from_pretrained("hf")
    queries, documents = map(list, zip(*HOSTILE, *LONG, strict=True))
    batch = tokenizer(queries, documents, truncation=True, padding=True, return_tensors="pt")
    with torch.inference_mode():
        probs = model.eval()(**batch).logits.softmax(1).numpy()
    assert apart(student, probs) <= APART


RERANK = [
    ("bert", "cls", 2, 32, "transformers"),
    ("bert", "cls", 3, 384, "transformers"),
    ("xlm-roberta", "cls", 3, 384, "transformers"),
    ("bert", "mean", 3, 384, "sentence-transformers"),
    ("modernbert", "cls", 2, 32, "sentence-transformers"),
]


@pytest.mark.parametrize(("kind", "pooling", "grades", "width", "library"), RERANK)
def test_a_rerank_folder_answers_the_expected_grade_with_one_number(
    relabel: Relabel, made: Callable[..., Path], folder: Path, kind: str, pooling: str, grades: int, width: int,
    library: str,
) -> None:  # fmt: skip
    cross_encoders = pytest.importorskip("sentence_transformers")
    student = made(kind, pooling, grades, width)
    done = relabel("export", str(student), "--to", "rerank", "--format", "rerank", "--output", "json")
    assert (done.code, done.json["library"]) == (0, library), done
    assert ("Neither vLLM" in done.err) == (library == "sentence-transformers")
    lineage = json.loads(Path("rerank/relabel.json").read_bytes())["lineage"]
    assert lineage["split"] == json.loads((student / "manifest.json").read_bytes())["split"]
    assert not any("path" in labels for labels in lineage["labels"]), "a folder that is made public names no place"
    model = cross_encoders.CrossEncoder("rerank", device="cpu", local_files_only=True)
    found = model.predict(HOSTILE + LONG)
    want = load_student(student).probabilities(HOSTILE + LONG)["relevance"] @ np.arange(grades) / (grades - 1)
    assert want.std() > 0.01
    assert np.abs(found - want).max() <= APART


SHORT = [(query, document) for query, document in HOSTILE + LONG if len(query) < 40]
"""Queries that fill less than half of the room for texts."""


@pytest.mark.parametrize(
    ("form", "grades", "width", "library"),
    [
        ("rerank", 2, 32, "transformers"),
        ("rerank", 3, 384, "sentence-transformers"),
        ("hf", 3, 32, "transformers"),
    ],
)
def test_a_decoder_answers_as_trained_with_its_prompt_in_the_tokenizer(
    relabel: Relabel, made_decoder: Callable[..., Path], folder: Path, form: str, grades: int, width: int, library: str
) -> None:
    """In sentence-transformers and, where one linear layer says it, in transformers' own class."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    cross_encoders = pytest.importorskip("sentence_transformers")
    student = made_decoder(grades, width)
    done = relabel("export", str(student), "--to", "out", "--format", form, "--output", "json")
    assert (done.code, done.json["library"]) == (0, library), done
    probs = load_student(student).probabilities(SHORT)["relevance"]
    want = probs if form == "hf" else probs @ np.arange(grades) / (grades - 1)
    assert want.std(0).max() > 0.01
    model = cross_encoders.CrossEncoder("out", device="cpu", local_files_only=True)
    assert np.abs(model.predict(SHORT, apply_softmax=form == "hf") - want).max() <= APART
    if library == "transformers":
        tokenizer = AutoTokenizer.from_pretrained("out")
        batch = tokenizer(*map(list, zip(*SHORT, strict=True)), truncation=True, padding=True, return_tensors="pt")
        with torch.inference_mode():
            logits = AutoModelForSequenceClassification.from_pretrained("out").eval()(**batch).logits
        found = logits.softmax(1) if form == "hf" else logits.sigmoid()[:, 0]
        assert np.abs(found.numpy() - want).max() <= APART
        assert tokenizer("lamp", "").input_ids == tokenizer(["lamp"], [""]).input_ids[0]  # not as a text alone


def test_the_score_of_a_rerank_folder_may_be_its_log_odds(
    relabel: Relabel, made: Callable[..., Path], folder: Path
) -> None:
    cross_encoders = pytest.importorskip("sentence_transformers")
    for kind, pooling in (("bert", "cls"), ("bert", "mean")):
        line = ("export", str(made(kind, pooling, 2)), "--to", f"{pooling}-odds", "--format", "rerank")
        assert relabel(*line, "--score", "log-odds-relevant").code == 0
        probs = load_student(made(kind, pooling, 2)).probabilities(SHORT)["relevance"].astype(float)
        found = cross_encoders.CrossEncoder(f"{pooling}-odds", device="cpu", local_files_only=True).predict(SHORT)
        assert found == pytest.approx(np.log(probs[:, 1] / probs[:, 0]), abs=1e-3)
        assert "log-odds of expected grade / 1" in Path(f"{pooling}-odds/README.md").read_text()
    held = json.loads(Path("cls-odds/config.json").read_text())
    assert held["id2label"] == {"0": "log-odds of the expected grade"}
    relabel("export", str(made("bert", "cls", 2)), "--to", "x", "--score", "log-odds-relevant").refused(2, "--score")


def test_openvino_genai_reranks_as_the_student(relabel: Relabel, made: Callable[..., Path], folder: Path) -> None:
    genai, tokenizers = pytest.importorskip("openvino_genai"), pytest.importorskip("openvino_tokenizers")
    openvino = pytest.importorskip("openvino")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    student = made("bert", "cls", 3, 384, has_pieces=True)
    assert relabel("export", str(student), "--to", "rerank", "--format", "rerank").code == 0
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained("rerank"),
        AutoTokenizer.from_pretrained("rerank"),
    )
    example = dict(tokenizer("red shoe", "a red shoe", return_tensors="pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        graph = openvino.convert_model(model.eval(), example_input=example)
    openvino.save_model(graph, "ir/openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(tokenizers.convert_tokenizer(tokenizer), "ir/openvino_tokenizer.xml")
    shutil.copy("rerank/config.json", "ir/config.json")
    documents = ["a red shoe of the size", "the new lamp", "a red shoe of the size " * 30]
    options = {"top_n": 9, "max_length": 32, "INFERENCE_PRECISION_HINT": "f32"}
    found = dict(genai.TextRerankPipeline("ir", "CPU", **options).rerank("red shoe", documents))
    pairs = [("red shoe", document) for document in documents]
    want = load_student(student).probabilities(pairs)["relevance"] @ np.arange(3) / 2
    assert [found[place] for place in range(3)] == pytest.approx(want, abs=APART)


def test_no_auto_class_puts_a_random_head_on_a_folder_of_modules(relabel: Relabel, student: Path, folder: Path) -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification

    assert relabel("export", str(student), "--to", "hf", "--format", "hf").code == 0
    for auto in (AutoModelForSequenceClassification, AutoModel):
        with pytest.raises((OSError, ValueError)):
            auto.from_pretrained("hf", local_files_only=True)


def test_the_card_has_what_the_hub_reads(relabel: Relabel, student: Path, folder: Path) -> None:
    from huggingface_hub import ModelCard

    assert relabel("export", str(student), "--to", "hf", "--format", "hf", "--licence", "Apache-2.0").code == 0
    card = ModelCard.load("hf/README.md")
    assert (card.data.library_name, card.data.license) == ("sentence-transformers", "apache-2.0")
    assert card.data.pipeline_tag == "text-ranking"
    assert card.data.base_model is None  # a folder of this machine is nothing for the Hub
    test = json.loads((student / "manifest.json").read_bytes())["metrics"]["test"]
    found = {one.metric_type: one.metric_value for one in card.data.eval_results or []}
    assert found["accuracy"] == pytest.approx(test["student"]["accuracy"], abs=1e-4)
    assert list(found) == card.data.metrics
    assert "expected_grade = probabilities @ [0, 1, 2]" in card.text
    assert "Without the student's other heads (subject, attribute)" in card.text
    assert str(student) not in card.content
    assert "`pooler.*` MISSING" in card.text, "what transformers prints while it loads, and why it does not matter"


def test_the_same_again_is_nothing_to_do_and_nothing_else_is_replaced(
    relabel: Relabel, student: Path, folder: Path
) -> None:
    line = ("export", str(student), "--to", "hf", "--format", "hf")
    assert relabel(*line).code == 0
    assert relabel(*line).code == 10
    assert relabel(*line, "--done-ok").code == 0
    relabel(*line, "--licence", "MIT").refused(
        3, 'hf: holds another export for these libraries (licence: was null, is "MIT")', "--replace"
    )
    assert relabel(*line, "--licence", "MIT", "--replace").code == 0
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("years of work")
    relabel("export", str(student), "--to", "mine", "--format", "hf", "--replace").refused(
        3, "mine: holds something that is no export for these libraries: there is no "
    )
    assert (folder / "mine/thesis.txt").is_file()


def test_what_no_class_there_can_say_is_refused(
    relabel: Relabel, student: Path, made: Callable[..., Path], folder: Path
) -> None:
    shutil.copytree(student, "logistic")
    record = json.loads(Path("logistic/student.json").read_text())
    Path("logistic/student.json").write_text(json.dumps({**record, "kind": "logistic"}))
    relabel("export", "logistic", "--to", "hf", "--format", "hf").refused(3, "kind logistic", "bundle")
    line = ("export", str(student), "--to", "hf", "--format", "hf")
    relabel(*line, "--triton").refused(2, "--triton belongs to bundles")
    relabel(*line, "--precisions", "int8-static").refused(3, "--precisions int8-static", "fp32, fp16, int8")
    relabel("export", str(made("bert", "cls", 4)), "--to", "hf", "--format", "rerank").refused(3, "4 grades", "serve")
    assert not (folder / "hf").exists()


def test_a_folder_that_answers_otherwise_when_it_is_loaded_is_refused_and_not_kept(
    relabel: Relabel, made: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one would be whose tokenizer these libraries read in a way that we do not foresee."""
    from transformers import PreTrainedTokenizerFast

    read = PreTrainedTokenizerFast.__call__

    def read_otherwise(self: Any, *texts: Any, **options: Any) -> Any:
        if options.get("padding"):  # a student pads by itself
            options["padding_side"] = "left"
        return read(self, *texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", read_otherwise)
    for form in ("hf", "rerank"):
        done = relabel("export", str(made("bert", "cls")), "--to", form, "--format", form)
        done.refused(5, "loaded again by transformers", "1e-05 is the limit", "Nothing is kept")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_where_sentence_transformers_is_not_installed_that_is_said(
    relabel: Relabel, made: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch, pooling: str
) -> None:
    from importlib import metadata

    from relabel.export import hub_parity

    def version(name: str) -> str:
        if name == "sentence-transformers":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(hub_parity, "version", version)
    done = relabel("export", str(made("bert", pooling)), "--to", "hf", "--format", "hf", "--output", "json")
    assert done.code == 0, done
    transformers, other, graph = done.json["checks"]
    assert "from the student" in transformers
    assert "from the student" in graph
    assert other == "not checked with sentence-transformers: not installed (pip install 'relabel-ir[hf]')"
    checks = json.loads(Path("hf/relabel.json").read_bytes())["checks"]
    assert [check["library"] for check in checks] == ["transformers", "sentence-transformers", "onnxruntime"]
    assert checks[1]["version"] is None


def test_pairs_to_compare_on_may_be_named_and_are_made_where_the_own_are_gone(
    relabel: Relabel, made: Callable[..., Path], folder: Path, graded_file: Path
) -> None:
    student = made("bert", "cls")
    done = relabel("export", str(student), "--to", "named", "--format", "hf", "--pairs", str(graded_file))
    assert done.code == 0, done
    assert "24 of pairs.parquet" in done.err
    own = graded_file.with_name("own.parquet")
    pq.write_table(pq.read_table(graded_file).rename_columns({"query_id": "qid", "document": "text"}), own)
    line = ("export", str(student), "--to", "own", "--format", "hf", "--pairs", str(own))
    relabel(*line).refused(3, "--columns query_id=", "--columns document=")
    done = relabel(*line, "--columns", "query_id=qid,document=text")
    assert done.code == 0, done
    assert "24 of own.parquet" in done.err
    shutil.copytree(student, "moved")
    manifest = json.loads(Path("moved/manifest.json").read_bytes())
    manifest["spec"]["labels"][0]["path"] = "gone.parquet"
    Path("moved/manifest.json").write_text(json.dumps(manifest))
    done = relabel("export", "moved", "--to", "hf", "--format", "hf")
    assert done.code == 0, done
    assert "pairs made here alone, since the student's own can't be read" in done.err


GRAPHS = [
    ("hf", "bert", "cls", 3, 32),
    ("rerank", "bert", "cls", 3, 384),
    ("hf", "bert", "mean", 3, 32),
    ("rerank", "modernbert", "mean", 2, 32),
]


@pytest.mark.parametrize(("form", "kind", "pooling", "grades", "width"), GRAPHS)
def test_the_folder_holds_the_students_own_graph(
    relabel: Relabel, made: Callable[..., Path], folder: Path, form: str, kind: str, pooling: str, grades: int,
    width: int,
) -> None:  # fmt: skip
    """Where sentence-transformers looks for it, with the names of inputs and outputs that optimum reads, alone and
    padded together.
    """
    onnxruntime = pytest.importorskip("onnxruntime")
    student = made(kind, pooling, grades, width)
    done = relabel("export", str(student), "--to", "out", "--format", form, "--output", "json")
    assert done.code == 0, done
    is_whole = done.json["library"] == "transformers"
    path = folder / "out" / ("onnx/model.onnx" if is_whole else "0_Transformer/onnx/model.onnx")
    assert f"`{path.relative_to(folder / 'out')}` is this student's graph" in (folder / "out/README.md").read_text()
    assert done.json["graphs"] == {str(path.relative_to(folder / "out")): sha256_file(path)}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {one.name for one in session.get_inputs()}
    types = {"token_type_ids"} if kind == "bert" else set()
    assert inputs == {"input_ids", "attention_mask"} | types
    assert [one.name for one in session.get_outputs()] == ["logits" if is_whole else "last_hidden_state"]
    assert re.search(r"onnxruntime .*: at most \S+ from the student", done.json["checks"][2])
    if not is_whole:
        return
    tokenizer = AutoTokenizer.from_pretrained(path.parents[1])
    want = load_student(student).probabilities(HOSTILE + LONG)["relevance"]
    if form == "rerank":
        want = want @ np.arange(grades)[:, None] / (grades - 1)
    for size in (1, len(want)):
        parts = []
        for start in range(0, len(want), size):
            queries, documents = map(list, zip(*(HOSTILE + LONG)[start : start + size], strict=True))
            batch = tokenizer(queries, documents, truncation=True, padding=True, return_tensors="np")
            (logits,) = session.run(None, dict(batch))
            parts.append(softmax(logits) if form == "hf" else 1 / (1 + np.exp(-logits)))
        assert np.abs(np.concatenate(parts) - want).max() <= APART


def test_smaller_graphs_pass_the_gates_of_bundles(relabel: Relabel, student: Path, folder: Path) -> None:
    line = ("export", str(student), "--to", "out", "--format", "hf", "--precisions", "fp16,int8", "--output", "json")
    done = relabel(*line)
    assert done.code == 0, done
    names = ["model.onnx", "model_fp16.onnx", "model_quantized.onnx"]
    assert list(done.json["graphs"]) == [f"0_Transformer/onnx/{name}" for name in names]
    parity = json.loads(Path("out/relabel.json").read_bytes())["parity"]
    assert [one["precision"] for one in parity] == ["fp16", "int8"]
    assert all(one["has_passed"] for one in parity)
    assert parity[1]["by_batch_size"]["7"]["max_abs"] > parity[0]["by_batch_size"]["7"]["max_abs"] > 0
    assert parity[1]["by_batch_size"]["7"]["judged_by"] == "gold"
    assert 'model_kwargs={"file_name": "model_quantized.onnx"}' in Path("out/README.md").read_text()
    assert relabel(*line).code == 10
    relabel(*line[:-4]).refused(3, "holds another export")


def test_a_graph_beyond_its_gate_is_not_kept(
    relabel: Relabel, made: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relabel.export import hub_onnx

    def write_ruined(_student: Any, full: Path, target: Path, _precision: str) -> None:
        graph = onnx.load(full)
        for tensor in graph.graph.initializer:
            if tensor.name.endswith("weight_KD"):
                tensor.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(tensor), tensor.name))
        onnx.save(graph, target)

    onnx = pytest.importorskip("onnx")
    monkeypatch.setattr(hub_onnx, "write_smaller", write_ruined)
    line = ("export", str(made("bert", "cls")), "--to", "out", "--format", "hf")
    relabel(*line, "--precisions", "int8").refused(5, "int8", "Nothing is kept")
    assert list(folder.iterdir()) == []


def test_a_decoder_has_a_graph_where_one_is_asked_for(
    relabel: Relabel, made_decoder: Callable[..., Path], folder: Path
) -> None:
    line = ("export", str(made_decoder(2)), "--format", "rerank", "--output", "json")
    assert relabel(*line, "--to", "plain").json["graphs"] == {}
    done = relabel(*line, "--to", "graphed", "--precisions", "fp32")
    assert done.code == 0, done
    assert list(done.json["graphs"]) == ["onnx/model.onnx"]
    assert "onnxruntime" in done.json["checks"][2]


def test_a_model_that_cannot_be_traced_is_exported_without_a_graph(
    relabel: Relabel, made: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relabel.export import hub_onnx

    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("torch.onnx can't trace this encoder")

    monkeypatch.setattr(hub_onnx, "trace_onnx", refuse)
    line = ("export", str(made("bert", "cls")), "--format", "hf")
    done = relabel(*line, "--to", "out")
    assert done.code == 0, done
    assert "without a graph (onnx/): torch.onnx can't trace this encoder" in done.err
    assert not Path("out/onnx").exists()
    assert relabel(*line, "--to", "named", "--precisions", "fp32").code == 4
    assert not Path("named").exists()


def test_weights_of_a_graph_above_2_gb_lie_where_optimum_fetches_them(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    values = np.arange(600, dtype=np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [600])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [600])],
        [onnx.numpy_helper.from_array(values, "w")],
    )
    path = tmp_path / "model.onnx"
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save_model(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    rename_data(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx_data"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": values})[0], 2 * values)
