"""What a bench found: `latency.json` as records, each with its fields in the order of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from relabel.export.bench.latency_comparison import ComparedModels, Finding
from relabel.export.bench.measured_machine import MeasuredMachine
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import read_record

LATENCY_FORMAT = 1
FACTS_NAME = "latency.json"


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """A closed-loop cell or an open-loop rate, a row of `latency.parquet`; None where a figure does not apply, or is
    not known.

    Args:
        runtime: what ran the model, with its version.
        precision_hint: in what OpenVINO was told to compute.
        has_amx: whether the CPU computes bf16 in AMX.
    """

    provider: str
    precision: str
    runtime: str | None = None
    precision_hint: str | None = None
    has_amx: bool | None = None
    model: str
    preset: str
    loop: str
    cell: str
    scope: str
    rows: int
    tokens: int | None = None
    max_batch: int | None = None
    samples: int
    warm_up: int
    unanswered: int | None = None
    peak_rss_bytes: int | None = None
    device_bytes: int | None = None
    threads: int
    offered_rate: float | None = None
    answered_rate: float | None = None
    max_wait_ms: float | None = None
    mean_batch: float | None = None
    seconds: float
    min_ms: float | None = None
    max_ms: float | None = None
    cv: float | None = None
    cpu_ms: float | None = None
    pairs_per_s: float | None = None
    pairs_per_s_low: float | None = None
    pairs_per_s_high: float | None = None
    mean_ms: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    p50_ms: float | None = None
    p50_low: float | None = None
    p50_high: float | None = None
    p90_ms: float | None = None
    p90_low: float | None = None
    p90_high: float | None = None
    p99_ms: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None
    p999_ms: float | None = None
    p999_low: float | None = None
    p999_high: float | None = None

    @property
    def side(self) -> str:
        """The model as findings and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class BoundedRate:
    """The most requests a second that keep `figure` (`mean` or `p99`) under a bound; see `rate_sweeps.HighestRate`."""

    preset: str
    figure: str = "p99"
    slo_ms: float
    highest_rate: float | None
    mean_ms: float | None = None
    p99_ms: float | None
    is_at_least: bool


@dataclass(frozen=True, kw_only=True)
class ModelLatency:
    """What was measured of one model.

    Args:
        asked_provider: what was asked for; `provider` is where it ran.
        cpu_nodes: heavy nodes that ran on the CPU though a GPU was asked for, by operator.
        capacity_per_s: requests/s of full micro-batches with nobody waiting, by preset.
        not_run: cells and rates left out, each with the reason.
    """

    asked_provider: str
    provider: str
    precision: str
    path: str
    rss_before_bytes: int | None
    cpu_nodes: dict[str, int]
    closed: list[LatencyRow]
    open: list[LatencyRow]
    capacity_per_s: dict[str, float]
    slo: list[BoundedRate]
    not_run: list[tuple[str, str]]

    @property
    def side(self) -> str:
        """As findings and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True)
class ReplayedLengths:
    """The lengths that were replayed, in tokens: `lengths` as the bundle records them, or of `pairs` of a file; the
    rest as in `TokenLengths`.
    """

    from_: Annotated[str, Field(alias="from")]
    rows: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: list[list[int]]


@dataclass(frozen=True)
class BenchedBundle:
    """The bundle that was measured, before the figures came into it."""

    version: str
    manifest_sha256: str


@dataclass(frozen=True)
class BenchFacts:
    """The whole of `latency.json`; `spec` are the options of the bench."""

    format: int
    name: str
    bundle: BenchedBundle
    measured_at: str
    spec: dict[str, Any]
    machine: MeasuredMachine
    workload: ReplayedLengths
    models: list[ModelLatency]
    comparisons: list[ComparedModels]
    findings: list[Finding]

    @property
    def rows(self) -> list[LatencyRow]:
        """Of `latency.parquet`: each model's cells, then its rates."""
        return [row for model in self.models for row in (*model.closed, *model.open)]


def read_latency(data: bytes, where: str) -> BenchFacts:
    """A `latency.json`, read.

    Raises:
        ManifestError: it is damaged, or of another make; names the key.
    """
    what, advice = "not latencies as this relabel writes them", "Measure them again: relabel bench."
    facts = read_record(BenchFacts, data, where, what, advice)
    if facts.format != LATENCY_FORMAT:
        raise ManifestError(f"{where}: latencies of format {facts.format}; this relabel reads {LATENCY_FORMAT}.")
    return facts
