"""Results as data: sections of text, facts, tables and plots, which the terminal and the HTML page both show; and the
records of `relabel evaluate` with the blocks that show them.

Everything in a block is text or a number; `as_text` and the templates of `jobs/report` escape it for where it is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from relabel.jobs.output import Printed, grid
from relabel.manifests.metrics.comparison import AGAINST_TEACHER, StudentComparison
from relabel.manifests.metrics.evaluation import FEWEST_QUERIES, Baselines, Evaluation, GateVerdict
from relabel.manifests.metrics.judged import METRICS, title_of
from relabel.manifests.metrics.metric import DEPTH, Difference, MetricValue
from relabel.manifests.records import LEFT_OUT, as_object
from relabel.manifests.secrets import one_line


@dataclass(frozen=True)
class Shade:
    """A number in a cell whose background gets darker with its share, 0 to 1."""

    text: str
    share: float


@dataclass(frozen=True)
class Badge:
    """A word with a tone: `good`, `bad`, `warn` or `plain`."""

    text: str
    tone: str = "plain"


Cell: TypeAlias = str | int | float | Shade | Badge | None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `tone` as a badge's."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each."""

    title: str
    rows: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns of numbers are aligned to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_number(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float | Shade) for cell in cells)

    @property
    def is_shaded(self) -> bool:
        """Whether it is read as a picture, such as a confusion matrix."""
        return any(isinstance(cell, Shade) for row in self.rows for cell in row)


class Series(NamedTuple):
    """One colour of a plot: values `y` at places `x`, with bounds for `intervals`."""

    name: str
    x: Sequence[str | float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Plot:
    """A drawing; the terminal leaves it out.

    Args:
        form: `histogram` has one place more than values: the edges of its bins. `reliability` is lines with a diagonal.
        label, value: of the two axes.
    """

    title: str
    form: Literal["bars", "histogram", "lines", "reliability", "intervals"]
    series: Sequence[Series]
    label: str
    value: str = ""
    note: str = ""

    @property
    def alt(self) -> str:
        """What it shows, in words: all points of a few, else the first and the last."""
        return "; ".join(f"{series.name}: {_points(series)}" for series in self.series)


@dataclass(frozen=True)
class Code:
    """Text as it is in a file."""

    label: str
    text: str


@dataclass(frozen=True)
class Remarks:
    """Sentences that a reader should know, of lesser weight."""

    items: Sequence[str]


@dataclass(frozen=True)
class Fold:
    """Blocks under a line that opens them; the terminal leaves them out."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = Paragraph | Facts | Table | Plot | Code | Remarks | Fold


@dataclass(frozen=True)
class Section:
    """A part of a page; one without blocks is left out.

    Args:
        name: its anchor, `[a-z-]+`.
    """

    name: str
    title: str
    blocks: Sequence[Block]


def confusion_table(counts: Sequence[Sequence[int]], rows: str, columns: str, *, caption: str = "") -> Table:
    """A confusion matrix with its sums, each row shaded by its shares."""
    body: list[list[Cell]] = [
        [str(grade), *(Shade(f"{count:,}", count / max(1, sum(row))) for count in row), sum(row)]
        for grade, row in enumerate(counts)
    ]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return Table(
        caption, [f"{rows} \\ {columns}", *map(str, range(len(counts))), "sum"], [*body, ["sum", *sums, sum(sums)]]
    )


def cell_text(value: Cell) -> str:
    """A cell as people read it: thousands apart, four digits after the point, tiny numbers as powers of ten."""
    if isinstance(value, Shade | Badge):
        return value.text
    if value is None or value != value:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and not 0.001 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(value: float | None) -> str | None:
    """A difference with its sign."""
    return None if value is None else f"{value:+.3f}"


def interval_text(figure: Difference) -> str:
    """Its bounds; nothing where there are none."""
    return "" if figure.low is None or figure.high is None else f"{figure.low:.3f} to {figure.high:.3f}"


def as_text(blocks: Iterable[Block]) -> str:
    """Blocks for a terminal."""
    parts: list[str] = []
    for is_paragraph, group in itertools.groupby(blocks, lambda block: isinstance(block, Paragraph)):
        texts = list(filter(None, map(_block_text, group)))
        if is_paragraph:
            parts.append("\n".join(texts))
        else:
            parts += texts
    return "\n\n".join(filter(None, parts))


def _block_text(block: Block) -> str:
    match block:
        case Paragraph(text=text):
            return one_line(text)
        case Facts(title=title, rows=rows):
            lines = [grid([(name, cell_text(value)) for name, value in rows])]
        case Table(caption=title, head=head, rows=rows):
            right = [column for column in range(len(head)) if block.is_number(column)]
            lines = [grid([head, *([cell_text(cell) for cell in row] for row in rows)], right)]
        case Remarks(items=items):
            title = "remarks" if items else ""
            lines = [f"  - {one_line(item)}" for item in items]
        case _:
            return ""
    if title:
        lines.insert(0, one_line(title))
    return "\n".join(lines)


def _points(series: Series) -> str:
    texts = [x if isinstance(x, str) else f"{x:g}" for x in series.x]
    points = [f"{x} {cell_text(y)}" for x, y in zip(texts, series.y, strict=False)]
    return ", ".join(points) if len(points) <= 12 else f"from {points[0]} to {points[-1]}, {len(points):,} points"


# ------------------------------------------------------------------------------
# Results of `relabel evaluate` and of its comparisons: the records of their JSON.

Side: TypeAlias = Literal["train", "dev", "test", "all"]


@dataclass
class SideCut:
    """Which rows are judged.

    Args:
        side: of the split of the students among the sets; of several students, a row is on `train` if it trained any.
        students: whose split is known, by path.
        rows: of each set by path, its rows by side, before the cut; empty where no split is known.
        unknown: by path of a set, why nobody knows whether its rows trained what labelled them.
        assumed: students whose manifest does not say which queries they learned from, so that any query is taken for
            one of theirs.
    """

    side: Side
    students: list[str]
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    assumed: list[str] | None = field(default=None, metadata=LEFT_OUT)

    def lines(self) -> list[str]:
        """The same in words, to be shown before any figure."""
        shown = []
        for why in dict.fromkeys(self.unknown.values()):
            paths = (path for path, text in self.unknown.items() if text == why)
            shown.append(f"{', '.join(paths)}: {why}, so figures may flatter")
        for path, count in self.rows.items():
            parts = [f"{number:,} {name}" for name, number in count.items() if number]
            total = sum(count.values())
            if self.side == "all":
                shown.append(
                    f"all {total:,} rows of {path}: {', '.join(parts)}; the {count['train']:,} train rows taught the "
                    "student, whose figures flatter"
                )
            else:
                left = [part for part in parts if not part.endswith(f" {self.side}")]
                judged = f"{count[self.side]:,} of {total:,} rows of {path}, the student's {self.side} side"
                shown.append(f"{judged}; left out: {', '.join(left) or 'none'} (--side all: every row)")
        if self.assumed:
            shown.append(
                f"{', '.join(self.assumed)}: the student was made by an earlier relabel and does not say which queries "
                "it learned from, so sides are taken from the query alone, also of data that it never had"
            )
        return shown


@dataclass(frozen=True, kw_only=True)
class JudgedLabels(Printed, Evaluation):
    """One set of labels, or several as one, by gold.

    Args:
        labels: path, kind, grades and origin of each set.
        counts: labels by what gold says of them, and queries of the judged: `without_label` rows hold none that can be
            read, `relabelled` are judged labels beyond the first of their pair; the `qrels` are pairs, absent where
            labels and gold are joined by row.
    """

    labels: list[dict[str, Any]]
    qrels: str | None
    joined_by: list[str]
    side: SideCut
    counts: dict[str, int]
    resamples: int
    seed: int
    gates: list[GateVerdict]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        return [as_text(evaluation_blocks(self))]


@dataclass(frozen=True, kw_only=True)
class ComparedStudent(StudentComparison):
    """One student compared with the teacher.

    Args:
        joined_by: how rows were joined with gold; None without gold.
        gates: verdicts on this student.
    """

    teacher: str
    student: str
    joined_by: str | None
    gates: list[GateVerdict]


@dataclass(frozen=True)
class ComparedSets(Printed):
    """All students compared with one teacher; `sets` are name, role, path, kind, quarantined and origin of each."""

    sets: list[dict[str, Any]]
    side: SideCut
    qrels: str | None
    grades: int
    resamples: int
    seed: int
    comparisons: list[ComparedStudent]
    notes: list[str]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        return [as_text(sets_blocks(self))]

    def verdicts(self) -> list[GateVerdict]:
        """Of all gates on all students."""
        return list(itertools.chain.from_iterable(student.gates for student in self.comparisons))


# ------------------------------------------------------------------------------
# Verdicts in a sentence. A difference counts as shown where its 95 % interval lies wholly on one side of zero; a
# baseline counts as a fixed number.

HEADLINES = ("accuracy", f"ndcg@{DEPTH}")
NOTHING_TO_RANK = 0.95
"""nDCG of a random order, above which no order is far from the best: one or two documents a query are judged."""


TOO_FEW = "too few queries for an interval"


def has_too_few_queries(found: Evaluation) -> bool:
    """Whether a sentence gives no interval, and so no verdict. Tables give all intervals, with a remark."""
    return found.resampled == "queries" and found.num_groups < FEWEST_QUERIES


def level_text(found: Evaluation, *, who: str = "") -> str:
    """Whether each headline figure is above its best baseline; empty where it has none.

    Args:
        who: begins the sentence, where there are several sets.
    """
    parts = []
    for name in HEADLINES:
        figure = found.figures.get(name)
        bounds = found.baselines.of(name)
        if figure is None or figure.value is None or not bounds:
            continue
        kind, bound = max(bounds.items(), key=lambda item: item[1])
        verdict = ""
        if has_too_few_queries(found):
            interval = TOO_FEW
        elif figure.low is None or figure.high is None:
            interval = "no interval"
        else:
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            verdict = "not shown to beat"
            if figure.low > bound:
                verdict = "above"
            elif figure.high < bound:
                verdict = "below"
        value = f"{title_of(name)} {figure.value:.3f} ({interval}, {figure.over:,} {figure.unit})"
        if bounds.get("random", 0) > NOTHING_TO_RANK:
            random = f"a random order has {bounds['random']:.3f}"
            parts.append(f"{value} shows nothing: so few documents of a query are judged that {random}")
        elif verdict:
            parts.append(f"{value} is {verdict} {found.baselines.words(kind)} with {bound:.3f}")
        else:
            parts.append(f"{value}; {found.baselines.words(kind)} has {bound:.3f}, and no verdict is given")
    return f"{who}{'; '.join(parts)}" if parts else ""


def difference_text(who: str, steps: Mapping[str, Difference], found: Evaluation) -> str:
    """Whether two sets differ in the headline figures; empty where they have none.

    Args:
        who: begins the sentence.
        found: of either set; both are of the same rows.
    """
    verdicts: dict[str, list[str]] = {}
    for name in HEADLINES:
        step = steps.get(name)
        if step is None or step.value is None:
            continue
        text = f"{title_of(name)} {step.value:+.3f}"
        verdict = "no interval, so no difference is shown"
        if has_too_few_queries(found):
            verdict = f"{TOO_FEW}, so no difference is shown"
        elif step.low is not None and step.high is not None:
            text += f", {step.low:+.3f} to {step.high:+.3f}"
            verdict = "no difference is shown"
            if step.low > 0:
                verdict = "better"
            elif step.high < 0:
                verdict = "worse"
        verdicts.setdefault(verdict, []).append(text)
    shown = "; ".join(f"{verdict}: {' and '.join(parts)}" for verdict, parts in verdicts.items())
    return f"{who}: {shown}" if shown else ""


def verdicts_of(compared: ComparedStudent) -> list[str]:
    """Whether a student differs from its teacher by gold, and beats the baselines; empty without gold."""
    gold = compared.against_gold
    if gold is None:
        return []
    who = f"{compared.student} against {compared.teacher}, by gold"
    difference = difference_text(who, gold.difference, gold.student)
    return [difference, level_text(gold.student, who=f"{compared.student}: ")]


# ------------------------------------------------------------------------------
# Tables and plots of figures.


def figure_title(figure: str, sides: Mapping[str, Mapping[str, MetricValue]]) -> str:
    """A figure's name, with a word where it ranks by the written grade for want of distributions.

    Args:
        sides: figures of each set, by the set's name.
    """
    there = [side for side, figures in sides.items() if figure in figures]
    by_grade = [side for side in there if sides[side][figure].is_by_grade]
    whose = "" if len(by_grade) == len(there) else f" of {' and '.join(by_grade)}"
    return title_of(figure) + (f" by written grade{whose}" if by_grade else "")


def figures_table(
    caption: str,
    figures: Mapping[str, MetricValue],
    *,
    title: Callable[[str], str] | None = None,
    baselines: Baselines | None = None,
) -> Table:
    """Figures with their intervals; `title` names them, where they are not those of `evaluate`."""
    head = ["figure", "value", "95 % interval", "over"]
    if baselines:
        head.append("baseline")
    rows: list[list[Cell]] = []
    for name, figure in figures.items():
        row: list[Cell] = [
            title(name) if title else figure_title(name, {"": figures}),
            "undefined" if figure.value is None else figure.value,
            "" if figure.low is None else f"{figure.low:.4f} to {figure.high:.4f}",
            f"{figure.over:,} {figure.unit}",
        ]
        if baselines:
            row.append(baselines.text(name))
        rows.append(row)
    return Table(caption, head, rows)


def both_table(
    caption: str, names: tuple[str, str], first: Evaluation, second: Evaluation, difference: Mapping[str, Difference]
) -> Table:
    """Figures of two sets, and the second minus the first with its interval."""
    sides = {names[0]: first.figures, names[1]: second.figures}
    rows: list[list[Cell]] = []
    for figure in {**first.figures, **second.figures}:
        values = [figures.get(figure) for figures in sides.values()]
        known = [value for value in values if value is not None]
        over = " and ".join(dict.fromkeys(f"{value.over:,}" for value in known))
        step = difference.get(figure)
        rows.append(
            [
                figure_title(figure, sides),
                *(None if value is None else value.value for value in values),
                "" if step is None or step.value is None else f"{step.value:+.4f}",
                "" if step is None or step.low is None else f"{step.low:+.4f} to {step.high:+.4f}",
                f"{over} {known[0].unit}",
                second.baselines.text(figure),
            ]
        )
    head = ("figure", *names, f"{names[1]} - {names[0]}", "95 % interval", "over", "baseline")
    return Table(caption, head, rows)


def figures_plot(title: str, sides: Mapping[str, Mapping[str, MetricValue]]) -> Plot:
    """The main figures of some sets, by their names, with intervals."""
    drawn = [metric.name for metric in METRICS if metric.is_drawn]
    series = []
    for side, figures in sides.items():
        names = []
        shown = []
        for name in drawn:
            figure = figures.get(name)
            if figure is not None and figure.value is not None:
                names.append(figure_title(name, {"": figures}))
                shown.append(figure)
        series.append(
            Series(
                name=side,
                x=names,
                y=[figure.value for figure in shown if figure.value is not None],
                low=[figure.low for figure in shown],
                high=[figure.high for figure in shown],
            )
        )
    return Plot(
        title=title,
        form="intervals",
        series=series,
        label="value, with its 95 % interval",
    )


# ------------------------------------------------------------------------------
# The whole of a result as blocks.


def evaluation_blocks(result: JudgedLabels, *, name: str = "") -> list[Block]:
    """One evaluation.

    Args:
        name: of the set, where several are on a page.
    """
    counts = result.counts
    of = f" of {name}" if name else ""
    drawn = f"{result.num_groups:,} {result.resampled}"
    facts: list[tuple[str, Cell]] = [
        ("labels", f"{counts['labels']:,}, {result.grades} grades"),
        ("judged", f"{counts['judged']:,}, joined by {' and '.join(result.joined_by)}"),
        ("unjudged", unjudged_text(counts)),
        ("quarantined", f"{counts['quarantined']:,}; {counts['without_label']:,} rows without a readable label"),
        ("resampled", resampled_text(drawn, result.num_groups, result.resamples, result.seed)),
    ]
    if "qrels" in counts:
        unlabelled = f"{counts['qrels_without_label']:,} of them graded and not labelled"
        facts.append(("qrels", f"{counts['qrels']:,} pairs, {unlabelled}"))
    paths = ", ".join(str(source["path"]) for source in result.labels)
    blocks: list[Block] = [
        *top_texts([level_text(result, who=f"{name}: " if name else "")], result.side),
        *from_gold_texts(counts),
        Facts(f"Labels of {paths} judged by {result.qrels}", facts),
        figures_table(f"figures{of}", result.figures, baselines=result.baselines),
    ]
    if result.confusion:
        caption = f"gold grades by labels{of}"
        blocks.append(confusion_table(result.confusion, "gold", "label", caption=caption))
    bins: list[list[Cell]] = [
        [f"{bin['from']:.2f} to {bin['to']:.2f}", bin["rows"], bin["confidence"], bin["accuracy"]]
        for bin in result.reliability or ()
    ]
    if bins:
        blocks.append(Table(f"reliability{of}", ("confidence", "rows", "mean", "accuracy"), bins))
    return [*blocks, *closing_blocks(result.notes, result.gates)]


def comparison_blocks(compared: ComparedStudent, result: ComparedSets) -> list[Block]:
    """One student compared with the teacher."""
    counts = compared.counts
    teacher = compared.teacher
    student = compared.student
    facts: list[tuple[str, Cell]] = [
        ("labels", f"{counts['teacher']:,} of {teacher}, {counts['student']:,} of {student}, {result.grades} grades"),
        ("matched", f"{counts['matched']:,} rows of {counts['queries']:,} queries, by {compared.matched_by}"),
        (
            "unmatched",
            f"{counts['only_teacher']:,} of {teacher}, {counts['only_student']:,} of {student}, left out",
        ),
    ]
    gold = compared.against_gold
    if gold:
        judged = f"{counts['judged']:,} of them, joined by {compared.joined_by}"
        facts.append(("judged", f"{judged}; {unjudged_text(counts)}"))
    facts.append(("resampled", resampled_text("queries", counts["queries"], result.resamples, result.seed)))

    def title(figure: str) -> str:
        return title_of(figure, AGAINST_TEACHER).replace("teacher ‖ student", f"{teacher} ‖ {student}")

    kinds = {labels["name"]: labels["kind"] for labels in result.sets}
    blocks: list[Block] = [
        *from_gold_texts(counts),
        Facts(f"{student} ({kinds[student]}) against {teacher} ({kinds[teacher]})", facts),
        figures_table(f"{student} against {teacher}", compared.against_teacher, title=title),
        confusion_table(compared.confusion, teacher, student),
    ]
    if gold:
        blocks.append(
            both_table(
                caption=f"both against {result.qrels}",
                names=(teacher, student),
                first=gold.teacher,
                second=gold.student,
                difference=gold.difference,
            )
        )
    return [*blocks, Remarks(compared.notes)]


def sets_blocks(result: ComparedSets) -> list[Block]:
    """All students: verdicts first."""
    verdicts: list[str] = []
    blocks: list[Block] = []
    names: list[str] = []
    for compared in result.comparisons:
        verdicts += verdicts_of(compared)
        blocks += comparison_blocks(compared, result)
        names += [compared.student] * len(compared.gates)
    if len(result.comparisons) == 1:
        names = []
    closing = closing_blocks(result.notes, result.verdicts(), names)
    return [*top_texts(verdicts, result.side), *blocks, *closing]


def top_texts(verdicts: Sequence[str], side: SideCut) -> list[Paragraph]:
    """What comes first: verdicts, a sentence each, and which rows are judged."""
    return [*(Paragraph(line) for line in verdicts if line), *(Paragraph(line, "warn") for line in side.lines())]


def closing_blocks(notes: Sequence[str], gates: Sequence[GateVerdict], names: Sequence[str] = ()) -> list[Block]:
    """Remarks, then the result of each `--require`; `names` are the students that the gates judge, where several."""
    rows: list[list[Cell]] = []
    has_intervals = any(gate.interval is not None for gate in gates)
    for gate in gates:
        badge = Badge("passed", "good") if gate.has_passed else Badge("refused", "bad")
        row: list[Cell] = [gate.gate, badge, gate.value, gate.bound]
        if has_intervals:
            row.insert(3, "" if gate.interval is None else interval_text(Difference(gate.value, *gate.interval)))
        rows.append(row)
    if not rows:
        return [Remarks(notes)]
    head = ["gate", "verdict", "value", "bound"]
    if has_intervals:
        head.insert(3, "95 % interval")
    if names:
        head = ["student", *head]
        rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return [Remarks(notes), Table("", head, rows)]


def from_gold_texts(counts: Mapping[str, int]) -> list[Paragraph]:
    """A line where labels saw gold of their queries, and so are not judged."""
    count = counts.get("from_gold")
    if not count:
        return []
    return [
        Paragraph(
            f"{count:,} labels are of queries whose gold went in when they were combined, and are not judged.", "warn"
        )
    ]


def unjudged_text(counts: Mapping[str, int]) -> str:
    return f"{counts['unjudged']:,} without a gold grade, {counts['gold_null']:,} with a null one"


def resampled_text(what: str, groups: int, resamples: int, seed: int) -> str:
    """What the intervals are drawn from."""
    if not resamples or groups < 2:
        return "nothing, so there are no intervals"
    return f"{what}, {resamples:,} times, seed {seed}"
