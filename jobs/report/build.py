"""Builds a report: opens the artifacts, reads each run once, judges it by gold, and collects
the sections that apply."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from relabel.jobs.evaluate.judging import compare_named, gold_of, judge, load_pairs, open_set
from relabel.jobs.evaluate.results import (
    ComparedSets,
    JudgedLabels,
    comparison_blocks,
    evaluation_blocks,
    figures_plot,
    top_texts,
    verdicts_of,
)
from relabel.jobs.evaluate.sides import EmptySideError, JudgingOptions
from relabel.jobs.report.artifacts import (
    Artifact,
    BundleArtifact,
    RunArtifact,
    StudentArtifact,
    TeacherArtifact,
    lineage_section,
    open_artifacts,
    trace,
)
from relabel.jobs.report.model_sections import (
    bundle_facts,
    latency_section,
    parity_section,
    student_facts,
    student_section,
    teacher_facts,
    training_section,
)
from relabel.jobs.report.page import Browser, render_page, shown_row
from relabel.jobs.report.run_sections import (
    RunTally,
    conservation_section,
    input_texts,
    labels_section,
    routes_section,
    run_facts,
    tally_labels,
)
from relabel.jobs.sections import Block, Cell, Code, Facts, Fold, Paragraph, Plot, Section, Series, Table
from relabel.manifests.errors import InputError, ManifestError, MissingExtraError, RelabelError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import own_input
from relabel.manifests.labels import Pair
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.measures import DEPTH, rank_queries
from relabel.manifests.schemas import LabelRow, QuarantineRow, texts_of

MAX_ROWS = 5000


@dataclass(frozen=True)
class BuiltPage:
    """A report.

    Args:
        sections: names of those that it has, in order; `labels` is the browser.
        rows_shown, rows: that the browser shows, and that there are.
    """

    html: str
    sections: list[str]
    rows_shown: int
    rows: int


def build_report(
    paths: Sequence[str],
    storage: Storage,
    *,
    gold: JudgingOptions | None = None,
    max_rows: int = MAX_ROWS,
) -> BuiltPage:
    """Report on label runs, trainings, teachers, students and bundles.

    Args:
        paths: folders or URLs, in any mix.
        gold: gold grades; without `qrels` the gold column that a run's own job names.
        max_rows: most rows of the label browser; 0 leaves it out.
    Raises:
        UsageError, InputError, ManifestError, StoreError: a path holds nothing to report on, or something damaged.
        MissingExtraError: gold grades were named, and the packages that judge by them are not here.
    """
    artifacts = open_artifacts(list(paths), storage)
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    students = [one for one in artifacts if isinstance(one, StudentArtifact)]
    bundles = [one for one in artifacts if isinstance(one, BundleArtifact)]
    trained = [one for one in artifacts if isinstance(one, TeacherArtifact)]
    scored = tuple(run.path for run in runs if run.is_scored)
    choice = replace(gold or JudgingOptions(), students=scored, allow_partial=True)
    tallies = [tally_labels(run, most=max_rows // len(runs)) for run in runs]
    browser = _browser(tallies, choice) if max_rows and any(tally.chosen for tally in tallies) else None
    sections = [
        ran_section(artifacts),
        lineage_section(trace(artifacts)),
        conservation_section(tallies, has_reasons=max_rows > 0),
        labels_section(tallies),
        routes_section(tallies),
        gold_section(runs, choice),
        compared_section(runs, choice),
        training_section([*trained, *students]),
        student_section(students),
        parity_section(bundles),
        latency_section(bundles),
    ]
    names = list(dict.fromkeys(one.name for one in artifacts))
    title = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
    html = render_page(title, _subtitle(artifacts), sections, browser=browser)
    shown = [section.name for section in sections if section.blocks] + (["labels"] if browser is not None else [])
    return BuiltPage(html, shown, len(browser.rows) if browser else 0, sum(one.by_status.total() for one in tallies))


def _subtitle(artifacts: Sequence[Artifact]) -> str:
    counts = Counter("student's scores" if one.kind == "scores" else one.kind for one in artifacts)
    parts = [f"{count} {kind}{'s' if count > 1 and not kind.endswith('s') else ''}" for kind, count in counts.items()]
    rows = sum(one.found.tally.rows for one in artifacts if isinstance(one, RunArtifact))
    return ", ".join(parts) + (f" · {rows:,} rows" if rows else "")


def ran_section(artifacts: Sequence[Artifact]) -> Section:
    """Each artifact with its origin, and the spec of each."""
    cards: list[Facts] = []
    notes: list[Paragraph] = []
    specs: list[Block] = []
    for one in artifacts:
        spec: Any = None
        if isinstance(one, RunArtifact):
            cards.append(run_facts(one))
            spec = one.spec
        elif isinstance(one, TeacherArtifact):
            cards.append(teacher_facts(one))
            notes += [Paragraph(f"{one.name}: {note}", "warn") for note in one.manifest.notes]
            spec = one.manifest.spec
        elif isinstance(one, StudentArtifact):
            cards.append(student_facts(one))
            spec = one.manifest.spec
        else:
            cards.append(bundle_facts(one))
            spec = one.facts.get("spec")
        if spec and isinstance(spec, dict):
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {one.name}, as it was resolved", [Code(f"spec of {one.name}", text)]))
    return Section("ran", "What ran", [*notes, *cards, *specs])


def _browser(tallies: Sequence[RunTally], choice: JudgingOptions) -> Browser:
    """The rows that were chosen, with their texts and gold grades."""
    notes: list[Paragraph] = []
    rows: list[dict[str, Any]] = []
    for number, tally in enumerate(tallies):
        run, found, num_rows = tally.run, tally.chosen, tally.by_status.total()
        if len(found) < num_rows:
            sample = "a seeded sample that keeps every status (the same rows each time)"
            counts = f"{len(found):,} of {num_rows:,} rows"
            notes.append(Paragraph(f"{run.name}: {counts}, {sample}. All other sections are over all rows.", "warn"))
        texts: dict[int, Pair] = {}
        golds: list[int | None] = [None] * len(found)
        try:
            texts = input_texts(run, [row.row_id for row in found])
        except (RelabelError, OSError) as exc:
            text = f"{run.name}: its rows are shown without their texts, which can't be read again: {exc}"
            notes.append(Paragraph(text, "warn"))
        options = gold_options(choice, run)
        if options is not None:
            try:
                golds = row_golds(run, options, found)
            except (InputError, MissingExtraError):
                if choice.qrels is not None:
                    raise  # else the section on gold grades says why
        shown = [shown_row(number, row, texts.get(row.row_id), gold) for row, gold in zip(found, golds, strict=True)]
        rows += sorted(shown, key=lambda row: int(row["row"]))
    return Browser([one.run.name for one in tallies], rows, notes)


# ------------------------------------------------------------------------------
# Gold grades of a report: those that were named, or the gold column that a run's own spec names.

CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""Why a run can't be judged: where grades were found and not asked for, the page says so."""


def gold_options(choice: JudgingOptions, run: RunArtifact) -> JudgingOptions | None:
    """How to judge a run: by the gold that was named, else by the gold column of its own input, where that is one path
    and still what was labelled; None without either.
    """
    path, column = run.spec_part("input").get("path"), run.spec_part("input", "columns").get("gold")
    if choice.qrels is not None:
        return choice
    paths = path if isinstance(path, list) else [path]
    with contextlib.suppress(*CANT):
        if column and len(paths) == 1 and own_input(run.plan, str(paths[0]), str(column), run.storage):
            return replace(choice, qrels=str(paths[0]), grade=str(column))
    return None


def row_golds(run: RunArtifact, options: JudgingOptions, rows: Sequence[LabelRow | QuarantineRow]) -> list[int | None]:
    """The gold grade of each row, None where there is none."""
    labels = open_set(run.path, options, run.storage)
    by_row = gold_of(labels, options, run.storage).by_row
    if by_row is not None:
        return list(by_row.take(pa.array([row.row_id for row in rows], pa.int64())).to_pylist())
    return load_pairs([labels], options, run.storage).grades_of([(row.query_id, row.doc_id) for row in rows])


# ------------------------------------------------------------------------------
# Each run by gold.

RESAMPLES, SEED = 1000, 7
WORST = 15


def gold_section(runs: Sequence[RunArtifact], choice: JudgingOptions) -> Section:
    """Every run by gold grades, and the queries that it ranks worst; why one could not be judged, where its grades were
    only found, not asked for.

    Raises:
        RelabelError: grades were asked for by name, and a run can't be judged by them.
    """
    blocks: list[Block] = []
    judged: dict[str, JudgedLabels] = {}
    worst: dict[str, list[list[Cell]]] = {}
    for run in runs:
        options = gold_options(choice, run)
        if options is None:
            continue
        try:
            rows, result = judge((run.path,), options, [], run.storage, resamples=RESAMPLES, seed=SEED)
        except CANT as exc:
            if choice.qrels is not None and not isinstance(exc, EmptySideError):
                raise
            blocks.append(Paragraph(f"{run.name} could not be judged: {exc}", "warn"))
            continue
        names = [] if rows.query_names is None else texts_of(rows.query_names)
        judged[run.name], worst[run.name] = result, _worst_queries(rows, names)
    if judged:
        figures = {name: result.figures for name, result in judged.items()}
        blocks.append(figures_plot("Agreement with gold", figures))
    lines = [
        Series(name, [bin_.confidence for bin_ in bins], [bin_.accuracy for bin_ in bins])
        for name, result in judged.items()
        if (bins := result.reliability)
    ]
    if lines:
        note = "Above the dotted line labels are right more often than they claim, below it less often."
        blocks.append(Plot("Reliability", "reliability", lines, "mean confidence", "share that is right", note))
    for name, result in judged.items():
        blocks += evaluation_blocks(result, name=name)
        if shown := worst[name][:WORST]:
            head = ("query", f"nDCG@{DEPTH}", "judged documents")
            title = f"The {len(shown)} queries that {name} ranks worst"
            blocks.append(Fold(title, [Table(title, head, shown)]))
    return Section("gold", "Against gold", blocks)


def _worst_queries(rows: Judged, names: Sequence[str]) -> list[list[Cell]]:
    """Query, nDCG and judged documents, worst first; queries without a relevant document are left out."""
    if rows.queries is None:
        return []
    found = rank_queries(rows.queries, rows.docs, np.round(rows.scores, 6), rows.gold, num_queries=rows.num_queries)
    sizes = np.bincount(rows.queries, minlength=rows.num_queries).tolist()
    listed = zip(found.ndcg.tolist(), names, sizes, strict=True)
    return [[query, ndcg, size] for ndcg, query, size in sorted(listed) if not math.isnan(ndcg)]


# ------------------------------------------------------------------------------
# Runs compared: a student's scores with its teacher, other runs with the first.


def compared_section(runs: Sequence[RunArtifact], choice: JudgingOptions) -> Section:
    """Each run compared with the first label run, by gold too where there is some."""
    teacher = next((run for run in runs if not run.is_scored), None) or next(iter(runs), None)
    blocks: list[Block] = []
    for other in runs:
        if teacher is None or other is teacher:
            continue
        try:
            found = _compare(teacher, other, choice)
        except CANT as exc:
            blocks.append(Paragraph(f"{teacher.name} and {other.name} can't be compared: {exc}", "warn"))
            continue
        one = found.comparisons[0]
        blocks += top_texts(verdicts_of(one), found.side)
        if by_gold := one.against_gold:
            sides = {teacher.name: by_gold.teacher.figures, other.name: by_gold.student.figures}
            blocks.append(figures_plot(f"{teacher.name} and {other.name} by gold grades", sides))
        blocks += comparison_blocks(one, found)
    return Section("between", "Between runs", blocks)


def _compare(teacher: RunArtifact, other: RunArtifact, choice: JudgingOptions) -> ComparedSets:
    """One run compared with another; by gold grades too, where those that were found (not asked for) fit."""
    paths = {teacher.name: teacher.path, other.name: other.path}
    options = gold_options(choice, teacher)
    if options is not None:
        try:
            return compare_named(paths, teacher.name, options, [], teacher.storage, resamples=RESAMPLES, seed=SEED)
        except CANT:
            if choice.qrels is not None:
                raise
    return compare_named(paths, teacher.name, choice, [], teacher.storage, resamples=RESAMPLES, seed=SEED)
