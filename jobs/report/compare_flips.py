"""The section of rows that two runs grade otherwise."""

from __future__ import annotations

from relabel.jobs.compare.results import Flip, Flips
from relabel.jobs.report.blocks import Block, Cell, Facts, Fold, Paragraph, Table
from relabel.jobs.report.downloads import csv_download


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
