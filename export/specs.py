"""What an export is asked for, checked key by key. Pure: no environment, no network, no disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from relabel.manifests.specs import Fraction, Spec

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-static"]


class ParitySpec(Spec):
    """The gate that every exported model passes on real pairs, or no bundle is made."""

    min_pairs: int = Field(2000, ge=1)
    """Pairs to compare on, sampled as whole queries of the test split. With fewer all are used and the result is marked
    weak.
    """
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 7, 32)
    """Every pair is answered once in batches of each size: alone, in an odd company, and in a full one, padding
    included.
    """
    fp32_max_abs: float = Field(1e-4, gt=0.0)
    """Largest |Δp| of any head in fp32: two orders above what sums in another order cost."""
    fp16_max_flips: Fraction = 0.001
    """Share of pairs whose grade changes in fp16 and bf16."""
    fp16_min_tau: float = Field(0.999, ge=-1.0, le=1.0)
    """Least Kendall tau of a query's order in fp16 and bf16: 0.999 is one order in 2,000 reversed (see
    `export/orders.py`).
    """
    fp16_max_ndcg_loss: float = Field(0.001, ge=0.0)
    """nDCG@10 that an fp16 or bf16 may lose: orders below tau's margin count too where grades tell which documents
    matter.
    """
    int8_max_f1_loss: float = Field(1.0, ge=0.0)
    """Points of macro F1 that an int8 may lose: refused when the 95 % interval of the loss lies wholly above. Where a
    part of it does, the pairs do not tell, and the model passes as `undecided`.
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

    formats: tuple[str, ...] = ("onnx",)
    """Registered ones, see `export.bundle_formats`; `onnx` always comes along."""
    precisions: tuple[Precision, ...] = ("fp32",)
    """int8 is dynamic; int8-static is calibrated on pairs of the training split. fp32 is always exported: all others
    are made of it.
    """
    exporter: str = "torch"
    """`torch`, or `optimum` in an environment of its own."""
    logits: bool = False
    """Also raw logits, as outputs `<head>_logits`."""
    opset: int = Field(20, ge=18, le=24)
    """ONNX operator set; 20 is the first with Gelu."""
    triton: bool = False
    """Also a Triton model repository."""
    licence: str | None = None
    """SPDX expression of what may be done with the bundle."""
    calibration_pairs: int = Field(256, ge=1)
    """Pairs of the training split that int8-static is calibrated on."""
    reference_pairs: int = Field(32, ge=0, le=1000)
    """Pairs of those compared that are sealed into the bundle, with their texts and each model's answers, for
    `load.py --check`; 0 seals none.
    """
    parity: ParitySpec = ParitySpec()

    @field_validator("formats", "precisions", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def onnx_precisions(self) -> tuple[Precision, ...]:
        """What is written as ONNX, fp32 first; bf16 is TensorRT's alone."""
        return ("fp32", *(name for name in dict.fromkeys(self.precisions) if name not in ("fp32", "bf16")))
