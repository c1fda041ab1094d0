"""Static int8: calibrated on pairs that its gate does not see, opened by both runtimes, the same in any company."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relabel.jobs.score as students
from relabel.export import exporting, loader
from relabel.export.exporting import export_bundle
from relabel.export.loader import STATIC, VNNI, Student, check_answers
from relabel.export.parity import PairsFile, answers
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import ConfigError, GateError, MissingExtraError
from relabel.manifests.files import Storage
from tests.export.conftest import HOSTILE
from tests.export.test_gates import shifted

no_vnni = pytest.mark.skipif(
    loader.cpu_flags().isdisjoint(VNNI), reason="without VNNI OpenVINO sums int8 otherwise than onnxruntime"
)


@pytest.mark.parametrize("provider", ["cpu", pytest.param("openvino", marks=no_vnni)])
def test_both_runtimes_answer_as_at_export_and_the_same_in_any_company(bundle: Path, provider: str) -> None:
    student = Student(bundle, provider=provider, precision=STATIC, threads=1)
    assert (student.provider, student.precision) == (provider, STATIC)
    assert check_answers(student).has_passed
    alone, together = (student.probabilities(HOSTILE, batch_tokens=size)["relevance"] for size in (1, 8192))
    assert np.abs(alone - together).max() <= 1e-5
    fp32 = Student(bundle, provider="cpu", precision="fp32", threads=1).probabilities(HOSTILE)["relevance"]
    assert 1e-5 < np.abs(alone - fp32).max() <= 0.1


def test_the_loader_and_score_take_it_in_openvino_on_a_cpu_with_vnni(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loader, students):
        monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(VNNI[:1]))
    student = Student(bundle, provider="openvino", threads=1)
    choice = students.choose(str(bundle), "openvino", None)
    assert (student.provider, student.precision) == (choice.provider, choice.precision) == ("openvino", STATIC)
    assert choice.reason.startswith("this CPU has VNNI")
    assert students.choose(str(bundle), "openvino", "fp32").reason.startswith("named")


@pytest.mark.parametrize("source", ["lineage", "file"])
def test_it_is_calibrated_on_pairs_that_are_not_compared_and_a_refused_one_leaves_nothing(
    student: Path, bundle: Path, graded_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The graph of static int8 is one that gives all pairs the same grade."""
    calibrated, compared = [], []

    def quantize(source: Path, target: Path, batches: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        calibrated.extend(batch["input_ids"][0].tolist() for batch in batches)
        return shifted(source.parent, target, -1.0)

    def answer(run: Any, encoder: Any, rows: Any, size: int) -> dict[str, np.ndarray]:
        compared.extend(ids for ids, _ in rows)
        return answers(run, encoder, rows, size)

    monkeypatch.setattr(
        exporting, "export_onnx", lambda _, path, __: {"of": str(shutil.copy(bundle / path.name, path))}
    )
    monkeypatch.setattr(exporting, "write_int8_static", quantize)
    monkeypatch.setattr(exporting, "answers", answer)
    spec = ExportSpec(precisions=STATIC, logits=True, parity={"min_pairs": 12, "int8_max_flips": 0.0})  # type: ignore[arg-type]
    pairs = PairsFile(str(graded_file)) if source == "file" else None
    with pytest.raises(GateError, match="int8-static: share of flipped grades is"):
        export_bundle(student, tmp_path / "bundle", spec, Storage(), pairs=pairs, provider="cpu")
    assert not (tmp_path / "bundle").exists()
    assert len(calibrated) > 10
    assert not [row for row in calibrated if row in compared]


def test_what_it_can_not_be_made_of_is_said_before_anything_is_exported(
    student: Path, decoder: Path, graded_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, pairs = ExportSpec(precisions=STATIC), PairsFile(str(graded_file))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"decoder.*Take int8"):
        export_bundle(decoder, tmp_path / "bundle", spec, Storage(), pairs=pairs, provider="cpu")
    with pytest.raises(ConfigError, match=r"all 36 are\. Name more of them"):
        export_bundle(student, tmp_path / "bundle", spec, Storage(), pairs=pairs, provider="cpu")
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingExtraError, match=r"relabel-ir\[int8-static\]"):
        export_bundle(student, tmp_path / "bundle", spec, Storage(), pairs=pairs, provider="cpu")
