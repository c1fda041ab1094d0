"""A logistic student from labels to a bundle that answers alone, and to labels by `relabel score`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.networks import LogisticStudent
from relabel.distill.students.spec import DistillSpec
from relabel.export.exporting import export_bundle
from relabel.export.loader import Student
from relabel.export.specs import ExportSpec
from relabel.manifests.files import Storage
from relabel.manifests.run_manifest import MANIFEST_NAME
from tests.distill.test_kinds import query_rows, write_queries
from tests.export.conftest import HOSTILE
from tests.export.test_bundle import LOADING
from tests.jobs.conftest import committed  # noqa: F401

PROMPTED = {"prompts": {"query": "red: "}}
"""As sentence-transformers writes what comes before a query."""


@pytest.fixture(scope="module")
def logistic(tmp_path_factory: pytest.TempPathFactory, encoder_dir: Callable[..., Path]) -> Path:
    """A student whose model wants a text before the query."""
    folder = tmp_path_factory.mktemp("logistic")
    model = Path(shutil.copytree(encoder_dir(), folder / "model"))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (model / "config_sentence_transformers.json").write_text(json.dumps(PROMPTED))
    spec = DistillSpec(
        name="complexity",
        labels=[write_queries(folder, query_rows())],
        student={"kind": "logistic", "model": str(model)},
        train={"max_tokens": 32},
        split={"dev": 0.2, "test": 0.3},
        output=str(folder / "student"),
    )  # type: ignore[arg-type]
    distill(spec, Storage())
    return folder / "student"


@pytest.fixture(scope="module")
def logistic_bundle(tmp_path_factory: pytest.TempPathFactory, logistic: Path) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "complexity"
    bounds = {"int8_max_f1_loss": 100, "fp16_max_flips": 0.2, "fp16_min_tau": 0.0, "fp16_max_ndcg_loss": 1.0}
    spec = ExportSpec(precisions="fp32,fp16,int8,int8-static", logits=True, triton=True, parity=bounds)  # type: ignore[arg-type]
    export_bundle(logistic, target, spec, Storage(), provider="cpu")
    return target


def test_record_and_bundle_hold_what_the_models_own_files_say(logistic: Path, logistic_bundle: Path) -> None:
    record = load_student(logistic).record
    assert (record.pooling, record.prompt) == ("mean", ("red: ", "", ""))
    model = logistic.parent / "model"
    (model / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    spec = DistillSpec(name="a", labels=["x"], student={"kind": "logistic", "model": "x"}, output="y")  # type: ignore[arg-type]
    assert LogisticStudent.own_parts(spec, model, None, 2) == {"pooling": "cls", "prompt": ("red: ", "", "")}
    inputs = json.loads((logistic_bundle / MANIFEST_NAME).read_bytes())["inputs"]
    assert (inputs["kind"], inputs["names"]) == ("logistic", ["input_ids", "attention_mask", "counts"])
    assert inputs["prompt"] == ["red: ", "", ""]


def test_the_loader_alone_answers_as_the_student_to_1e_5(
    logistic: Path, logistic_bundle: Path, deployed: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "pairs.json").write_text(json.dumps(HOSTILE))
    done = deployed(logistic_bundle, LOADING, str(tmp_path / "pairs.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[0])["relevance"]
    np.testing.assert_allclose(found, load_student(logistic).probabilities(HOSTILE)["relevance"], atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int8-static"])
def test_fewer_bits_keep_the_counts_and_the_head(logistic: Path, logistic_bundle: Path, precision: str) -> None:
    pairs = [(row["query"], "") for row in query_rows()]
    ours = Student(logistic_bundle, provider="cpu", precision=precision)
    wanted = load_student(logistic).probabilities(pairs)["relevance"]
    assert np.abs(ours.probabilities(pairs)["relevance"] - wanted).max() < (0.02 if precision == "fp16" else 0.3)


def test_scores_are_the_students_own(
    logistic: Path,
    relabel: Callable[..., Any],
    committed: Callable[..., Any],  # noqa: F811
) -> None:
    pairs = str(logistic.parent / "queries.parquet")
    done = relabel("score", str(logistic), "--input", pairs, "--to", "scores", "--device", "cpu")
    assert done.code == 0, done.err
    labels = committed("labels", "scores")
    rows = query_rows()
    wanted = load_student(logistic).probabilities([(row["query"], "") for row in rows])["relevance"]
    np.testing.assert_allclose([labels[row]["probs"] for row in range(len(rows))], wanted, atol=1e-5)
    assert relabel("verify", "scores").code == 0
