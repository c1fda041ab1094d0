"""int8 by onnxruntime's quantization: weights of matrix products by channel, activations by batch (dynamic) or by
calibration (static). Tables of embeddings, most of a small encoder's bytes, get a scale for each row (`embeddings.py`).

Heads stay float: they are a thousandth of the work. The exported graph's own shape notes are dropped first;
`quantize_dynamic` infers them anew and trips over those that torch wrote for shapes that are symbols (a 384 against a
3).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.embeddings import quantize_embeddings
from relabel.export.optimize import is_big, quiet
from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require

CALIBRATION_BATCH = 8


def write_int8(source: Path, target: Path, *, narrowing: bool) -> dict[str, Any]:
    """Dynamic int8: activations are scaled anew in every batch, over all of its rows.

    Args:
        narrowing: also the matrices that narrow. Not for decoders: the token that all others attend to, their first,
            brings values into the second matrix of a feed-forward layer that are far outside the others' (Sun et al.
            2024, arXiv:2402.17762), in every batch, and the scale of them all leaves the others no digits.
            SmolLM2-135M: what the layers give is off by 19 % with these matrices, by 4 % without (2026-11-20). Of an
            encoder's answers they cost little.
    Raises:
        ModelError: the graph can't be quantized.
    """
    quantization = require("onnxruntime.quantization", extra="cpu", purpose="int8")
    with tempfile.TemporaryDirectory(dir=target.parent) as work, _translate_errors(source):
        bare = _without_shapes(source, Path(work) / "bare.onnx")
        quantization.quantize_dynamic(
            bare,
            target,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=[*_heads(bare), *([] if narrowing else _narrowing(bare))],
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=is_big(source),
            extra_options={"MatMulConstBOnly": True},
        )
    matrices = _count(target, "MatMulInteger", "DynamicQuantizeMatMul")
    return {"kind": "dynamic", "quantized": matrices, "tables": quantize_embeddings(target, is_big=is_big(source))}


def write_int8_static(source: Path, target: Path, batches: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Static int8 as QuantizeLinear and DequantizeLinear around the matrix products, scales from real batches.

    Matrices that narrow stay float: what goes into the second of a feed-forward layer has a few values far outside the
    others, and one scale for all of them leaves the others no digits. MiniLM on 2,023 real pairs: 9.4 % of grades
    flipped with them, 3.0 % without (2026-11-20). A dynamic scale, of one batch, suffers less.

    Args:
        batches: what the model is fed to see its activations.
    Raises:
        ModelError: the graph can't be quantized.
    """
    quantization = require("onnxruntime.quantization", extra="cpu", purpose="int8-static")
    with tempfile.TemporaryDirectory(dir=target.parent) as work, _translate_errors(source):
        bare = _without_shapes(source, Path(work) / "bare.onnx")
        quantization.quantize_static(
            bare,
            target,
            _reader(quantization, batches),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=[*_heads(bare), *_narrowing(bare)],
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            activation_type=quantization.QuantType.QUInt8,
            use_external_data_format=is_big(source),
            extra_options={"MatMulConstBOnly": True},
        )
    found = {"quantized": _count(target, "QuantizeLinear"), "calibration_batches": len(batches)}
    return {"kind": "static", **found, "tables": quantize_embeddings(target, is_big=is_big(source))}


def _reader(quantization: Any, batches: Sequence[dict[str, np.ndarray]]) -> Any:
    class Batches(quantization.CalibrationDataReader):  # type: ignore[misc]
        """Hands out one batch after the other."""

        def __init__(self) -> None:
            self.left: Iterator[dict[str, np.ndarray]] = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    return Batches()


def _without_shapes(source: Path, target: Path) -> Path:
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(source))
    del model.graph.value_info[:]
    onnx.save_model(model, str(target), save_as_external_data=is_big(source), location=target.name + ".data")
    return target


def _heads(path: Path) -> list[str]:
    """The heads' nodes; the library turns a Gemm into a MatMul of another name before it looks at them."""
    onnx = require("onnx", extra="cpu", purpose="int8")
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return [name for node in nodes if node.op_type == "Gemm" for name in (node.name, node.name + "_MatMul")]


def _narrowing(path: Path) -> list[str]:
    """Matrix products with a constant of more rows than columns."""
    onnx = require("onnx", extra="cpu", purpose="int8")
    graph = onnx.load(str(path), load_external_data=False).graph
    shapes = {constant.name: list(constant.dims) for constant in graph.initializer}
    matrices = ((node.name, shapes.get(node.input[1], [])) for node in graph.node if node.op_type == "MatMul")
    return [name for name, shape in matrices if len(shape) == 2 and shape[0] > shape[1]]


def _count(path: Path, *operators: str) -> int:
    onnx = require("onnx", extra="cpu", purpose="int8")
    return sum(node.op_type in operators for node in onnx.load(str(path), load_external_data=False).graph.node)


@contextlib.contextmanager
def _translate_errors(source: Path) -> Iterator[None]:
    """Quiets the library's advice, and turns its errors into ours.

    Raises:
        ModelError: the library gave up.
    """
    try:
        with quiet():
            yield
    except (ValueError, RuntimeError, KeyError, AttributeError) as exc:
        raise ModelError(f"{source}: onnxruntime can't quantize this graph ({type(exc).__name__}: {exc}).") from exc
