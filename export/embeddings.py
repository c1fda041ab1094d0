"""Tables of embeddings in int8, with a scale for each row: a value is off by at most a 254th of the largest in its row.

onnxruntime's quantization has one scale for a whole table, or none; most of a small encoder's bytes are in this table
(MiniLM: 47 of the 59 MB that int8 left).
"""

# V rows, H columns

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from relabel.manifests.extras import require

LEAST_VALUES = 1 << 14
"""A smaller table is not worth the operators."""
STEPS = 127


def quantize_embeddings(path: Path, *, is_big: bool) -> int:
    """Quantize, in place, the float tables that a graph looks rows up in and uses for nothing else.

    Args:
        is_big: its weights lie in a file beside it.
    Returns:
        How many there were.
    """
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(path))
    graph = model.graph
    tables = {one.name: one for one in graph.initializer if _is_table(onnx, one)}
    readers: dict[str, list[Any]] = {name: [] for name in tables}
    for node in graph.node:
        for name in node.input:
            if name in readers:
                readers[name].append(node)
    nodes, found = [], 0
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or readers[table.name] != [node] or any(one.i for one in node.attribute):  # of another axis
            nodes.append(node)
            continue
        nodes += _looked_up(onnx, graph, node, table)
        found += 1
    if found:
        del graph.node[:]
        graph.node.extend(nodes)
        beside = path.with_name(path.name + ".data")
        if is_big:
            beside.unlink()  # it is held in memory, and onnx appends
        onnx.save_model(model, str(path), save_as_external_data=is_big, location=beside.name)
    return found


def _is_table(onnx: Any, one: Any) -> bool:
    return one.data_type == onnx.TensorProto.FLOAT and len(one.dims) == 2 and one.dims[0] * one.dims[1] >= LEAST_VALUES


def _looked_up(onnx: Any, graph: Any, node: Any, table: Any) -> list[Any]:
    """The nodes in place of one look-up: rows in int8, their scales, and the product. Puts the two tables in place of
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
