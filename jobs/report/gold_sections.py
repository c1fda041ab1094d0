"""Report sections that compare labels with gold grades and with other label sets: metrics with intervals, reliability,
confusion matrices and nDCG by query."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.judging import Judging, compare_sets, gold_of, judge, load_pairs, open_set
from relabel.jobs.evaluate.results import (
    BothByGold,
    SetsBeside,
    StudentBeside,
    baseline_text,
    figure_title,
    level_text,
    verdicts_of,
)
from relabel.jobs.evaluate.sides import EmptySideError, JudgingOptions, Side
from relabel.jobs.report.artifacts import RunArtifact
from relabel.jobs.report.page import (
    Badge,
    Block,
    Cell,
    Drawing,
    Fold,
    Paragraph,
    Section,
    Table,
    confusion_table,
    csv_download,
    title_over,
)
from relabel.jobs.report.page import Side as PageSide
from relabel.jobs.report.plots import Bars, Line, PlottedInterval, draw_histogram, draw_intervals, draw_reliability
from relabel.manifests.errors import InputError, ManifestError, MissingExtraError, UsageError
from relabel.manifests.files import is_url
from relabel.manifests.gold import Duplicates, GradeMap, own_input
from relabel.manifests.metrics.comparison import AGAINST_TEACHER
from relabel.manifests.metrics.evaluation import Evaluation, evaluate
from relabel.manifests.metrics.measures import DEPTH, rank_queries
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import METRICS, title_of
from relabel.manifests.schemas import LabelRow, QuarantineRow, texts_of
from relabel.manifests.secrets import shortened

# ------------------------------------------------------------------------------
# Gold grades for a report: those that were named, or the gold column that a run's own spec names; and the grade of
# each row.


CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""What keeps a run from being judged: where grades were found and not asked for, it is reported on the page."""
NO_GOLD = JudgingOptions(allow_partial=True)


def gold_files(path: str | None) -> list[str]:
    """What must not be written over where these are the gold grades: the path as given, and the local files that a
    pattern stands for.
    """
    if path is None:
        return []
    return [path] if is_url(path) else [path, *glob.glob(path, recursive=True)]  # noqa: PTH207 (an absolute pattern is beyond Path.glob)


@dataclass(frozen=True)
class GoldChoice:
    """Where gold grades are.

    Args:
        path: of `--gold`; None takes the column that a run's own spec names, where it names one.
        grade, by, doc: columns of grade, query and document.
        grade_map: brings them to the labels' scale.
        duplicates: what becomes of a pair whose grades differ.
        side: of a student's split that is judged.
        students: scored runs on the page, whose split cuts all of them.
    """

    path: str | None = None
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grade_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    side: Side | None = None
    students: tuple[str, ...] = ()

    def options(self, run: RunArtifact | None) -> JudgingOptions | None:
        """How to judge: by what was named, else by the gold column of the run's input, else not at all."""
        path, grade = self.path, self.grade
        if path is None and run is not None:
            own = _own_gold(run)
            path, grade = own.path, own.column
        if path is None:
            return None
        return replace(
            self.no_gold,
            qrels=path,
            grade=grade,
            by=self.by,
            doc=self.doc,
            grade_map=self.grade_map,
            duplicates=self.duplicates,
        )

    @property
    def no_gold(self) -> JudgingOptions:
        """How to compare without gold."""
        return replace(NO_GOLD, side=self.side, students=self.students)

    def why_not(self, run: RunArtifact) -> str | None:
        """Why the gold column that a run's job names is not used; None where it is, where there is none, or `--gold` is
        given.
        """
        return None if self.path is not None else _own_gold(run).why_not


class _OwnGold(NamedTuple):
    """Where the gold column of a run's own input is, or why it is not used."""

    path: str | None = None
    column: str | None = None
    why_not: str | None = None


def _own_gold(run: RunArtifact) -> _OwnGold:
    column = run.spec_part("input", "columns").get("gold") or run.plan.facts.columns.gold
    if not column:
        return _OwnGold()
    return _gold_of_paths(run, str(column))


def _gold_of_paths(run: RunArtifact, column: str) -> _OwnGold:
    said = f"{run.name}: the job names the gold column `{column}`, which is not used: "
    if run.manifest is None:
        return _OwnGold(
            why_not=f"{said}it is not finished, and only its manifest, which is written last, says where its input is."
        )
    named = run.spec_part("input").get("path")
    paths = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not paths:
        return _OwnGold(why_not=f"{said}its manifest does not say where its input is.")
    if len(paths) > 1:
        return _OwnGold(why_not=f"{said}its input is {len(paths)} paths, and grades are read from one.")
    path = str(paths[0])
    try:
        own = own_input(run.plan, path, column, run.storage)
    except CANT as exc:
        return _OwnGold(why_not=f"{said}{exc}")
    if own is None:
        why = f"its input {path} is not there, as seen from this folder, or is not what was labelled any more."
        return _OwnGold(why_not=said + why)
    return _OwnGold(path, column)


class RunGold:
    """The gold grades of a run's rows, as the browser shows them."""

    def __init__(self, run: RunArtifact, options: JudgingOptions) -> None:
        labels = open_set(run.path, options, run.storage)
        self._by_row = gold_of(labels, options, run.storage).by_row
        self._by_pair = None if self._by_row is not None else load_pairs([labels], options, run.storage)

    def of(self, rows: Sequence[LabelRow] | Sequence[QuarantineRow]) -> list[int | None]:
        """The grade of each row, None where there is none."""
        if self._by_pair is not None:
            return self._by_pair.grades_of([(row.query_id, row.doc_id) for row in rows])
        assert self._by_row is not None
        return list(self._by_row.take(pa.array([row.row_id for row in rows], pa.int64())).to_pylist())


# ------------------------------------------------------------------------------
# Sections about labels beside gold grades: figures with intervals, reliability, confusion, nDCG by query.
#
# Every figure is one that `relabel evaluate` prints; nothing is computed here but nDCG's order by query.


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
            PageSide([*_against(judged), *_reliability(judged), *_confusions(judged)]),
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


# ------------------------------------------------------------------------------
# The section of rankings: nDCG by query, and the queries that are worst.


BINS = 20
WORST = 15


def ranking_section(judged: Sequence[JudgedRun]) -> Section:
    """nDCG query by query."""
    blocks: list[Block] = []
    groups: list[Bars] = []
    rows: list[tuple[str, str, float, int]] = []
    worst: list[list[Cell]] = []
    for one in judged:
        found = _ndcg(one)
        if found:
            counts, _ = np.histogram([value for _, value, _ in found], bins=BINS, range=(0.0, 1.0))
            groups.append(Bars(one.name, [], counts.tolist()))
            rows += [(one.name, query, value, docs) for query, value, docs in found]
            worst += [[one.name, query, value, docs] for query, value, docs in found[:WORST]]
    if groups:
        head = ("run", "query", f"ndcg@{DEPTH}", "judged documents")
        edges = [number / BINS for number in range(BINS + 1)]
        alt = " ".join(
            f"{group.name}: {_ndcg_text([value for run, _, value, _ in rows if run == group.name])}" for group in groups
        )
        svg = draw_histogram(groups, edges, label=f"nDCG@{DEPTH}", value="queries")
        title = title_over(f"nDCG@{DEPTH} by query", judged_queries(judged))
        blocks.append(PageSide([Drawing(title, svg, alt, csv_download("ndcg-by-query", head, rows), alt)]))
        each = (
            f", {WORST} of each run"
            if len(worst) == WORST * len(groups) > WORST
            else ", run by run"
            if len(groups) > 1
            else ""
        )
        blocks.append(
            Fold(f"The {len(worst)} queries where it is lowest{each}", [Table(head, worst, "Lowest first, run by run")])
        )
    return Section("ranking", "Queries", blocks)


def _ndcg_text(values: Sequence[float]) -> str:
    return (
        f"nDCG@{DEPTH} of {len(values):,} queries, from {min(values):.3f} to {max(values):.3f}, mean "
        f"{np.mean(values):.4f}."
    )


def _ndcg(one: JudgedRun) -> list[tuple[str, float, int]]:
    """Query, nDCG and judged documents, worst first; queries without a relevant document have none."""
    rows = one.judging.judged
    if rows.queries is None or rows.query_names is None:
        return []
    found = rank_queries(rows.queries, rows.docs, np.round(rows.scores, 6), rows.gold, num_queries=rows.num_queries)
    size_G = np.bincount(rows.queries, minlength=rows.num_queries).tolist()
    listed = zip(texts_of(rows.query_names), found.ndcg.tolist(), size_G, strict=True)
    return sorted((item for item in listed if not math.isnan(item[1])), key=lambda item: (item[1], item[0]))


# ------------------------------------------------------------------------------
# Sections about runs beside each other: a student's scores against its teacher and gold, other runs beside the
# first.
#
# Every figure is one that `relabel evaluate` prints for several sets.


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
        PageSide(
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
    return [PageSide([figure]), table]


def _against_name(figure: str, teacher: str, student: str) -> str:
    """A figure's name, by the names of the runs: two runs beside each other need not be teacher and student."""
    return (
        f"mean KL({shortened(teacher, 20)} ‖ {shortened(student, 20)}), nats"
        if figure == "kl"
        else title_of(figure, AGAINST_TEACHER)
    )


def _said(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "undefined"
