"""Graph fusion and fp16, by onnxruntime's transformers optimizer; and the graph's facts that others need.

The fp32 file stays as it was exported, free of onnxruntime's own operators, since TensorRT builds from it (onnxruntime
fuses it when it is loaded). fp16 is fused first: onnxruntime's loading-time fusions look for float32.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require

BIG_BYTES = 1_800_000_000
"""From here on weights lie beside the graph: protobuf ends at 2 GB."""
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
            model = optimizer.optimize_model(
                str(source), model_type="bert", num_heads=num_heads, hidden_size=hidden_size, opt_level=0
            )
            fused = {name: int(count) for name, count in sorted(model.get_fused_operator_statistics().items()) if count}
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
    """onnxruntime's tools tell each fusion that they tried, and give advice through warnings."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
