"""The text of a comparison: for each student what was matched, its figures against the teacher, and both against human
grades.
"""

from __future__ import annotations

from relabel.jobs.evaluate.headlines import baseline_text, difference_text, level_text
from relabel.jobs.evaluate.results import BothByGold, SetsBeside, StudentBeside
from relabel.jobs.evaluate.text import (
    aligned,
    gates_text,
    interval_text,
    notes_text,
    over_text,
    sides_title,
    top_text,
    value_text,
)
from relabel.jobs.output import table
from relabel.manifests.metrics.evaluation_of_both import Difference
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import title_of
from relabel.manifests.metrics.teacher_statistics import AGAINST_TEACHER


def comparison_text(result: SetsBeside) -> str:
    """The report of one comparison."""
    kinds = {one.name: one.kind for one in result.sets}
    blocks = [top_text([line for one in result.comparisons for line in verdicts_of(one)], result.side)]
    for one in result.comparisons:
        teacher, student = (f"{name} ({kinds[name]})" for name in (one.teacher, one.student))
        blocks += [
            f"teacher {teacher}, student {student}\n" + table(_counts(one, result)),
            "student against teacher\n" + _against_teacher(one.against_teacher),
            _confusion(one.confusion),
        ]
        if one.against_gold:
            blocks.append(f"both against {result.qrels}\n" + _against_gold(one.against_gold))
        blocks.append(notes_text(one.notes))
    verdicts = [(one.student, gates_text(one.gates)) for one in result.comparisons if one.gates]
    said = [f"{student}\n{text}" if len(verdicts) > 1 else text for student, text in verdicts]
    return "\n\n".join(filter(None, [*blocks, notes_text(result.notes), *said]))


def verdicts_of(one: StudentBeside) -> list[str]:
    """Whether a student differs from its teacher by gold, and beats the baselines; empty without gold."""
    found = one.against_gold
    if found is None:
        return []
    said = difference_text(f"{one.student} against {one.teacher}, by gold", found.difference)
    return [said, level_text(found.student.figures, found.student.baselines, who=f"{one.student}: ")]


def _counts(one: StudentBeside, result: SetsBeside) -> list[tuple[str, str]]:
    counts = one.counts
    rows = [
        ("labels", f"{counts.teacher:,} of the teacher, {counts.student:,} of the student, {result.grades} grades"),
        ("matched", f"{counts.matched:,} rows of {counts.queries:,} queries, by {one.matched_by}"),
        ("unmatched", f"{counts.only_teacher:,} of the teacher, {counts.only_student:,} of the student, left out"),
    ]
    if one.against_gold:
        without = f"{counts.unjudged:,} without a gold grade, {counts.gold_null:,} with a null one"
        rows.append(("judged", f"{counts.judged:,} of them, joined by {one.joined_by}; {without}"))
    drawn = f"queries, {result.resamples:,} times, seed {result.seed}, the same draws for both"
    rows.append(
        ("resampled", drawn if result.resamples and counts.queries > 1 else "nothing, so there are no intervals")
    )
    return rows


def _against_teacher(figures: dict[str, MetricValue]) -> str:
    rows = [("figure", "value", "95 % interval", "over")]
    for name, figure in figures.items():
        title = title_of(name, AGAINST_TEACHER)
        rows.append((title, value_text(figure.value), interval_text(figure), f"{figure.over:,} {figure.unit}"))
    return aligned(rows)


def _confusion(matrix: list[list[int]]) -> str:
    grades = range(len(matrix))
    rows = [("teacher \\ student", *map(str, grades), "sum")]
    rows += [(str(grade), *(f"{count:,}" for count in matrix[grade]), f"{sum(matrix[grade]):,}") for grade in grades]
    return aligned(rows, right=True)


def _against_gold(found: BothByGold) -> str:
    ours, theirs = found.teacher.figures, found.student.figures
    rows = [("figure", "teacher", "student", "student - teacher", "95 % interval", "over", "baseline")]
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        first, second = (value_text(side[name].value) if name in side else "-" for side in (ours, theirs))
        title = sides_title(name, {"teacher": ours, "student": theirs})
        over, bound = over_text(name, theirs, ours), baseline_text(found.student.baselines, name) or "-"
        rows.append((title, first, second, *_difference(found.difference.get(name)), over, bound))
    return aligned(rows)


def _difference(step: Difference | None) -> tuple[str, str]:
    if step is None:
        return "-", "-"
    interval = "-" if step.low is None else f"{signed_text(step.low)} to {signed_text(step.high)}"
    return signed_text(step.value), interval


def signed_text(value: float | None) -> str:
    """A difference's value."""
    return "undefined" if value is None else f"{value:+.4f}"
