"""Sections about the labels themselves: grades, entropy, mass outside the grades, flags; and how many flip when asked
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from relabel.jobs.report.blocks import Badge, Block, Cell, Drawing, Paragraph, Section, Side, Table, title_over
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.plots import draw_bars, draw_histogram, draw_intervals
from relabel.jobs.report.plotted import Bars, PlottedInterval
from relabel.jobs.report.sections_runs import TalliedRun
from relabel.jobs.report.tallies import Histogram, LabelTally
from relabel.jobs.running.canary import load_results


def labels_section(runs: Sequence[TalliedRun]) -> Section:
    """Grades, entropy and outside mass, over all labels."""
    figures: list[Block] = []
    graded = [one for one in runs if one.tally.by_grade.sum()]
    if graded:
        most = max(one.tally.grades for one in graded)
        grades = [str(grade) for grade in range(most)]
        bars = [
            Bars(one.run.name, grades, [*one.tally.by_grade.tolist(), *[0] * (most - one.tally.grades)])
            for one in graded
        ]
        rows = [(bar.name, grade, int(count)) for bar in bars for grade, count in zip(grades, bar.values, strict=True)]
        alt = "; ".join(
            f"{bar.name}: "
            + ", ".join(f"grade {grade} {int(count):,}" for grade, count in zip(grades, bar.values, strict=True))
            for bar in bars
        )
        figures.append(
            Drawing(
                title_over("Grades", (one.tally.queries for one in graded)),
                draw_bars(bars, label="grade", value="rows"),
                alt,
                csv_download("grades", ("run", "grade", "rows"), rows),
            )
        )
    figures += _histograms("Entropy of the distributions", "entropy", "nats", runs, lambda one: one.entropy)
    figures += _histograms("Mass outside the grades", "outside mass", "", runs, lambda one: one.outside)
    blocks: list[Block] = [Side(figures)] if figures else []
    if runs and not any(one.tally.entropy.rows for one in runs):
        blocks.append(Paragraph("These labels hold no distributions, so no entropy and no outside mass can be shown."))
    flags: list[list[Cell]] = [
        [one.run.name, flag, count] for one in runs for flag, count in one.tally.flags.most_common()
    ]
    if flags:
        head = ("run", "flag", "rows")
        blocks.append(Table(head, flags, "Flags on labels", csv_download("flags", head, flags)))
    return Section("distributions", "Labels", blocks)


def _histograms(
    title: str, name: str, unit: str, runs: Sequence[TalliedRun], of_run: Callable[[LabelTally], Histogram]
) -> list[Block]:
    """One figure; runs with another number of grades have another top, and a figure of their own."""
    found: list[Block] = []
    held = {one.run.name: of_run(one.tally) for one in runs}
    queries = {one.run.name: one.tally.queries for one in runs}
    tops = dict.fromkeys(one.top for one in held.values() if one.rows)
    for top in tops:
        chosen = {run: one for run, one in held.items() if one.rows and one.top == top}
        edges = next(iter(chosen.values())).edges
        bars = [Bars(run, [], one.counts.tolist()) for run, one in chosen.items()]
        rows = [
            (run, low, high, int(count))
            for run, one in chosen.items()
            for low, high, count in zip(edges, edges[1:], one.counts, strict=False)
        ]
        means = "; ".join(f"{run}: mean {one.mean:.4f} over {one.rows:,} rows" for run, one in chosen.items())
        label = f"{name}, {unit}" if unit else name
        of = f", {round(math.exp(top))} grades" if len(tops) > 1 else ""
        save = csv_download(f"{name}{of}", ("run", "from", "to", "rows"), rows)
        found.append(
            Drawing(
                title_over(title, (queries[run] for run in chosen)) + of,
                draw_histogram(bars, edges, label=label, value="rows"),
                f"Histogram of {name}. {means}.",
                save,
                means,
            )
        )
    return found


def noise_section(runs: Sequence[TalliedRun]) -> Section:
    """How many grades flip when the same rows are asked again."""
    rows: list[list[Cell]] = []
    marks = []
    for run, _, _ in runs:
        for one in load_results(run.store):
            name = f"{one.engine.get('family')} {one.engine.get('version', '')}"
            figures = (one.rows, one.flips, one.unreadable, one.flip_rate, one.low, one.high, one.mean_kl)
            verdict = Badge("passed", "good") if one.has_passed else Badge("refused", "bad")
            rows.append([run.name, name, *figures, one.max_flip_rate, verdict])
            marks.append(PlottedInterval(run.name if len(runs) > 1 else name, one.flip_rate, one.low, one.high))
    if not rows:
        return Section("noise", "", [])
    head = (
        "run",
        "engine",
        "asked again",
        "flips",
        "no label now",
        "flip rate",
        "low",
        "high",
        "mean KL, nats",
        "limit",
        "verdict",
    )
    save = csv_download("noise-floor", head[:-1], [row[:-1] for row in rows])
    alt = "; ".join(
        f"{row[0]}: {row[5]:.4f} of grades flipped, 95 % interval {row[6]:.4f} to {row[7]:.4f}" for row in rows
    )
    text = (
        "A canary asks rows that are labelled already once more. Compare any "
        "difference between labels with the share of grades that flip."
    )
    figure = Drawing(
        "Share of grades that flipped, 95 % interval", draw_intervals([("canary", marks)], label="flip rate"), alt, save
    )
    return Section("noise", "Noise floor", [Paragraph(text), Side([figure]), Table(head, rows, "Canaries")])
