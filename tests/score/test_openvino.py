"""`relabel score BUNDLE --device openvino`: only where it is asked for, in one precision a run, after this machine has
answered the reference pairs, and its labels say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.loader import AVX512, Checked
from relabel.jobs.score import students
from tests.score.test_bundles import Rows, Score, bundle  # noqa: F401

Flags = Callable[..., None]


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Flags:
    """`flags("amx_bf16")`: of the CPU, as the choice sees them."""
    return lambda *names: monkeypatch.setattr(students, "cpu_flags", lambda: frozenset(names))


def test_labels_are_those_of_fp32_and_name_runtime_version_and_hint(
    score: Score,
    write_pairs: Callable[..., Path],
    committed: Callable[..., Any],
    folder: Path,
    bundle: Path,  # noqa: F811
) -> None:
    openvino = pytest.importorskip("openvino")
    write_pairs()
    done = score("--device", "openvino", "--precision", "fp32", student=bundle)
    assert (done.code, "tiny on openvino 2" in done.err) == (0, True), done.err
    assert score("--device", "cpu", "--precision", "fp32", student=bundle, to="out/other").code == 0
    ours, theirs = committed("labels", "out/scores"), committed("labels", "out/other")
    for row, label in theirs.items():
        assert ours[row]["probs"] == pytest.approx(label["probs"], abs=1e-5)
        assert ours[row]["key"] != label["key"], "nobody takes the one for the other's answer"
    manifest = json.loads((folder / "out/scores/manifest.json").read_bytes())
    (engine,) = manifest["engines"]
    assert (engine["device"], engine["dtype"]) == ("openvino", "fp32")
    assert openvino.__version__.startswith(engine["version"])
    assert (engine["details"]["runtime"], engine["details"]["precision_hint"]) == ("openvino", "f32")
    assert isinstance(engine["details"]["has_amx"], bool)


def test_a_run_has_one_runtime(score: Score, write_pairs: Callable[..., Path], bundle: Path) -> None:  # noqa: F811
    pytest.importorskip("openvino")
    write_pairs()
    assert score("--shard", "0/2", "--precision", "fp32", student=bundle).code == 0
    other = score("--device", "openvino", "--precision", "fp32", student=bundle)
    other.refused(3, "belongs to another job", "engine.args.runtime")


def test_without_amx_it_stays_with_onnxruntime_and_says_so(
    score: Score,
    write_pairs: Callable[..., Path],
    bundle: Path,  # noqa: F811
    flags: Flags,
) -> None:
    flags(AVX512)
    write_pairs()
    done = score("--device", "openvino", "--dry-run", student=bundle)
    assert done.code == 0
    assert "precision int8 on cpu: no bench of this bundle on cpu" in done.err
    assert "openvino: no amx_bf16 here (this CPU has avx512_bf16 alone), so onnxruntime answers." in done.err


def test_a_machine_that_answers_otherwise_labels_nothing(
    score: Score,
    write_pairs: Callable[..., Path],
    folder: Path,
    bundle: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(students, "check_answers", lambda _: Checked("tiny, fp32 on openvino", 1e-4, [0.0, 0.5]))
    write_pairs()
    line = ("--device", "openvino", "--precision", "fp32")
    score(*line, student=bundle).refused(5, "tiny, fp32 on openvino: 1 of 2 reference pairs", "pair 1 by 0.5")
    assert not list((folder / "out/scores").glob("labels/**/*.parquet"))
