"""A bundle from a student: named outputs, calibrated probabilities, a loader that needs nothing, parity on real pairs,
Triton's view.
"""

import ast
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.distill.students.model import load_student, student_digest
from relabel.export import loader
from relabel.export.bundles import open_bundle
from relabel.export.exporting import FILES, IMPORTED
from relabel.export.loader import BundleError, Student, choose_model, open_session
from tests.export.conftest import HOSTILE

LOADING = """
import json, time
start = time.perf_counter()
from load import Student
student = Student(BUNDLE, provider="cpu", threads=1)
pairs = [tuple(pair) for pair in json.loads(open(sys.argv[1], encoding="utf-8").read())]
found = student.probabilities(pairs)
print(json.dumps({name: values.tolist() for name, values in found.items()}))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_the_folder_is_sealed_and_says_what_it_is(bundle: Path, student: Path) -> None:
    held = open_bundle(bundle)
    names = {file.path for file in held.all_files}
    assert {"model.onnx", "model.fp16.onnx", "model.int8.onnx"} <= names
    assert {"load.py", "tokenizer.json", "README.md"} <= names
    facts = held.facts
    assert facts["heads"] == {"relevance": 3, "subject": 5, "attribute": 5}
    assert facts["grades"] == 3
    assert facts["phi"] is not None
    assert facts["inputs"]["max_tokens"] == 32
    assert facts["lineage"]["student"]["digest"] == student_digest(student)
    assert len(facts["lineage"]["labels"][0]["sha256"]) == 64
    assert facts["licence"]["bundle"] == "Apache-2.0"
    assert [model["precision"] for model in facts["models"]] == list(FILES)
    assert facts["made_by"]["models"]["int8"]["quantized"] == 12  # two layers of six matrices; the heads stay float
    written, text = (bundle / "load.py").read_text(), Path(loader.__file__).read_text()
    before, _, after = text.partition(IMPORTED)
    assert after
    assert written.startswith(before)
    assert written.endswith(after)
    nodes = [node for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in nodes for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names == {
        "numpy",
        "onnxruntime",
        "openvino",
        "tokenizers",
    }


def test_every_head_is_a_named_output_with_any_batch_and_length(bundle: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(bundle / "model.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == [
        "relevance", "subject", "attribute", "relevance_logits", "subject_logits", "attribute_logits",
    ]  # fmt: skip
    for rows, tokens in ((1, 1), (1, 32), (5, 3), (33, 17)):
        ids = np.full((rows, tokens), 7, dtype=np.int64)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        relevance, subject = session.run(["relevance", "subject"], feed)
        assert (relevance.shape, subject.shape) == ((rows, 3), (rows, 5))
        np.testing.assert_allclose(relevance.sum(1), 1.0, rtol=1e-5)


def test_no_model_file_holds_shapes_of_its_results(bundle: Path, decoder_bundle: Path) -> None:
    """Notes of symbolic shapes make onnxruntime plan memory before it knows a size, which costs time and memory."""
    import onnx

    files = [*bundle.glob("*.onnx"), *decoder_bundle.glob("*.onnx")]
    assert len(files) > len(FILES)
    for file in files:
        graph = onnx.load(str(file), load_external_data=False).graph
        assert len(graph.value_info) == 0, file.name
        data = file.read_bytes()
        assert not [word for word in (b"site-packages", b'File "', b"stack_trace") if word in data], file.name
        assert [dimension.dim_param for dimension in graph.input[0].type.tensor_type.shape.dim] == [
            "batch",
            "sequence",
        ], file.name
        onnx.checker.check_model(str(file))


def test_logits_in_the_graph_are_the_students_and_probabilities_are_their_tempered_softmax(
    bundle: Path, student: Path
) -> None:
    loaded, ours = load_student(student), Student(bundle, provider="cpu")
    assert loaded.record.temperature["relevance"] != 1.0
    batch = ours.encoder.collate(ours.encoder.encode(HOSTILE))
    probs, logits = ours.session.run(["relevance", "relevance_logits"], batch)
    np.testing.assert_allclose(logits, loaded.logits(HOSTILE)["relevance"], atol=1e-4)
    tempered = np.exp(logits / loaded.record.temperature["relevance"])
    np.testing.assert_allclose(probs, tempered / tempered.sum(1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_loader_alone_says_what_the_student_says_of_hostile_texts(
    kind: str, request: pytest.FixtureRequest, deployed: Callable[..., Any], tmp_path: Path
) -> None:
    path = request.getfixturevalue("student" if kind == "encoder" else "decoder")
    made = request.getfixturevalue("bundle" if kind == "encoder" else "decoder_bundle")
    (tmp_path / "pairs.json").write_text(json.dumps(HOSTILE))
    done = deployed(made, LOADING, str(tmp_path / "pairs.json"))
    assert done.returncode == 0, done.stderr
    found, modules = map(json.loads, done.stdout.splitlines())
    for name, wanted in load_student(path).probabilities(HOSTILE).items():
        np.testing.assert_allclose(found[name], wanted, atol=1e-4)
    assert not {"torch", "transformers", "relabel"} & set(modules)


def test_a_deployed_loader_gives_rows_for_nothing_and_mends_half_a_surrogate(bundle: Path) -> None:
    ours = Student(bundle, provider="cpu")
    assert ours.probabilities([])["subject"].shape == (0, 5)
    assert np.isfinite(ours.probabilities([("red \ud800", "shoe \udfff")])["relevance"]).all()
    assert ours.grades(HOSTILE).shape == (len(HOSTILE),)


def test_answers_do_not_hang_on_the_company_in_fp32(bundle: Path) -> None:
    ours = Student(bundle, provider="cpu", precision="fp32")
    alone = ours.probabilities(HOSTILE, batch_tokens=1)["relevance"]
    np.testing.assert_allclose(ours.probabilities(HOSTILE)["relevance"], alone, atol=1e-6)


def test_a_loader_refuses_what_is_not_the_bundle_that_was_made(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    Student(copy, provider="cpu", check_digests=False)
    with pytest.raises(BundleError, match=r"tokenizer\.json.*not those that the manifest names"):
        Student(copy, provider="cpu")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "current").symlink_to(copy)
    with pytest.raises(BundleError, match=r"manifest\.json is missing. A pull made this folder: give .*served/current"):
        Student(tmp_path / "served")
    (copy / "model.onnx").unlink()
    with pytest.raises(BundleError, match=r"model\.onnx is missing"):
        Student(copy, provider="cpu")
    with pytest.raises(BundleError, match="no ONNX model in fp64"):
        choose_model([{"precision": "fp32", "format": "onnx"}], "fp64")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["models"][0]["path"] = "../model.onnx"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="leaves the bundle"):
        Student(copy, provider="cpu", check_digests=False)
    (copy / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="no readable manifest"):
        Student(copy)


def test_a_session_that_fell_back_to_the_cpu_is_an_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(BundleError, match="has no CUDAExecutionProvider"):
        Student(bundle, provider="cuda")
    with pytest.raises(BundleError, match="fell back to CPUExecutionProvider"):
        open_session(bundle / "model.onnx", "cuda")
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with pytest.raises(BundleError, match="fell back"):
        Student(bundle)  # auto: what this onnxruntime claims to have, it must deliver


def test_parity_is_of_the_test_split_in_every_company_and_few_pairs_are_called_weak(
    bundle: Path, student: Path
) -> None:
    parity = open_bundle(bundle).facts["parity"]
    rows = json.loads((student / "manifest.json").read_text())["split"]["test"]["rows"]
    assert parity["provider"] == "cpu"
    assert parity["pairs"]["side"] == "test"
    for one in parity["models"]:
        assert one["rows"] == rows
        assert one["is_weak"]
        assert set(one["by_batch_size"]) == {"1", "7", "32"}
        assert all(figures["judged_by"] == "gold" for figures in one["by_batch_size"].values())
    fp32, int8 = parity["models"][0], parity["models"][2]
    assert max(figures["max_abs"] for figures in fp32["by_batch_size"].values()) <= 1e-5
    assert min(figures["max_abs"] for figures in int8["by_batch_size"].values()) > 2e-5
    assert len(fp32["worst"]) == 10
    assert "weak" in (bundle / "README.md").read_text()


def test_a_packed_decoder_is_served_padded_and_keeps_its_prompt(decoder_bundle: Path) -> None:
    facts = open_bundle(decoder_bundle).facts
    assert facts["inputs"]["names"] == ["input_ids", "attention_mask", "position_ids"]
    assert facts["inputs"]["padding_side"] == "left"
    assert all(facts["inputs"]["prompt_ids"])
    assert facts["parity"]["models"][0]["has_passed"]
    assert facts["parity"]["pairs"]["from"] == "file"


def triton_config_module() -> Any:
    """Triton's message classes, past a package whose own import wants grpc."""
    pytest.importorskip("tritonclient")
    package = importlib.util.find_spec("tritonclient")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(next(iter(package.submodule_search_locations))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tritons_view_parses_as_tritons_own_config_and_holds_the_models(bundle: Path) -> None:
    from google.protobuf import text_format

    model_config_pb2 = triton_config_module()
    views = sorted(path.name for path in (bundle / "triton").iterdir())
    assert views == ["tiny-fp16", "tiny-fp32", "tiny-int8", "tiny-int8-static"]
    for view in views:
        folder = bundle / "triton" / view
        config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        assert (config.name, config.backend) == (view, "onnxruntime")
        assert [value.name for value in config.input] == ["input_ids", "attention_mask", "token_type_ids"]
        assert {value.name: list(value.dims) for value in config.output}["subject_logits"] == [5]
        assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
        assert config.max_batch_size >= 32
        precision = view.partition("-")[2]
        assert (folder / "1" / "model.onnx").read_bytes() == (bundle / FILES[precision]).read_bytes()
