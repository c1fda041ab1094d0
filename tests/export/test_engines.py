"""TensorRT engines: profiles from real lengths, refused on every machine but theirs, built for real where TensorRT-RTX is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export import engines
from export.bundles import open_bundle
from export.engines import build, build_into, describe_lengths, find_tensorrt, plan_profile
from export.loader import Machine, Student, choose_engine
from manifests.errors import MissingExtraError, ModelError, UsageError

CAPABILITY = "8.9"
ENGINE = {
    "path": "engines/x/fp16.onnx", "format": "tensorrt", "precision": "fp16", "flavour": "tensorrt", "tensorrt": "10.9.0.34",
    "capability": "9.0",
}  # fmt: skip


def has_rtx() -> bool:
    try:
        return find_tensorrt()[0] == "tensorrt_rtx"
    except MissingExtraError:
        return False


needs_rtx = pytest.mark.skipif(not has_rtx(), reason="needs tensorrt-rtx, which builds without a GPU")


def machine(**changes: Any) -> Machine:
    held: dict[str, Any] = {"capability": "9.0", "tensorrt": {"tensorrt": "10.9.0"}, "providers": ["TensorrtExecutionProvider"]}
    return Machine(**held | changes)


def test_an_engine_is_taken_on_its_own_gpu_and_tensorrt_alone() -> None:
    assert choose_engine([ENGINE], machine(), None) == (ENGINE, [])
    for changes, reason in (
        ({"capability": "8.9"}, "compute capability 9.0, this machine has 8.9"),
        ({"capability": None}, "this machine has no GPU"),
        ({"tensorrt": {"tensorrt": "10.8.0"}}, "10.9.0.34, this machine has 10.8.0"),
        ({"tensorrt": {"tensorrt_rtx": "10.9.0"}}, "this machine has none"),
        ({"providers": ["CPUExecutionProvider"]}, "no TensorrtExecutionProvider"),
    ):
        chosen, refused = choose_engine([ENGINE], machine(**changes), None)
        assert chosen is None
        assert reason in refused[0]
    assert choose_engine([ENGINE], machine(), "fp32") == (None, [])


def test_the_profile_is_tuned_for_real_lengths_and_takes_every_length() -> None:
    lengths = describe_lengths([10] * 50 + [30] * 45 + [200] * 5)
    assert lengths == {"rows": 100, "p50": 20, "p90": 30, "p99": 200, "max": 200, "histogram": [[10, 50], [30, 45], [200, 5]]}
    profile = plan_profile(lengths, 256)
    assert (profile.low, profile.tuned, profile.high) == ((1, 1), (8, 30), (128, 256))
    assert plan_profile({**lengths, "p90": 300}, 256).tuned[1] == 256


def test_without_tensorrt_or_a_gpu_the_command_says_what_is_missing(
    relabel: Callable[..., Any], bundle: Path, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "engine")
    relabel("build-engine", str(bundle), "--to", target, "--precision", "int4").refused(2, "fp32, fp16, bf16")
    monkeypatch.setattr(engines, "MODULES", ())
    relabel("build-engine", str(bundle), "--to", target, "--capability", CAPABILITY).refused(4, "needs TensorRT")
    relabel("export", str(student), "--to", target, "--formats", "onnx,tensorrt").refused(4, "needs TensorRT")
    assert not Path(target).exists()


@needs_rtx
@pytest.mark.tensorrt
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_is_built_into_a_new_bundle_and_the_loader_falls_back_to_onnx_here(bundle: Path, tmp_path: Path, precision: str) -> None:
    before = open_bundle(bundle).version
    made = build_into(bundle, tmp_path / "engine", precision=precision, capability=CAPABILITY)
    entry = made.facts["models"][-1]
    assert (entry["flavour"], entry["capability"], entry["is_compared"]) == ("tensorrt_rtx", CAPABILITY, False)
    assert open_bundle(made.folder).version != before == open_bundle(bundle).version
    assert all((made.folder / file).stat().st_size > 0 for file in entry["files"])
    here = Student(made.folder)
    assert (here.provider, here.precision) == ("cpu", "fp32")
    assert len(here.refused) == 1
    assert here.probabilities([("red shoe", "lamp")])["relevance"].shape == (1, 3)


@needs_rtx
@pytest.mark.tensorrt
def test_what_tensorrt_can_not_parse_or_build_for_is_said(bundle: Path, tmp_path: Path) -> None:
    _, trt = find_tensorrt()
    profile = plan_profile(describe_lengths([8, 16]), 32)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph")
    with pytest.raises(ModelError, match="can't parse it"):
        build(trt, broken, profile, precision="fp32", capability=CAPABILITY)
    with pytest.raises(MissingExtraError, match="builds for"):
        build(trt, bundle / "model.onnx", profile, precision="fp32", capability="1.0")
    if shutil.which("nvidia-smi"):
        pytest.skip("a GPU is here")
    with pytest.raises(MissingExtraError, match="No GPU"):
        build_into(bundle, tmp_path / "engine", precision="fp32", capability=None)


def test_a_capability_is_for_rtx_alone(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_tensorrt", lambda: ("tensorrt", object()))
    with pytest.raises(UsageError, match="only TensorRT-RTX"):
        build_into(bundle, tmp_path / "engine", precision="fp32", capability=CAPABILITY)
