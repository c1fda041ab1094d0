"""What `relabel bench` measured, as records: `latency.json`, its place near the bundle, the fastest precision."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from relabel.export.bundle_facts import Parity, TokenLengths
from relabel.export.bundles import Bundle
from relabel.export.puller import VERSIONS
from relabel.manifests.errors import ManifestError, StoreError, UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.records import plain, read_record, readable_json
from relabel.manifests.store import LocalRunStore

LATENCY_FORMAT = 1
FACTS_NAME = "latency.json"
MEASUREMENTS = "measurements"
UNMEASURED = {"cpu": ("int8", "fp32", "fp16"), "cuda": ("fp16", "fp32", "int8")}
"""Precisions by provider, fastest first, where a bundle has no measurement: int8 takes 0.4 of fp32's time on a CPU, and
up to nine times as long on a GPU, where onnxruntime has few kernels for it.
"""


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """What a bench ran on.

    Args:
        gpu: name of the first one; None without one.
        threads: of the CPU that the models used.
        versions: of the libraries that are installed.
    """

    cpu: str
    gpu: str | None
    usable_cores: int
    threads: int
    python: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """A closed-loop cell or an open-loop rate; None where a figure does not apply, or is not known.

    Args:
        scope: timed from a ready `batch`, from `tokens` (with padding), or from `texts`.
        rows: pairs of a request; `tokens` of each, None where lengths are replayed.
        unanswered: requests that still waited when the open loop was stopped.
        mean_batch: requests of a micro-batch, on average.
        p50_low: with `p50_high` the ends of a 95 % interval.
    """

    provider: str
    precision: str
    preset: str
    loop: str
    cell: str
    scope: str
    rows: int
    tokens: int | None = None
    offered_rate: float | None = None
    answered_rate: float | None = None
    mean_batch: float | None = None
    unanswered: int | None = None
    samples: int
    seconds: float
    pairs_per_s: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p50_low: float | None = None
    p50_high: float | None = None
    p99_ms: float | None = None
    p99_low: float | None = None
    p99_high: float | None = None
    p999_ms: float | None = None

    @property
    def side(self) -> str:
        """The model as tables and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class BoundedRate:
    """The highest offered requests/s that keeps `figure` (`mean` or `p99`) under a bound.

    Args:
        highest_rate: None where no rate that was tried keeps it; `mean_ms` and `p99_ms` are those at that rate.
        is_at_least: no rate that was tried broke the bound, so the true one may be higher.
    """

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
        capacity_per_s: requests/s of full micro-batches with no queue, by preset.
        not_run: cells and rates left out, each with the reason.
    """

    asked_provider: str
    provider: str
    precision: str
    path: str
    closed: list[LatencyRow]
    open: list[LatencyRow]
    capacity_per_s: dict[str, float]
    slo: list[BoundedRate]
    not_run: list[tuple[str, str]]

    @property
    def side(self) -> str:
        """As tables and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class ReplayedLengths(TokenLengths):
    """The lengths that were replayed, in tokens: `lengths` as the bundle records them, or of `pairs` of a file."""

    from_: Annotated[str, Field(alias="from")]


@dataclass(frozen=True)
class BenchedBundle:
    """The bundle that was measured."""

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

    @property
    def rows(self) -> list[LatencyRow]:
        """Each model's cells, then its rates."""
        return [row for model in self.models for row in (*model.closed, *model.open)]


def measurements_of(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What benches of the bundle in a folder found, newest first. A file names its bundle's manifest, so figures of an
    earlier bundle at the same place are not taken for those of the present one.

    Raises:
        ManifestError: a file of them is damaged, or of another format.
    """
    found = [_read(path) for path in sorted(measurements_folder(folder).glob("*.json"))]
    own = [facts for facts in found if facts.bundle.manifest_sha256 == manifest_sha256]
    return sorted(own, key=lambda facts: facts.measured_at, reverse=True)


def _read(path: Path) -> BenchFacts:
    what, advice = "not latencies as this relabel writes them", "Measure them again: relabel bench."
    facts = read_record(BenchFacts, path.read_bytes(), str(path), what, advice)
    if facts.format != LATENCY_FORMAT:
        raise ManifestError(f"{path}: latencies of format {facts.format}; this relabel reads {LATENCY_FORMAT}.")
    return facts


def measurements_folder(folder: Path) -> Path:
    """Where figures of a bundle lie: `measurements/NAME` next to it, of a pulled version in the folder pulled to."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / MEASUREMENTS / place.name


def write_measurements(bundle: Bundle, facts: BenchFacts) -> Path:
    """Write figures next to their bundle, in place of earlier ones of such a machine; the file.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    folder, name = measurements_folder(bundle.folder), f"{machine_name(facts.machine)}.json"
    LocalRunStore(folder).put(name, readable_json(plain(facts)))
    return folder / name


def check_place(folder: Path) -> None:
    """Refuse a place for figures that can't be written, before anything is measured for it; leaves nothing there.

    Raises:
        StoreError, DiskFullError: it can't be written.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with translate_errors("write the figures in", there), tempfile.TemporaryFile(dir=there):
            pass
    except StoreError as exc:
        raise StoreError(f"{exc} Or name another folder for them: --to DIR") from exc


def machine_name(machine: MeasuredMachine) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, not by host name."""
    parts = [machine.cpu, f"{machine.usable_cores} cores", *([machine.gpu] if machine.gpu else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]


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
    rates = {
        model.precision: {(row.rows, row.cell): row.pairs_per_s or 0.0 for row in model.closed}
        for model in (latency.models if latency else ())
        if model.provider == provider and model.precision in passed
    }
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
