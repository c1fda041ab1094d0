"""The result of `relabel compare`, and its sections for terminal and page. Differences are run B minus run A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relabel.jobs.evaluate.results import (
    both_table,
    difference_text,
    figures_plot,
    figures_table,
    level_text,
    resampled_text,
    top_texts,
    unjudged_text,
)
from relabel.jobs.evaluate.sides import SideCut
from relabel.jobs.sections import (
    Block,
    Cell,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Remarks,
    Section,
    Series,
    Table,
    cell_text,
    confusion_table,
)
from relabel.manifests.metrics.comparison import PAIRED
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import title_of
from relabel.manifests.secrets import shortened

SHOWN = 60
"""Characters of a query or document in a table."""


@dataclass(frozen=True)
class RunComparison:
    """Two runs compared.

    Args:
        a, b: path, name, recipe digests and rows of each.
        differences: parts of the recipe that differ, each with its differing names.
        matched_by: how rows were matched, in words.
        grades: of both scales.
        counts: rows by what each run has of them: see `matches.row_counts`.
        confusion: rows by grade of A, columns by grade of B.
        gold: None without gold grades; else both runs, `a` and `b`, by them, and their `difference`; matched rows that
            are `judged`, that have no grade, that have a null one; rows where one run alone is right.
        flips: rows whose grade changed, with the largest as `examples`.
        queries: those whose order or mean changed, with the largest as `moved_most`.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    differences: dict[str, list[str]]
    matched_by: str
    grades: int
    side: SideCut
    counts: dict[str, int]
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    gold: dict[str, Any] | None
    flips: dict[str, Any]
    queries: dict[str, Any]
    resamples: int
    seed: int
    notes: list[str]


def comparison_sections(result: RunComparison) -> list[Section]:
    """All of a comparison: verdicts first."""
    return [
        Section("matched", "Rows", [*top_texts(verdicts_of(result), result.side), _facts(result)]),
        Section("figures", "Figures", _figures(result)),
        Section("gold", "Both against gold", _gold(result.gold) if result.gold else []),
        Section("flips", "Flips", _flips(result.flips)),
        Section("queries", "Queries that moved", _queries(result.queries)),
        Section("remarks", "Remarks", [Remarks(result.notes)] if result.notes else []),
    ]


def verdicts_of(result: RunComparison) -> list[str]:
    """Whether B differs from A by gold, and both from the baselines; without gold, how far they agree."""
    if result.gold is None:
        one = result.figures["agreement"]
        interval = "no interval" if one.low is None else f"{one.low:.4f} to {one.high:.4f}"
        return [f"B against A: equal grades in {cell_text(one.value)} of {one.over:,} rows ({interval})"]
    gold = result.gold
    levels = [level_text(found, who=who) for who, found in (("A: ", gold["a"]), ("B: ", gold["b"]))]
    return [difference_text("B against A, by gold", gold["difference"]), *levels]


def _facts(result: RunComparison) -> Facts:
    counts, queries = result.counts, result.queries["queries"]
    parts = [f"{part} ({', '.join(names)})" if names else part for part, names in result.differences.items()]
    rows: list[tuple[str, Cell]] = [
        *(
            (letter, f"{run['path']}: {run['name']}, {run['labeler']}, {run['labelled']:,} rows labelled")
            for letter, run in (("A", result.a), ("B", result.b))
        ),
        ("made", f"differently in {'; '.join(parts) or 'nothing that either run records'}"),
        ("both", f"{counts['both']:,} rows of {queries:,} queries, by {result.matched_by}; {result.grades} grades"),
        ("one", f"{counts['only_a']:,} rows that only A has, {counts['only_b']:,} that only B has"),
        (
            "quarantined",
            f"{counts['quarantined_a_only']:,} in A alone, {counts['quarantined_b_only']:,} in B alone, "
            f"{counts['quarantined_both']:,} in both, {counts['quarantined_elsewhere_absent']:,} in one and absent "
            "from the other",
        ),
        ("resampled", resampled_text("queries", queries, result.resamples, result.seed)),
    ]
    return Facts("The two runs", rows)


def _figures(result: RunComparison) -> list[Block]:
    grades = list(map(str, range(result.grades)))
    ours, theirs = [sum(row) for row in result.confusion], [sum(row) for row in zip(*result.confusion, strict=True)]
    return [
        figures_table("B and A", result.figures, title=lambda figure: title_of(figure, PAIRED)),
        confusion_table(result.confusion, "A", "B"),
        Plot("Grades of both", "bars", [Series("A", grades, ours), Series("B", grades, theirs)], "grade", "rows"),
    ]


def _gold(gold: dict[str, Any]) -> list[Block]:
    judged = f"{gold['judged']:,} rows, joined by {gold['joined_by']}; {unjudged_text(gold)}"
    right = f"A alone {gold['only_a_right']:,}, B alone {gold['only_b_right']:,} rows"
    return [
        Facts("", [("gold", gold["qrels"]), ("judged", judged), ("right", right)]),
        both_table(f"both against {gold['qrels']}", ("A", "B"), gold["a"], gold["b"], gold["difference"]),
        figures_plot("A and B by gold grades", {"A": gold["a"].figures, "B": gold["b"].figures}),
    ]


def _flips(found: dict[str, Any]) -> list[Block]:
    head = ("row", "A", "B", "change", "query", "document")
    rows: list[list[Cell]] = []
    folds: list[Fold] = []
    for one in found["examples"]:
        row = str(one["row_a"]) if one["row_a"] == one["row_b"] else f"{one['row_a']}, {one['row_b']}"
        query, document = one["query"] or one["query_id"], one["document"] or one["doc_id"]
        change = f"{one['change']:+.3f}"
        texts = [shortened(" ".join(text.split()), SHOWN) for text in (query, document)]
        rows.append([row, one["a"]["grade"], one["b"]["grade"], change, *texts])
        facts = [("query", query), ("document", document)]
        for letter in "ab":
            probs, reasoning = one[letter]["probs"], one[letter]["reasoning"]
            facts += [] if probs is None else [(f"{letter.upper()}: p", " · ".join(f"{p:.3f}" for p in probs))]
            facts += [] if reasoning is None else [(f"{letter.upper()}: reasoning", reasoning)]
        folds.append(Fold(f"row {row}, {change}: {texts[0]}", [Facts("", facts)]))
    text = f"flips: {found['rows']:,} rows changed their grade, {found['up']:,} up, {found['down']:,} down"
    return [Paragraph(text), *([Table("the largest flips", head, rows)] if rows else []), *folds]


def _queries(found: dict[str, Any]) -> list[Block]:
    depth = found["depth"]
    text = (
        f"queries: {found['moved']:,} of {found['queries']:,} moved, {found['up']:,} up, {found['down']:,} down; "
        f"{found['top_changed']:,} have other documents in their top {depth}, {found['first_changed']:,} another first"
    )
    head = ("query", "rows", "mean A", "mean B", "change", "tau", f"new in top {depth}")
    rows: list[list[Cell]] = [
        [
            shortened(one["query_id"], SHOWN),
            *(one[name] for name in ("rows", "mean_a", "mean_b")),
            f"{one['change']:+.3f}",
            one["kendall_tau"],
            f"{one['entered_top']} of {one['top']}",
        ]
        for one in found["moved_most"]
    ]
    return [Paragraph(text), *([Table("queries that moved furthest", head, rows)] if rows else [])]
