"""The text of an evaluation: counts first, then figures with their intervals, the confusion matrix, calibration,
remarks, and last the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relabel.jobs.evaluate.headlines import baseline_text, level_text
from relabel.jobs.evaluate.results import JudgedLabels
from relabel.jobs.evaluate.sides import SideCut
from relabel.jobs.output import table
from relabel.manifests.metrics.baselines import Baselines
from relabel.manifests.metrics.calibration_trial import CalibrationTrial
from relabel.manifests.metrics.evaluation import ReliabilityBin
from relabel.manifests.metrics.gates import GateVerdict
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import CALIBRATION, title_of


def evaluation_text(result: JudgedLabels) -> str:
    """The report of one evaluation."""
    blocks = [
        top_text([level_text(result.figures, result.baselines)], result.side),
        f"Labels of {', '.join(source.path for source in result.labels)} judged by {result.qrels}\n"
        + table(_counts(result)),
        _figures(result.figures, result.baselines),
        confusion_text(result.confusion, "gold \\ label"),
    ]
    if result.reliability:
        blocks.append(_reliability(result.reliability))
    if result.calibration:
        blocks.append(_calibration(result.calibration))
    blocks += [notes_text(result.notes), gates_text(result.gates)]
    return "\n\n".join(filter(None, blocks))


def top_text(verdicts: Sequence[str], side: SideCut) -> str:
    """What comes first: verdicts, a sentence each, and which rows are judged; what is empty is left out."""
    return "\n".join(filter(None, [*verdicts, *side.lines()]))


def gates_text(gates: list[GateVerdict]) -> str:
    """What each `--require` came to; empty without any."""
    rows = [("gate", "verdict", "value", "bound")]
    rows += [
        (gate.gate, "passed" if gate.has_passed else "refused", value_text(gate.value), value_text(gate.bound))
        for gate in gates
    ]
    return aligned(rows) if gates else ""


def notes_text(notes: list[str]) -> str:
    """Remarks; empty without any."""
    return "remarks\n" + "\n".join(f"  - {note}" for note in notes) if notes else ""


def _counts(result: JudgedLabels) -> list[tuple[str, str]]:
    counts = result.counts
    rows = [
        ("labels", f"{counts.labels:,}, {result.grades} grades"),
        ("judged", f"{counts.judged:,}, joined by {' and '.join(result.joined_by)}"),
        ("unjudged", f"{counts.unjudged:,} without a gold grade, {counts.gold_null:,} with a null one"),
        ("quarantined", f"{counts.quarantined:,}" + _and(counts.without_label, "rows without a readable label")),
    ]
    if counts.qrels is not None:
        without = _and(counts.qrels_without_label, "of them graded and not labelled")
        rows.append(("qrels", f"{counts.qrels:,} pairs{without}"))
    drawn = f"{result.num_groups:,} {result.resampled}, {result.resamples:,} times, seed {result.seed}"
    is_drawn = result.resamples and result.num_groups > 1
    return [*rows, ("resampled", drawn if is_drawn else "nothing, so there are no intervals")]


def _and(count: int | None, what: str) -> str:
    return f", {count:,} {what}" if count else ""


def _figures(figures: dict[str, MetricValue], beside: Baselines) -> str:
    rows = [("figure", "value", "95 % interval", "over", "baseline")]
    for name, figure in figures.items():
        title = figure_title(name, {"labels": figure.is_by_grade})
        over, bound = f"{figure.over:,} {figure.unit}", baseline_text(beside, name) or "-"
        rows.append((title, value_text(figure.value), interval_text(figure), over, bound))
    return aligned(rows)


def figure_title(figure: str, is_by_grade: Mapping[str, bool]) -> str:
    """A figure's name, with a word where it ranks by the written grade for want of distributions.

    Args:
        is_by_grade: of each side that has the figure, by the side's name.
    """
    sides = [side for side, is_so in is_by_grade.items() if is_so]
    if not sides:
        return title_of(figure)
    whose = "" if len(sides) == len(is_by_grade) else f" of {' and '.join(sides)}"
    return f"{title_of(figure)} by written grade{whose}"


def sides_title(figure: str, sides: Mapping[str, Mapping[str, MetricValue]]) -> str:
    """The name of a figure that sides have beside each other; `sides` are their figures."""
    return figure_title(
        figure, {side: figures[figure].is_by_grade for side, figures in sides.items() if figure in figures}
    )


def value_text(value: float | None) -> str:
    """A figure's value."""
    return "undefined" if value is None else f"{value:.4f}"


def interval_text(figure: MetricValue) -> str:
    """A figure's bounds; a dash where nothing was drawn."""
    return "-" if figure.low is None else f"{figure.low:.4f} to {figure.high:.4f}"


def over_text(figure: str, *sides: Mapping[str, MetricValue]) -> str:
    """Over how many rows or queries a figure is, of each side where they differ."""
    held = [side[figure] for side in sides if figure in side]
    return " and ".join(dict.fromkeys(f"{one.over:,}" for one in held)) + f" {held[0].unit}"


def confusion_text(matrix: list[list[int]], corner: str) -> str:
    """A confusion matrix with its sums; `corner` names its rows and columns."""
    grades = range(len(matrix))
    rows = [(corner, *map(str, grades), "sum")]
    rows += [(str(grade), *(f"{count:,}" for count in matrix[grade]), f"{sum(matrix[grade]):,}") for grade in grades]
    sums = [sum(row[grade] for row in matrix) for grade in grades]
    rows.append(("sum", *(f"{count:,}" for count in sums), f"{sum(sums):,}"))
    return aligned(rows, right=True)


def _reliability(bins: list[ReliabilityBin]) -> str:
    rows = [("confidence", "rows", "mean confidence", "accuracy")]
    rows += [
        (f"{one.from_:.2f} to {one.to:.2f}", f"{one.rows:,}", f"{one.confidence:.3f}", f"{one.accuracy:.3f}")
        for one in bins
    ]
    return aligned(rows, right=True)


def _calibration(found: CalibrationTrial) -> str:
    rows: list[tuple[str, ...]] = [("held out", "before", "95 % interval", "after", "95 % interval")]
    for name in (metric.name for metric in CALIBRATION):
        sides = (found.before[name], found.after[name])
        cells = [cell for one in sides for cell in (value_text(one.value), interval_text(one))]
        rows.append((title_of(name), *cells))
    said = (
        f"temperature {found.parameters['temperature']:.3f}" if found.method == "temperature" else "isotonic, one a cut"
    )
    fitted, held = found.fitted_on, found.held_out
    sizes = (
        f"fitted on {fitted.groups:,} {found.split_by} ({fitted.rows:,} rows), held out {held.groups:,} "
        f"({held.rows:,} rows)"
    )
    return f"calibration: {said}; {sizes}\n" + aligned(rows)


def aligned(rows: Sequence[tuple[str, ...]], *, right: bool = False) -> str:
    """Columns padded to their widest cell; all but the first to the right if asked."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
