"""The ONNX graph of a student's module. Imports torch; import it only where a graph is exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relabel.distill.students.model import StudentModel
from relabel.export.exporters import input_names, output_names
from relabel.export.quantization import quiet
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


def export_onnx(student: StudentModel, path: Path, options: ExportSpec) -> dict[str, Any]:
    """Write the student as ONNX; weights are inside the file, or in `<file>.data` above the 2 GB that
    protobuf takes.

    Raises:
        MissingExtraError: onnxscript is absent.
        ModelError: torch can't trace the model.
    """
    require("onnxscript", extra="cpu", purpose="An export")
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
                f"({str(exc).strip().splitlines()[-1][:300]}). Take another base model."
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
