"""What a bench is asked for, checked key by key. Pure: no environment, no network, no disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from relabel.manifests.json_schemas import DRAFT, ObjectSchema, Schema
from relabel.manifests.specs import PathText, Spec

Preset = Literal["grid", "table3", "serving"]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class BenchSpec(Spec):
    """Options of `relabel bench`."""

    providers: tuple[Literal["auto", "cpu", "cuda", "tensorrt", "openvino"], ...] = ("auto",)
    """`auto` is CUDA where this onnxruntime has it, else the CPU; `tensorrt` is an engine of the bundle that fits this
    machine; `openvino` is the fp32 file in OpenVINO, in fp32 and bf16.
    """
    precisions: tuple[str, ...] = ()
    """All that the bundle has by default."""
    presets: tuple[Preset, ...] = ("grid",)
    """`grid`: batches by lengths, the shapes of public tables, single pairs by a Poisson process. `table3`: 1 to 10,000
    documents of one query. `serving`: a request is a query with 100 documents, by a Poisson process.
    """
    batches: tuple[Positive, ...] = (1, 8, 32)
    """Rows of a closed-loop batch."""
    lengths: tuple[Positive, ...] = ()
    """Tokens of a row; by default the 50th and 99th percentile of the workload's."""
    rates: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    """Requests/s to offer; by default shares of what the model can do."""
    max_batch: int = Field(32, ge=1)
    """Pairs of a micro-batch; a request with more goes alone."""
    max_wait_ms: float = Field(2.0, ge=0.0)
    """How long the oldest request waits for company."""
    slo_ms: float | None = Field(None, gt=0.0)
    """Bound of p99 for which the highest rate is sought. `serving` seeks it for the mean as well, and bounds both by
    150 where none is named.
    """
    threads: int = Field(0, ge=0)
    """Of the CPU; 0 is every core that this process may use, or as many as its quota of CPU time keeps busy."""
    seconds: float = Field(120.0, gt=0.0)
    """For all measuring together. What does not fit is left out and said so."""
    rounds: int = Field(20, ge=2)
    """Rounds of a comparison, at least; both sides take their turn in each."""
    seed: int = 0
    """Draws pairs, lengths and arrivals."""
    allows_fallback: bool = False
    """Measure on the CPU where a provider is not to be had, and report it, instead of ending with exit 4."""

    @field_validator("providers", "precisions", "presets", "batches", "lengths", "rates", mode="before")
    @classmethod
    def _commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class OtherGraph(Spec):
    """An ONNX file that a bundle is compared with."""

    path: PathText = Field(min_length=1)
    name: str | None = Field(None, min_length=1)
    """What results call it; by default the file's name without its ending."""


class BenchFile(BenchSpec):
    """A bench that is kept as a file: `relabel bench BENCH.yaml`. Flags of the command win over its keys."""

    bundle: PathText = Field(min_length=1)
    """The bundle's folder."""
    pairs: PathText | None = None
    """Parquet with pairs to replay, instead of the lengths that the bundle records."""
    student: PathText | None = None
    """The bundle's student, to compare with: it runs in torch, eager, float32."""
    against: tuple[OtherGraph, ...] = ()
    """ONNX files to compare with."""
    require: tuple[str, ...] = ()
    """Gates: exit 5 unless they hold. `cpu.int8/fp32.1x128.ratio<=0.7`."""
    to: PathText | None = None
    """Write the results there, with a table and plots; by default the figures lie beside the bundle."""


def bench_schema() -> Schema:
    """JSON Schema (draft 2020-12) of a bench file."""
    definitions: dict[str, Schema] = {}
    bench = ObjectSchema(BenchFile, definitions)
    return {"$schema": DRAFT, "$defs": definitions, **bench.values, "title": "relabel bench"}
