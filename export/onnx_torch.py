"""The exporter `torch`: torch.onnx with dynamo, heads and calibration traced along with the backbone."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relabel.distill.students.students import StudentModel
from relabel.export.exporters import GraphOptions, input_names, output_names
from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require

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


def export_torch(student: StudentModel, path: Path, options: GraphOptions) -> dict[str, Any]:
    """Write the student as ONNX; weights are inside the file, or beside it as `<file>.data` above the 2 GB that
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
    with _quiet(), _plain_attention(student), torch.no_grad():
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
    """Attention as products and a softmax. torch's own operator becomes a graph that looks for NaN in every weight: 5 %
    slower on a CPU.
    """
    model = student.module.inner
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx tells of torchvision that is not installed, of deprecations in its own code, and prints its steps."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
