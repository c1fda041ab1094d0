"""Smaller precisions of an ONNX graph: fp16 by onnxruntime's transformers optimizer, dynamic int8 by its
quantization with int8 embedding tables of a scale for each row, and static int8 by NNCF.

The fp32 file stays as it was exported, free of onnxruntime's own operators, since TensorRT builds from it (onnxruntime
fuses it when it is loaded). fp16 is fused first: onnxruntime's loading-time fusions need float32. Heads stay float:
they are a thousandth of the work.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from relabel.manifests.errors import ModelError
from relabel.manifests.process import require

BIG_BYTES = 1_800_000_000
"""From here on weights are in a file of their own: protobuf ends at 2 GB."""
LAYER_OPERATORS = {
    "LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization",
    "RMSNormalization", "MatMul", "Attention",
}  # fmt: skip
"""A layer of a transformer ends in one of these."""


def write_fp16(source: Path, target: Path, *, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """Fuse a float32 graph and halve it; inputs, outputs, and what comes after the last layer stay float32.

    Args:
        num_heads, hidden_size: of the attention, which fusion needs.
    Returns:
        Which fusions were found, by name.
    Raises:
        ModelError: the graph can't be converted.
    """
    optimizer = require("onnxruntime.transformers.optimizer", extra="cpu", purpose="fp16")
    with quiet():
        try:
            fused = {}
            try:
                model = optimizer.optimize_model(
                    str(source), model_type="bert", num_heads=num_heads, hidden_size=hidden_size, opt_level=0
                )
                found = sorted(model.get_fused_operator_statistics().items())
                fused = {name: int(count) for name, count in found if count}
            except IndexError:  # its fusions stumble over ModernBERT's rotated positions: halved as it is
                model = require("onnxruntime.transformers.onnx_model", extra="cpu", purpose="fp16").OnnxModel(
                    require("onnx", extra="cpu", purpose="fp16").load(str(source))
                )
            model.convert_float_to_float16(keep_io_types=True, node_block_list=_head_nodes(model.model.graph))
            _drop_twins(model.model.graph)
            model.topological_sort()
            model.save_model_to_file(str(target), use_external_data_format=is_big(source))
        except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as exc:
            raise ModelError(
                f"{source}: onnxruntime's optimizer can't halve this graph ({type(exc).__name__}: {exc})."
            ) from exc
    return {"fused": fused}


def drop_notes(path: Path) -> None:
    """Take out of a model file what nobody needs who runs it: where in whose code each node was traced, with paths of
    the machine that exported, so that the same student gives the same bytes anywhere; and the shapes between inputs and
    outputs, which are inferred.

    With shapes onnxruntime plans before the first run which result shall lie where another was, of symbols (batch,
    sequence) and not of sizes. For a MiniLM in float32 on a CPU that plan costs 5 to 6 % of the time from batches of 8
    on and 160 MB more at its peak (onnxruntime 1.31, 2026-11-20).
    """
    onnx = require("onnx", extra="cpu", purpose="An export")
    model = onnx.load(str(path), load_external_data=False)
    del model.graph.value_info[:]
    for part in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.functions):
        del part.metadata_props[:]
        part.doc_string = ""
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    path.write_bytes(model.SerializeToString())


def is_big(path: Path) -> bool:
    """Whether a model with its data passes what one protobuf file holds."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0) > BIG_BYTES


def _head_nodes(graph: Any) -> list[str]:
    """Names of the nodes between the last layer and the outputs: pooling (a sum over a row's tokens, which halves can
    overflow), heads and softmax. They are few multiplications.
    """
    made_by = {name: node for node in graph.node for name in node.output}
    found: dict[str, None] = {}
    pending = [output.name for output in graph.output]
    while pending:
        node = made_by.get(pending.pop())
        if node is None or node.op_type in LAYER_OPERATORS or node.name in found:
            continue
        found[node.name] = None
        pending += list(node.input)
    return list(found)


def _drop_twins(graph: Any) -> None:
    """The converter casts a value once for each float32 node that reads it, under one name; one cast is enough."""
    seen: set[str] = set()
    kept = []
    for number, node in enumerate(graph.node):
        if node.output and node.output[0] in seen:
            continue
        seen.update(node.output)
        node.name = f"{node.op_type}_{number}"
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the steps, fusions, deprecations and advice that the exporters and onnxruntime's tools print."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


LEAST_VALUES = 1 << 14
"""A smaller table is not worth the operators."""
STEPS = 127


def quantize_embeddings(path: Path, *, is_big: bool) -> int:
    """Quantize, in place, the float tables that a graph gathers rows of and uses for nothing else: a value is off by at
    most a 254th of the largest in its row. onnxruntime's quantization has one scale for a whole table, or none; most of
    a small encoder's bytes are in this table (MiniLM: 47 of the 59 MB that int8 left).

    Args:
        is_big: its weights are in a file of their own.
    Returns:
        How many there were.
    """
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(path))
    graph = model.graph
    floats = [one for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT and len(one.dims) == 2]
    tables = {one.name: one for one in floats if one.dims[0] * one.dims[1] >= LEAST_VALUES}
    readers = Counter(name for node in graph.node for name in node.input)
    nodes, found = [], 0
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        is_other_axis = any(one.i for one in node.attribute)
        if table is None or readers[table.name] != 1 or is_other_axis:
            nodes.append(node)
        else:
            nodes += _gathered(onnx, graph, node, table)
            found += 1
    if found:
        del graph.node[:]
        graph.node.extend(nodes)
        data = path.with_name(path.name + ".data")
        if is_big:
            data.unlink()  # it is held in memory, and onnx appends
        onnx.save_model(model, str(path), save_as_external_data=is_big, location=data.name)
    return found


def _gathered(onnx: Any, graph: Any, node: Any, table: Any) -> list[Any]:
    """The nodes in place of one Gather: rows in int8, their scales, and the product. Puts the two tables in place of
    the one.
    """
    values_VH = onnx.numpy_helper.to_array(table)
    largest_V1 = np.abs(values_VH).max(axis=1, keepdims=True)
    scales_V1 = np.where(largest_V1 > 0, largest_V1 / STEPS, 1.0).astype(np.float32)
    rows_VH = np.clip(np.rint(values_VH / scales_V1), -STEPS, STEPS).astype(np.int8)
    graph.initializer.remove(table)
    for name, held in ((f"{table.name}_int8", rows_VH), (f"{table.name}_scales", scales_V1)):
        graph.initializer.append(onnx.numpy_helper.from_array(held, name))
    out, make = node.output[0], onnx.helper.make_node
    return [
        make("Gather", [f"{table.name}_int8", node.input[1]], [f"{out}_int8"], name=f"{node.name}_int8"),
        make("Cast", [f"{out}_int8"], [f"{out}_steps"], name=f"{node.name}_steps", to=onnx.TensorProto.FLOAT),
        make("Gather", [f"{table.name}_scales", node.input[1]], [f"{out}_scales"], name=f"{node.name}_scales"),
        make("Mul", [f"{out}_steps", f"{out}_scales"], [out], name=node.name),
    ]


def write_int8(source: Path, target: Path, *, narrowing: bool) -> dict[str, Any]:
    """Dynamic int8: activations are scaled in every batch, over all of its rows.

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
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(source))
    # `quantize_dynamic` infers shapes, and trips over those that torch wrote for symbols (a 384 against a 3)
    del model.graph.value_info[:]
    left_out = _nodes_left_out(model.graph, narrowing=narrowing)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        bare = Path(work) / "bare.onnx"
        onnx.save_model(model, str(bare), save_as_external_data=is_big(source), location=bare.name + ".data")
        del model  # the library loads it again
        try:
            with quiet():
                quantization.quantize_dynamic(
                    bare,
                    target,
                    op_types_to_quantize=["MatMul"],
                    nodes_to_exclude=left_out,
                    per_channel=True,
                    weight_type=quantization.QuantType.QInt8,
                    use_external_data_format=is_big(source),
                    extra_options={"MatMulConstBOnly": True},
                )
        except (ValueError, RuntimeError, KeyError, AttributeError) as exc:
            raise ModelError(f"{source}: onnxruntime can't quantize this graph ({type(exc).__name__}: {exc}).") from exc
    nodes = onnx.load(str(target), load_external_data=False).graph.node
    matrices = sum(node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul") for node in nodes)
    return {"kind": "dynamic", "quantized": matrices, "tables": quantize_embeddings(target, is_big=is_big(source))}


def _nodes_left_out(graph: Any, *, narrowing: bool) -> list[str]:
    """The heads (the library first turns a Gemm into a MatMul of another name); unless `narrowing`, also the products
    with a constant of more rows than columns.
    """
    shapes = {constant.name: list(constant.dims) for constant in graph.initializer}
    found = []
    for node in graph.node:
        shape = shapes.get(node.input[1], []) if node.op_type == "MatMul" else []
        if node.op_type == "Gemm":
            found += [node.name, node.name + "_MatMul"]
        elif not narrowing and len(shape) == 2 and shape[0] > shape[1]:
            found.append(node.name)
    return found


def require_nncf() -> ModuleType:
    """NNCF, without its reports of what it is used for, which it sends to Intel unless it is switched off.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("NNCF_CI", "1")
    return require("nncf", extra="int8-static", purpose="The precision int8-static")


def write_int8_static(source: Path, target: Path, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Static int8: activations are scaled by what they are on some pairs, so that an answer does not depend on its
    batch; SmoothQuant (Xiao et al. 2023, arXiv:2211.10438) first moves into the weights what few channels have more of.

    The file is ONNX with QuantizeLinear and DequantizeLinear. OpenVINO runs it as fast as an IR of the same, and
    onnxruntime runs it too.

    Args:
        batches: the graph's inputs, of a pair each.
    Raises:
        ModelError: the graph can't be quantized.
    """
    nncf, onnx = require_nncf(), require("onnx", extra="cpu", purpose="int8-static")
    try:
        with quiet():
            model = nncf.quantize(
                onnx.load(str(source)),
                nncf.Dataset(batches),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(batches),
            )
    except Exception as exc:  # NNCF's errors and onnxruntime's share no other class
        raise ModelError(f"{source}: NNCF can't quantize this graph ({type(exc).__name__}: {str(exc)[:300]}).") from exc
    onnx.save_model(model, str(target), save_as_external_data=is_big(source), location=target.name + ".data")
    return {"kind": "static", "pairs": len(batches), "nncf": nncf.__version__}
