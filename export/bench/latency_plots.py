"""Two plots: what a batch takes, and what a request takes when many come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relabel.export.bench.latency_facts import BenchFacts
from relabel.manifests.extras import require

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
