"""The graph that relabel measured is the one that these libraries run: its bytes, no export of their own, and the
bundle's scores.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel import Bundle
from relabel.distill.students.model import load_student
from relabel.export.specs import ParitySpec
from relabel.manifests.records import sha256_file
from tests.export.conftest import HOSTILE
from tests.export.test_huggingface import made  # noqa: F401

SAME = 1e-5
"""Of what one graph answers in two environments."""
APART = ParitySpec().fp32_max_abs
PAIRS = HOSTILE + [("red shoe", "a red shoe of the size " * number) for number in (1, 3, 9, 30)]


def files_of(place: Path) -> dict[str, str]:
    return {str(path): sha256_file(path) for path in place.rglob("*") if path.is_file()}


def sealed(place: Path, precision: str = "fp32") -> str:
    """What the export noted of a graph."""
    graphs = json.loads((place / "relabel.json").read_bytes())["graphs"]
    return next(graph["sha256"] for graph in graphs if graph["precision"] == precision)


@pytest.mark.parametrize("form", ["hf", "rerank"])
@pytest.mark.parametrize(
    ("kind", "pooling", "loaders"),
    [
        ("bert", "cls", ["optimum", "cross-encoder"]),
        ("xlm-roberta", "cls", ["optimum", "cross-encoder"]),
        ("bert", "mean", ["cross-encoder"]),
    ],
)
def test_the_measured_graph_is_loaded_and_scores_as_the_bundle(
    relabel: Callable[..., Any],
    made: Callable[..., Path],  # noqa: F811
    folder: Path,
    load: Callable[..., Any],
    kind: str,
    pooling: str,
    loaders: list[str],
    form: str,
) -> None:
    student = made(kind, pooling, 3, 384)
    place = folder / form
    assert relabel("export", str(student), "--to", form, "--format", form).code == 0
    assert relabel("export", str(student), "--to", "bundle", "--set", "parity.min_pairs=20").code == 0
    want_BK = Bundle("bundle").probabilities(PAIRS)["relevance"]
    if form == "rerank":
        want_BK = want_BK @ np.arange(3)[:, None] / 2
    before = files_of(place)
    for loader in loaders:
        found = load(loader, form, PAIRS, apply_softmax=form == "hf")
        scores_BK = np.array(found.scores).reshape(len(PAIRS), -1)
        if loader == "optimum" and form == "hf":
            scores_BK = np.exp(scores_BK - scores_BK.max(1, keepdims=True))
            scores_BK /= scores_BK.sum(1, keepdims=True)
        elif loader == "optimum":
            scores_BK = 1 / (1 + np.exp(-scores_BK))
        assert want_BK.std(0).max() > 0.01
        assert np.abs(scores_BK - want_BK).max() <= APART
        assert (Path(found.graph).name, found.sha256) == ("model.onnx", sealed(place))
    assert files_of(place) == before, "nothing was exported into the folder"


def test_a_smaller_graph_is_loaded_by_its_name(
    relabel: Callable[..., Any],
    student: Path,
    folder: Path,
    load: Callable[..., Any],
) -> None:
    done = relabel("export", str(student), "--to", "hf", "--format", "hf", "--precisions", "fp32,int8")
    assert done.code == 0, done
    found = load("cross-encoder", "hf", PAIRS, file_name="model_quantized.onnx")
    assert (Path(found.graph).name, found.sha256) == ("model_quantized.onnx", sealed(folder / "hf", "int8"))


@pytest.mark.parametrize("kind", ["trained", "bert"])
def test_a_smaller_graph_of_a_reranker_scores_as_its_parity_record_says(
    relabel: Callable[..., Any],
    student: Path,
    made: Callable[..., Path],  # noqa: F811
    folder: Path,
    load: Callable[..., Any],
    kind: str,
) -> None:
    """As far from the student as the record holds, one pair at a time: what int8 answers depends on the batch."""
    path = student if kind == "trained" else made("bert", "cls", 3, 384)
    loaders = ["cross-encoder"] if kind == "trained" else ["optimum", "cross-encoder"]
    pairs = [(f"red shoe {number % 4}", "a red shoe of the size " * (1 + number % 7)) for number in range(40)]
    rows = [
        {"query_id": str(number), "query": query, "doc_id": str(number), "document": document}
        for number, (query, document) in enumerate(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "asked.parquet")
    line = ("export", str(path), "--to", "out", "--format", "rerank", "--precisions", "fp16,int8")
    done = relabel(*line, "--pairs", "asked.parquet")
    assert done.code == 0, done
    record = json.loads(Path("out/relabel.json").read_bytes())
    want_B = load_student(path).probabilities(pairs)["relevance"] @ np.arange(3) / 2
    files = {"fp16": "model_fp16.onnx", "int8": "model_quantized.onnx"}
    for parity in record["parity"]:
        precision = parity["precision"]
        for loader in loaders:
            found = load(loader, "out", pairs, file_name=files[precision], batch_size=1)
            assert (Path(found.graph).name, found.sha256) == (files[precision], sealed(folder / "out", precision))
            scores_B = np.array(found.scores).reshape(len(pairs))
            if loader == "optimum":
                scores_B = 1 / (1 + np.exp(-scores_B))
            noted = parity["by_batch_size"]["1"]["max_abs"]
            assert np.abs(scores_B - want_B).max() == pytest.approx(noted, abs=SAME)
            # one in fp32 is some 1e-7 from the student, so that it would not be as far as the record says
            assert noted > 1.5 * SAME, "a graph in fp32 would pass"
