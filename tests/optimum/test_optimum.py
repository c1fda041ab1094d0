"""The exporter `optimum`, in its own environment (`make test-optimum`): transformers 4.57 and students that
transformers 5 wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.manifests.files import Storage

pytest.importorskip("optimum.exporters.onnx", reason="needs optimum-onnx in an environment of its own")

from relabel.distill.students.model import load_student
from relabel.export.bundles import open_bundle
from relabel.export.exporting import export_bundle
from relabel.export.loader import Student
from relabel.export.parity import PairsFile
from relabel.export.specs import ExportSpec
from tests.export.conftest import HOSTILE, decoder, graded_file  # noqa: F401
from tests.score.conftest import write_tiny_student


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(pooling: str) -> Path:
        if pooling not in made:
            columns = {"query_id": "query_id", "query": "query", "doc_id": "doc_id", "document": ["document"]}
            made[pooling] = write_tiny_student(
                tmp_path_factory.mktemp(pooling) / "student", pooling=pooling, columns=columns
            )
        return made[pooling]

    return make


def exported(student: Path, pairs: Path, target: Path, **options: Any) -> Path:
    export_bundle(
        student,
        target,
        ExportSpec(exporter="optimum", **options),
        Storage(),
        pairs=PairsFile(str(pairs), "grade"),
        provider="cpu",
    )
    return target


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoders_heads_after_optimums_backbone_say_what_the_student_says(
    pooling: str,
    encoder: Callable[..., Path],
    graded_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    student = encoder(pooling)
    made = exported(
        student, graded_file, tmp_path / "bundle", logits=True, precisions="fp32,int8", parity={"int8_max_f1_loss": 100}
    )
    facts = open_bundle(made).facts
    assert facts["made_by"]["models"]["fp32"]["exporter"] == "optimum"
    assert facts["made_by"]["versions"]["transformers"].startswith("4.57")
    assert facts["parity"]["models"][0]["has_passed"]
    ours, loaded = Student(made, provider="cpu"), load_student(student)
    for name, wanted in loaded.probabilities(HOSTILE).items():
        np.testing.assert_allclose(ours.probabilities(HOSTILE)[name], wanted, atol=1e-4)
    batch = ours.encoder.collate(ours.encoder.encode(HOSTILE))
    np.testing.assert_allclose(
        ours.session.run(["subject_logits"], batch)[0], loaded.logits(HOSTILE)["subject"], atol=1e-3
    )


def test_a_decoders_grade_tokens_after_optimums_backbone_say_what_the_student_says(
    decoder: Path,  # noqa: F811
    graded_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    made = exported(decoder, graded_file, tmp_path / "bundle")
    found = Student(made, provider="cpu").probabilities(HOSTILE)["relevance"]
    np.testing.assert_allclose(found, load_student(decoder).probabilities(HOSTILE)["relevance"], atol=1e-4)


def test_a_tokenizer_that_transformers_5_wrote_keeps_its_inputs(encoder: Callable[..., Path], tmp_path: Path) -> None:
    student = encoder("mean")
    file = student / "tokenizer_config.json"
    written = file.read_text()
    held = json.loads(written)
    try:
        file.write_text(
            json.dumps(
                {key: value for key, value in held.items() if key != "model_input_names"}
                | {"tokenizer_class": "TokenizersBackend"}
            )
        )
        assert load_student(student).tokenizer.model_input_names == ["input_ids", "attention_mask"]
    finally:
        file.write_text(written)
