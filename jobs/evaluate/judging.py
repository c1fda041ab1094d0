"""Evaluates label sets against gold grades, and students against their teacher: opens the inputs, joins the rows and
computes the metrics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.sides import (
    ComparedSets,
    ComparedStudent,
    Gold,
    JudgedLabels,
    JudgingOptions,
    Sides,
    cut_sets,
    lexical_scores,
    scale_of,
)
from relabel.jobs.exits import Exit
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import (
    PairGrades,
    check_chunks,
    check_scale,
    column_names,
    columns_taken,
    further_of_input,
    gold_columns,
    graded,
    grades_by_pair,
    grades_seen,
    has_implied_grades,
    load_gold_by_row,
    load_qrels,
    own_input,
    taken,
)
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import SHOWN, Join, LabelSet, gather, map_labels, open_labels
from relabel.manifests.metrics import evaluation
from relabel.manifests.metrics.comparison import BY_IDS, Labelled, Match, StudentComparison, compare, match_rows
from relabel.manifests.metrics.evaluation import TEACHER, Gate, judge_gates
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.records import plain
from relabel.manifests.schemas import release_unused

BY_INPUT_ROW = "row_id: the qrels are the run's own input"
BY_FILE_ROW = "row: labels and grades are in one file"


def judged_labels(
    paths: tuple[str, ...],
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> JudgedLabels:
    """One set, or several as one, by gold grades: the whole result of `relabel evaluate`; see `judge`."""
    return judge(paths, options, gates, storage, resamples=resamples, seed=seed)[1]


def judge(
    paths: tuple[str, ...],
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> tuple[Judged, JudgedLabels]:
    """Join labels with grades, and compute all figures of them and the gates' verdicts.

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
        raise InputError(_nothing_judged(join, pairs, options))
    release_unused()
    judged, texts = join.judged(), list[str]()
    lexical = lexical_scores(sets[0] if len(sets) == 1 else None, join.row_ids, storage, texts)
    judged = replace(judged, lexical=lexical)
    notes = [*(note for one in sets for note in one.notes), *notes, *_join_notes(join, pairs, options), *texts]
    if len(sets) > 1:
        notes.append(f"{len(sets)} sources are judged together, as one set of labels")
    found = evaluation.evaluate(judged, resamples=resamples, seed=seed, pass_at=options.pass_at)
    verdicts = judge_gates(gates, {name: figure.value for name, figure in found.figures.items()}, None)
    return judged, JudgedLabels(
        **{**vars(found), "notes": [*notes, *found.notes]},
        labels=[{"path": one.where, "kind": one.kind, "grades": one.grades, **plain(one.origin)} for one in sets],
        qrels=options.qrels,
        joined_by=sorted(join.joined_by),
        side=sides.cut,
        counts=_counts(join, sets, pairs, judged),
        resamples=resamples,
        seed=seed,
        gates=verdicts,
        exit_code=int(Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE),
    )


def _counts(join: Join, sets: list[LabelSet], pairs: PairGrades | None, judged: Judged) -> dict[str, int]:
    counts = {
        "labels": join.num_labels,
        "judged": join.num_judged,
        "unjudged": join.num_unjudged,
        "gold_null": join.num_gold_null,
        "without_label": join.num_without_label,
        "quarantined": sum(one.num_quarantined or 0 for one in sets),
        "relabelled": join.num_relabelled,
        "queries": judged.num_queries,
    }
    if pairs is not None:
        is_graded_P = pairs.grades.is_valid().to_numpy(zero_copy_only=False)
        counts |= {
            "qrels": len(pairs.keys),
            "qrels_repeated": pairs.num_repeated,
            "qrels_in_conflict": pairs.num_conflicts,
            "qrels_without_label": int((is_graded_P & ~join.is_labelled).sum()),
        }
    return counts


def _join_notes(join: Join, pairs: PairGrades | None, options: JudgingOptions) -> list[str]:
    notes = []
    if join.num_relabelled:
        notes.append(f"judged labels beyond the first of their pair, each judged: {join.num_relabelled:,}")
    if pairs is not None and pairs.num_conflicts:
        rule = "mean of their grades, rounded, halves up" if options.duplicates == "mean" else "first of their grades"
        notes.append(f"pairs whose grades differ, which take the {rule}: {pairs.num_conflicts:,}")
    if pairs is not None and pairs.num_null:
        notes.append(f"qrels without a grade, which judge nothing: {pairs.num_null:,}")
    return notes


def _nothing_judged(join: Join, pairs: PairGrades | None, options: JudgingOptions) -> str:
    if join.num_gold_null:
        return f"{options.qrels}: all {join.num_gold_null:,} labels that were found there have a null grade."
    if pairs is None or not join.num_labels:
        return "no labels: nothing was found to judge."
    examples = ", ".join(f"({query}, {doc})" for query, doc in pairs.begins[:SHOWN])
    return (
        f"no label has a grade: {join.num_labels:,} labels and {pairs.num_rows:,} qrels were compared by (query_id, "
        f"doc_id). Labels begin with {', '.join(join.label_examples[:SHOWN])}; {options.qrels} with "
        f"{examples or 'nothing, it is empty'}. Do the ids mean the same things? --by and --doc name other columns."
    )


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
    own = own_input(labels.plan, options.qrels, options.grade, storage)
    if own is None:
        return Gold(None, BY_IDS)
    files, column = own
    columns = further_of_input(files, gold_columns(labels.columns), storage, where=options.qrels)
    is_implied = columns and has_implied_grades(column, column_names(files[0], storage), columns)
    written = None if is_implied else load_gold_by_row(files, column, storage)
    grades = graded(written, columns, column, options.grade_map, path=options.qrels)
    return Gold(grades, BY_INPUT_ROW, columns)


# ------------------------------------------------------------------------------
# Gold of rows that a student's and a teacher's labels share.

Both: TypeAlias = tuple[LabelSet, LabelSet]
"""Teacher and student."""


class GoldOfBoth:
    """The gold grades of all sets: by row of a set's own input, and by pair where any set needs that."""

    def __init__(self, sets: list[LabelSet], options: JudgingOptions, storage: Storage) -> None:
        self.qrels, self._storage = str(options.qrels), storage
        self._golds = {id(one): gold_of(one, options, storage) for one in sets}
        golds = self._golds.values()
        self._pairs = load_pairs(sets, options, storage) if any(gold.by_row is None for gold in golds) else None
        self.seen = seen_by(golds, self._pairs)

    def of(
        self, sets: Both, rows: tuple[Labelled, Labelled], match: Match
    ) -> tuple[str, pa.Int64Array, np.ndarray, dict[str, pa.Array]]:
        """Gold of matched rows: how they are joined with it, their grades, whether each has one at all, and further
        columns. By row where either set can be joined so.

        Raises:
            InputError: a gold chunk is not one of its document's.
        """
        found = self._of(sets, rows, match)
        for one, places in zip(rows, (match.teacher, match.student), strict=True):
            taken_of = pa.array(places)
            held = {**columns_taken(one.columns, taken_of), **found[-1]}
            if held:
                check_chunks(held, one.query_ids.take(taken_of), one.doc_ids.take(taken_of), where=self.qrels)
        return found

    def compared(
        self, sets: Both, rows: tuple[Labelled, Labelled], match: Match, drawn: dict[str, Any]
    ) -> tuple[StudentComparison, str, pa.Int64Array]:
        """Two sets compared with each other and with gold, how their rows are joined with it, and the grade of each
        matched row; `drawn` are the scale, resamples and samples.

        Raises:
            InputError: no matched row has a grade, or see `of`.
        """
        joined_by, golds, is_known, columns = self.of(sets, rows, match)
        number, notes = int(sets[0].plan is None), list[str]()
        judged = golds.is_valid().to_numpy(zero_copy_only=False)
        row_ids = rows[number].row_ids[(match.teacher, match.student)[number][judged]]
        lexical = lexical_scores(sets[number], row_ids, self._storage, notes)
        found = compare(*rows, match, golds, is_known, columns=columns, lexical=lexical, **drawn)
        found.notes.extend(notes)
        if found.against_gold is None:
            raise InputError(
                f"none of the {len(golds):,} rows that {rows[0].where} and {rows[1].where} share has a grade in "
                f"{self.qrels}, joined by {joined_by}. Do the ids mean the same things? --by and --doc name other "
                "columns."
            )
        return found, joined_by, golds

    def _of(
        self, sets: Both, rows: tuple[Labelled, Labelled], match: Match
    ) -> tuple[str, pa.Int64Array, np.ndarray, dict[str, pa.Array]]:
        for labels, held, places in zip(sets, rows, (match.teacher, match.student), strict=True):
            gold = self._golds[id(labels)]
            if gold.by_row is not None:
                row_ids = pa.array(held.row_ids[places])
                columns = columns_taken(gold.columns, row_ids)
                return gold.how, gold.by_row.take(row_ids), np.ones(len(places), dtype=bool), columns
        assert self._pairs is not None
        matched = pa.array(match.teacher)
        place_N = self._pairs.places(rows[0].query_ids.take(matched), rows[0].doc_ids.take(matched))
        columns = {name: taken(column, place_N) for name, column in self._pairs.columns.items()}
        return BY_IDS, taken(self._pairs.grades, place_N), place_N >= 0, columns


# ------------------------------------------------------------------------------
# Students against their teacher: which set is the teacher, which rows are the same, and how gold grades judge them.

_NAMED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<path>.+)", re.DOTALL)


def compare_sets(
    arguments: tuple[str, ...],
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> ComparedSets:
    """Compare every set with the teacher: the set of that name, else the first that is no student's output.

    Args:
        arguments: two or more of `PATH` or `NAME=PATH`.
    Raises:
        UsageError: two sets of one name, and see `compare_named`.
    """
    paths: dict[str, str] = {}
    for argument in arguments:
        # a folder may be called `date=2026-11-20`
        match = None if Path(argument).exists() else _NAMED.fullmatch(argument)
        name, path = (match["name"], match["path"]) if match else (argument, argument)
        if name in paths:
            raise UsageError(f"LABELS: two sets are called {name}. Name them apart: NAME=PATH.")
        paths[name] = path
    return compare_named(paths, None, options, gates, storage, resamples=resamples, seed=seed)


def compare_named(
    paths: Mapping[str, str],
    teacher: str | None,
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> ComparedSets:
    """Compare every other set with the teacher.

    Args:
        paths: by the name of each set.
        teacher: a name of them; None for the one of that name, else the first that is no student's output.
    Raises:
        InputError: a file or column is off, scales differ, or two sets have no row in common.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: options that contradict each other.
        ConfigError: a gate names no figure.
    """
    named = {name: open_set(path, options, storage, wants_ids=True) for name, path in paths.items()}
    teacher = teacher or _teacher_of(named)
    named = {teacher: named.pop(teacher), **named}
    sets = list(named.values())
    sides = cut_sets(sets, options.side, storage, students=options.students)
    gold = None if options.qrels is None else GoldOfBoth(sets, options, storage)
    seen = gold.seen if gold else set()
    grades, notes = scale_of(sets, seen, options)
    check_scale(seen, grades, where=str(options.qrels), option="--map")
    ours = _gathered(sets[0], grades, options)
    drawn = {"grades": grades, "resamples": resamples, "seed": seed, "pass_at": options.pass_at}
    comparisons = []
    for name, labels in list(named.items())[1:]:
        theirs = _gathered(labels, grades, options)
        found, joined_by = _against_teacher((sets[0], labels), (ours, theirs), gold, sides, drawn)
        verdicts = judge_gates(gates, *_figures(found))
        comparisons.append(
            ComparedStudent(**vars(found), teacher=teacher, student=name, joined_by=joined_by, gates=verdicts)
        )
    has_passed = all(verdict.has_passed for one in comparisons for verdict in one.gates)
    return ComparedSets(
        sets=[
            plain(labels.origin)
            | {"name": name, "role": "teacher" if name == teacher else "student", "path": labels.where}
            | {"kind": labels.kind, "quarantined": labels.num_quarantined}
            for name, labels in named.items()
        ],
        side=sides.cut,
        qrels=options.qrels,
        grades=grades,
        resamples=resamples,
        seed=seed,
        comparisons=comparisons,
        notes=[*(note for one in sets for note in one.notes), *notes],
        exit_code=int(Exit.DONE if has_passed else Exit.GATE),
    )


def _against_teacher(
    sets: Both, rows: tuple[Labelled, Labelled], gold: GoldOfBoth | None, sides: Sides, drawn: dict[str, Any]
) -> tuple[StudentComparison, str | None]:
    """The comparison of a teacher and one student, and how their rows are joined with gold grades; `drawn` are the
    scale, resamples and samples.
    """
    first, second = sets[0].plan, sets[1].plan
    is_same_input = first is not None and second is not None and not changed_files(first.files, tuple(second.files))
    match = match_rows(*rows, is_same_input=is_same_input)
    if not len(match.teacher):
        sides.check()
        raise InputError(_nothing_matched(*rows, match))
    if gold is None:
        return compare(*rows, match, None, np.zeros(0), **drawn), None
    return gold.compared(sets, rows, match, drawn)[:2]


def _teacher_of(named: dict[str, LabelSet]) -> str:
    """The set of that name, else the first that is no student's output, else the first."""
    others = (name for name, labels in named.items() if labels.kind != "student" and name != "student")
    return TEACHER if TEACHER in named else next(others, next(iter(named)))


def _gathered(labels: LabelSet, grades: int, options: JudgingOptions) -> Labelled:
    parts = (map_labels(part, options.label_map, where=labels.where) for part in labels.parts())
    return gather(parts, grades=grades, where=labels.where, option="--map-labels")


def _figures(found: StudentComparison) -> tuple[dict[str, float | None], dict[str, float | None] | None]:
    """What gates may name: the student's figures by gold grades and against its teacher (`teacher.kl`); and the
    teacher's.
    """
    own = {f"{TEACHER}.{name}": figure.value for name, figure in found.against_teacher.items()}
    if found.against_gold is None:
        return own, None
    student, teacher = (
        {name: figure.value for name, figure in one.figures.items()}
        for one in (found.against_gold.student, found.against_gold.teacher)
    )
    return {**student, **own}, teacher


def _nothing_matched(teacher: Labelled, student: Labelled, match: Match) -> str:
    begins = " ".join(
        f"{labels.where} begins with "
        f"{', '.join(f'({query}, {doc})' for query, doc in labels.pairs(SHOWN)) or 'nothing, it is empty'}."
        for labels in (teacher, student)
    )
    return (
        f"{teacher.where} and {student.where} have no row in common: {len(teacher.grades):,} and "
        f"{len(student.grades):,} labels were compared by {match.how}. {begins} Do the ids mean the same things? --by "
        "and --doc name other columns of a file."
    )
