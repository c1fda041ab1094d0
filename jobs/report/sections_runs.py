"""Sections about what ran and whether every row is there: artifacts, specs, conservation, quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact
from jobs.report.blocks import Badge, Block, Cell, Code, Facts, Fold, Paragraph, Section, Shade, Side, Table
from jobs.report.browser import ShownRow
from jobs.report.downloads import csv_download
from jobs.report.sections_teachers import teacher_facts, teacher_notes
from jobs.report.tallies import LabelTally
from jobs.report.teachers import TeacherArtifact
from manifests.schemas import Try
from manifests.secrets.redaction import redacted, shortened

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


def ran_section(artifacts: Sequence[Artifact], *, has_places: bool = True) -> Section:
    """What there is, and the spec of each.

    Args:
        has_places: say where each thing lies, and a bundle's version.
    """
    notes = teacher_notes([one for one in artifacts if isinstance(one, TeacherArtifact)])
    cards = [
        _run_facts(one)
        if isinstance(one, RunArtifact)
        else teacher_facts(one, digits=DIGITS)
        if isinstance(one, TeacherArtifact)
        else _student_facts(one, has_places=has_places)
        if isinstance(one, StudentArtifact)
        else _bundle_facts(one, has_places=has_places)
        for one in artifacts
    ]
    specs: list[Block] = []
    for one in artifacts:
        spec = _spec_of(one)
        if spec:
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {one.name}, as it was resolved", [Code(text, f"spec of {one.name}")]))
    return Section("ran", "What ran", [Side(cards), *notes, *specs])


def _spec_of(one: Artifact) -> dict[str, Any]:
    if isinstance(one, RunArtifact):
        return one.spec
    if isinstance(one, StudentArtifact | TeacherArtifact):
        return {} if one.manifest is None else one.manifest.spec
    held = one.facts.get("spec")
    return held if isinstance(held, dict) else {}


def _run_facts(run: RunArtifact) -> Facts:
    tally = run.found.tally
    engines = [
        (
            f"{_base(str(one.get('model')))} on {one.get('family')} {one.get('version', '')}, {one.get('device')}, "
            f"{one.get('dtype')}"
        )
        for one in run.found.engines
    ]
    rows: list[tuple[str, Cell]] = [
        ("state", _state(run)),
        ("labeler", f"{run.plan.facts.labeler.name}, grades 0 to {run.grades - 1}"),
        *(("student" if run.is_scored else "teacher", text) for text in engines),
        ("rows", f"{tally.rows:,} of {run.plan.rows:,} done, {run.plan.queries:,} queries"),
        ("shards, chunks", f"{len(run.plan.shards):,}, {run.plan.num_chunks:,}"),
    ]
    if run.manifest is not None:
        rows.append(("relabel", run.manifest.relabel))
        if run.manifest.mixed.differences:
            rows.append(("engines differ", "; ".join(run.manifest.mixed.differences)))
    rows += [("fingerprint", run.plan.fingerprint[:DIGITS]), ("path", run.path)]
    return Facts(rows, f"{'Scores' if run.is_scored else 'Label run'} {run.name}")


def _state(run: RunArtifact) -> Badge:
    if not run.is_finished:
        return Badge("not finished", "warn")
    if run.manifest is not None and run.manifest.over_limit:
        return Badge("over its quarantine limit", "bad")
    return Badge("finished, every row accounted for", "good")


def _student_facts(one: StudentArtifact, *, has_places: bool) -> Facts:
    manifest, record = one.manifest, one.record
    rows: list[tuple[str, Cell]] = [("kind", record.kind)]
    rows += _heads(record.heads, {}) if manifest is None else _heads(manifest.heads, manifest.temperature)
    rows.append(("reads at most", f"{record.max_tokens} tokens"))
    if manifest is not None:
        rows += [("starts from", manifest.model.reference), ("fingerprint", manifest.fingerprint[:DIGITS])]
        rows.append(("gate", Badge("passed", "good") if manifest.gate.has_passed else Badge("refused", "bad")))
    return Facts([*rows, *([("path", one.path)] if has_places else [])], f"Student {one.name}")


def _bundle_facts(one: BundleArtifact, *, has_places: bool) -> Facts:
    student = one.student
    models = ", ".join(f"{model.path} ({model.precision})" for model in student.models)
    rows = [("models", models), *_heads(student.heads, student.temperature or {})]
    rows += [("version", one.manifest_sha256[:DIGITS])] if has_places else []
    rows.append(("licence", student.licence.bundle or "not stated"))
    return Facts([*rows, *([("path", one.path)] if has_places else [])], f"Bundle {one.name}")


def _heads(heads: Mapping[str, int], temperature: Mapping[str, float]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [("heads", ", ".join(f"{name} ({grades} grades)" for name, grades in heads.items()))]
    if temperature:
        rows.append(("temperatures", ", ".join(f"{name} {value:.3g}" for name, value in temperature.items())))
    return rows


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


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path
