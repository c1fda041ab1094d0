"""Sections that judge labels by gold grades and compare runs: the results of `relabel evaluate`, shown run by run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

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
from relabel.jobs.report.artifacts import RunArtifact
from relabel.jobs.report.run_sections import title_over
from relabel.jobs.sections import Block, Cell, Fold, Paragraph, Plot, Section, Series, Table
from relabel.manifests.errors import InputError, ManifestError, MissingExtraError, UsageError
from relabel.manifests.gold import own_input
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.measures import DEPTH, rank_queries
from relabel.manifests.schemas import LabelRow, QuarantineRow, texts_of

# ------------------------------------------------------------------------------
# Gold grades of a report: those that were named, or the gold column that a run's own spec names.

CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""Why a run can't be judged: where grades were found and not asked for, the page says so."""


def gold_options(choice: JudgingOptions, run: RunArtifact) -> JudgingOptions | str | None:
    """How to judge a run: by the gold that was named, else by the gold column of its own input; None without a gold
    column, and in words why one is not used.
    """
    column = run.spec_part("input", "columns").get("gold") or run.plan.facts.columns.gold
    if choice.qrels is not None or not column:
        return None if choice.qrels is None else choice
    not_used = f"{run.name}: the job names the gold column `{column}`, which is not used: "
    if run.manifest is None:
        return f"{not_used}it is not finished, and only its manifest, which is written last, says where its input is."
    named = run.spec_part("input").get("path")
    paths = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if len(paths) != 1:
        return f"{not_used}its input is {len(paths)} paths in its manifest, and grades are read from one."
    try:
        own = own_input(run.plan, str(paths[0]), str(column), run.storage)
    except CANT as exc:
        return f"{not_used}{exc}"
    if own is None:
        where = "as seen from this folder, or is not what was labelled any more."
        return f"{not_used}its input {paths[0]} is not there, {where}"
    return replace(choice, qrels=str(paths[0]), grade=str(column))


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
    queries: list[list[str]] = []
    for run in runs:
        options = gold_options(choice, run)
        if not isinstance(options, JudgingOptions):
            blocks += [Paragraph(options, "warn")] if options else []
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
        queries += [names] if names else []
    if judged:
        figures = {name: result.figures for name, result in judged.items()}
        blocks.append(figures_plot(title_over("Agreement with gold", queries), figures))
    lines = [
        Series(name, [bin_.confidence for bin_ in bins], [bin_.accuracy for bin_ in bins])
        for name, result in judged.items()
        if (bins := result.reliability)
    ]
    if lines:
        note = "Above the dotted line labels are right more often than they claim, below it less often."
        title = title_over("Reliability", queries)
        blocks.append(Plot(title, "reliability", lines, "mean confidence", "share that is right", note))
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


def compared_sections(runs: Sequence[RunArtifact], choice: JudgingOptions) -> list[Section]:
    """Each run compared with the first label run, by gold too where there is some."""
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
    return [
        Section("between", "Between runs", between),
        Section("student-against-teacher", "Student against teacher and gold", students),
    ]


def _compare(teacher: RunArtifact, other: RunArtifact, choice: JudgingOptions) -> ComparedSets:
    """One run compared with another; by gold grades too, where those that were found (not asked for) fit."""
    paths = {teacher.name: teacher.path, other.name: other.path}
    options = gold_options(choice, teacher)
    if isinstance(options, JudgingOptions):
        try:
            return compare_named(paths, teacher.name, options, [], teacher.storage, resamples=RESAMPLES, seed=SEED)
        except CANT:
            if choice.qrels is not None:
                raise
    return compare_named(paths, teacher.name, choice, [], teacher.storage, resamples=RESAMPLES, seed=SEED)
