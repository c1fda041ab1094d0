"""`relabel bench --providers openvino`: the fp32 file in each precision that this CPU computes, beside onnxruntime, and
what was asked of what.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export import loader
from relabel.export.bench.comparisons import Against, plan_sides
from relabel.export.bench.plans import BenchModel, choose_models
from relabel.export.bench.records import read_latency
from relabel.export.loader import AMX, AVX512, Machine, cpu_flags
from relabel.manifests.errors import MissingExtraError
from tests.bench.test_plans import CPU, MODELS, spec

HERE = ["CPUExecutionProvider", "openvino"]


def test_the_fp32_file_is_measured_in_what_the_cpu_computes() -> None:
    def chosen(flags: set[str], **values: Any) -> list[tuple[str, str, str]]:
        found = choose_models(MODELS, spec(providers="openvino", **values), Machine(None, {}, HERE, flags))
        return [(model.provider, model.precision, model.path) for model in found]

    plain, narrow = ("openvino", "fp32", "model.onnx"), ("openvino", "bf16", "model.onnx")
    assert chosen(set()) == [plain]
    assert chosen({AVX512}) == chosen({AMX}) == [plain, narrow]
    assert chosen(set(), precisions="bf16") == [narrow], "opening it says that this CPU does not compute it"
    with pytest.raises(MissingExtraError, match=r"pip install 'relabel-ir\[openvino\]'"):
        choose_models(MODELS, spec(providers="openvino"), CPU)
    fallen = choose_models(MODELS, spec(providers="openvino", precisions="fp32", allows_fallback=True), CPU)
    assert fallen == [BenchModel("openvino", "cpu", "fp32", "model.onnx")]


def test_each_is_compared_with_onnxruntime_and_bf16_with_fp32() -> None:
    models = choose_models(MODELS, spec(providers="openvino"), Machine(None, {}, HERE, {AMX}))
    sides = [(model.precision, other) for model, other in plan_sides(models, Against())]
    assert sides == [("fp32", "onnxruntime"), ("bf16", "fp32"), ("bf16", "onnxruntime")]


def test_rows_say_runtime_version_hint_and_amx(relabel: Callable[..., Any], bundle: Path) -> None:
    openvino = pytest.importorskip("openvino")
    line = ("--seconds", "3", "--threads", "1", "--batches", "1", "--to", "results", "--output", "json")
    done = relabel("bench", "bundle", "--providers", "cpu,openvino", "--precisions", "fp32", *line)
    assert done.code == 0, done
    facts = read_latency(Path("results/latency.json").read_bytes(), "here")
    assert facts.machine.has_amx == (AMX in cpu_flags())
    own, theirs = facts.models[1], facts.models[0]
    assert (own.provider, own.precision, own.path) == ("openvino", "fp32", "model.onnx")
    for row in own.closed + own.open:
        assert row.runtime is not None
        assert openvino.__version__.startswith(row.runtime.removeprefix("openvino "))
        assert (row.precision_hint, row.has_amx) == ("f32", AMX in cpu_flags())
    for row in theirs.closed:
        assert row.runtime is not None
        assert row.runtime.startswith("onnxruntime ")
        assert row.precision_hint is None
    compared = [one for one in facts.comparisons if one.theirs == "onnxruntime"]
    assert {(one.provider, one.ours) for one in compared} == {("openvino", "fp32")}
    assert all(one.answers_differ_by is not None and one.answers_differ_by <= 1e-5 for one in compared)
    assert "answers_strayed" not in {finding.kind for finding in facts.findings}
    assert f"openvino {own.closed[0].runtime.split()[1]} with" in json.dumps(
        done.err + Path("results/latency.md").read_text()
    )


def test_answers_that_strayed_are_a_finding(
    relabel: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tolerance under which nothing passes."""
    pytest.importorskip("openvino")
    real = loader.check_answers

    monkeypatch.setattr("relabel.export.bench.benching.check_answers", lambda student: _strict(real(student)))
    line = ("--seconds", "3", "--threads", "1", "--batches", "1", "--output", "json")
    done = relabel("bench", "bundle", "--providers", "openvino", "--precisions", "fp32", *line)
    (found,) = [one for one in done.json["findings"] if one["kind"] == "answers_strayed"]
    assert found["where"] == "openvino fp32"
    assert "are answered otherwise than at export" in found["text"]


def _strict(checked: loader.Checked) -> loader.Checked:
    return loader.Checked(checked.student, -1.0, checked.differences)


def test_where_a_cpu_does_not_compute_bf16_the_row_of_its_stand_in_says_fp32(
    relabel: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    opened = loader.open_session

    def refuses(path: Path, provider: str, **options: Any) -> Any:
        if provider == "openvino":
            raise loader.BundleError("openvino computes in f32 on this CPU, not in bf16.")
        return opened(path, provider, **options)

    monkeypatch.setattr("relabel.export.bench.cells.open_session", refuses)
    line = ("--seconds", "3", "--threads", "1", "--batches", "1", "--to", "results", "--output", "json")
    done = relabel("bench", "bundle", "--providers", "openvino", "--precisions", "bf16", "--allow-fallback", *line)
    assert done.code == 0, done
    facts = read_latency(Path("results/latency.json").read_bytes(), "here")
    assert [(one.provider, one.precision) for one in facts.models] == [("cpu", "fp32")]
