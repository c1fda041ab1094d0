"""A Triton model repository inside a bundle: `triton/<name>-<precision>/config.pbtxt` and `…/1/model.onnx`.

The model files are the bundle's own under a second name (a copy where the disk has no links): Triton wants them where
its layout says, and a published bundle's equal bytes are uploaded and downloaded once. Triton serves token ids, so the
client encodes with the bundle's `load.py` (`Encoder`), and pads the rows of a batch alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from relabel.export.bundle_places import link_or_copy
from relabel.export.student_facts import ModelFile

FOLDER = "triton"
MAX_BATCH = 128
PREFERRED_BATCHES = (8, 32)
MAX_DELAY_US = 2000
"""How long Triton may hold a request back for company: 2 ms, a fraction of what one batch costs on a CPU or an older
GPU.
"""


def write_repository(
    bundle: Path, name: str, models: Sequence[ModelFile], inputs: Sequence[str], outputs: Mapping[str, int]
) -> None:
    """Write the view beside the models.

    Args:
        bundle: folder of the bundle.
        models: as in its manifest.
        inputs: names of the graph's inputs.
        outputs: number of grades by output.
    """
    for model in models:
        if model.format != "onnx":
            continue
        label = f"{model_name(name)}-{model.precision}"
        folder = bundle / FOLDER / label
        (folder / "1").mkdir(parents=True)
        for file in model.files:
            link_or_copy(bundle / file, folder / "1" / _inner_name(file, model.path))
        (folder / "config.pbtxt").write_text(render_config(label, inputs, outputs), encoding="utf-8")


def render_config(label: str, inputs: Sequence[str], outputs: Mapping[str, int]) -> str:
    """Triton's ModelConfig in protobuf's text form."""
    lines = [f'name: "{label}"', 'backend: "onnxruntime"', f"max_batch_size: {MAX_BATCH}"]
    lines += [f'input [{{ name: "{name}" data_type: TYPE_INT64 dims: [ -1 ] }}]' for name in inputs]
    lines += [
        f'output [{{ name: "{name}" data_type: TYPE_FP32 dims: [ {grades} ] }}]' for name, grades in outputs.items()
    ]
    sizes = ", ".join(map(str, PREFERRED_BATCHES))
    lines += [
        f"dynamic_batching {{ preferred_batch_size: [ {sizes} ] max_queue_delay_microseconds: {MAX_DELAY_US} }}",
        "instance_group [{ count: 1 kind: KIND_AUTO }]",
        "",
    ]
    return "\n".join(lines)


def model_name(name: str) -> str:
    """A bundle's name as Triton and file systems take it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "student"


def _inner_name(file: str, path: str) -> str:
    """`model.onnx` for the graph; data beside it keeps the name that the graph knows it by."""
    return "model.onnx" if file == path else Path(file).name
