"""What a bench found: its file of figures near the bundle, the fastest precision, one table, one plot."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relabel.export.bench.latency import LatencyRow
from relabel.export.bundle_facts import Parity
from relabel.export.bundles import MANIFEST_NAME
from relabel.export.loader import OPENVINO, ROUNDED
from relabel.export.puller import VERSIONS
from relabel.manifests.errors import ManifestError, StoreError, UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.records import plain, read_record, readable_json
from relabel.manifests.store import LocalRunStore

LATENCY_FORMAT = 2
MEASUREMENTS = "measurements"
UNMEASURED = {"cpu": ("int8", "fp32", "fp16"), "cuda": ("fp16", "fp32", "int8")}
"""Precisions by provider, fastest first, where a bundle has no measurement: int8 takes 0.4 of fp32's time on a CPU, and
up to nine times as long on a GPU, where onnxruntime has few kernels for it.
"""


@dataclass
class ModelLatency:
    """A model, where it runs, and what was measured of it.

    Args:
        path: of the graph, relative to the bundle.
        open: by the offered rate.
        capacity_per_s: requests/s of full micro-batches with no queue; None without an open loop.
        slo: of each bound, what `highest_rate` says.
        not_run: cells and rates left out, each with the reason.
    """

    provider: str
    precision: str
    path: str
    closed: list[LatencyRow] = field(default_factory=list)
    open: list[LatencyRow] = field(default_factory=list)
    capacity_per_s: float | None = None
    slo: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    @property
    def side(self) -> str:
        """As messages, tables and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True)
class BenchFacts:
    """The whole file of figures.

    Args:
        bundle: `version` and `manifest_sha256`.
        spec: the options of the bench.
        machine: `cpu`, `gpu` (of the first one, None without one), `usable_cores`, `threads` (of the CPU, that the
            models used), `python`, and `versions` of libraries.
        workload: the lengths that were replayed, in tokens; they are `from` the bundle's own `lengths`, or `pairs`.
    """

    format: int
    name: str
    bundle: dict[str, str]
    measured_at: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, Any]
    models: list[ModelLatency]


# ------------------------------------------------------------------------------
# Where figures lie.


def measurements_folder(folder: Path) -> Path:
    """Where figures of a bundle lie: `measurements/NAME` next to it, of a pulled version in the folder pulled to."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / MEASUREMENTS / place.name


def measurements_of(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What benches of the bundle in a folder found, newest first. A file names its bundle's manifest, so figures of an
    earlier bundle at the same place are not taken for those of the present one.

    Raises:
        ManifestError: a file of them is damaged, or of another format.
    """
    own = []
    for path in sorted(measurements_folder(folder).glob("*.json")):
        what, advice = "not latencies as this relabel writes them", "Measure them again: relabel bench."
        facts = read_record(BenchFacts, path.read_bytes(), str(path), what, advice)
        if facts.format != LATENCY_FORMAT:
            raise ManifestError(
                f"{path}: latencies of format {facts.format}; this relabel reads {LATENCY_FORMAT}. {advice}"
            )
        own += [facts] if facts.bundle.get("manifest_sha256") == manifest_sha256 else []
    return sorted(own, key=lambda facts: facts.measured_at, reverse=True)


def machine_name(machine: dict[str, Any]) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, not by host name."""
    parts = [machine["cpu"], f"{machine['usable_cores']} cores", machine["gpu"] or ""]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]


def check_place(folder: Path) -> None:
    """Refuse a place for figures before anything is measured for it: a bundle, which they would make unreadable, or a
    folder that can't be written. Leaves nothing there.

    Raises:
        UsageError: it is a bundle, or lies in one.
        StoreError, DiskFullError: it can't be written.
    """
    places = (folder.resolve(), *folder.resolve().parents)
    if any((one / MANIFEST_NAME).is_file() for one in places):
        raise UsageError(f"--to {folder}: holds a {MANIFEST_NAME}, or is inside such a folder. Name another folder.")
    there = next(one for one in places if one.exists())
    try:
        with translate_errors("write the figures in", there), tempfile.TemporaryFile(dir=there):
            pass
    except StoreError as exc:
        raise StoreError(f"{exc} Or name another folder for them: --to DIR") from exc


# ------------------------------------------------------------------------------
# The precision to label with.


class ChosenPrecision(NamedTuple):
    """A precision, and why it is taken, in words.

    Args:
        provider: that it is taken on.
    """

    precision: str
    reason: str
    provider: str


def choose_precision(
    parity: Parity, latency: BenchFacts | None, provider: str, wish: str | None, why: str = "named"
) -> ChosenPrecision:
    """The precision to label with.

    Args:
        latency: what a bench of this bundle found; None where there was none.
        provider: `cpu`, `cuda`, or `openvino`, of which a bench has figures: it leaves to `cpu` what is faster there.
        wish: the precision that is named; None for the fastest.
        why: it is named.
    Raises:
        UsageError: no model of that precision passed a gate.
    """
    passed = [model.precision for model in parity.models if model.has_passed]
    if provider == OPENVINO:
        passed += [name for name, source in ROUNDED.items() if source in passed]
    if wish is not None and wish not in passed:
        raise UsageError(f"--precision {wish}: those of this bundle that passed their gate are {', '.join(passed)}.")
    chosen = _fastest(passed, latency, provider) if wish is None else ChosenPrecision(wish, why, provider)
    source = ROUNDED.get(chosen.precision, chosen.precision)
    model = next(model for model in parity.models if model.precision == source)
    doubts = list(model.doubts)
    if model.could_lose is not None:
        doubts.insert(0, f"it could lose {model.could_lose:.1f} points of macro F1")
    return chosen._replace(reason=f"{chosen.reason}; its gate is undecided: {'; '.join(doubts)}") if doubts else chosen


def _fastest(passed: Sequence[str], latency: BenchFacts | None, provider: str) -> ChosenPrecision:
    """By the largest call that was measured of all, else as a rule."""
    providers = (OPENVINO, "cpu") if provider == OPENVINO else (provider,)
    sides = [
        model
        for model in (latency.models if latency else ())
        if model.provider in providers and model.precision in passed
    ]
    rates = [{(row["rows"], row["cell"]): row["pairs_per_s"] or 0.0 for row in model.closed} for model in sides]
    if cells := set.intersection(*map(set, rates)) if rates else set():
        cell = max(cells)
        best = sides[int(np.argmax([found[cell] for found in rates]))]
        names = ", ".join(model.side if len(providers) > 1 else model.precision for model in sides)
        reason = f"the fastest of {names} at {cell[1]} in the bundle's bench"
        return ChosenPrecision(best.precision, reason, best.provider)
    usual = f"no bench of this bundle on {providers[-1]}, where it is as a rule the fastest of {', '.join(passed)}"
    return ChosenPrecision(next(name for name in UNMEASURED[providers[-1]] if name in passed), usual, providers[-1])


# ------------------------------------------------------------------------------
# For people: a table, warnings of a line each, a plot.

HEAD = ("model", "measured", "samples", "mean ms", "p50 ms (95 %)", "p99 ms (95 %)", "p99.9 ms", "pairs/s")


def write_results(folder: Path, facts: BenchFacts) -> Path:
    """Write figures, the table and the plot into a folder, in place of earlier ones of such a machine; the file of
    figures.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    head, *rows = latency_rows(facts)
    table = [head, ["---"] * len(head), *rows]
    lines = [f"# {facts.name}", "", machine_line(facts), "", *(f"| {' | '.join(row)} |" for row in table)]
    lines += ["", "–: too few latencies were measured to state it. All figures: the file `.json`."]
    lines += [f"\n{warning}" for warning in warnings_of(facts)]
    store, name = LocalRunStore(folder), machine_name(facts.machine)
    store.put(f"{name}.svg", plot(facts))
    store.put(f"{name}.md", ("\n".join(lines) + "\n").encode())
    store.put(f"{name}.json", readable_json(plain(facts)))
    return folder / f"{name}.json"


def machine_line(facts: BenchFacts) -> str:
    """What it was measured on, and with what."""
    machine, workload = facts.machine, facts.workload
    source = "its own record of lengths" if workload["from"] == "lengths" else "pairs of a file"
    versions = machine["versions"].items()
    runtimes = [f"{name} {version}" for name, version in versions if name.startswith(("onnxruntime", "openvino"))]
    used = filter(None, [machine["cpu"], machine["gpu"], f"threads: {machine['threads']}", *runtimes])
    return (
        f"Measured {facts.measured_at[:10]} on {', '.join(used)}. "
        f"Replayed lengths are of {source} (p50 {workload['p50']}, p99 {workload['p99']} tokens)."
    )


def latency_rows(facts: BenchFacts) -> list[list[str]]:
    """A row a closed-loop cell or a rate; the first row is the head."""
    found = [list(HEAD)]
    for model in facts.models:
        for row in (*model.closed, *model.open):
            measured = row["cell"]
            if row["offered_rate"] is not None:
                measured += f", {row['offered_rate']:,.1f}/s offered"
                measured += f", {row['unanswered']:,} never answered" if row["unanswered"] else ""
                for slo in model.slo:
                    if slo["highest_rate"] == row["offered_rate"]:
                        measured += f" (highest with {slo['figure']} ≤ {slo['slo_ms']:g} ms)"
            figures = [_number(row["mean_ms"]), _between(row, "p50"), _between(row, "p99"), _number(row["p999_ms"])]
            found.append([model.side, measured, f"{row['samples']:,}", *figures, _number(row["pairs_per_s"], 0)])
    return found


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _between(row: LatencyRow, name: str) -> str:
    value, low, high = (row[f"{name}_{end}"] for end in ("ms", "low", "high"))
    return _number(value) if low is None or high is None else f"{_number(value)} ({low:,.2f} to {high:,.2f})"


def warnings_of(facts: BenchFacts) -> list[str]:
    """What a reader of the figures has to know, a line each: what was left out, a bound that was missed."""
    found = []
    for model in facts.models:
        if model.not_run:
            name, reason = model.not_run[0]
            found.append(f"{model.side}: {len(model.not_run)} not measured, {name} first: {reason}")
        for slo in model.slo:
            if slo["highest_rate"] is None:
                found.append(f"{model.side}: no rate that was tried keeps {slo['figure']} ≤ {slo['slo_ms']:g} ms.")
    return found


def plot(facts: BenchFacts) -> bytes:
    """p50 and p99 against the offered rate, by model, as SVG. The same figures give the same bytes."""
    matplotlib: Any = require("matplotlib", extra="cpu", purpose="The plot of a bench")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a bench").Figure
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        figure = figure_class(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for model in facts.models:
            for name, style in (("p50", ":"), ("p99", "-")):
                rows = [row for row in model.open if row[f"{name}_ms"] is not None]
                if rows:
                    rates, latencies_ms = ([row[key] for row in rows] for key in ("offered_rate", f"{name}_ms"))
                    label = f"{model.side}: {name}"
                    axes.plot(rates, latencies_ms, style, marker="o", markersize=3, linewidth=1, label=label)
        for bound in {slo["slo_ms"] for model in facts.models for slo in model.slo}:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="requests/s offered", ylabel="ms from scheduled arrival", yscale="log", title=facts.name)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
