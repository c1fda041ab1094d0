"""Specs of an export and of a bench, checked key by key. Pure: no environment, no network, no disk."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from relabel.manifests.specs import Fraction, Spec

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-static"]


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


COMMAS = BeforeValidator(_split)
"""A text is taken for a list with commas, as a flag gives it."""


class ParitySpec(Spec):
    """The gate that every exported model passes on real pairs, or no bundle is made."""

    min_pairs: int = Field(2000, ge=1)
    """Pairs to compare on, sampled as whole queries of the test split. With fewer all are used and the result is marked
    weak.
    """
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 7, 32)
    """Every pair is answered once in batches of each size: alone, in an odd batch, and in a full one, padding
    included.
    """
    fp32_max_abs: float = Field(1e-4, gt=0.0)
    """Largest |Δp| of any head in fp32: two orders above what sums in another order cost."""
    fp16_max_flips: Fraction = 0.001
    """Share of pairs whose grade changes in fp16 and bf16."""
    fp16_min_tau: float = Field(0.999, ge=-1.0, le=1.0)
    """Least Kendall tau of a query's order in fp16 and bf16: 0.999 is one order in 2,000 reversed (see
    `export/parity.py`).
    """
    fp16_max_ndcg_loss: float = Field(0.001, ge=0.0)
    """nDCG@10 that an fp16 or bf16 may lose: orders below tau's margin count too where grades say which documents
    matter.
    """
    int8_max_f1_loss: float = Field(1.0, ge=0.0)
    """Points of macro F1 that an int8 may lose: refused when the 95 % interval of the loss lies wholly above. Where a
    part of it does, the pairs do not decide, and the model passes as `undecided`.
    """
    int8_max_flips: Fraction | None = None
    """Share of pairs whose grade may change in int8. None refuses none: what a flip costs hangs on what the grades are
    used for.
    """
    int8_min_tau: float = Field(0.5, ge=-1.0, le=1.0)
    """Least Kendall tau of a query's order in int8: refused when the 95 % interval lies wholly below, `undecided` where
    a part of it does. 0.5 is one order in four reversed; raise it for a ranker.
    """
    resamples: int = Field(1000, ge=100, le=100_000)
    """Resamples of queries for that interval."""
    worst: int = Field(10, ge=1, le=1000)
    """Rows to list, those that differ most."""
    seed: int = 0
    """Draws queries and resamples."""


class ExportSpec(Spec):
    """Options of `relabel export`."""

    formats: Annotated[tuple[Literal["onnx", "tensorrt"], ...], COMMAS] = ("onnx",)
    """`onnx` always comes along: TensorRT engines are made of it, and the loader falls back to it."""
    precisions: Annotated[tuple[Precision, ...], COMMAS] = ("fp32",)
    """fp32 is always exported: all others are made of it. int8-static is calibrated on pairs that are not compared."""
    logits: bool = False
    """Also raw logits, as outputs `<head>_logits`."""
    opset: int = Field(20, ge=18, le=24)
    """ONNX operator set; 20 is the first with Gelu."""
    triton: bool = False
    """Also a Triton model repository."""
    licence: str | None = None
    """SPDX expression of what may be done with the bundle."""
    reference_pairs: int = Field(32, ge=0, le=1000)
    """Pairs of those compared that are sealed into the bundle, with their texts and each model's answers, for
    `load.py --check`; 0 seals none.
    """
    parity: ParitySpec = ParitySpec()

    @model_validator(mode="after")
    def _bf16_is_of_engines(self) -> Self:
        if "bf16" in self.precisions and "tensorrt" not in self.formats:
            raise ValueError("bf16 is of --formats tensorrt alone; OpenVINO computes the fp32 file in bf16")
        return self

    @property
    def onnx_precisions(self) -> tuple[Precision, ...]:
        """What is written as ONNX, fp32 first; bf16 is TensorRT's alone."""
        return ("fp32", *(name for name in dict.fromkeys(self.precisions) if name not in ("fp32", "bf16")))


def _check_shape(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,5}x([1-9]\d{0,5}|replay)", text):
        raise ValueError("write PAIRSxTOKENS, such as 8x128, or 8xreplay for real lengths")
    return text


Shape = Annotated[str, AfterValidator(_check_shape)]


class BenchSpec(Spec):
    """Options of `relabel bench`."""

    providers: Annotated[tuple[Literal["auto", "cpu", "cuda", "tensorrt", "openvino"], ...], COMMAS] = ("auto",)
    """`auto` is CUDA where this onnxruntime has it, else the CPU; `tensorrt` is an engine of the bundle that fits this
    machine; `openvino` is OpenVINO: the fp32 file in fp32 and bf16, and int8-static.
    """
    precisions: Annotated[tuple[str, ...], COMMAS] = ()
    """All that the bundle has by default."""
    shapes: Annotated[tuple[Shape, ...], COMMAS] = (
        *("1xreplay", "8xreplay", "32xreplay"),
        *("1x128", "32x128", "1x384"),  # of public tables, so that figures compare
    )
    """Closed-loop requests, in the order in which they are measured: `8xreplay` is 8 pairs of real lengths, batched as
    the loader does it; `8x128` is one batch of 8 rows of 128 tokens.
    """
    rates: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], COMMAS] = ()
    """Requests/s to offer; by default shares of what the model can do."""
    request_pairs: int = Field(1, ge=1)
    """Pairs of an open-loop request: a query's documents."""
    max_batch: int = Field(32, ge=1)
    """Pairs of a micro-batch; a request with more goes alone."""
    max_wait_ms: float = Field(2.0, ge=0.0)
    """How long the oldest request waits for its batch to fill."""
    slo_ms: float | None = Field(None, gt=0.0)
    """Bound of p99 for which the highest rate is sought."""
    slo_mean_ms: float | None = Field(None, gt=0.0)
    """Bound of the mean for which the highest rate is sought."""
    threads: int = Field(0, ge=0)
    """Of the CPU; 0 is every core that this process may use, or as many as its quota of CPU time keeps busy."""
    seconds: float = Field(120.0, gt=0.0)
    """For all measuring together. What does not fit is left out and said so."""
    seed: int = 0
    """Draws pairs, lengths and arrivals."""
