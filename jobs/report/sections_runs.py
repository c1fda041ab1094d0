"""Sections about what ran and whether every row is there: artifacts, specs, conservation, quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from relabel.jobs.report.blocks import Badge, Block, Cell, Code, Facts, Fold, Paragraph, Section, Shade, Table
from relabel.jobs.report.browser import ShownRow
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.tallies import LabelTally
from relabel.manifests.schemas import Try
from relabel.manifests.secrets.redaction import redacted, shortened

DIGITS = 16
"""Of a digest that is shown."""
EXAMPLES = 5
REASONS = 12
REASON_CHARS = 300
OWN_WORDS = ("format", "truncated")
"""Statuses whose reasons are a labeler's own words, but for what they quote; after a colon, the others may have a
server's or a model's.
"""


class TalliedRun(NamedTuple):
    """A run, what its labels come to, and rows of its quarantine to show."""

    run: RunArtifact
    tally: LabelTally
    quarantined: Sequence[ShownRow]


def conservation_section(runs: Sequence[TalliedRun], *, quotes: bool) -> Section:
    """Rows in = labelled + reused + quarantined; what lies in quarantine, by reason, with examples.

    Args:
        quotes: reasons may quote what a model or a server answered, and so what a document holds.
    """
    if not runs:
        return Section("conservation", "", [])
    rows: list[list[Cell]] = []
    for run, _, _ in runs:
        tally = run.found.tally
        adds_up = tally.rows == tally.labelled + tally.reused + tally.num_quarantined
        verdict = Badge("does not add up", "bad")
        if adds_up:
            verdict = (
                Badge("proven by row ids", "good")
                if run.is_finished
                else Badge(f"{run.plan.rows - tally.rows:,} rows open", "warn")
            )
        rows.append([run.name, run.plan.rows, tally.labelled, tally.reused, tally.num_quarantined, verdict])
    head = ("run", "rows in", "labelled", "reused", "quarantined", "verdict")
    blocks: list[Block] = [
        Paragraph(
            "Rows in = labelled + reused + quarantined, compared as multisets of row ids when a run ends; relabel "
            "verify proves it again."
        ),
        Table(head, rows, "Rows in and out", csv_download("conservation", head[:-1], [row[:-1] for row in rows])),
    ]
    for one in runs:
        blocks += _quarantine(one, is_alone=len(runs) == 1, quotes=quotes)
    if not quotes and any(one.run.found.tally.num_quarantined for one in runs):
        blocks.append(Paragraph("This page shows no rows, so quoted text is left out of the reasons (…)."))
    return Section("conservation", "Conservation", blocks)


def _quarantine(tallied: TalliedRun, *, is_alone: bool, quotes: bool) -> list[Block]:
    run, tally, shown = tallied
    if not run.found.tally.num_quarantined:
        return []
    of = "" if is_alone else f" of {run.name}"
    counts = sorted(run.found.tally.quarantined.items(), key=lambda item: (-item[1], item[0]))
    share = run.found.tally.num_quarantined / max(1, run.found.tally.rows)
    limit = f", limit {run.manifest.max_failed_fraction:.1%}" if run.manifest is not None else ""
    rows: list[list[Cell]] = [
        [status, Shade(f"{count:,}", count / run.found.tally.num_quarantined)] for status, count in counts
    ]
    title = f"Quarantine{of}: {share:.2%} of the rows{limit}"
    blocks: list[Block] = [
        Table(("status", "rows"), rows, title, csv_download(f"quarantine-{run.name}", ("status", "rows"), counts))
    ]
    for status, count in counts:
        reasons: Counter[str] = Counter()
        for reason, number in (tally.reasons.get(status) or Counter()).items():
            reasons[shortened(reason, REASON_CHARS) if quotes else _unquoted(status, reason)] += number
        inner: list[Block] = []
        if reasons:
            listed = list(reasons.most_common(REASONS))
            inner.append(
                Table(
                    ("reason", "rows"),
                    [list(item) for item in listed],
                    f"Why, the {len(listed)} most frequent of {len(reasons):,}",
                )
            )
        examples = [row for row in shown if row.status == status][:EXAMPLES]
        inner += [_example(row) for row in examples]
        if inner:
            blocks.append(Fold(f"{status}{of}: {count:,} rows, {len(examples)} examples", inner))
    return blocks


def _example(row: ShownRow) -> Fold:
    """A row of the browser that has no label."""
    blocks: list[Block] = [
        Facts(
            [
                ("query", row.query_id if row.query is None else row.query),
                ("document", shortened((row.doc_id if row.document is None else row.document) or "", 600)),
                ("why", row.reason),
            ]
        )
    ]
    blocks += [
        Code(one.text or "(empty)", f"try {one.attempt} of {one.stage}, ended by {one.finish}")
        for one in (Try(**held) for held in row.tries or ())
    ]
    return Fold(f"row {row.row}: {shortened(row.reason or '', 120)}", blocks)


def _unquoted(status: str, reason: str) -> str:
    """A reason up to where it begins to quote somebody."""
    reason = redacted(reason)
    marks = "'\"`“‘«" if status in OWN_WORDS else "'\"`“‘«:"
    place = min((place for mark in marks if (place := reason.find(mark)) >= 0), default=None)
    if place is None:
        return shortened(reason, REASON_CHARS)
    return shortened(reason[:place], REASON_CHARS) + (": …" if reason[place] == ":" else "…")
