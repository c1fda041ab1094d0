"""ONNX graphs of a student's module, exported by `torch.onnx` or by optimum. Imports torch; import it only where a
graph is exported or served."""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relabel.distill.students.model import StudentModel
from relabel.distill.students.spec import KINDS
from relabel.export.exporters import input_names, output_names
from relabel.export.quantization import BIG_BYTES, quiet
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import ModelError
from relabel.manifests.process import require

# B rows, T tokens, K grades

SAMPLE = [("red shoe", "a red running shoe of size nine"), ("lamp", "x"), ("a", "")]
"""Traced with: three rows of unequal length, so that neither dimension is 1 or the other one's size."""


class ServingModule(nn.Module):  # type: ignore[misc]
    """A student that answers with probabilities: softmax(logits / temperature) of every head, in float32.

    Args:
        module: the student's.
        names: what its forward calls the inputs, in the order in which they come here.
        temperature: by head.
        logits: also give the raw logits.
    """

    def __init__(self, module: nn.Module, names: list[str], temperature: Mapping[str, float], *, logits: bool) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.temperature = dict(temperature)
        self.logits = logits

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Probabilities [B, K] by head, then logits [B, K] by head if asked for."""
        found = self.module(**dict(zip(self.names, inputs, strict=True)))
        raw = [values_BK.float() for values_BK in found.values()]
        probs = [
            torch.softmax(values / self.temperature.get(name, 1.0), -1) for name, values in zip(found, raw, strict=True)
        ]
        return tuple(probs + raw) if self.logits else tuple(probs)


def export_torch(student: StudentModel, path: Path, options: ExportSpec) -> dict[str, Any]:
    """Write the student as ONNX; weights are inside the file, or in `<file>.data` above the 2 GB that
    protobuf takes.

    Raises:
        MissingExtraError: onnxscript is absent.
        ModelError: torch can't trace the model.
    """
    require("onnxscript", extra="cpu", purpose="The exporter torch")
    names = input_names(student)
    serving = ServingModule(student.module, names, student.record.temperature, logits=options.logits).eval()
    batch = student.texts.collate(student.texts.encode(SAMPLE), pad_multiple=1)
    longest = max(student.record.max_tokens, 2)
    axes = {0: torch.export.Dim("batch", min=1, max=1 << 20), 1: torch.export.Dim("sequence", min=1, max=longest)}
    with quiet(), _plain_attention(student), torch.no_grad():
        try:
            program = torch.onnx.export(
                serving,
                tuple(batch[name] for name in names),
                dynamo=True,
                opset_version=options.opset,
                input_names=names,
                output_names=output_names(student, options),
                dynamic_shapes=(tuple({0: axes[0]} if name == "counts" else dict(axes) for name in names),),
                verbose=False,
            )
        except (RuntimeError, TypeError, ValueError) as exc:
            raise ModelError(
                f"{student.path}: torch.onnx can't trace this {student.record.kind} "
                f"({str(exc).strip().splitlines()[-1][:300]}). "
                "Try --exporter optimum in its own environment."
            ) from exc
        program.save(path)
    return {
        "exporter": "torch",
        "torch": torch.__version__,
        "onnxscript": require("onnxscript", extra="cpu", purpose="").__version__,
    }


@contextlib.contextmanager
def _plain_attention(student: StudentModel) -> Iterator[None]:
    """Attention as products and a softmax. torch's own operator becomes a graph that checks every weight for NaN: 5 %
    slower on a CPU.
    """
    model = student.module.inner
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


HIDDEN = "last_hidden_state"
MAX_OPSET = 18
"""TorchScript's exporter knows no later operator set."""


def export_optimum(student: StudentModel, path: Path, options: ExportSpec) -> dict[str, Any]:
    """Write the student as ONNX: optimum-onnx exports the backbone, and the heads are a few nodes after it.
    optimum-onnx wants transformers 4.57, so this runs in an environment of its own (extra `optimum`), and traces with
    TorchScript.

    Raises:
        MissingExtraError: optimum-onnx is absent.
        ModelError: optimum has no export for this model, or one with other inputs.
    """
    convert = require(
        "optimum.exporters.onnx.convert", extra="optimum", purpose="The exporter optimum (in an environment of its own)"
    )
    onnx = require("onnx", extra="optimum", purpose="The exporter optimum")
    module = student.module.inner.base_model
    opset = min(options.opset, MAX_OPSET)
    with tempfile.TemporaryDirectory(dir=path.parent) as work, quiet():
        try:
            # its own check is one dummy batch that only warns; ours is the parity gate
            convert.onnx_export_from_model(
                module,
                Path(work),
                task="feature-extraction",
                opset=opset,
                do_validation=False,
                no_dynamic_axes=False,
                do_constant_folding=True,
            )
        except (ValueError, KeyError, RuntimeError, NotImplementedError, TypeError) as exc:
            raise ModelError(
                f"{student.path}: optimum can't export this {student.record.kind} ({type(exc).__name__}: "
                f"{str(exc)[:300]}). Take --exporter torch."
            ) from exc
        model = onnx.load(str(Path(work) / "model.onnx"))
    _fit_inputs(onnx, model.graph, input_names(student), student.path)
    _put_heads(onnx, model.graph, student, options)
    onnx.save_model(model, str(path), save_as_external_data=model.ByteSize() > BIG_BYTES, location=path.name + ".data")
    onnx.checker.check_model(str(path))
    names = ("optimum-onnx", "optimum", "transformers", "torch")
    return {"exporter": "optimum", "opset": opset, **{name: importlib.metadata.version(name) for name in names}}


def _fit_inputs(onnx: Any, graph: Any, wanted: list[str], where: Path) -> None:
    """The graph's inputs become those that the student's batches hold, in their order.

    Raises:
        ModelError: the graph lacks one, or wants one that the student has not.
    """
    there = {value.name: value for value in graph.input}
    if missing := [name for name in wanted if name not in there]:
        raise ModelError(
            f"{where}: optimum's graph takes no {', '.join(missing)}, which this student needs. Take --exporter torch."
        )
    for name in there.keys() - set(wanted):
        if name != "token_type_ids":
            raise ModelError(
                f"{where}: optimum's graph wants {name}, which this student does not have. Take --exporter torch."
            )
        # a tokenizer without segments: all are segment 0
        graph.node.insert(0, onnx.helper.make_node("Sub", ["input_ids", "input_ids"], [name], name="no_segments"))
    del graph.input[:]
    graph.input.extend(there[name] for name in wanted)


def _put_heads(onnx: Any, graph: Any, student: StudentModel, options: ExportSpec) -> None:
    """Pooling, heads, temperatures and softmax after the last hidden state."""
    pooled = _pool(onnx, graph, student)
    probabilities, logits = [], []
    for name, (weight_KD, bias_K) in _heads(student).items():
        _constant(onnx, graph, f"{name}_weight", weight_KD)
        _constant(onnx, graph, f"{name}_bias", bias_K)
        _constant(
            onnx, graph, f"{name}_temperature", np.array(student.record.temperature.get(name, 1.0), dtype=np.float32)
        )
        _node(onnx, graph, "Gemm", [pooled, f"{name}_weight", f"{name}_bias"], f"{name}_logits", transB=1)
        _node(onnx, graph, "Div", [f"{name}_logits", f"{name}_temperature"], f"{name}_tempered")
        _node(onnx, graph, "Softmax", [f"{name}_tempered"], name, axis=-1)
        shape = ["batch_size", len(bias_K)]
        probabilities.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        logits.append(onnx.helper.make_tensor_value_info(f"{name}_logits", onnx.TensorProto.FLOAT, shape))
    del graph.output[:]
    graph.output.extend(probabilities + (logits if options.logits else []))


def _pool(onnx: Any, graph: Any, student: StudentModel) -> str:
    """Put in what makes one vector of a row; its name."""
    pads_left = KINDS[student.record.kind].pads_left
    if pads_left or student.record.pooling == "cls":
        place = -1 if pads_left else 0
        _constant(onnx, graph, "pooled_place", np.array(place, dtype=np.int64))
        return _node(onnx, graph, "Gather", [HIDDEN, "pooled_place"], "pooled", axis=1)
    _constant(onnx, graph, "pool_last", np.array([-1], dtype=np.int64))
    _constant(onnx, graph, "pool_tokens", np.array([1], dtype=np.int64))
    _constant(onnx, graph, "pool_one", np.array(1.0, dtype=np.float32))
    _node(onnx, graph, "Cast", ["attention_mask"], "pool_mask", to=onnx.TensorProto.FLOAT)
    _node(onnx, graph, "Unsqueeze", ["pool_mask", "pool_last"], "pool_weight")
    _node(onnx, graph, "Mul", [HIDDEN, "pool_weight"], "pool_weighted")
    _node(onnx, graph, "ReduceSum", ["pool_weighted", "pool_tokens"], "pool_sum", keepdims=0)
    _node(onnx, graph, "ReduceSum", ["pool_weight", "pool_tokens"], "pool_count", keepdims=0)
    _node(onnx, graph, "Max", ["pool_count", "pool_one"], "pool_divisor")
    return _node(onnx, graph, "Div", ["pool_sum", "pool_divisor"], "pooled")


def _heads(student: StudentModel) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Weight [K, D] and bias [K] by head, float32."""
    heads = student.module.output_rows()
    return {name: tuple(part.detach().float().cpu().numpy() for part in parts) for name, parts in heads.items()}


def _node(onnx: Any, graph: Any, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
    graph.node.append(onnx.helper.make_node(kind, inputs, [output], name=f"student/{output}", **attributes))
    return output


def _constant(onnx: Any, graph: Any, name: str, value: np.ndarray) -> None:
    graph.initializer.append(onnx.numpy_helper.from_array(value, name))
