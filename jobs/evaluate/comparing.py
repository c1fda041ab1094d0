"""Students against their teacher: which set is the teacher, which rows are the same, and how gold grades judge them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from relabel.jobs.evaluate.gold_scale import scale_of
from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.judging import open_set
from relabel.jobs.evaluate.matched_gold import Both, GoldOfBoth
from relabel.jobs.evaluate.results import SetBeside, SetsBeside, StudentBeside
from relabel.jobs.evaluate.sides import Sides, cut_sets
from relabel.jobs.exits import Exit
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.judging.joins import SHOWN, gather
from relabel.manifests.judging.label_columns import map_labels
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.qrels import check_scale
from relabel.manifests.metrics.gates import TEACHER, Gate, judge_gates
from relabel.manifests.metrics.student_comparison import StudentComparison, compare
from relabel.manifests.metrics.student_matches import Labelled, Match, match_rows
from relabel.manifests.storage.context import Storage

_NAMED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<path>.+)", re.DOTALL)
PREFIX = f"{TEACHER}."
"""Of figures of a student against its teacher, in a gate: `teacher.kl<=0.1`."""


class NamedSet(NamedTuple):
    """A label set and what the report calls it: the name that the user gave, else its path."""

    name: str
    labels: LabelSet


def compare_sets(
    arguments: tuple[str, ...],
    options: JudgingOptions,
    gates: list[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> SetsBeside:
    """Compare every set with the teacher.

    Args:
        arguments: two or more of `PATH` or `NAME=PATH`.
    Raises:
        InputError: a file or column is off, scales differ, or two sets have no row in common.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: two sets of one name, or options that contradict each other.
        ConfigError: a gate names no figure.
    """
    named = _opened(arguments, options, storage)
    teacher, students = _by_role(named)
    sets = [one.labels for one in (teacher, *students)]
    sides = cut_sets(sets, options.side, storage, students=options.students)
    gold = None if options.qrels is None else GoldOfBoth(sets, options, storage)
    seen = gold.seen if gold else set()
    grades, notes = scale_of(sets, seen, options)
    check_scale(seen, grades, where=str(options.qrels), option="--map")
    ours = _gathered(teacher.labels, grades, options)
    comparisons = []
    for student in students:
        theirs = _gathered(student.labels, grades, options)
        drawn = {"resamples": resamples, "seed": seed, "pass_at": options.pass_at}
        found, joined_by = _against_teacher(
            (teacher.labels, student.labels), (ours, theirs), gold, sides, grades, drawn
        )
        verdicts = judge_gates(gates, *_figures(found))
        comparisons.append(StudentBeside.of((teacher.name, student.name), found, joined_by, verdicts))
    has_passed = all(verdict.has_passed for one in comparisons for verdict in one.gates)
    return SetsBeside(
        sets=[_beside(one, "teacher" if one is teacher else "student") for one in (teacher, *students)],
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
    sets: Both,
    rows: tuple[Labelled, Labelled],
    gold: GoldOfBoth | None,
    sides: Sides,
    grades: int,
    drawn: dict[str, Any],
) -> tuple[StudentComparison, str | None]:
    """The comparison of a teacher and one student, and how their rows met gold grades; `drawn` says of which resamples
    and samples.
    """
    match = match_rows(*rows, is_same_input=_is_same_input(*sets))
    if not len(match.teacher):
        sides.check()
        raise InputError(_nothing_matched(*rows, match))
    if gold is None:
        return compare(*rows, match, None, np.zeros(0), grades=grades, **drawn), None
    joined_by, golds, is_known, columns = gold.of(sets, rows, match)
    lexical, notes = gold.lexical(sets, rows, match, golds)
    found = compare(*rows, match, golds, is_known, grades=grades, columns=columns, lexical=lexical, **drawn)
    found.notes.extend(notes)
    if found.teacher is None:
        raise InputError(
            f"none of the {len(golds):,} rows that {rows[0].where} and {rows[1].where} share has a grade in "
            f"{gold.qrels}, joined by "
            f"{joined_by}. Do the ids mean the same things? --by and --doc name other columns."
        )
    return found, joined_by


def _beside(one: NamedSet, role: Literal["teacher", "student"]) -> SetBeside:
    labels = one.labels
    origin = {**vars(labels.origin), "name": one.name}
    return SetBeside(role=role, path=labels.where, kind=labels.kind, quarantined=labels.num_quarantined, **origin)


def _opened(arguments: tuple[str, ...], options: JudgingOptions, storage: Storage) -> list[NamedSet]:
    found = []
    for argument in arguments:
        # a folder may be called `date=2026-11-20`
        match = None if Path(argument).exists() else _NAMED.fullmatch(argument)
        name, path = (match["name"], match["path"]) if match else (argument, argument)
        found.append(NamedSet(name, open_set(path, options, storage, wants_ids=True)))
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"LABELS: two sets are called {twice}. Name them apart: NAME=PATH.")
    return found


def _by_role(named: list[NamedSet]) -> tuple[NamedSet, list[NamedSet]]:
    """The teacher: the set of that name, else the first that is no student's output, else the first."""
    teacher = next((one for one in named if one.name == TEACHER), None)
    teacher = teacher or next(
        (one for one in named if one.labels.kind != "student" and one.name != "student"), named[0]
    )
    return teacher, [one for one in named if one is not teacher]


def _is_same_input(one: LabelSet, other: LabelSet) -> bool:
    if one.plan is None or other.plan is None:
        return False
    return not changed_files(one.plan.files, tuple(other.plan.files))


def _gathered(labels: LabelSet, grades: int, options: JudgingOptions) -> Labelled:
    parts = (map_labels(part, options.label_map, where=labels.where) for part in labels.parts())
    return gather(parts, grades=grades, where=labels.where)


def _figures(found: StudentComparison) -> tuple[dict[str, float | None], dict[str, float | None] | None]:
    """What gates may name: the student's figures by gold grades and against its teacher; and the teacher's."""
    own = {f"{PREFIX}{name}": figure.value for name, figure in found.against_teacher.items()}
    if found.student is None or found.teacher is None:
        return own, None
    student = {name: figure.value for name, figure in found.student.figures.items()}
    return {**student, **own}, {name: figure.value for name, figure in found.teacher.figures.items()}


def _nothing_matched(teacher: Labelled, student: Labelled, match: Match) -> str:
    begins = " ".join(
        (
            f"{labels.where} begins with "
            f"{', '.join(f'({query}, {doc})' for query, doc in labels.pairs(SHOWN)) or 'nothing, it is empty'}."
        )
        for labels in (teacher, student)
    )
    return (
        f"{teacher.where} and {student.where} have no row in common: {len(teacher.grades):,} and "
        f"{len(student.grades):,} labels were compared by {match.how}. {begins} Do the ids mean the same things? --by "
        "and --doc name other columns of a file."
    )
