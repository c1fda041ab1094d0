"""The HTML page of `relabel compare`."""

from __future__ import annotations

from relabel.jobs.compare.results import (
    AgainstGold,
    Flip,
    Flips,
    QueriesMoved,
    RunComparison,
    both_title,
    difference_text,
    name_of,
    outcome_text,
    verdicts_of,
)
from relabel.jobs.evaluate.results import baseline_text, over_text
from relabel.jobs.report.page import (
    Block,
    Cell,
    Drawing,
    Facts,
    Fold,
    Page,
    Paragraph,
    Section,
    Side,
    Table,
    confusion_table,
    csv_download,
    render_page,
)
from relabel.jobs.report.plots import Bars, PlottedInterval, draw_bars, draw_intervals

# ------------------------------------------------------------------------------
# The section of rows that two runs grade otherwise.


def flips_section(found: Flips) -> list[Block]:
    said = f"{found.rows:,} rows changed their grade: {found.up:,} up, {found.down:,} down."
    if not found.examples:
        return [Paragraph(said)]
    head = ("row", "query id", "document id", "A", "B", "expected A", "expected B", "change")
    rows = [
        (
            str(one.row_a),
            one.query_id,
            one.doc_id,
            one.a.grade,
            one.b.grade,
            one.a.expected_grade,
            one.b.expected_grade,
            one.change,
        )
        for one in found.examples
    ]
    texts = ("query", "document", "reasoning A", "reasoning B")
    data = [
        (*row, one.query, one.document, one.a.reasoning, one.b.reasoning)
        for row, one in zip(rows, found.examples, strict=True)
    ]
    table = Table(head, rows, "The largest flips", csv_download("flips", (*head, *texts), data))
    return [Paragraph(said), table, *(_example(one) for one in found.examples)]


def _example(one: Flip) -> Fold:
    summary = f"row {one.row_a}: {one.a.grade} became {one.b.grade} ({one.change:+.3f}) · {one.query or one.query_id}"
    facts: list[tuple[str, Cell]] = [("query", one.query), ("document", one.document)]
    for letter, said in (("A", one.a), ("B", one.b)):
        facts.append((f"{letter}: grade", said.grade))
        facts.append(
            (
                f"{letter}: distribution",
                None if said.probs is None else " · ".join(f"{value:.3f}" for value in said.probs),
            )
        )
        if said.reasoning:
            facts.append((f"{letter}: reasoning", said.reasoning))
    return Fold(summary, [Facts([(name, value) for name, value in facts if value is not None])])


# ------------------------------------------------------------------------------
# The page of `relabel compare`: two runs beside each other, from what the command's JSON holds.


DIGEST_CHARACTERS = 12
"""Shown of a digest; the JSON has all of it."""
_AGREEMENT = ("agreement", "kappa", "kappa_quadratic", "kendall_tau")


def comparison_page(result: RunComparison) -> str:
    """One self-contained HTML file."""
    sections = [
        Section("matched", "Rows", _rows(result)),
        Section("figures", "B beside A", _figures(result)),
        Section("tests", "Tests", _tests(result)),
        Section("gold", "Both against gold", _gold(result.gold) if result.gold else []),
        Section("flips", "Flips", flips_section(result.flips)),
        Section("queries", "Queries that moved", _queries(result.queries)),
    ]
    subtitle = f"A {result.a.path}, B {result.b.path}; differences are B minus A"
    return render_page(
        Page(f"{result.a.name} beside {result.b.name}", subtitle, sections, notes=result.notes, made_by="compare")
    )


def _rows(result: RunComparison) -> list[Block]:
    a, b, counts, queries = result.a, result.b, result.counts, result.queries
    made = Table(
        ("run", "A", "B"),
        [
            ("output", a.path, b.path),
            ("name", a.name, b.name),
            ("labeler", a.labeler, b.labeler),
            ("model", a.model[:DIGEST_CHARACTERS], b.model[:DIGEST_CHARACTERS]),
            ("fingerprint", a.fingerprint[:DIGEST_CHARACTERS], b.fingerprint[:DIGEST_CHARACTERS]),
            ("labelled", a.labelled, b.labelled),
            ("quarantined", a.quarantined, b.quarantined),
        ],
        caption="The two runs",
    )
    facts: list[tuple[str, Cell]] = [
        ("made differently in", difference_text(result)),
        ("matched by", result.matched_by),
        ("labelled by both", counts.both),
        ("queries", queries.queries),
        ("only in A", counts.only_a),
        ("only in B", counts.only_b),
        ("quarantined in A alone", counts.quarantined_a_only),
        ("quarantined in B alone", counts.quarantined_b_only),
        ("quarantined in both", counts.quarantined_both),
        ("quarantined in one, absent from the other", counts.quarantined_elsewhere_absent),
    ]
    said = [Paragraph(line) for line in verdicts_of(result) if line]
    return [*said, *(Paragraph(line, "warn") for line in result.side.lines()), made, Facts(facts)]


def _figures(result: RunComparison) -> list[Block]:
    figures, confusion = result.figures, result.confusion
    head = ("figure", "value", "low", "high", "over")
    plain = [(name_of(name), one.value, one.low, one.high, f"{one.over:,} {one.unit}") for name, one in figures.items()]
    table = Table(head, plain, "Figures with 95 % intervals over queries", csv_download("figures", head, plain))
    agreement = {name: figures[name] for name in _AGREEMENT}
    shown = [
        PlottedInterval(name_of(name), one.value, one.low, one.high)
        for name, one in agreement.items()
        if one.value is not None
    ]
    alt = "; ".join(f"{one.name} {one.value:.3f}" for one in shown)
    grades = list(map(str, range(result.grades)))
    ours, theirs = [sum(row) for row in confusion], [sum(column) for column in zip(*confusion, strict=True)]
    bars = draw_bars([Bars("A", grades, ours), Bars("B", grades, theirs)], label="grade", value="rows")
    spoken = "; ".join(
        f"grade {grade}: A {one:,}, B {other:,}" for grade, one, other in zip(grades, ours, theirs, strict=True)
    )
    counts = list(zip(grades, ours, theirs, strict=True))
    flat = [(row, column, count) for row, held in enumerate(confusion) for column, count in enumerate(held)]
    matrix = confusion_table(
        confusion, "A", "B", caption="Grades", download=csv_download("confusion", ("A", "B", "rows"), flat)
    )
    drawn: list[Block] = [Drawing("Grades of both", bars, spoken, csv_download("grades", ("grade", "A", "B"), counts))]
    if shown:
        save = csv_download("agreement", head[:4], [(one.name, one.value, one.low, one.high) for one in shown])
        drawn.insert(0, Drawing("Agreement", draw_intervals([("B beside A", shown)], label="value"), alt, save))
    return [Side(drawn), matrix, table]


def _tests(result: RunComparison) -> list[Block]:
    rows: list[tuple[str, str, str]] = []
    tests = result.tests
    for test, question in (
        (tests.stuart_maxwell, "Is each grade given equally often?"),
        (tests.bowker, "Is each change as often as its reverse?"),
    ):
        rows.append((question, test.method, outcome_text(test)))
    if result.gold:
        mcnemar = result.gold.mcnemar
        found = (
            f"A alone right in {mcnemar.only_a_right:,} rows, B alone in {mcnemar.only_b_right:,}; "
            f"{outcome_text(mcnemar)}"
        )
        rows.append(("Are both right equally often?", mcnemar.method, found))
    else:
        rows.append(("Are both right equally often?", "McNemar", "not available: it needs gold"))
    note = "These tests take rows for independent, which rows of one query are not; the intervals over queries do not."
    return [Table(("question", "test", "outcome"), rows, "Tests"), Paragraph(note)]


def _gold(gold: AgainstGold) -> list[Block]:
    ours, theirs = gold.a.figures, gold.b.figures
    head = ("figure", "A", "B", "B minus A", "low", "high", "over", "baseline")
    rows: list[tuple[Cell, ...]] = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        step = gold.difference.get(name)
        values = [side[name].value if name in side else None for side in (ours, theirs)]
        ends = (None, None, None) if step is None else (step.value, step.low, step.high)
        bound = baseline_text(gold.b.baselines, name)
        rows.append((both_title(name, ours, theirs), *values, *ends, over_text(name, theirs, ours), bound))
    steps = [PlottedInterval(str(row[0]), float(row[3]), row[4], row[5]) for row in rows if isinstance(row[3], float)]  # type: ignore[arg-type]
    blocks: list[Block] = [
        Facts(
            [
                ("gold grades", gold.qrels),
                ("joined by", gold.joined_by),
                ("judged rows", gold.judged),
                ("without a gold grade", gold.unjudged),
                ("with a null gold grade", gold.gold_null),
            ]
        )
    ]
    if steps:
        alt = "B minus A: " + "; ".join(f"{one.name} {one.value:+.3f}" for one in steps)
        data = csv_download("differences", head, rows)
        blocks.append(
            Drawing("B minus A", draw_intervals([("B minus A", steps)], label="difference"), alt, data, is_wide=True)
        )
    return [*blocks, Table(head, rows, "Both against gold", csv_download("gold", head, rows))]


def _queries(found: QueriesMoved) -> list[Block]:
    said = (
        f"{found.moved:,} of {found.queries:,} queries moved: {found.up:,} up, {found.down:,} down. "
        f"{found.top_changed:,} have other documents in their top {found.depth}, {found.first_changed:,} another first."
    )
    if not found.moved_most:
        return [Paragraph(said)]
    head = (
        "query id",
        "rows",
        "mean A",
        "mean B",
        "change",
        "Kendall tau",
        f"new in top {found.depth}",
        "another first",
    )
    rows = [
        (
            one.query_id,
            one.rows,
            one.mean_a,
            one.mean_b,
            one.change,
            one.kendall_tau,
            f"{one.entered_top} of {one.top}",
            "yes" if one.first_changed else "no",
        )
        for one in found.moved_most
    ]
    return [Paragraph(said), Table(head, rows, "Queries that moved furthest", csv_download("queries", head, rows))]
