"""Results of `relabel evaluate`: the records behind its JSON, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from relabel.jobs.evaluate.sides import SideCut
from relabel.jobs.output import table
from relabel.manifests.metrics.comparison import AGAINST_TEACHER, StudentComparison, StudentComparisonCounts
from relabel.manifests.metrics.evaluation import Baselines, CalibrationTrial, Difference, Evaluation, ReliabilityBin
from relabel.manifests.metrics.gates import GateVerdict
from relabel.manifests.metrics.measures import DEPTH
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import CALIBRATION, title_of
from relabel.manifests.records import LEFT_OUT

# ------------------------------------------------------------------------------
# What `evaluate` found, of one set of labels or of several side by side: the fields of its JSON, in their order.


@dataclass(frozen=True)
class JudgedSource:
    """Labels that were judged: `kind` and `grades` as in `LabelSet`, the rest as in `LabelOrigin`."""

    path: str
    kind: str
    grades: int | None
    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    column: str | None = field(default=None, metadata=LEFT_OUT)
    where: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class JudgedCounts:
    """Labels by what gold says of them, rows without one, and queries of the judged.

    Args:
        without_label: rows that hold none that can be read.
        relabelled: judged labels beyond the first of their pair.
        qrels: pairs; None where labels and gold are joined by row.
        qrels_without_label: of them graded, and not labelled.
    """

    labels: int
    judged: int
    unjudged: int
    gold_null: int
    without_label: int
    quarantined: int
    relabelled: int
    queries: int
    qrels: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_repeated: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_in_conflict: int | None = field(default=None, metadata=LEFT_OUT)
    qrels_without_label: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class JudgedLabels:
    """One set of labels, or several as one, by gold; from `grades` to `baselines` as in `Evaluation`."""

    labels: list[JudgedSource]
    qrels: str | None
    joined_by: list[str]
    side: SideCut
    counts: JudgedCounts
    resamples: int
    seed: int
    grades: int
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    resampled: str
    num_groups: int
    reliability: list[ReliabilityBin] | None
    calibration: CalibrationTrial | None
    notes: list[str]
    baselines: Baselines
    gates: list[GateVerdict]
    exit_code: int


@dataclass(frozen=True)
class SetBeside:
    """A set that is compared: `kind` and `quarantined` as in `LabelSet`, from `labeler` on as in `LabelOrigin`."""

    name: str
    role: Literal["teacher", "student"]
    path: str
    kind: str
    quarantined: int | None
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    column: str | None = field(default=None, metadata=LEFT_OUT)
    where: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class BothByGold:
    """Teacher and student by gold, over the rows that both have; student minus teacher."""

    teacher: Evaluation
    student: Evaluation
    difference: dict[str, Difference]


@dataclass(frozen=True)
class StudentBeside:
    """One student beside the teacher.

    Args:
        matched_by, joined_by: how rows met each other, and gold; the latter None where nobody judges.
        confusion: rows teacher, columns student.
        gates: verdicts on this student.
    """

    teacher: str
    student: str
    matched_by: str
    joined_by: str | None
    counts: StudentComparisonCounts
    against_teacher: dict[str, MetricValue]
    confusion: list[list[int]]
    against_gold: BothByGold | None
    gates: list[GateVerdict]
    notes: list[str]

    @classmethod
    def of(
        cls, names: tuple[str, str], found: StudentComparison, joined_by: str | None, gates: list[GateVerdict]
    ) -> StudentBeside:
        """`names` are teacher and student."""
        gold = None
        if found.teacher is not None and found.student is not None:
            gold = BothByGold(found.teacher, found.student, found.difference)
        return cls(
            *names,
            matched_by=found.matched_by,
            joined_by=joined_by,
            counts=found.counts,
            against_teacher=found.against_teacher,
            confusion=found.confusion,
            against_gold=gold,
            gates=gates,
            notes=found.notes,
        )


@dataclass(frozen=True)
class SetsBeside:
    """All students beside one teacher."""

    sets: list[SetBeside]
    side: SideCut
    qrels: str | None
    grades: int
    resamples: int
    seed: int
    comparisons: list[StudentBeside]
    notes: list[str]
    exit_code: int


# ------------------------------------------------------------------------------
# What figures come to, in a sentence: whether labels beat a baseline, and whether two sets differ.
#
# Something is said to be shown where a 95 % interval lies wholly on one side; a baseline counts as a fixed number.


HEADLINES = ("accuracy", f"ndcg@{DEPTH}")


def baseline_text(found: Baselines, figure: str) -> str:
    """The baselines that bound a figure; empty where none does."""
    return ", ".join(f"{value:.4f} {kind}" for kind, value in found.of(figure).items())


def level_text(figures: Mapping[str, MetricValue], found: Baselines, *, who: str = "") -> str:
    """Where a set lies beside the best baseline of each headline figure; empty where it has none.

    Args:
        who: begins the sentence, where there are several sets.
    """
    names = {
        "constant": f"the constant grade {found.grade}",
        "random": "a random order",
        "lexical": "shared words alone",
    }
    parts = []
    for name in HEADLINES:
        figure, bounds = figures.get(name), found.of(name)
        if figure is None or figure.value is None or not bounds:
            continue
        kind = max(bounds, key=lambda one: bounds[one])
        if figure.low is None or figure.high is None:
            interval, place = "no interval", "beside"
        else:
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            place = (
                "above" if figure.low > bounds[kind] else "below" if figure.high < bounds[kind] else "not shown to beat"
            )
        value = f"{title_of(name)} {figure.value:.3f} ({interval}, {figure.over:,} {figure.unit})"
        parts.append(f"{value} is {place} {names[kind]} with {bounds[kind]:.3f}")
    return f"{who}{'; '.join(parts)}" if parts else ""


def difference_text(who: str, steps: Mapping[str, Difference]) -> str:
    """Whether two sets differ in the headline figures; empty where they have none.

    Args:
        who: is measured against whom; begins the sentence.
    """
    said: dict[str, list[str]] = {}
    for name in HEADLINES:
        step = steps.get(name)
        if step is None or step.value is None:
            continue
        text = f"{title_of(name)} {step.value:+.3f}"
        if step.low is None or step.high is None:
            said.setdefault("no interval, so no difference is shown", []).append(text)
            continue
        verdict = "better" if step.low > 0 else "worse" if step.high < 0 else "no difference is shown"
        said.setdefault(verdict, []).append(f"{text}, {step.low:+.3f} to {step.high:+.3f}")
    return (
        f"{who}: " + "; ".join(f"{verdict}: {' and '.join(parts)}" for verdict, parts in said.items()) if said else ""
    )


# ------------------------------------------------------------------------------
# The text of an evaluation: counts first, then figures with their intervals, the confusion matrix, calibration,
# remarks, and last the verdict.


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


# ------------------------------------------------------------------------------
# The text of a comparison: for each student what was matched, its figures against the teacher, and both against human
# grades.


def comparison_text(result: SetsBeside) -> str:
    """The report of one comparison."""
    kinds = {one.name: one.kind for one in result.sets}
    blocks = [top_text([line for one in result.comparisons for line in verdicts_of(one)], result.side)]
    for one in result.comparisons:
        teacher, student = (f"{name} ({kinds[name]})" for name in (one.teacher, one.student))
        blocks += [
            f"teacher {teacher}, student {student}\n" + table(_comparison_text_counts(one, result)),
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


def _comparison_text_counts(one: StudentBeside, result: SetsBeside) -> list[tuple[str, str]]:
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
