"""What can be timed: an ONNX file on a provider, and a student's own module in torch. A runner takes a batch and gives
numpy arrays.

Its answer lies in host memory when it returns, so a device has finished by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from relabel.export.loader import BundleError, open_session
from relabel.manifests.errors import InputError, MissingExtraError, ModelError, RelabelError

Batch = dict[str, np.ndarray]
Runner = Callable[[Batch], Mapping[str, np.ndarray]]
SEGMENTS = "token_type_ids"


class OnnxRunner:
    """An ONNX file, or an engine's context, on the provider that was asked for.

    Args:
        precision: in what openvino computes.
        outputs: names of the outputs to ask for; all by default.
    Raises:
        MissingExtraError: the runtime can't open it there, or fell back.
    """

    def __init__(
        self,
        path: Path,
        provider: str,
        *,
        precision: str = "fp32",
        threads: int,
        outputs: Sequence[str] | None = None,
    ) -> None:
        self._path = path
        try:
            self._session: Any = open_session(path, provider, precision=precision, threads=threads)
        except BundleError as exc:
            raise MissingExtraError(f"{exc} Or measure what this machine has, with --allow-fallback.") from exc
        self._quiet = _quiet()
        self._outputs = list(outputs) if outputs is not None else [found.name for found in self._session.get_outputs()]
        self.inputs: list[str] = [found.name for found in self._session.get_inputs()]

    def __call__(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Outputs by name.

        Raises:
            ModelError: it does not run on such a batch.
        """
        try:
            found = self._session.run(self._outputs, batch, self._quiet)
        except Exception as exc:  # the runtimes' errors share no other class
            rows, tokens = next(iter(batch.values())).shape
            raise ModelError(f"{self._path.name}: can't run {rows} rows of {tokens} tokens ({_reason(exc)}).") from exc
        return dict(zip(self._outputs, found, strict=True))


def _quiet() -> Any:
    """Options of a run that fails without a word of onnxruntime's own on stderr: the caller reports the error."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    return options


def open_other(path: Path, provider: str, names: Sequence[str], *, threads: int) -> Runner:
    """Another ONNX file of the same weights, asked with the bundle's batches.

    Args:
        names: what the bundle's batches hold.
    Raises:
        InputError: there is no such file, or it takes inputs that the batches lack.
        MissingExtraError: see `OnnxRunner`.
    """
    if not path.is_file():
        raise InputError(f"--against {path}: no such file. Name an ONNX file, or torch.")
    runner = OnnxRunner(path, provider, threads=threads)
    if strange := [name for name in runner.inputs if name not in (*names, SEGMENTS)]:
        raise InputError(
            f"--against {path}: takes {', '.join(strange)}, which this bundle's batches ({', '.join(names)}) lack."
        )

    def run(batch: Batch) -> Mapping[str, np.ndarray]:
        held = {SEGMENTS: np.zeros_like(batch["input_ids"]), **batch}
        return runner({name: held[name] for name in runner.inputs})

    return run


def open_torch(path: Path, provider: str, *, threads: int) -> Runner:
    """A student's own module, eager, with the softmax and the temperatures that the graphs have.

    Args:
        path: the student's folder.
    Raises:
        MissingExtraError: torch is absent, or sees no GPU.
        ModelError: the student can't be loaded.
    """
    from relabel.manifests.extras import require

    torch = require("torch", extra="cpu", purpose="--against torch")
    from relabel.distill.students.students import load_student, make_texts
    from relabel.export.exporters import input_names
    from relabel.export.onnx_torch import ServingModule

    if provider != "cpu" and not torch.cuda.is_available():
        raise MissingExtraError(
            f"--against torch on {provider}: this torch sees no GPU. Install one that does, or compare on the CPU."
        )
    torch.set_num_threads(threads)
    device = "cpu" if provider == "cpu" else "cuda"
    student = load_student(path, device=device)
    student.texts = make_texts(replace(student.record, packs=False), student.tokenizer)
    names = input_names(student)
    module = ServingModule(student.module, names, student.record.temperature, logits=False).eval()

    def run(batch: Batch) -> Mapping[str, np.ndarray]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(batch[name]).to(device) for name in names))
            return {name: values.cpu().numpy() for name, values in zip(student.record.heads, found, strict=True)}

    return run


def _reason(error: Exception) -> str:
    """The part of onnxruntime's error that says something: what comes after the status code's name."""
    return str(error).splitlines()[0].rpartition(" : ")[2][:200]


def differ_by(ours: Runner, theirs: Runner, batch: Batch) -> float | None:
    """Largest |Δp| of the heads that both answer with; None where they share none, or one can't answer at all."""
    try:
        mine, others = ours(batch), theirs(batch)
    except RelabelError:
        return None
    shared = [name for name in mine if name in others and mine[name].shape == others[name].shape]
    return max((float(np.abs(mine[name] - others[name]).max()) for name in shared), default=None)
