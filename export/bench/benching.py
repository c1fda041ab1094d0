"""A bench of a bundle from plan to gates, and its results as files: JSON, Parquet table, plots and text."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.export.bench import machine
from relabel.export.bench.cells import (
    TOO_LONG,
    Say,
    Setting,
    bounds_of,
    measure_cells,
    measure_sweep,
    sweep_fits,
    sweeps_of,
)
from relabel.export.bench.comparisons import (
    Against,
    compare_models,
    comparison_findings,
    latency_lines,
    machine_findings,
    model_findings,
    plan_sides,
)
from relabel.export.bench.machine import MachineWatch, cpu_nodes
from relabel.export.bench.plans import (
    CELL_WEIGHT,
    COMPARISON_WEIGHT,
    SWEEP_WEIGHT,
    TOO_SHORT,
    BenchModel,
    Budget,
    Cell,
    choose_models,
    measured_figures,
    plan_cells,
    plan_shapes,
    planned_figures,
    workload_of_lengths,
    workload_of_pairs,
)
from relabel.export.bench.records import (
    FACTS_NAME,
    LATENCY_FORMAT,
    BenchedBundle,
    BenchFacts,
    Finding,
    LatencyRow,
    ModelLatency,
    ReplayedLengths,
)
from relabel.export.bundle_facts import student_facts
from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.export.loader import OPENVINO, BundleError, Encoder, Machine, Student, check_answers, default_threads
from relabel.export.specs import BenchSpec
from relabel.manifests.errors import UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.metrics.gates import Gate, judge_gates
from relabel.manifests.process import require
from relabel.manifests.records import plain, readable_json

# ------------------------------------------------------------------------------
# A bench from a bundle to figures: every model's cells and rates, then the comparisons, then what is to be known about
# them.
#
# Models are opened one after the other; sides of a comparison are open together and take turns. torch is loaded last,
# so that the memory of the models' own figures is without it.


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Args:
        facts: `latency.json`.
        planned: names of all figures that were to be measured.
    """

    facts: BenchFacts
    planned: Sequence[str]

    @property
    def figures(self) -> dict[str, float | None]:
        """By the names that gates have for them; None where a planned one was not measured."""
        return measured_figures(self.facts, self.planned)


def bench_bundle(
    bundle: Bundle,
    spec: BenchSpec,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    against: Against | None = None,
    gates: Sequence[Gate] = (),
    say: Say = lambda _: None,
) -> Bench:
    """Measure a bundle's models.

    Args:
        bundle: opened, its bytes checked.
        pairs: (query, document) texts to replay; the bundle's recorded lengths by default.
        gates: to be held against the figures; here their names alone are looked at, before anything is measured.
        say: receives progress, a line each.
    Raises:
        ConfigError: a gate names a figure that will not be measured.
        MissingExtraError: a provider or torch is not to be had.
        ManifestError: the bundle holds no student.
        UsageError, InputError, ManifestError, ModelError: see the modules that say so.
    """
    require("onnxruntime", extra="cpu", purpose="A bench")
    against = against or Against()
    student, threads = student_facts(bundle), spec.threads or default_threads()
    encoder = Encoder(bundle.folder, bundle.facts["inputs"])
    planned = choose_models(student.models, spec, Machine.here())
    against.check(student, threads=threads)
    workload = (
        workload_of_lengths(student.inputs.lengths, encoder, seed=spec.seed)
        if pairs is None
        else workload_of_pairs(pairs, encoder)
    )
    cells, shapes = plan_cells(spec, workload.lengths), plan_shapes(workload.lengths)
    sides = plan_sides(planned, against)
    bounded = [(preset, bound.figure) for preset in sweeps_of(spec) for bound in bounds_of(spec, preset)]
    names = planned_figures(planned, cells, bounded, sides, shapes, may_fall_back=spec.allows_fallback)
    judge_gates(gates, dict.fromkeys(names), None)
    weight = CELL_WEIGHT * len(cells) + SWEEP_WEIGHT * len(sweeps_of(spec))
    whole = len(planned) * weight + COMPARISON_WEIGHT * len(shapes) * len(sides)
    setting = Setting(bundle, student, spec, encoder, workload, Budget(spec.seconds, whole), threads, say)
    watch = MachineWatch(threads)
    models = {}
    for model in planned:
        opened, facts = measure_model(setting, model, cells, setting.budget.share(weight))
        models[opened] = facts
    left_out = {model: {cell for cell, why in facts.not_run if why == TOO_LONG} for model, facts in models.items()}
    comparisons, findings = compare_models(setting, list(models), against, shapes, left_out)
    machine = watch.facts()
    findings = [
        *(finding for model in models for finding in strayed_findings(setting, model)),
        *machine_findings(machine),
        *(finding for facts in models.values() for finding in model_findings(facts, max_tokens=encoder.max_tokens)),
        *findings,
        *comparison_findings(comparisons, rounds=spec.rounds),
    ]
    return Bench(
        BenchFacts(
            format=LATENCY_FORMAT,
            name=bundle.name,
            bundle=BenchedBundle(bundle.version, bundle.manifest.sha256),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            spec=spec.model_dump(mode="json"),
            machine=machine,
            workload=ReplayedLengths(workload.source, **vars(workload.lengths)),
            models=list(models.values()),
            comparisons=comparisons,
            findings=findings,
        ),
        names,
    )


def strayed_findings(setting: Setting, model: BenchModel) -> list[Finding]:
    """What OpenVINO answers of the bundle's reference pairs, where that is not what was sealed at export."""
    if model.provider != OPENVINO:
        return []
    student = Student(
        setting.bundle.folder,
        provider=OPENVINO,
        precision=model.precision,
        threads=setting.threads,
        check_digests=False,
    )
    try:
        checked = check_answers(student)
    except BundleError as exc:
        return [Finding("answers_strayed", model.name, str(exc))]
    return [] if checked.has_passed else [Finding("answers_strayed", model.name, str(checked))]


def measure_model(
    setting: Setting, model: BenchModel, cells: Sequence[Cell], seconds: float
) -> tuple[BenchModel, ModelLatency]:
    """One model's closed-loop cells and open-loop sweeps.

    Returns:
        The model as it was opened, and what was measured of it.
    """
    rss_bytes, device_bytes = machine.rss_bytes(), machine.device_bytes()
    setting.say(f"{model.name}: opening {model.path}")
    model, run = setting.open(model)
    start = time.perf_counter()
    closed, left_out, pairs_per_s = measure_cells(setting, model, run, cells, seconds, device_bytes=device_bytes)
    sweeps, presets = {}, sweeps_of(setting.spec)
    for number, preset in enumerate(presets):
        left_s = (seconds - (time.perf_counter() - start)) / (len(presets) - number)
        if sweep_fits(setting.spec, preset, pairs_per_s, left_s):
            sweeps[preset] = measure_sweep(setting, model, run, preset, left_s)
            left_out += [(f"open-{preset} at {rate:,.1f}/s", TOO_SHORT) for rate in sweeps[preset].left_out]
        else:
            left_out.append((f"open-{preset}", TOO_SHORT))
    setting.budget.spend(time.perf_counter() - start)
    path = setting.bundle.folder / model.path
    return model, ModelLatency(
        asked_provider=model.asked,
        provider=model.provider,
        precision=model.precision,
        path=model.path,
        rss_before_bytes=rss_bytes,
        cpu_nodes=cpu_nodes(path, model.provider, setting.probe, threads=setting.threads),
        closed=closed,
        open=[row for sweep in sweeps.values() for row in sweep.rows],
        capacity_per_s={preset: sweep.capacity_per_s for preset, sweep in sweeps.items()},
        slo=[slo for sweep in sweeps.values() for slo in sweep.slo],
        not_run=left_out,
    )


# ------------------------------------------------------------------------------
# Two plots: what a batch takes, and what a request takes when many come.


CLOSED_NAME, OPEN_NAME = "latency-closed.svg", "latency-open.svg"


def write_plots(folder: Path, facts: BenchFacts) -> list[str]:
    """Write what there is to plot; the names of the files. The same figures give the same bytes."""
    plots: dict[str, Callable[[Any, BenchFacts], bool]] = {CLOSED_NAME: _plot_closed, OPEN_NAME: _plot_open}
    matplotlib = require("matplotlib", extra="cpu", purpose="The plots of a bench")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plots of a bench").Figure
    written = []
    for name, plot in plots.items():
        with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
            figure = figure_class(figsize=(8, 5), layout="constrained")
            if plot(figure.subplots(), facts):
                figure.savefig(folder / name, format="svg", metadata={"Date": None})
                written.append(name)
    return written


def _plot_closed(axes: Any, facts: BenchFacts) -> bool:
    """p50 with a whisker up to p99, by cell and model."""
    models = [model for model in facts.models if model.closed]
    cells = list(dict.fromkeys(row.cell for model in models for row in model.closed))
    for number, model in enumerate(models):
        rows = {row.cell: row for row in model.closed}
        places = [cells.index(cell) + (number - (len(models) - 1) / 2) * 0.8 / len(models) for cell in rows]
        middle = [row.p50_ms or 0.0 for row in rows.values()]
        upper = [max(0.0, (row.p99_ms or value) - value) for row, value in zip(rows.values(), middle, strict=True)]
        width, whiskers = 0.75 / len(models), [[0.0] * len(upper), upper]
        axes.bar(places, middle, width=width, yerr=whiskers, capsize=2, label=model.side)
    axes.set_xticks(range(len(cells)), cells, rotation=45, ha="right", fontsize="small")
    axes.set(yscale="log", ylabel="ms a request", title=f"{facts.name}: one caller; median, whisker to p99")
    axes.grid(axis="y", alpha=0.3)
    if models:
        axes.legend(fontsize="small")
    return bool(models)


def _plot_open(axes: Any, facts: BenchFacts) -> bool:
    """p50 and p99 against the offered rate, by model and preset."""
    has_any = False
    for model in facts.models:
        for preset in dict.fromkeys(row.preset for row in model.open):
            rows = [row for row in model.open if row.preset == preset]
            p99s = [(row.offered_rate, row.p99_ms) for row in rows if row.p99_ms is not None]
            p50s = [(row.offered_rate, row.p50_ms) for row in rows if row.p50_ms is not None]
            color = None
            for name, style, points in (("p99", "-", p99s), ("p50", ":", p50s)):
                if not points:
                    continue
                label = f"{model.side}, {preset}: {name}"
                line = axes.plot(
                    *zip(*points, strict=True), style, marker="o", markersize=3, linewidth=1, label=label, color=color
                )[0]
                color, has_any = line.get_color(), True
        for slo in model.slo:
            axes.axhline(slo.slo_ms, color="black", linewidth=0.8, linestyle="--")
    axes.set(
        xlabel="requests/s offered",
        ylabel="ms from scheduled arrival",
        yscale="log",
        title=f"{facts.name}: requests by Poisson",
    )
    axes.grid(alpha=0.3)
    if has_any:
        axes.legend(fontsize="small")
    return has_any


# ------------------------------------------------------------------------------
# `latency.parquet`: a row a closed-loop cell or an open-loop rate. docs/bench.md says what each column holds.


TABLE_NAME = "latency.parquet"
_ARROW_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _column(name: str, hint: Any) -> tuple[str, pa.DataType]:
    kind, *_ = get_args(hint) or (hint,)  # `int | None` is a column of integers
    return name, _ARROW_TYPES[kind]


LATENCY_SCHEMA = pa.schema([_column(name, hint) for name, hint in get_type_hints(LatencyRow).items()])


def latency_table_bytes(rows: Sequence[LatencyRow]) -> bytes:
    """The table as a Parquet file; the same rows give the same bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=LATENCY_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


# ------------------------------------------------------------------------------
# A bench's figures as files in a folder that is named: JSON, table, plots, and a text for people.


TEXT_NAME = "latency.md"
NAMES = (FACTS_NAME, TABLE_NAME, CLOSED_NAME, OPEN_NAME)
"""Every file of an earlier bench goes when a new one comes."""


def check_results_folder(folder: Path, bundle: Path) -> None:
    """Refuse a folder for results that would make a bundle unreadable: one with files that its manifest does not name.

    Raises:
        UsageError: it is the bundle, lies inside it, or is another one.
    """
    place = folder.resolve()
    if bundle.resolve() in (place, *place.parents):
        raise UsageError(f"--to {folder}: is the bundle or inside it. Without --to the results go beside it.")
    if (place / MANIFEST_NAME).is_file():
        raise UsageError(
            f"--to {folder}: holds a {MANIFEST_NAME}, which says what may lie there. Name a folder for the results "
            "alone."
        )


def write_to(folder: Path, bench: Bench) -> list[str]:
    """Write figures, plots and a text for people into a folder; their names.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    with translate_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        (folder / FACTS_NAME).write_bytes(readable_json(plain(bench.facts)))
        (folder / TABLE_NAME).write_bytes(latency_table_bytes(bench.facts.rows))
        plots = write_plots(folder, bench.facts)
        lines = [f"# {bench.facts.name}", "", "## Latency", "", *latency_lines(bench.facts)]
        (folder / TEXT_NAME).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return [FACTS_NAME, TABLE_NAME, *plots, TEXT_NAME]
