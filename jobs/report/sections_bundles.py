"""Sections about bundles: parity with the student, and latency as `relabel bench` measured it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from relabel.export.bench.latency_facts import FACTS_NAME, BenchFacts, LatencyRow, read_latency
from relabel.export.bench.measurements import machine_name, measured_beside
from relabel.export.bundle_cards import compared_on, parity_rows, undecided_lines
from relabel.export.parity_records import Parity
from relabel.jobs.report.artifacts import BundleArtifact
from relabel.jobs.report.blocks import Badge, Block, Cell, Drawing, Facts, Fold, Paragraph, Section, Side, Table
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.plots import draw_lines
from relabel.jobs.report.plotted import Line
from relabel.manifests.storage.filesystems import is_url

MOST_LINES = 6
_TONES = {"passed": "good", "REFUSED": "bad"}
_CLOSED = ("provider", "precision", "preset", "cell", "scope", "samples", "p50_ms", "p90_ms", "p99_ms", "pairs_per_s")
_OPEN = (
    "provider",
    "precision",
    "preset",
    "offered_rate",
    "answered_rate",
    "mean_batch",
    "samples",
    "mean_ms",
    "p50_ms",
    "p99_ms",
    "p999_ms",
    "unanswered",
)


def parity_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Every model beside the student that it was exported from, on real pairs."""
    blocks: list[Block] = []
    for bundle in bundles:
        parity = bundle.parity
        if parity is None:
            blocks.append(
                Paragraph(
                    (
                        f"The manifest of {bundle.name} holds no parity, so nothing says how near its models are to "
                        "the student."
                    ),
                    "warn",
                )
            )
            continue
        head, *rows = parity_rows(parity)
        shown: list[list[Cell]] = [[*row[:-1], Badge(row[-1], _TONES.get(row[-1], "warn"))] for row in rows]
        weak = " Fewer than the gate wants: a weak result." if parity.models[0].is_weak else ""
        blocks += [
            Paragraph(f"{compared_on(parity)} The worst batch size of each.{weak}"),
            Table(head, shown, f"Parity of {bundle.name}", csv_download(f"parity-{bundle.name}", head, rows)),
            *(Paragraph(sentence, "warn") for sentence in undecided_lines(parity)),
            _worst(parity),
        ]
    return Section("parity", "Parity", blocks)


def _worst(parity: Parity) -> Fold:
    head = ("precision", "source", "row", "batch", "flipped", "max |Δp|", "student", "model")
    rows: list[list[Cell]] = [
        [
            one.precision,
            row.source,
            row.row,
            row.batch_size,
            "yes" if row.is_flip else "",
            "none" if row.max_abs is None else f"{row.max_abs:.1e}",
            _probs(row.student),
            _probs(row.model),
        ]
        for one in parity.models
        for row in one.worst
    ]
    return Fold(
        "The rows that differ most",
        [
            Table(
                head, rows, "By their row in the source", csv_download("parity-worst", head, rows), has_row_heads=False
            )
        ],
    )


def _probs(values: Sequence[float | None]) -> str:
    return " ".join("none" if value is None else f"{value:.3f}" for value in values)


def latency_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Closed loop: ask, wait, ask again. Open loop: requests come when they come."""
    blocks: list[Block] = []
    for bundle in bundles:
        found = [] if is_url(bundle.path) else measured_beside(Path(bundle.path), bundle.manifest_sha256)
        with suppress(FileNotFoundError):  # as benches wrote it before
            found.append(read_latency(bundle.store.read(FACTS_NAME), f"{bundle.path}/{FACTS_NAME}"))
        for facts in found:
            name = bundle.name if len(found) == 1 else f"{bundle.name} on {machine_name(facts.machine)}"
            if facts.rows:
                blocks += _latency_blocks(replace(bundle, name=name), facts)
    return Section("latency", "Latency", blocks)


def _latency_blocks(bundle: BundleArtifact, facts: BenchFacts) -> list[Block]:
    closed = [row for model in facts.models for row in model.closed]
    opened = [row for model in facts.models for row in model.open]
    blocks: list[Block] = [
        *_machine(bundle, facts),
        Side([*_closed_figures(bundle, closed), *_open_figures(bundle, opened)]),
    ]
    for name, head, chosen in (("Closed loop", _CLOSED, closed), ("Open loop", _OPEN, opened)):
        if chosen:
            body: list[list[Cell]] = [[getattr(row, column) for column in head] for row in chosen]
            save = csv_download(
                f"latency-{name}-{bundle.name}", tuple(vars(chosen[0])), [tuple(vars(row).values()) for row in chosen]
            )
            titles = [column.replace("_", " ") for column in head]
            blocks.append(
                Fold(f"{name}: {len(chosen):,} measurements of {bundle.name}", [Table(titles, body, name, save)])
            )
    findings = [Paragraph(f"{one.where}: {one.text}") for one in facts.findings]
    if findings:
        blocks.append(Fold(f"What the bench found: {len(findings)}", findings))
    return blocks


def _machine(bundle: BundleArtifact, facts: BenchFacts) -> list[Block]:
    """Where it was measured, what it serves in time, and models side by side."""
    machine = facts.machine
    rows: list[tuple[str, Cell]] = [
        ("measured at", facts.measured_at),
        ("CPU", f"{machine.cpu}, {machine.threads} threads"),
        *([("GPU", machine.gpu.name)] if machine.gpu else []),
        ("load before", str(machine.load_before)),
    ]
    limits: list[list[Cell]] = []
    for model in facts.models:
        for slo in model.slo:
            rate = slo.highest_rate
            served = "none" if rate is None else f"{rate:,.1f}{' or more' if slo.is_at_least else ''}"
            limits.append([model.side, slo.preset, slo.figure, slo.slo_ms, served, slo.mean_ms, slo.p99_ms])
    found: list[Block] = [Facts(rows, f"Where {bundle.name} was measured")]
    if limits:
        head = ("model", "preset", "bound on", "at most, ms", "requests/s", "mean there, ms", "p99 there, ms")
        found.append(
            Table(head, limits, "The most that it serves in time", csv_download(f"slo-{bundle.name}", head, limits))
        )
    pairs: list[list[Cell]] = [
        [f"{one.ours} over {one.theirs}", one.provider, one.cell, one.ratio, one.low, one.high]
        for one in facts.comparisons
    ]
    if pairs:
        side_head = ("models", "provider", "cell", "time over time", "low", "high")
        save = csv_download(f"side-by-side-{bundle.name}", side_head, pairs)
        found.append(Table(side_head, pairs, "Side by side; under 1 the first is faster", save))
    return found


def _closed_figures(bundle: BundleArtifact, rows: Sequence[LatencyRow]) -> list[Block]:
    """Latency over length, for the fewest pairs a request and for the most, each model a curve."""
    fixed = [row for row in rows if row.tokens is not None and row.scope == "batch"]
    found: list[Block] = []
    sizes = sorted({row.rows for row in fixed})
    for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
        for value in ("p50_ms", "p99_ms"):
            lines, data = _lines([row for row in fixed if row.rows == size], "tokens", value)
            if any(len(line.places) > 1 for line in lines):
                what = f"{value.removesuffix('_ms')} of {size:,} pair{'s' if size > 1 else ''} a request"
                save = csv_download(f"closed-{value}-{size}-{bundle.name}", ("model", "tokens", value), data)
                svg = draw_lines(lines, label="tokens a pair", value="ms", is_log=True, starts_at_0=True)
                found.append(Drawing(f"Closed loop, {what}", svg, _said(lines, "ms at the longest"), save))
    return found


def _open_figures(bundle: BundleArtifact, rows: Sequence[LatencyRow]) -> list[Block]:
    """Latency over the rate at which requests come, for each preset."""
    found: list[Block] = []
    for preset in dict.fromkeys(row.preset for row in rows):
        for value in ("p50_ms", "p99_ms"):
            lines, data = _lines([row for row in rows if row.preset == preset], "offered_rate", value)
            if lines:
                save = csv_download(f"open-{preset}-{value}-{bundle.name}", ("model", "requests_per_s", value), data)
                svg = draw_lines(lines, label="requests/s that come", value="ms", has_log_values=True)
                what = f"{value.removesuffix('_ms')} from the scheduled arrival, {preset}"
                found.append(Drawing(f"Open loop, {what}", svg, _said(lines, "ms at the highest rate"), save))
    return found


def _lines(rows: Sequence[LatencyRow], place: str, value: str) -> tuple[list[Line], list[tuple[str, float, float]]]:
    """A curve a model, and all their points; `place` and `value` are fields of the rows."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        at, held = getattr(row, place), getattr(row, value)
        if at is not None and held is not None:
            points.setdefault(row.side, {})[float(at)] = float(held)
    lines = [
        Line(name, sorted(held), [held[at] for at in sorted(held)], has_marks=True) for name, held in points.items()
    ]
    return lines[:MOST_LINES], [
        (line.name, at, number) for line in lines for at, number in zip(line.places, line.values, strict=True)
    ]


def _said(lines: Sequence[Line], what: str) -> str:
    return "; ".join(f"{line.name}: {line.values[-1]:.2f} {what}" for line in lines)
