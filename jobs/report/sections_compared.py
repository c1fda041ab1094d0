"""Sections about runs beside each other: a student's scores against its teacher and gold, other runs beside the
first.

Every figure is one that `relabel evaluate` prints for several sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relabel.jobs.evaluate.comparing import compare_sets
from relabel.jobs.evaluate.comparison_text import verdicts_of
from relabel.jobs.evaluate.headlines import baseline_text
from relabel.jobs.evaluate.results import BothByGold, SetsBeside, StudentBeside
from relabel.jobs.evaluate.text import figure_title
from relabel.jobs.report.blocks import (
    Badge,
    Block,
    Cell,
    Drawing,
    Fold,
    Paragraph,
    Section,
    Side,
    Table,
    confusion_table,
)
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.gold import CANT, GoldChoice
from relabel.jobs.report.plots import draw_intervals
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.sections_judged import RESAMPLES, shown_figures
from relabel.manifests.metrics.registry import title_of
from relabel.manifests.metrics.teacher_statistics import AGAINST_TEACHER
from relabel.manifests.secrets.redaction import shortened


def compared_sections(runs: Sequence[RunArtifact], gold: GoldChoice) -> list[Section]:
    """Runs beside each other: a student's scores against its teacher and gold, other runs beside the first."""
    if len(runs) < 2:
        return []
    teacher = next((run for run in runs if not run.is_scored), runs[0])
    between: list[Block] = []
    students: list[Block] = []
    for other in runs:
        if other is teacher:
            continue
        blocks = students if other.is_scored and not teacher.is_scored else between
        try:
            found = _compare(teacher, other, gold)
        except CANT as exc:
            blocks.append(Paragraph(f"{teacher.name} and {other.name} can't be compared: {exc}", "warn"))
            continue
        blocks += [Paragraph(line, "warn") for line in found.side.lines()]
        blocks += [Paragraph(line) for line in verdicts_of(found.comparisons[0]) if line]
        blocks += _comparison_blocks(teacher.name, other.name, found.comparisons[0])
    return [
        Section("between", "Between runs", between),
        Section("student-against-teacher", "Student against teacher and gold", students),
    ]


def _compare(teacher: RunArtifact, other: RunArtifact, gold: GoldChoice) -> SetsBeside:
    """One run beside another; by gold grades too, where those that were found (not asked for) fit."""
    options, no_gold = gold.options(teacher), gold.no_gold
    for one in (options, no_gold):
        try:
            return compare_sets(
                (teacher.path, other.path), one or no_gold, [], teacher.storage, resamples=RESAMPLES, seed=7
            )
        except CANT:
            if one in (None, no_gold) or gold.path is not None:
                raise
    raise AssertionError("the last of two either returns or raises")


def _comparison_blocks(teacher: str, student: str, found: StudentBeside) -> list[Block]:
    pair = f"{teacher} and {student}"
    rows = [
        (_against_name(name, teacher, student), one.value, one.low, one.high, f"{one.over:,} {one.unit}")
        for name, one in found.against_teacher.items()
    ]
    head = ("figure", "value", "low", "high", "over")
    counts = found.counts
    alone = counts.only_teacher + counts.only_student
    matched = (
        f"{counts.matched:,} rows of both, matched by {found.matched_by}; {alone:,} are in one only and are left out."
    )
    cells = [(one, other, count) for one, row in enumerate(found.confusion) for other, count in enumerate(row)]
    confusion = confusion_table(
        found.confusion, shortened(teacher, 20), shortened(student, 20), caption=f"Grades of {pair}",
        download=csv_download(f"confusion-{teacher}-{student}", (teacher, student, "rows"), cells),
    )  # fmt: skip
    blocks: list[Block] = [
        Paragraph(f"{pair}: {matched}"),
        Side(
            [
                confusion,
                Table(
                    head,
                    rows,
                    f"{student} against {teacher}, 95 % intervals",
                    csv_download(f"against-{teacher}-{student}", head, rows),
                ),
            ]
        ),
    ]
    if found.against_gold is not None:
        blocks += _both_against_gold(teacher, student, found.against_gold, counts.judged)
    if found.notes:
        blocks.append(Fold(f"Remarks: {len(found.notes)}", [Paragraph(note) for note in found.notes]))
    return blocks


def _both_against_gold(teacher: str, student: str, found: BothByGold, judged: int) -> list[Block]:
    sides = [(teacher, found.teacher.figures), (student, found.student.figures)]
    groups = [(name, shown_figures(figures)) for name, figures in sides]
    rows: list[list[Cell]] = []
    for key, ours in found.teacher.figures.items():
        theirs, step = found.student.figures.get(key), found.difference.get(key)
        is_apart = (
            step is not None and step.low is not None and step.high is not None and not step.low <= 0 <= step.high
        )
        held = ((shortened(teacher, 20), ours), (shortened(student, 20), theirs))
        title = figure_title(key, {name: figure.is_by_grade for name, figure in held if figure is not None})
        ends = (None, None, None) if step is None else (step.value, step.low, step.high)
        rows.append(
            [
                title,
                ours.value,
                None if theirs is None else theirs.value,
                *ends,
                baseline_text(found.student.baselines, key),
                Badge("differs", "warn") if is_apart else "",
            ]
        )
    head = (
        "figure",
        shortened(teacher, 20),
        shortened(student, 20),
        "difference",
        "low",
        "high",
        "baseline",
        "verdict",
    )
    save = csv_download(
        f"student-against-teacher-{teacher}-{student}",
        (*head[:-1], "differs"),
        [[*row[:-1], "yes" if row[-1] else "no"] for row in rows],
    )
    alt = "; ".join(f"{row[0]}: {teacher} {_said(row[1])}, {student} {_said(row[2])}" for row in rows)
    note = (
        f"Over {judged:,} rows with a gold grade; the difference has the interval of a paired bootstrap over queries."
    )
    figure = Drawing(
        f"{teacher} and {student} by gold grades",
        draw_intervals(groups, label="value, with its 95 % interval"),
        alt,
        save,
        note,
    )
    table = Table(head, rows, f"{student} minus {teacher}, 95 % intervals", save)
    return [Side([figure]), table]


def _against_name(figure: str, teacher: str, student: str) -> str:
    """A figure's name, by the names of the runs: two runs beside each other need not be teacher and student."""
    return (
        f"mean KL({shortened(teacher, 20)} ‖ {shortened(student, 20)}), nats"
        if figure == "kl"
        else title_of(figure, AGAINST_TEACHER)
    )


def _said(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "undefined"
