"""The model files of a bundle: the graph as it is exported, and what is made of it in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.kinds import KINDS
from relabel.distill.students.students import StudentModel
from relabel.export.contracts import input_contract
from relabel.export.exporters import GraphOptions, load_exporter
from relabel.export.loader import Encoder
from relabel.export.optimize import drop_notes, write_fp16
from relabel.export.quantize import CALIBRATION_BATCH, write_int8, write_int8_static
from relabel.export.reference_pairs import PairSet, draw_pairs
from relabel.export.specs import ExportSpec
from relabel.export.student_facts import ModelFile
from relabel.manifests.errors import InputError
from relabel.manifests.records import plain

FILES = {
    "fp32": "model.onnx",
    "fp16": "model.fp16.onnx",
    "int8": "model.int8.onnx",
    "int8-static": "model.int8-static.onnx",
}

Say = Callable[[str], None]


def write_models(
    student: StudentModel, folder: Path, spec: ExportSpec, training: PairSet | None, say: Say
) -> dict[str, Any]:
    """Write every ONNX file of a bundle.

    Args:
        folder: holds the tokenizer already.
        training: pairs to calibrate on, where a static int8 is asked for.
    Returns:
        What made each: exporter and versions, fusions that were found, operators quantized.
    Raises:
        ModelError: a step can't be done with this model.
        InputError: there is nothing to calibrate on.
    """
    plain = folder / FILES["fp32"]
    say(f"fp32: exporting with {spec.exporter}")
    made: dict[str, Any] = {"fp32": load_exporter(spec.exporter)(student, plain, GraphOptions(spec.logits, spec.opset))}
    for precision in spec.onnx_precisions[1:]:
        target = folder / FILES[precision]
        say(f"{precision}: writing {target.name}")
        if precision == "fp16":
            config = student.module.inner.config
            made[precision] = write_fp16(
                plain, target, num_heads=config.num_attention_heads, hidden_size=config.hidden_size
            )
        elif precision == "int8":
            made[precision] = write_int8(plain, target, narrowing=KINDS[student.record.kind].int8_narrows)
        else:
            assert training is not None
            made[precision] = write_int8_static(plain, target, _calibration(student, folder, spec, training))
    for precision in spec.onnx_precisions:  # last: fp16 is made by the notes of fp32
        drop_notes(folder / FILES[precision])
    return made


def list_models(folder: Path, spec: ExportSpec) -> list[ModelFile]:
    """The ONNX files as the manifest lists them."""
    found = []
    for precision in spec.onnx_precisions:
        path = FILES[precision]
        files = sorted(file.name for file in folder.iterdir() if file.name in (path, path + ".data"))
        found.append(ModelFile(path=path, format="onnx", precision=precision, files=files))
    return found


def _calibration(
    student: StudentModel, folder: Path, spec: ExportSpec, training: PairSet
) -> list[dict[str, np.ndarray]]:
    """Batches of training pairs of like length."""
    pairs = draw_pairs(training, spec.calibration_pairs, seed=spec.parity.seed)
    if not pairs:
        raise InputError(
            "int8-static: the student's training split is empty, there is nothing to calibrate on. Take int8."
        )
    encoder = Encoder(folder, plain(input_contract(student)))
    rows = sorted(encoder.encode(pairs), key=lambda row: len(row[0]))
    return [
        encoder.collate(rows[start : start + CALIBRATION_BATCH]) for start in range(0, len(rows), CALIBRATION_BATCH)
    ]
