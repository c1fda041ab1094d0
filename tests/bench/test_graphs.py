"""What keeps the exported graph fast on a CPU, seen in the graph that onnxruntime runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest

from relabel.export.loader import open_session


def test_the_graph_looks_for_no_nan_in_its_attention(made: Path) -> None:
    assert "IsNaN" not in Counter(node.op_type for node in onnx.load(made / "model.onnx").graph.node)


def test_a_cpu_session_leaves_out_the_fusion_that_slows_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = onnxruntime.SessionOptions

    def telling() -> onnxruntime.SessionOptions:
        found = options()
        found.optimized_model_filepath = str(tmp_path / "run.onnx")
        return found

    monkeypatch.setattr("onnxruntime.SessionOptions", telling)
    open_session(made / "model.int8.onnx", "cpu", threads=1)
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node)
    assert operators["LayerNormalization"] == 5  # of the embeddings, and two in each layer
    assert operators["SkipLayerNormalization"] == 0
