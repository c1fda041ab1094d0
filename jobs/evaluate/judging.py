"""From paths to judged labels: opens label sets and qrels, decides how they are joined, and counts what the join left
out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relabel.jobs.evaluate.gold_scale import scale_of
from relabel.jobs.evaluate.join_notes import join_notes, judged_counts, nothing_judged
from relabel.jobs.evaluate.judged_options import Gold, JudgingOptions
from relabel.jobs.evaluate.lexical import lexical_scores
from relabel.jobs.evaluate.results import JudgedCounts, JudgedLabels, JudgedSource
from relabel.jobs.evaluate.sides import SideCut, cut_sets
from relabel.jobs.exits import Exit
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.judging.further_columns import gold_columns
from relabel.manifests.judging.gold_columns import column_names, further_of_input, load_gold_by_row, own_input
from relabel.manifests.judging.joins import Join
from relabel.manifests.judging.label_columns import map_labels
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.opened_labels import open_labels
from relabel.manifests.judging.pair_grades import PairGrades, grades_by_pair
from relabel.manifests.judging.qrels import (
    check_scale,
    graded,
    grades_seen,
    load_qrels,
    tells_grades,
)
from relabel.manifests.memory import release_unused
from relabel.manifests.metrics import evaluation
from relabel.manifests.metrics.gates import Gate, judge_gates
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.student_matches import BY_IDS
from relabel.manifests.storage.context import Storage

BY_INPUT_ROW = "row_id: the qrels are the run's own input"
BY_FILE_ROW = "row: labels and grades are in one file"


@dataclass
class Judging:
    """Judged labels, and all that a report says about where they came from."""

    judged: Judged
    sources: list[JudgedSource]
    counts: JudgedCounts
    joined_by: list[str]
    side: SideCut
    notes: list[str] = field(default_factory=list)


def judged_labels(
    paths: tuple[str, ...],
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
    calibrate: Any = None,
) -> JudgedLabels:
    """One set, or several as one, by gold grades: all that `relabel evaluate` says of it.

    Args:
        calibrate: `temperature` or `isotonic`, fitted on half the queries; None for neither.
    Raises:
        InputError, ManifestError, UsageError: see `judge`.
    """
    judging = judge(paths, options, storage)
    found = evaluation.evaluate(
        judging.judged, resamples=resamples, seed=seed, calibrate=calibrate, pass_at=options.pass_at
    )
    verdicts = judge_gates(gates, {name: figure.value for name, figure in found.figures.items()}, None)
    code = Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE
    return JudgedLabels(
        labels=judging.sources,
        qrels=options.qrels,
        joined_by=judging.joined_by,
        side=judging.side,
        counts=judging.counts,
        resamples=resamples,
        seed=seed,
        **{**vars(found), "notes": [*judging.notes, *found.notes]},
        gates=verdicts,
        exit_code=int(code),
    )


def judge(paths: tuple[str, ...], options: JudgingOptions, storage: Storage) -> Judging:
    """Join labels with grades.

    Raises:
        InputError: a file or column is off, grades are off the scale, or no label has a grade.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: options that contradict each other, or a set that is named twice.
    """
    for path, again in itertools.combinations(paths, 2):
        if _is_same_file(path, again):
            raise UsageError(f"LABELS: {path} and {again} are the same set, whose rows would count twice.")
    sets = [open_set(path, options, storage) for path in paths]
    sides = cut_sets(sets, options.side, storage, students=options.students)
    release_unused()
    golds = [gold_of(one, options, storage) for one in sets]
    pairs = load_pairs(sets, options, storage) if any(gold.by_row is None for gold in golds) else None
    seen = seen_by(golds, pairs)
    grades, notes = scale_of(sets, seen, options)
    check_scale(seen, grades, where=str(options.qrels), option="--map")
    join = Join(grades, pairs, qrels=str(options.qrels))
    release_unused()
    for one, gold in zip(sets, golds, strict=True):
        for part in one.parts():
            labels = map_labels(part, options.label_map, where=one.where)
            if gold.by_row is not None:
                join.add_by_row(labels, gold.by_row, one.where, by=gold.how, columns=gold.columns)
            else:
                join.add_by_pair(labels, one.where)
    sides.check()
    if not join.num_judged:
        raise InputError(nothing_judged(join, pairs, options))
    release_unused()
    judged, texts = join.judged(), list[str]()
    lexical = lexical_scores(sets[0] if len(sets) == 1 else None, join.row_ids, storage, texts)
    judged = replace(judged, lexical=lexical)
    notes = [
        *itertools.chain.from_iterable(one.notes for one in sets),
        *notes,
        *join_notes(join, pairs, options),
        *texts,
    ]
    sources = [JudgedSource(path=one.where, kind=one.kind, grades=one.grades, **vars(one.origin)) for one in sets]
    if len(sets) > 1:
        notes.append(f"{len(sets)} sources are judged together, as one set of labels")
    return Judging(judged, sources, judged_counts(join, sets, pairs, judged), sorted(join.joined_by), sides.cut, notes)


def seen_by(golds: Iterable[Gold], pairs: PairGrades | None) -> set[int]:
    """The human grades that occur."""
    by_row = (grades_seen(gold.by_row) for gold in golds if gold.by_row is not None)
    return set().union(*by_row, pairs.seen if pairs else ())


def load_pairs(sets: Iterable[LabelSet], options: JudgingOptions, storage: Storage) -> PairGrades:
    """The qrels as one grade a pair, with the further columns by which any of the sets is judged.

    Raises:
        InputError: they can't be read, or a pair has several grades.
    """
    qrels = load_qrels(
        str(options.qrels),
        storage,
        grade=options.grade or "grade",
        by=options.by or "query_id",
        doc=options.doc,
        is_by_row=False,
        grade_map=options.grade_map,
        further=gold_columns(name for one in sets for name in one.columns),
    )
    release_unused()
    return grades_by_pair(qrels, options.duplicates)


def open_set(path: str, options: JudgingOptions, storage: Storage, *, wants_ids: bool = False) -> LabelSet:
    """A label set of the command line.

    Args:
        wants_ids: query and document ids must be there in any case; else only where labels are joined by them.
    """
    is_one_file = options.qrels is not None and _is_same_file(path, options.qrels)
    if is_one_file and options.label == (options.grade or "grade"):
        raise UsageError(
            f"{path}: labels and gold grades would both be column `{options.label}`. Name them with --label and "
            "--grade."
        )
    return open_labels(
        path,
        storage,
        allow_partial=options.allow_partial,
        label=options.label,
        by=options.by or "query_id",
        doc=options.doc,
        where=options.where,
        wants_ids=wants_ids or not is_one_file,
        is_by_named=options.by is not None,
    )


def _is_same_file(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one == other
    return Path(one).resolve() == Path(other).resolve()


def gold_of(labels: LabelSet, options: JudgingOptions, storage: Storage) -> Gold:
    """How a set is joined with the qrels, and its grades where that is by row."""
    assert options.qrels is not None
    if labels.kind == "file":
        if not _is_same_file(labels.where, options.qrels):
            return Gold(None, BY_IDS)
        grade, by = options.grade or "grade", options.by or "query_id"
        held = load_qrels(
            options.qrels, storage, grade=grade, by=by, doc=options.doc, is_by_row=True, grade_map=options.grade_map
        )
        return Gold(held.grades, BY_FILE_ROW)
    assert labels.plan is not None
    own = own_input(labels.where, labels.plan, options.qrels, options.grade, storage)
    if own is None:
        return Gold(None, BY_IDS)
    files, column = own
    columns = further_of_input(files, gold_columns(labels.columns), storage, where=options.qrels)
    is_told = columns and tells_grades(column, column_names(files[0], storage), columns)
    written = None if is_told else load_gold_by_row(files, column, storage)
    grades = graded(written, columns, column, options.grade_map, path=options.qrels)
    return Gold(grades, BY_INPUT_ROW, columns)
