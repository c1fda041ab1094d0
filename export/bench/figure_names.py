"""Figures by the names that `--require` gives them: `cpu.int8.1x128.p99_ms`, `cpu.int8.grid.highest_rate`,
`cpu.int8/fp32.1x128.ratio`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relabel.export.bench.latency_facts import BenchFacts
from relabel.export.bench.plans import BenchModel, Cell

CELL_KEYS = ("samples", "p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")
"""Of a cell, in the manifest's summary; all but the samples can be required."""
CELL_FIGURES = CELL_KEYS[1:]
RATIO_FIGURES = {"ratio": "ratio", "ratio_high": "high", "cpu_ratio": "cpu_ratio"}
"""Name of a comparison's figure → its field of `ComparedModels`."""


def planned_figures(
    models: Sequence[BenchModel],
    cells: Sequence[Cell],
    bounded: Iterable[tuple[str, str]],
    sides: Sequence[tuple[BenchModel, str]],
    shapes: Sequence[tuple[int, int]],
    *,
    may_fall_back: bool,
) -> list[str]:
    """Every name that a bench may have a figure for, known before anything is measured.

    Args:
        bounded: presets for which the highest rate is sought, with the figure that it keeps under a bound: `mean` or
            `p99`.
        sides, shapes: of the comparisons.
        may_fall_back: a model may come to run on the CPU, and its figures to be named after that.
    """
    names = [f"{_model(model)}.{cell.name}.{key}" for model in models for cell in cells for key in CELL_FIGURES]
    names += [f"{_model(model)}.{rate_name(preset, figure)}" for preset, figure in bounded for model in models]
    compared = [f"{_model(model)}/{other}.{rows}x{tokens}" for model, other in sides for rows, tokens in shapes]
    names += [f"{name}.{figure}" for name in compared for figure in RATIO_FIGURES]
    if may_fall_back:
        names += [f"cpu.{name.split('.', 1)[1]}" for name in names]
    return list(dict.fromkeys(names))


def measured_figures(facts: BenchFacts, planned: Iterable[str]) -> dict[str, float | None]:
    """What was measured, by name; None where it was planned and then left out, or is not known well enough to be
    stated.
    """
    found: dict[str, float | None] = dict.fromkeys(planned)
    for model in facts.models:
        name = f"{model.provider}.{model.precision}"
        for row in model.closed:
            found |= {f"{name}.{row.cell}.{key}": getattr(row, key) for key in CELL_FIGURES}
        for slo in model.slo:
            found[f"{name}.{rate_name(slo.preset, slo.figure)}"] = slo.highest_rate
    for one in facts.comparisons:
        name = f"{one.provider}.{one.ours}/{one.theirs}.{one.cell}"
        found |= {f"{name}.{figure}": getattr(one, key) for figure, key in RATIO_FIGURES.items()}
    return found


def rate_name(preset: str, figure: str) -> str:
    """The highest rate of a preset; by p99 where nothing else is said."""
    return f"{preset}.highest_rate" if figure == "p99" else f"{preset}.highest_rate_by_{figure}"


def _model(model: BenchModel) -> str:
    return f"{model.provider}.{model.precision}"
