"""Exporters by name: what turns a student's module into an ONNX graph of floats. One line each; third parties use the
entry point group.

An exporter is a function `(student, path, options) -> facts`: it writes one ONNX file at `path` with dynamic batch and
sequence, whose inputs are `input_names(student)` and whose outputs are the heads by name (calibrated probabilities,
then `<head>_logits` where asked for), and says what made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relabel.distill.students.students import StudentModel
from relabel.manifests.registered import Registry

EXPORTERS = {"torch": "relabel.export.onnx_torch:export_torch", "optimum": "relabel.export.onnx_optimum:export_optimum"}
_REGISTRY = Registry("exporter", "relabel.exporters", EXPORTERS)


@dataclass(frozen=True)
class GraphOptions:
    """What a graph is to hold.

    Args:
        logits: raw logits as further outputs.
        opset: ONNX operator set.
    """

    logits: bool = False
    opset: int = 20


class Exporter(Protocol):
    """Writes one ONNX file."""

    def __call__(self, student: StudentModel, path: Path, options: GraphOptions) -> dict[str, Any]:
        """Write the graph; return what made it (`exporter`, versions)."""
        ...


def load_exporter(name: str) -> Exporter:
    """The exporter of a name.

    Raises:
        ConfigError: no such exporter; names the nearest.
    """
    found: Exporter = _REGISTRY.load(name)
    return found


def input_names(student: StudentModel) -> list[str]:
    """The graph's inputs, in order; every one int64 [B, T], but for `counts`, which is [B, 19]."""
    return list(student.texts.collate(student.texts.encode([("a", "b")])))


def output_names(student: StudentModel, options: GraphOptions) -> list[str]:
    """The graph's outputs, in order: probabilities by head, then logits."""
    heads = list(student.record.heads)
    return [*heads, *(f"{name}_logits" for name in heads if options.logits)]
