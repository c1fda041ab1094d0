"""The text of a comparison of two runs: what differs in how they were made, rows, figures, tests, flips and the queries
that moved.
"""

from __future__ import annotations

from collections.abc import Mapping

from relabel.jobs.compare.results import AgainstGold, Flips, McNemar, QueriesMoved, RunComparison
from relabel.jobs.evaluate.comparison_text import signed_text
from relabel.jobs.evaluate.headlines import baseline_text, level_text
from relabel.jobs.evaluate.headlines import difference_text as difference_text_of
from relabel.jobs.evaluate.text import (
    aligned,
    confusion_text,
    figure_title,
    interval_text,
    notes_text,
    over_text,
    top_text,
    value_text,
)
from relabel.jobs.output import table
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.paired_labels import PAIRED
from relabel.manifests.metrics.paired_tests import PairedTest
from relabel.manifests.metrics.registry import title_of

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
