"""Sections about labels beside gold grades: figures with intervals, reliability, confusion, nDCG by query.

Every figure is one that `relabel evaluate` prints; nothing is computed here but nDCG's order by query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from relabel.jobs.evaluate.headlines import level_text
from relabel.jobs.evaluate.judging import Judging, judge
from relabel.jobs.evaluate.sides import EmptySideError
from relabel.jobs.evaluate.text import figure_title
from relabel.jobs.report.blocks import (
    Block,
    Cell,
    Drawing,
    Fold,
    Paragraph,
    Section,
    Side,
    Table,
    confusion_table,
    title_over,
)
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.gold import CANT, GoldChoice
from relabel.jobs.report.plots import draw_intervals, draw_reliability
from relabel.jobs.report.plotted import Line, PlottedInterval
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.manifests.ids import texts_of
from relabel.manifests.metrics.evaluation import Evaluation, evaluate
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import METRICS

RESAMPLES = 1000
_FIGURE_HEAD = ("run", "figure", "value", "low", "high", "over", "unit", "constant", "random", "lexical")
"""The last three are baselines."""


@dataclass(frozen=True)
class JudgedRun:
    """A run that was judged: its rows, and every figure."""

    name: str
    judging: Judging
    evaluation: Evaluation


def judge_runs(runs: Sequence[RunArtifact], gold: GoldChoice) -> tuple[list[JudgedRun], list[str]]:
    """Judge each run by itself.

    Returns:
        Those that could be, and why the others could not, where grades were only found, not asked for.
    Raises:
        RelabelError: grades were asked for by name, and a run can't be judged by them.
    """
    found, notes = [], []
    for run in runs:
        options = gold.options(run)
        if options is None:
            continue
        try:
            judging = judge((run.path,), options, run.storage)
            found.append(JudgedRun(run.name, judging, evaluate(judging.judged, resamples=RESAMPLES)))
        except CANT as exc:
            if gold.path is not None and not isinstance(exc, EmptySideError):
                raise
            notes.append(f"{run.name} could not be judged: {exc}")
    return found, notes


def gold_section(judged: Sequence[JudgedRun], notes: Sequence[str]) -> Section:
    """Every run beside gold grades."""
    blocks: list[Block] = [Paragraph(note, "warn") for note in notes]
    blocks += [
        Paragraph(line, "warn") for line in dict.fromkeys(line for one in judged for line in one.judging.side.lines())
    ]
    said = (level_text(one.evaluation.figures, one.evaluation.baselines, who=f"{one.name}: ") for one in judged)
    blocks += [Paragraph(text) for text in said if text]
    if judged:
        blocks += [
            _counts(judged),
            Side([*_against(judged), *_reliability(judged), *_confusions(judged)]),
            _figures(judged),
            *_remarks(judged),
        ]
    return Section("gold", "Against gold", blocks)


def judged_queries(judged: Sequence[JudgedRun]) -> list[set[str]]:
    """Of each run whose queries are known, those that were judged."""
    return [set(texts_of(names)) for one in judged if (names := one.judging.judged.query_names) is not None]


def _counts(judged: Sequence[JudgedRun]) -> Table:
    names = {
        "labels": "labels",
        "judged": "judged",
        "unjudged": "without a gold grade",
        "gold_null": "with a null one",
        "queries": "queries",
    }
    rows: list[list[Cell]] = [
        [one.name, *(getattr(one.judging.counts, name) for name in names), " and ".join(one.judging.joined_by)]
        for one in judged
    ]
    head = ("run", *names.values(), "joined by")
    return Table(head, rows, "What was judged", csv_download("judged-rows", head, rows))


def _against(judged: Sequence[JudgedRun]) -> list[Block]:
    groups = []
    for one in judged:
        groups.append((one.name, shown_figures(one.evaluation.figures)))
    rows = _figure_rows(judged)
    alt = "; ".join(f"{run}: {figure} {value:.4f}" for run, figure, value, *_ in rows if value is not None)
    svg = draw_intervals(groups, label="value, with its 95 % interval")
    note = f"Intervals over queries: of shares Wilson's, else percentile bootstrap, {RESAMPLES:,} resamples."
    title = title_over("Agreement with gold", judged_queries(judged))
    return [Drawing(title, svg, alt, csv_download("figures", _FIGURE_HEAD, rows), note)]


def shown_figures(figures: Mapping[str, MetricValue]) -> list[PlottedInterval]:
    """The metrics that are drawn, where they are defined."""
    held = [(metric.name, figures[metric.name]) for metric in METRICS if metric.is_drawn and metric.name in figures]
    return [
        PlottedInterval(_title(name, one), one.value, one.low, one.high) for name, one in held if one.value is not None
    ]


def _title(name: str, figure: MetricValue) -> str:
    return figure_title(name, {"labels": figure.is_by_grade})


def _figure_rows(judged: Sequence[JudgedRun]) -> list[tuple[Any, ...]]:
    return [
        (
            *(one.name, _title(name, figure), figure.value, figure.low, figure.high, figure.over, figure.unit),
            *(one.evaluation.baselines.of(name).get(kind) for kind in _FIGURE_HEAD[-3:]),
        )
        for one in judged
        for name, figure in one.evaluation.figures.items()
    ]


def _figures(judged: Sequence[JudgedRun]) -> Fold:
    rows = _figure_rows(judged)
    return Fold(
        f"All {len(rows):,} figures",
        [Table(_FIGURE_HEAD, rows, "Figures with 95 % intervals", csv_download("figures", _FIGURE_HEAD, rows))],
    )


def _reliability(judged: Sequence[JudgedRun]) -> list[Block]:
    lines, rows = [], []
    for one in judged:
        bins = one.evaluation.reliability
        if bins:
            lines.append(Line(one.name, [bin_.confidence for bin_ in bins], [bin_.accuracy for bin_ in bins]))
            rows += [(one.name, *astuple(bin_)) for bin_ in bins]
    if not lines:
        return []
    head = ("run", "from", "to", "rows", "confidence", "accuracy")
    eces = [
        f"{one.name}: ECE {figure.value:.4f}"
        for one in judged
        if (figure := one.evaluation.figures.get("ece")) and figure.value is not None
    ]
    note = "; ".join(eces) + ". Above the dotted line labels are right more often than they say, below it less often."
    return [
        Drawing(
            title_over("Reliability", judged_queries(judged)),
            draw_reliability(lines),
            f"Reliability diagram. {note}",
            csv_download("reliability", head, rows),
            note,
        )
    ]


def _confusions(judged: Sequence[JudgedRun]) -> list[Block]:
    tables: list[Block] = []
    for one in judged:
        counts = one.evaluation.confusion
        rows = [(gold, label, count) for gold, row in enumerate(counts) for label, count in enumerate(row)]
        save = csv_download(f"confusion-{one.name}", ("gold", "label", "rows"), rows)
        tables.append(
            confusion_table(counts, "gold", "label", caption=f"Gold grades by labels of {one.name}", download=save)
        )
    return tables


def _remarks(judged: Sequence[JudgedRun]) -> list[Block]:
    notes = list(dict.fromkeys(note for one in judged for note in [*one.judging.notes, *one.evaluation.notes]))
    return [Fold(f"Remarks on what was judged: {len(notes)}", [Paragraph(note) for note in notes])] if notes else []
