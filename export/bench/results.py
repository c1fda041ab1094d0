"""What a bench found, for people: one table, warnings of a line each, one plot; and the files of `--to`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relabel.export.bench.records import FACTS_NAME, BenchFacts
from relabel.export.bundles import MANIFEST_NAME
from relabel.manifests.errors import UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.records import plain, readable_json

TEXT_NAME, PLOT_NAME = "latency.md", "latency.svg"
HEAD = ("model", "measured", "samples", "mean ms", "p50 ms (95 %)", "p99 ms (95 %)", "p99.9 ms", "pairs/s")


def check_results_folder(folder: Path) -> None:
    """Refuse a folder for results that is a bundle or lies in one, which they would make unreadable.

    Raises:
        UsageError: it does.
    """
    place = folder.resolve()
    if any((one / MANIFEST_NAME).is_file() for one in (place, *place.parents)):
        raise UsageError(f"--to {folder}: holds a {MANIFEST_NAME}, or is inside such a folder. Name another folder.")


def write_results(folder: Path, facts: BenchFacts) -> None:
    """Write figures, the table and the plot into a folder.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    head, *rows = latency_rows(facts)
    table = [head, ["---"] * len(head), *rows]
    lines = [f"# {facts.name}", "", machine_line(facts), "", *(f"| {' | '.join(row)} |" for row in table)]
    lines += ["", "–: too few latencies were measured to state it. All figures: `latency.json`."]
    lines += [f"\n{warning}" for warning in warnings_of(facts)]
    with translate_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLOT_NAME).unlink(missing_ok=True)
        (folder / FACTS_NAME).write_bytes(readable_json(plain(facts)))
        (folder / TEXT_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
        write_plot(folder / PLOT_NAME, facts)


def machine_line(facts: BenchFacts) -> str:
    """What it was measured on, and with what."""
    machine, workload = facts.machine, facts.workload
    source = "its own record of lengths" if workload.from_ == "lengths" else "pairs of a file"
    versions = machine.versions.items()
    runtimes = [f"{name} {version}" for name, version in versions if name.startswith(("onnxruntime", "openvino"))]
    used = [machine.cpu, *([machine.gpu] if machine.gpu else []), f"threads: {machine.threads}", *runtimes]
    return (
        f"Measured {facts.measured_at[:10]} on {', '.join(used)}. "
        f"Replayed lengths are of {source} (p50 {workload.p50}, p99 {workload.p99} tokens)."
    )


def latency_rows(facts: BenchFacts) -> list[list[str]]:
    """A row a closed-loop cell or a rate; the first row is the head."""
    found = [list(HEAD)]
    for model in facts.models:
        for row in (*model.closed, *model.open):
            measured = row.cell if row.scope == "batch" else f"{row.cell}, {row.scope}"
            if row.offered_rate is not None:
                measured += f", {row.offered_rate:,.1f}/s offered"
                measured += f", {row.unanswered:,} never answered" if row.unanswered else ""
                for slo in model.slo:
                    if (slo.preset, slo.highest_rate) == (row.preset, row.offered_rate):
                        measured += f" (highest with {slo.figure} ≤ {slo.slo_ms:g} ms)"
            p50, p99 = ((row.p50_ms, row.p50_low, row.p50_high), (row.p99_ms, row.p99_low, row.p99_high))
            figures = [_number(row.mean_ms), _between(*p50), _between(*p99), _number(row.p999_ms)]
            found.append([model.side, measured, f"{row.samples:,}", *figures, _number(row.pairs_per_s, 0)])
    return found


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _between(value: float | None, low: float | None, high: float | None) -> str:
    return _number(value) if low is None or high is None else f"{_number(value)} ({low:,.2f} to {high:,.2f})"


def warnings_of(facts: BenchFacts) -> list[str]:
    """What a reader of the figures has to know, a line each: a fallback, what was left out, a bound that was missed."""
    found = []
    for model in facts.models:
        if model.asked_provider not in ("auto", model.provider) and model.provider == "cpu":
            found.append(f"{model.side}: {model.asked_provider} is not to be had here: these are figures of the CPU.")
        if model.not_run:
            name, reason = model.not_run[0]
            found.append(f"{model.side}: {len(model.not_run)} not measured, {name} first: {reason}")
        missed = [f"{slo.figure} ≤ {slo.slo_ms:g} ms ({slo.preset})" for slo in model.slo if slo.highest_rate is None]
        if missed:
            found.append(f"{model.side}: no rate that was tried keeps {', '.join(missed)}.")
    return found


def write_plot(path: Path, facts: BenchFacts) -> None:
    """p50 and p99 against the offered rate, by model and preset; no file where no open loop has them. The same figures
    give the same bytes.
    """
    matplotlib: Any = require("matplotlib", extra="cpu", purpose="The plot of a bench")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a bench").Figure
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        figure = figure_class(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for side, preset in dict.fromkeys((row.side, row.preset) for row in facts.rows if row.loop == "open"):
            rows = [row for row in facts.rows if (row.loop, row.side, row.preset) == ("open", side, preset)]
            for name, style in (("p50", ":"), ("p99", "-")):
                points = [(row.offered_rate, ms) for row in rows if (ms := getattr(row, f"{name}_ms")) is not None]
                if points:
                    label = f"{side}, {preset}: {name}"
                    axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, linewidth=1, label=label)
        for bound in {slo.slo_ms for model in facts.models for slo in model.slo}:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="requests/s offered", ylabel="ms from scheduled arrival", yscale="log", title=facts.name)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
            figure.savefig(path, format="svg", metadata={"Date": None})
