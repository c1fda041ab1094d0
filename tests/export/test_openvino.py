"""OpenVINO next to onnxruntime: the same file, the precision that was stated, no other runtime than was asked for."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from relabel.export import loader
from relabel.export.loader import (
    AMX,
    AVX512,
    STATIC,
    VNNI,
    BundleError,
    OpenVinoSession,
    Student,
    choose_openvino,
    cpu_flags,
)
from tests.export.conftest import HOSTILE
from tests.export.test_reference_answers import load_main, strayed  # noqa: F401

pytest.importorskip("openvino")
HAS_BF16 = bool({AMX, AVX512} & cpu_flags())


def apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert list(ours) == list(theirs)
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


@pytest.mark.parametrize("name", ["bundle", "decoder_bundle"])
def test_fp32_answers_as_onnxruntime_to_1e_5_in_any_company(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    theirs = Student(folder, provider="cpu", precision="fp32", threads=1)
    ours = Student(folder, provider="openvino", precision="fp32", threads=1)
    assert (ours.provider, ours.precision, ours.refused) == ("openvino", "fp32", [])
    for batch_tokens in (1, 100, 8192):
        expected = theirs.probabilities(HOSTILE, batch_tokens=batch_tokens)
        assert apart(ours.probabilities(HOSTILE, batch_tokens=batch_tokens), expected) <= 1e-5


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no arithmetic in bf16")
def test_bf16_stays_within_its_tolerance_and_is_not_fp32(bundle: Path) -> None:
    theirs = Student(bundle, provider="cpu", precision="fp32", threads=1).probabilities(HOSTILE)
    ours = Student(bundle, provider="openvino", precision="bf16", threads=1)
    assert ours.precision == "bf16"
    difference = apart(ours.probabilities(HOSTILE), theirs)
    assert 1e-5 < difference <= loader.BF16_TOLERANCE


@pytest.mark.skipif(bool({"avx512_fp16", "avx_ne_convert"} & cpu_flags()), reason="this CPU computes in f16")
def test_a_cpu_that_does_not_compute_in_bf16_is_an_error_and_no_answer_in_fp32(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO takes f32 there and says so when it is asked; f16 in its place."""
    monkeypatch.setitem(loader.HINTS, "bf16", "f16")
    with pytest.raises(BundleError, match=r"openvino computes in \w+ on this CPU, not in f16. Take fp32"):
        OpenVinoSession(bundle / "model.onnx", "bf16", threads=1)


def test_threads_that_ask_at_once_each_get_their_own_answer(bundle: Path) -> None:
    student = Student(bundle, provider="openvino", precision="fp32", threads=1)
    pairs = [("red shoe", "lamp " * number) for number in range(1, 33)]
    alone = [student.probabilities([pair])["relevance"] for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda pair: student.probabilities([pair])["relevance"], pairs))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_the_choice_follows_from_what_was_named_and_the_cpus_flags() -> None:
    for flags in ({AMX, AVX512}, {AVX512}, set[str]()):
        for named in ("fp32", "bf16", STATIC):
            assert choose_openvino(named, flags, ()) == ("openvino", named, [])
    assert choose_openvino(None, {AMX, AVX512, *VNNI}, (STATIC,)) == ("openvino", "bf16", [])
    assert choose_openvino(None, {VNNI[1]}, (STATIC,)) == ("openvino", STATIC, [])
    for flags, has, held in (
        ({AVX512, *VNNI}, "avx512_bf16 alone", ()),
        (set[str](), "no arithmetic in bf16", (STATIC,)),
    ):
        provider, precision, (why,) = choose_openvino(None, flags, held)
        assert (provider, precision) == ("cpu", None)
        assert f"no amx_bf16 here (this CPU has {has}), so onnxruntime answers" in why
    with pytest.raises(BundleError, match="openvino computes in fp32 or bf16 or int8-static, not in int8"):
        choose_openvino("int8", {AMX}, ())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.skipif(not HAS_BF16, reason=""))])
def test_the_sealed_pairs_are_asked_of_openvino_too(
    bundle: Path,
    strayed: Path,  # noqa: F811
    precision: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both against what fp32 answered at export."""
    line = ["--check", "--provider", "openvino", "--precision", precision]
    assert load_main(bundle)(line) == 0
    out, err = capsys.readouterr()
    assert f"{precision} on openvino: 32 reference pairs are answered as at export" in out
    assert f"(tolerance {'0.005' if precision == 'bf16' else '0.0001'})" in out
    assert err == ""
    assert load_main(strayed)(line) == 5
    assert "2 of 32 reference pairs are answered otherwise" in capsys.readouterr().err


def test_neither_torch_nor_onnxruntime_is_needed(bundle: Path, deployed: Callable[..., object]) -> None:
    code = """
import load

student = load.Student(BUNDLE, provider="openvino", precision="fp32")
assert student.score([("red shoe", "a red shoe")])[0] >= 0
assert "onnxruntime" not in sys.modules, "it was not asked for"
"""
    done = deployed(bundle, code)
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stderr
