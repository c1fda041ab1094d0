"""A bench from a bundle to figures: every model's cells and rates, then the comparisons, then what is to be known about
them.

Models are opened one after the other; sides of a comparison are open together and take turns. torch is loaded last, so
that the memory of the models' own figures is without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from relabel.export.bench import memory
from relabel.export.bench.closed_cells import TOO_LONG, measure_cells
from relabel.export.bench.figure_names import measured_figures, planned_figures
from relabel.export.bench.findings import comparison_findings, machine_findings, model_findings
from relabel.export.bench.latency_comparison import Finding
from relabel.export.bench.latency_facts import (
    LATENCY_FORMAT,
    BenchedBundle,
    BenchFacts,
    ModelLatency,
    ReplayedLengths,
)
from relabel.export.bench.machine_facts import MachineWatch
from relabel.export.bench.open_rates import bounds_of, measure_sweep, sweep_fits, sweeps_of
from relabel.export.bench.plans import (
    CELL_WEIGHT,
    COMPARISON_WEIGHT,
    SWEEP_WEIGHT,
    TOO_SHORT,
    BenchModel,
    Budget,
    Cell,
    choose_models,
    plan_cells,
    plan_shapes,
)
from relabel.export.bench.settings import Say, Setting
from relabel.export.bench.side_by_side import Against, compare_models, plan_sides
from relabel.export.bench.specs import BenchSpec
from relabel.export.bench.workloads import workload_of_lengths, workload_of_pairs
from relabel.export.bundles import Bundle
from relabel.export.loader import OPENVINO, BundleError, Encoder, Machine, Student, check_answers, default_threads
from relabel.export.placement import cpu_nodes
from relabel.export.student_facts import student_facts
from relabel.manifests.extras import require
from relabel.manifests.metrics.gates import Gate, judge_gates


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
    rss_bytes, device_bytes = memory.rss_bytes(), memory.device_bytes()
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
