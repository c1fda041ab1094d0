"""Records of a bench: `latency.json`, the machine it was measured on, where it lies beside its bundle, and the fastest
precision by it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from relabel.export.bundle_facts import Parity
from relabel.export.bundles import Bundle
from relabel.export.destinations import VERSIONS
from relabel.manifests.errors import ManifestError, StoreError, UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.records import plain, read_record, readable_json
from relabel.manifests.store import LocalRunStore

# ------------------------------------------------------------------------------
# What a comparison of models says of each pair, and in words.


@dataclass(frozen=True, kw_only=True)
class ComparedPair:
    """Two models to compare.

    Args:
        ours: a precision.
        theirs: another of the same provider, or the name of what was asked for.
        answers_differ_by: the largest |Δp|; None where they share no head.
    """

    provider: str
    ours: str
    theirs: str
    answers_differ_by: float | None


@dataclass(frozen=True, kw_only=True)
class ComparedModels(ComparedPair):
    """Two models that took turns on one batch; see `comparisons.Turns`. `ratio` is our time over theirs."""

    cell: str
    rounds: int
    ratio: float
    low: float | None
    high: float | None
    cpu_ratio: float | None
    cpu_low: float | None
    cpu_high: float | None
    ours_ms: float
    theirs_ms: float
    ratios: list[float]


class Finding(NamedTuple):
    """One thing to know.

    Args:
        kind: `cpu_fallback`, `cpu_nodes`, `slower_than_fp32`, `noisy`, `too_few_samples`, `too_few_rounds`,
            `not_run`, `over_max_tokens`, `slo_missed`, `answers_differ`, `answers_strayed`,
            `busy_machine`, `over_quota`.
        where: provider and precision, or `machine`.
        text: a sentence.
    """

    kind: str
    where: str
    text: str


# ------------------------------------------------------------------------------
# The machine that figures were measured on.


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment; None where the driver does not tell."""

    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class MeasuredGpu:
    """The GPU of a bench, and its state before and after."""

    name: str
    driver: str
    memory_mib: float | None
    power_limit_w: float | None
    max_sm_mhz: float | None
    before: GpuState | None
    after: GpuState | None


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """What a bench ran on; None where the system does not tell.

    Args:
        cpu_quota: cores' worth of time that a container may take.
        threads: of the CPU that the models used.
        has_amx: whether the CPU computes bf16 in AMX; None in figures of earlier days.
        gpu: None without one.
        versions: of the libraries that are installed.
    """

    cpu: str
    cores: int | None
    usable_cores: int
    cpu_quota: float | None = None
    threads: int
    mhz_before: float | None
    mhz_after: float | None
    governor: str | None
    power_w: float | None
    load_before: float | None
    load_after: float | None
    memory_bytes: int | None
    has_amx: bool | None = None
    gpu: MeasuredGpu | None
    system: str
    python: str
    versions: dict[str, str]

    @property
    def onnxruntime(self) -> str | None:
        """Its version, of whichever package it was installed by."""
        return self.versions.get("onnxruntime") or self.versions.get("onnxruntime-gpu")


# ------------------------------------------------------------------------------
# What a bench found: `latency.json` as records, each with its fields in the order of the file.


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


# ------------------------------------------------------------------------------
# What was measured of a bundle lies beside it, one file a machine; the bundle stays as it is.
#
#     PLACE/bundle                              what was measured
#     PLACE/measurements/bundle/MACHINE.json    what a bench on such a machine found; the newest stays
#
# Of a pulled version, PLACE is the folder that it was pulled to. A file says which manifest it is of, so that figures
# of an earlier bundle at the same place are not taken for those of the present one.


MEASUREMENTS = "measurements"


def measurements_of(bundle: Bundle) -> list[BenchFacts]:
    """What benches of this very bundle found, newest first: those beside it, and one inside it, as benches wrote it
    before.

    Raises:
        ManifestError: a file of them is damaged.
    """
    found = measured_beside(bundle.folder, bundle.manifest.sha256)
    if any(file.path == FACTS_NAME for file in bundle.files):
        path = bundle.folder / FACTS_NAME
        found.append(read_latency(path.read_bytes(), str(path)))
    return found


def measured_beside(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What lies beside a bundle's folder of the bundle that has this manifest, newest first.

    Raises:
        ManifestError: a file of them is damaged.
    """
    files = measurements_folder(folder).glob("*.json")
    found = [read_latency(path.read_bytes(), str(path)) for path in sorted(files)]
    held = [facts for facts in found if facts.bundle.manifest_sha256 == manifest_sha256]
    return sorted(held, key=lambda facts: facts.measured_at, reverse=True)


def measurements_folder(folder: Path) -> Path:
    """Where figures of the bundle in a folder lie."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / MEASUREMENTS / place.name


def write_measurements(bundle: Bundle, facts: BenchFacts) -> Path:
    """Write figures beside their bundle, in the place of earlier ones of such a machine; the file.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    folder, name = measurements_folder(bundle.folder), f"{machine_name(facts.machine)}.json"
    LocalRunStore(folder).put(name, readable_json(plain(facts)))
    return folder / name


def check_place(folder: Path) -> None:
    """Refuse a place for figures that can't be written, before anything is measured for it; leaves nothing there.

    Raises:
        StoreError, DiskFullError: it can't, and what to do.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with translate_errors("write the figures in", there), tempfile.TemporaryFile(dir=there):
            pass
    except StoreError as exc:
        raise StoreError(f"{exc} Or name another folder for them: --to DIR") from exc


def machine_name(machine: MeasuredMachine) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, and not by the name
    that somebody gave one.
    """
    parts = [machine.cpu, f"{machine.usable_cores} cores", *([machine.gpu.name] if machine.gpu else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]


# ------------------------------------------------------------------------------
# Which of a bundle's models labels fastest: by its own measurements, else by what is fastest as a rule.
#
# Only models that passed their gate count. The cell with the most pairs that was measured of all of them decides, since
# labels are made in full batches.


UNMEASURED = {"cpu": ("int8", "int8-static", "fp32", "fp16"), "cuda": ("fp16", "fp32", "int8-static", "int8")}
"""Precisions by provider, fastest first, where a bundle holds no measurement: int8 takes 0.4 of fp32's time on a CPU,
and up to nine times as long on a GPU, where onnxruntime has few kernels for it.
"""


class ChosenPrecision(NamedTuple):
    """A precision, and why it is taken, in words."""

    precision: str
    reason: str


def choose_precision(parity: Parity, latency: BenchFacts | None, provider: str, wish: str | None) -> ChosenPrecision:
    """The precision to label with.

    Args:
        latency: what a bench of this bundle found; None where there was none.
        provider: `cpu` or `cuda`.
        wish: the precision that is named; None for the fastest.
    Raises:
        UsageError: no model of that precision passed a gate.
    """
    passed = [model.precision for model in parity.models if model.has_passed]
    if wish is not None and wish not in passed:
        raise UsageError(f"--precision {wish}: those of this bundle that passed their gate are {', '.join(passed)}.")
    choice = (
        ChosenPrecision(wish, "named")
        if wish is not None
        else _measured(passed, latency, provider) or _likely(passed, provider)
    )
    model = next(model for model in parity.models if model.precision == choice.precision)
    doubts = list(model.doubts)
    if model.could_lose is not None:
        doubts.insert(0, f"it could lose {model.could_lose:.1f} points of macro F1")
    if not doubts:
        return choice
    doubt = f"its gate is undecided: {'; '.join(doubts)}"
    return ChosenPrecision(choice.precision, f"{choice.reason}; {doubt}")


def _measured(passed: Sequence[str], latency: BenchFacts | None, provider: str) -> ChosenPrecision | None:
    rates: dict[str, dict[tuple[int, str], float]] = {}
    for model in latency.models if latency else ():
        if model.provider == provider and model.precision in passed:
            found = {(row.rows, row.cell): row.pairs_per_s for row in model.closed if row.pairs_per_s is not None}
            rates.setdefault(model.precision, {}).update(found)
    cells = set.intersection(*map(set, rates.values())) if rates else set()
    if not cells:
        return None
    cell = max(cells)
    best = max(rates, key=lambda precision: rates[precision][cell])
    return ChosenPrecision(best, f"the fastest of {', '.join(rates)} at {cell[1]} in the bundle's bench")


def _likely(passed: Sequence[str], provider: str) -> ChosenPrecision:
    best = next(name for name in UNMEASURED[provider] if name in passed)
    return ChosenPrecision(
        best, f"no bench of this bundle on {provider}, where it is as a rule the fastest of {', '.join(passed)}"
    )
