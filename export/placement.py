"""Which heavy nodes of a graph run on the CPU though a GPU was asked for.

A session may be on the GPU as a whole and yet send its quantized products to the CPU and back, which can cost several
times what fp32 takes. Only onnxruntime's own profile tells where each node ran.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.loader import OPENVINO, PROVIDERS

HEAVY = {
    "MatMul",
    "Gemm",
    "FusedMatMul",
    "FusedGemm",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "MatMulNBits",
    "Attention",
    "QAttention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "EmbedLayerNormalization",
    "LayerNormalization",
    "SkipLayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "Softmax",
    "Gelu",
    "BiasGelu",
    "FastGelu",
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    "DequantizeLinear",
}
"""Operators over whole rows. Shapes are counted on the CPU also where all is well."""


def cpu_nodes(path: Path, provider: str, batch: dict[str, np.ndarray], *, threads: int) -> dict[str, int]:
    """Heavy nodes that a session on a GPU runs on the CPU: how many, by operator. Empty on the CPU itself."""
    if provider in ("cpu", OPENVINO):
        return {}
    import onnxruntime

    with tempfile.TemporaryDirectory() as work:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(work, "profile"))
        session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDERS[provider], PROVIDERS["cpu"]])
        session.run(None, batch)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return count_cpu_nodes(events)


def count_cpu_nodes(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Heavy nodes on the CPU by operator, from the events of onnxruntime's profile."""
    nodes = {}
    for event in events:
        match event:
            case {"cat": "Node", "name": name, "args": {"provider": provider, "op_name": operator, **more}}:
                if provider == PROVIDERS["cpu"]:
                    nodes[more.get("node_index"), name] = operator
    return dict(sorted(Counter(operator for operator in nodes.values() if operator in HEAVY).items()))
