"""TensorRT engines: profiles from real lengths, refused on every machine but theirs, built for real where TensorRT-RTX
is installed.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relabel.export import tensorrt_engines as engines
from relabel.export.bundle_facts import TokenLengths, describe_lengths
from relabel.export.bundles import open_bundle
from relabel.export.loader import Machine, Student, choose_engine
from relabel.export.tensorrt_engines import build, build_into, find_tensorrt, plan_profile
from relabel.manifests.errors import MissingExtraError, ModelError, StaleRunError

CAPABILITY = "8.9"
ENGINE = {
    "path": "engines/x/fp16.onnx",
    "format": "tensorrt",
    "precision": "fp16",
    "flavour": "tensorrt",
    "tensorrt": "10.9.0.34",
    "capability": "9.0",
}


def has_rtx() -> bool:
    try:
        return find_tensorrt()[0] == "tensorrt_rtx"
    except MissingExtraError:
        return False


needs_rtx = pytest.mark.skipif(not has_rtx(), reason="needs tensorrt-rtx, which builds without a GPU")


def is_read_back(engine: bytes) -> bool:
    """Whether TensorRT takes it for an engine of its own. Without a GPU that is by its header; only with one is all of
    it loaded.
    """
    _, trt = find_tensorrt()
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    if shutil.which("nvidia-smi"):
        return runtime.deserialize_cuda_engine(engine) is not None
    _, faults = runtime.get_engine_validity(engine)
    return not faults & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)


def machine(**changes: Any) -> Machine:
    held: dict[str, Any] = {
        "capability": "9.0",
        "tensorrt": {"tensorrt": "10.9.0"},
        "providers": ["TensorrtExecutionProvider"],
    }
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
    chosen, refused = choose_engine([ENGINE], machine(), "fp32")
    assert (chosen, "computes in fp16, and fp32 is wanted" in refused[0]) == (None, True)


def test_the_profile_is_tuned_for_real_lengths_and_takes_every_length() -> None:
    lengths = describe_lengths([10] * 50 + [30] * 45 + [200] * 5)
    histogram = [[10, 50], [30, 45], [200, 5]]
    assert lengths == TokenLengths(rows=100, p50=20, p90=30, p99=200, max=200, histogram=histogram)
    assert plan_profile(lengths, 256) == ((1, 1), (8, 30), (128, 256))
    assert plan_profile(replace(lengths, p90=300), 256)[1] == (8, 256)


def test_without_tensorrt_or_a_gpu_the_command_says_what_is_missing(
    relabel: Callable[..., Any], bundle: Path, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "engine")
    relabel("build-engine", str(bundle), "--to", target, "--precision", "int4").refused(2, "int4", "bf16")
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    relabel("build-engine", str(bundle), "--to", target, "--capability", CAPABILITY).refused(4, "needs TensorRT")
    relabel("export", str(student), "--to", target, "--formats", "onnx,tensorrt").refused(4, "needs TensorRT")
    assert not Path(target).exists()


@needs_rtx
@pytest.mark.tensorrt
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_is_built_into_a_new_bundle_and_the_loader_falls_back_to_onnx_here(
    bundle: Path, tmp_path: Path, precision: str
) -> None:
    before = open_bundle(bundle).version
    made = build_into(bundle, tmp_path / "engine", precision=precision, capability=CAPABILITY)
    entry = made.facts["models"][-1]
    assert (entry["flavour"], entry["capability"]) == ("tensorrt_rtx", CAPABILITY)
    assert open_bundle(made.folder).version != before == open_bundle(bundle).version
    assert is_read_back((made.folder / entry["files"][1]).read_bytes())
    assert not is_read_back(b"x" * 4096)
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


class Library:
    """In place of a TensorRT that builds at once; nothing but its version is asked."""

    __version__ = "10.9.0.34"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bytes]], None]:
    """`builds(work)`: engines are what `work` returns."""

    def use(work: Callable[[], bytes]) -> None:
        monkeypatch.setattr(engines, "find_tensorrt", lambda: ("tensorrt_rtx", Library))
        monkeypatch.setattr(engines, "build", lambda *_, **__: work())

    return use


def left_next_to(target: Path) -> list[str]:
    """What lies next to a bundle's place but for its lock."""
    return sorted(path.name for path in target.parent.iterdir() if not path.name.endswith("relabel-lock"))


def test_an_engine_that_fails_to_go_into_a_bundle_leaves_it_whole_and_one_that_goes_takes_its_place(
    bundle: Path, tmp_path: Path, builds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    before = open_bundle(target)
    monkeypatch.setattr(engines, "gpu_capability", lambda: CAPABILITY)

    def fails() -> bytes:
        raise ModelError("no engine")

    builds(fails)
    with pytest.raises(ModelError):
        build_into(target, target, precision="fp16", capability=None, is_replacing=True)
    assert open_bundle(target).version == before.version
    builds(lambda: b"engine")
    made = build_into(target, target, precision="fp16", capability=None, is_replacing=True)
    assert [model["path"] for model in made.facts["models"]][:-1] == [model["path"] for model in before.facts["models"]]
    assert open_bundle(target).version == made.version
    assert left_next_to(target) == ["bundle"]


def test_what_someone_makes_at_the_place_during_a_build_stays(
    bundle: Path, tmp_path: Path, builds: Callable[..., None]
) -> None:
    target = tmp_path / "engine"

    def meanwhile() -> bytes:
        target.mkdir()
        (target / "theirs").touch()
        return b"engine"

    builds(meanwhile)
    with pytest.raises(StaleRunError, match="exists already"):
        build_into(bundle, target, precision="fp16", capability=CAPABILITY)
    assert (target / "theirs").exists()
    assert left_next_to(target) == ["engine"]


STALLED = """
import sys, time
from pathlib import Path
from relabel.export import tensorrt_engines as engines
from relabel.jobs.cli import main

class Library:
    __version__ = "10.9.0.34"

def stalls(*_, **__):
    Path(MARK).touch()
    time.sleep(120)

engines.find_tensorrt = lambda: ("tensorrt_rtx", Library)
engines.build = lambda *_, **__: b"engine"
engines.write_context = stalls
sys.exit(main(LINE))
"""


def test_sigterm_in_the_middle_of_a_build_leaves_nothing_and_what_a_kill_left_goes_with_the_next(
    bundle: Path, tmp_path: Path, builds: Callable[..., None]
) -> None:
    target, mark = tmp_path / "engine", tmp_path / "mark"
    line = ["build-engine", str(bundle), "--to", str(target), "--capability", CAPABILITY]
    code = f"MARK, LINE = {str(mark)!r}, {line!r}\n{STALLED}"
    for number, ends in ((signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=Path.cwd()) as process:
            while not mark.exists() and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        assert process.returncode == ends, said
        mark.unlink()
        assert len([name for name in left_next_to(target) if "relabel-making" in name]) == (number == signal.SIGKILL)
    builds(lambda: b"engine")
    build_into(bundle, target, precision="fp16", capability=CAPABILITY)
    assert left_next_to(target) == ["engine"]
