"""Results of `relabel compare`: the records behind its JSON, and their text. Differences are run B minus run A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relabel.jobs.evaluate.results import (
    aligned,
    baseline_text,
    confusion_text,
    figure_title,
    interval_text,
    level_text,
    notes_text,
    over_text,
    signed_text,
    top_text,
    value_text,
)
from relabel.jobs.evaluate.results import difference_text as difference_text_of
from relabel.jobs.evaluate.sides import SideCut
from relabel.jobs.output import table
from relabel.manifests.metrics.comparison import PAIRED
from relabel.manifests.metrics.evaluation import Difference, Evaluation
from relabel.manifests.metrics.measures import PairedTest
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import title_of

# ------------------------------------------------------------------------------
# What a comparison of two runs, A and B, found: the fields of its JSON, in their order. Differences are B minus A.


@dataclass(frozen=True)
class ComparedRun:
    """One of the two; `model` and `fingerprint` are digests, the last two count rows."""

    path: str
    name: str
    labeler: str
    model: str
    fingerprint: str
    labelled: int
    quarantined: int


@dataclass(frozen=True)
class RowCounts:
    """Rows by what each run has of them.

    Args:
        both: labelled by both; all that follows in a comparison is of these.
        quarantined_elsewhere_absent: in quarantine in one run, absent from the other.
        repeated: matched rows beyond the first of their pair, where rows are matched by ids.
    """

    both: int
    labelled_a: int
    labelled_b: int
    only_a: int
    only_b: int
    quarantined_a_only: int
    quarantined_b_only: int
    quarantined_both: int
    quarantined_elsewhere_absent: int
    repeated: int


@dataclass(frozen=True)
class GradeTests:
    """Tests that need no gold grades."""

    stuart_maxwell: PairedTest
    bowker: PairedTest


@dataclass(frozen=True)
class McNemar:
    """Rows where one run alone is right, and the test of whether both are right equally often; the rest as in
    `PairedTest`.
    """

    only_a_right: int
    only_b_right: int
    method: str
    statistic: float | None
    df: int | None
    p: float


@dataclass(frozen=True)
class AgainstGold:
    """Both runs by gold grades: matched rows that are judged, that have no grade, that have a null one; and queries of
    the judged.
    """

    qrels: str
    joined_by: str
    judged: int
    unjudged: int
    gold_null: int
    queries: int
    a: Evaluation
    b: Evaluation
    difference: dict[str, Difference]
    mcnemar: McNemar


@dataclass(frozen=True)
class FlipSide:
    """What one run says of a row."""

    grade: int
    expected_grade: float | None
    probs: list[float] | None
    reasoning: str | None


@dataclass(frozen=True)
class Flip:
    """A row whose grade changed; texts are cut, and None where they can't be read any more. `change` is of the expected
    grade.
    """

    row_a: int
    row_b: int
    query_id: str
    doc_id: str
    query: str | None
    document: str | None
    change: float
    a: FlipSide
    b: FlipSide


@dataclass(frozen=True)
class Flips:
    """Rows that changed their grade, and the largest of the changes."""

    rows: int
    up: int
    down: int
    examples: list[Flip]


@dataclass(frozen=True)
class MovedQuery:
    """A query whose mean score changed.

    Args:
        kendall_tau: of the two orders; None where either run scores all rows alike.
        entered_top: documents of B's `top` that are not in A's.
        first_changed: another document comes first.
    """

    query_id: str
    rows: int
    mean_a: float
    mean_b: float
    change: float
    kendall_tau: float | None
    entered_top: int
    top: int
    first_changed: bool


@dataclass(frozen=True)
class QueryMoveCounts:
    """How many queries there are, and how many moved, up or down, have other documents in their
    top, another one first.
    """

    queries: int
    moved: int
    up: int
    down: int
    top_changed: int
    first_changed: int


@dataclass(frozen=True)
class QueriesMoved(QueryMoveCounts):
    """The same, with the depth of the top and the queries that moved furthest."""

    depth: int
    moved_most: list[MovedQuery]


@dataclass(frozen=True)
class RunComparison:
    """Two runs compared.

    Args:
        differences: parts of the recipe that differ, each with its differing names.
        matched_by: how rows were matched, in words.
        grades: of both scales.
        confusion: rows by grade of A, columns by grade of B.
        gold: None where nobody judges.
    """

    a: ComparedRun
    b: ComparedRun
    differences: dict[str, list[str]]
    matched_by: str
    grades: int
    side: SideCut
    counts: RowCounts
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    tests: GradeTests
    gold: AgainstGold | None
    flips: Flips
    queries: QueriesMoved
    resamples: int
    seed: int
    notes: list[str]


# ------------------------------------------------------------------------------
# The text of a comparison of two runs: what differs in how they were made, rows, figures, tests, flips and the queries
# that moved.


SHOWN = 60


def runs_text(result: RunComparison) -> str:
    """The report of one comparison."""
    blocks = [
        top_text(verdicts_of(result), result.side),
        f"A {result.a.path}, B {result.b.path}\n" + table(_counts(result)),
        "B beside A\n" + _figures(result.figures),
        confusion_text(result.confusion, "A \\ B"),
        "tests\n" + _tests(result),
    ]
    if result.gold:
        blocks.append(f"both against {result.gold.qrels}\n" + _against_gold(result.gold))
    blocks += [_flips(result.flips), _queries(result.queries), notes_text(result.notes)]
    return "\n\n".join(filter(None, blocks))


def verdicts_of(result: RunComparison) -> list[str]:
    """Whether B differs from A by gold, and where both lie beside the baselines; without gold, how far they agree."""
    if result.gold is None:
        one = result.figures["agreement"]
        return [f"B against A: equal grades in {value_text(one.value)} of {one.over:,} rows ({interval_text(one)})"]
    gold = result.gold
    both = (("A: ", gold.a), ("B: ", gold.b))
    said = [level_text(found.figures, found.baselines, who=who) for who, found in both]
    return [difference_text_of("B against A, by gold", gold.difference), *said]


def name_of(figure: str) -> str:
    """What the report calls a figure."""
    return title_of(figure, PAIRED)


def difference_text(result: RunComparison) -> str:
    """In what the two runs were made differently."""
    parts = [f"{part} ({', '.join(names)})" if names else part for part, names in result.differences.items()]
    return "; ".join(parts) or "nothing that either run records"


def both_title(figure: str, ours: Mapping[str, MetricValue], theirs: Mapping[str, MetricValue]) -> str:
    """The name of a figure that both runs have beside each other."""
    return figure_title(
        figure, {side: found[figure].is_by_grade for side, found in (("A", ours), ("B", theirs)) if figure in found}
    )


def outcome_text(test: PairedTest | McNemar) -> str:
    """A test's statistic and p."""
    p = "p < 0.0001" if test.p < 1e-4 else f"p = {test.p:.4f}"
    return p if test.statistic is None else f"χ² = {test.statistic:.3f}, {test.df} df, {p}"


def _counts(result: RunComparison) -> list[tuple[str, str]]:
    counts = result.counts
    elsewhere = counts.quarantined_elsewhere_absent
    rows = [
        ("made", f"differently in {difference_text(result)}"),
        (
            "both",
            (
                f"{counts.both:,} rows of {result.queries.queries:,} queries, by {result.matched_by}; {result.grades} "
                "grades"
            ),
        ),
        ("one", f"{counts.only_a:,} rows that only A has, {counts.only_b:,} that only B has"),
        (
            "quarantined",
            f"{counts.quarantined_a_only:,} in A alone, {counts.quarantined_b_only:,} in B alone, "
            f"{counts.quarantined_both:,} in both"
            + (f", {elsewhere:,} in one and absent from the other" if elsewhere else ""),
        ),
    ]
    if result.gold:
        gold = result.gold
        without = f"{gold.unjudged:,} without a gold grade, {gold.gold_null:,} with a null one"
        rows.append(("judged", f"{gold.judged:,} of them, joined by {gold.joined_by}; {without}"))
    drawn = f"queries, {result.resamples:,} times, seed {result.seed}, the same resamples for both"
    rows.append(
        (
            "resampled",
            drawn if result.resamples and result.queries.queries > 1 else "nothing, so there are no intervals",
        )
    )
    return rows


def _figures(figures: dict[str, MetricValue]) -> str:
    rows = [("figure", "value", "95 % interval", "over")]
    for name, figure in figures.items():
        rows.append((name_of(name), value_text(figure.value), interval_text(figure), f"{figure.over:,} {figure.unit}"))
    return aligned(rows)


def _tests(result: RunComparison) -> str:
    rows = [("each grade equally often (Stuart-Maxwell)", outcome_text(result.tests.stuart_maxwell))]
    rows.append(("each change as often as its reverse (Bowker)", outcome_text(result.tests.bowker)))
    if result.gold:
        test = result.gold.mcnemar
        found = f"A alone {test.only_a_right:,}, B alone {test.only_b_right:,} rows; {outcome_text(test)}"
        rows.append((f"right equally often ({test.method})", found))
    else:
        rows.append(("right equally often (McNemar)", "not available: it needs gold, see --qrels"))
    return aligned(rows)


def _against_gold(found: AgainstGold) -> str:
    ours, theirs = found.a.figures, found.b.figures
    rows = [("figure", "A", "B", "B - A", "95 % interval", "over", "baseline")]
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        first, second = (value_text(side[name].value) if name in side else "-" for side in (ours, theirs))
        step = found.difference.get(name)
        interval = "-" if step is None or step.low is None else f"{signed_text(step.low)} to {signed_text(step.high)}"
        title = both_title(name, ours, theirs)
        change = "-" if step is None else signed_text(step.value)
        over, bound = over_text(name, theirs, ours), baseline_text(found.b.baselines, name) or "-"
        rows.append((title, first, second, change, interval, over, bound))
    return aligned(rows)


def _flips(found: Flips) -> str:
    head = f"flips: {found.rows:,} rows changed their grade, {found.up:,} up, {found.down:,} down"
    if not found.examples:
        return head
    rows = [("row", "A", "B", "change", "query", "document")]
    for one in found.examples:
        row = str(one.row_a) if one.row_a == one.row_b else f"{one.row_a}, {one.row_b}"
        grades = (str(one.a.grade), str(one.b.grade), f"{one.change:+.3f}")
        rows.append((row, *grades, _short(one.query or one.query_id), _short(one.document or one.doc_id)))
    return f"{head}; the largest\n" + aligned(rows)


def _queries(found: QueriesMoved) -> str:
    head = (
        f"queries: {found.moved:,} of {found.queries:,} moved, {found.up:,} up, {found.down:,} down; "
        f"{found.top_changed:,} have other documents in their top {found.depth}, {found.first_changed:,} another first"
    )
    if not found.moved_most:
        return head
    rows = [("query", "rows", "mean A", "mean B", "change", "tau", f"new in top {found.depth}")]
    for one in found.moved_most:
        means = (f"{one.mean_a:.3f}", f"{one.mean_b:.3f}", f"{one.change:+.3f}")
        tau = "-" if one.kendall_tau is None else f"{one.kendall_tau:.3f}"
        rows.append((_short(one.query_id), f"{one.rows:,}", *means, tau, f"{one.entered_top} of {one.top}"))
    return f"{head}; the furthest\n" + aligned(rows)


def _short(text: str) -> str:
    """Text on one line of a terminal, without what would steer it."""
    flat = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 1] + "…"
