"""Judges label sets by gold grades, and compares students with their teacher: `judge` and `compare_sets`.

Both open the sets, cut them to one side of a student's split, find the grade scale and read gold (`Golds`), by row
where it is a run's own input or the label file itself, else by pair. `relabel compare`, `combine` and `report` judge by
the same parts.
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.distill.students.examples import SIDES, folded, query_sides, read_pairs
from relabel.distill.students.spec import SplitFacts
from relabel.jobs.output import Exit
from relabel.jobs.sections import ComparedSets, ComparedStudent, JudgedLabels, Side, SideCut
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.gold import (
    DEFAULT_GRADE,
    GOLD,
    Duplicates,
    GoldRows,
    GradeMap,
    PairGrades,
    check_scale,
    column_names,
    first_pairs,
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
from relabel.manifests.label_sets import (
    LabelSet,
    gather,
    label_set,
    labelled_parts,
    map_labels,
    no_labels,
    open_labels,
    put_together,
)
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Pair, Reads, codes_of, ids_of, release_unused, texts_of
from relabel.manifests.metrics.comparison import BY_IDS, Labelled, Match, StudentComparison, compare, match_rows
from relabel.manifests.metrics.evaluation import (
    MOST_LEXICAL,
    TEACHER,
    Gate,
    bm25,
    evaluate,
    judge_gates,
    outside_mass_text,
)
from relabel.manifests.metrics.judged import Judged, judged_rows, with_columns
from relabel.manifests.plan import Plan
from relabel.manifests.records import checked, sha256_bytes
from relabel.manifests.rows import open_run_input
from relabel.manifests.run_labels import open_run_labels
from relabel.manifests.run_manifest import load_manifest
from relabel.manifests.store import open_run_store

MOST_GRADES = 10
"""As many as a labeler may have."""


@dataclass(frozen=True)
class JudgingOptions:
    """Options of `relabel evaluate`. `grade` and `by` are None where the user named no column, `qrels` without gold;
    `pass_at` is empty where the k of pass@k were left open; `side` None takes the test side of a student: one of the
    sets, or one of `students`, outputs that are on the same page.
    """

    qrels: str | None = None
    label: str = "grade"
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grades: int | None = None
    grade_map: GradeMap | None = None
    label_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    where: Mapping[str, str] = field(default_factory=dict)
    allow_partial: bool = False
    pass_at: tuple[int, ...] = ()
    side: Side | None = None
    students: tuple[str, ...] = ()


def judge(
    paths: tuple[str, ...],
    options: JudgingOptions,
    gates: Sequence[Gate],
    storage: Storage,
    *,
    resamples: int,
    seed: int,
) -> tuple[Judged, JudgedLabels]:
    """Join one set, or several as one, with gold grades, and compute all figures of them and the gates' verdicts.

    Raises:
        InputError: a file or column is off, grades are off the scale, or no label has a grade.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: options that contradict each other, or a set that is named twice.
    """
    for path, again in itertools.combinations(paths, 2):
        if place_of(path) == place_of(again):
            raise UsageError(f"LABELS: {path} and {again} are the same set, whose rows would count twice.")
    sets = [open_set(path, options, storage) for path in paths]
    sides = cut_sets(sets, options.side, storage, students=options.students)
    release_unused()
    golds = Golds(sets, options, storage)
    grades, notes = scale_of(sets, golds.seen, options)
    check_scale(golds.seen, grades, where=golds.qrels, option="--map")
    release_unused()
    rows, counts, joined_by = _joined(sets, golds, grades)
    sides.check()
    if not counts["judged"]:
        raise InputError(_nothing_judged(sets, golds, counts))
    release_unused()
    judged_ids = rows["row_id"].filter(rows[GOLD].is_valid()).to_numpy()
    remarks: list[str] = []
    lexical = lexical_scores(sets[0] if len(sets) == 1 else None, judged_ids, storage, remarks)
    has_docs = rows["doc_id"].null_count < rows.num_rows
    outside_mass = _outside_mass_text(rows)
    judged = judged_rows(
        rows,
        grades,
        where=", ".join(paths),
        qrels=golds.qrels,
        lexical=lexical,
    )
    del rows
    if judged.queries is not None and has_docs:
        pair_N = judged.queries * (judged.docs.max() + 1) + judged.docs
        counts["relabelled"] = len(pair_N) - len(np.unique(pair_N))
    counts["quarantined"], counts["queries"] = sum(one.num_quarantined or 0 for one in sets), judged.num_queries
    rule = "mean of their grades, rounded, halves up" if options.duplicates == "mean" else "first of their grades"
    remarked = {
        "judged labels beyond the first of their pair, each judged": counts["relabelled"],
        f"pairs whose grades differ, which take the {rule}": golds.pairs.num_conflicts if golds.pairs else 0,
        "qrels without a grade, which judge nothing": golds.pairs.num_null if golds.pairs else 0,
    }
    notes = [
        *filter(None, [outside_mass]),
        *(note for one in sets for note in one.notes),
        *notes,
        *(f"{text}: {count:,}" for text, count in remarked.items() if count),
        *remarks,
        *([f"{len(sets)} sources are judged together, as one set of labels"] if len(sets) > 1 else []),
    ]
    found = evaluate(judged, resamples=resamples, seed=seed, pass_at=options.pass_at)
    verdicts = judge_gates(gates, {name: figure.value for name, figure in found.figures.items()}, None)
    return judged, JudgedLabels(
        **{**vars(found), "notes": [*notes, *found.notes]},
        labels=[{"path": one.where, "kind": one.kind, "grades": one.grades, **one.origin} for one in sets],
        qrels=options.qrels,
        joined_by=sorted(joined_by),
        side=sides,
        counts=counts,
        resamples=resamples,
        seed=seed,
        gates=verdicts,
        exit_code=int(Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE),
    )


def _joined(sets: Sequence[LabelSet], golds: Golds, grades: int) -> tuple[pa.RecordBatch, Counter[str], set[str]]:
    """The labels of all sets with their gold, counts, and how they were joined. Rows without gold are there only where
    they may say something of their query, so that memory grows with what is judged, not with what is labelled.
    """
    counts = Counter(
        labels=0,
        judged=0,
        unjudged=0,
        gold_null=0,
        without_label=0,
        quarantined=0,
        relabelled=0,
        queries=0,
    )
    joined_by: set[str] = set()
    held = [no_labels()]
    is_labelled_P = np.zeros(0 if golds.pairs is None else len(golds.pairs.keys), dtype=bool)
    for one in sets:
        for part in labelled_parts(
            one.parts(),
            counts,
            grades=grades,
            where=one.where,
            option="--map-labels",
        ):
            found = golds.of(one, part)
            joined_by.add(found.how)
            counts.update({"labels": part.num_rows, **found.counts})
            joined = with_columns(part, found.columns)
            is_judged = found.columns[GOLD].is_valid()
            held.append(joined if one.columns or pc.all(is_judged).as_py() else joined.filter(is_judged))
            if golds.pairs is not None and {"query_id", "doc_id"} <= set(part.schema.names):
                place_N = golds.pairs.places(part["query_id"], part["doc_id"])
                is_labelled_P[place_N[(place_N >= 0) & is_judged.to_numpy(zero_copy_only=False)]] = True
    if golds.pairs is not None:
        is_graded_P = golds.pairs.columns[GOLD].is_valid().to_numpy(zero_copy_only=False)
        counts.update(
            qrels=len(golds.pairs.keys),
            qrels_repeated=golds.pairs.num_repeated,
            qrels_in_conflict=golds.pairs.num_conflicts,
            qrels_without_label=int((is_graded_P & ~is_labelled_P).sum()),
        )
    return put_together(held), counts, joined_by


def all_from_gold(qrels: str, count: int) -> str:
    """Why nothing is judged where all graded rows went into `combine` as gold."""
    return (
        f"{qrels}: all {count:,} labels that it has a grade for were taken from gold when they were combined, so no "
        "figure would say anything. Judge by gold that did not go in, or see what `relabel combine` printed: it "
        "measures each query without its own gold."
    )


def _outside_mass_text(rows: pa.RecordBatch) -> str:
    """A warning where the labels' distributions leave out much mass; empty where they do not, or it is not known."""
    if "outside_mass" not in rows.schema.names:
        return ""
    mass_N = rows["outside_mass"].drop_null().to_numpy()
    mass_N = mass_N[np.isfinite(mass_N)]
    return outside_mass_text(float(mass_N.mean())) if len(mass_N) else ""


def _nothing_judged(sets: Sequence[LabelSet], golds: Golds, counts: Mapping[str, int]) -> str:
    if counts["from_gold"]:
        return all_from_gold(golds.qrels, counts["from_gold"])
    if counts["gold_null"]:
        return f"{golds.qrels}: all {counts['gold_null']:,} labels that were found there have a null grade."
    if golds.pairs is None or not counts["labels"]:
        return "no labels: nothing was found to judge."
    first = next(sets[0].parts())
    num_qrels = len(golds.pairs.keys) + golds.pairs.num_repeated
    return (
        f"no label has a grade: {counts['labels']:,} labels and {num_qrels:,} qrels were compared by "
        f"(query_id, doc_id). Labels begin with {first_pairs(first['query_id'], first['doc_id'])}; {golds.qrels} with "
        f"{golds.pairs.begins}. Do the ids mean the same things? --by and --doc name other columns."
    )


def open_set(path: str, options: JudgingOptions, storage: Storage, *, wants_ids: bool = False) -> LabelSet:
    """A label set of the command line, whose rows are on the scale of `--map-labels`.

    Args:
        wants_ids: query and document ids must be there in any case; else only where labels are joined by them.
    """
    is_one_file = options.qrels is not None and place_of(path) == place_of(options.qrels)
    if is_one_file and options.label == (options.grade or DEFAULT_GRADE):
        raise UsageError(
            f"{path}: labels and gold grades would both be column `{options.label}`. Name them with --label and "
            "--grade."
        )
    found = open_labels(
        path,
        storage,
        allow_partial=options.allow_partial,
        label=options.label,
        by=options.by,
        doc=options.doc,
        where=options.where,
        wants_ids=wants_ids or not is_one_file,
    )
    return replace(found, parts=lambda: (map_labels(one, options.label_map, where=path) for one in found.parts()))


# ------------------------------------------------------------------------------
# Gold: by row of a set's own input or file, or by pair.


class Golds:
    """Gold of some label sets.

    Attributes:
        pairs: the qrels as one grade a pair; None where all sets are joined by row.
        seen: the grades that occur.
    Raises:
        InputError: they can't be read, or a pair has several grades.
    """

    def __init__(self, sets: Sequence[LabelSet], options: JudgingOptions, storage: Storage) -> None:
        self.qrels = str(options.qrels)
        self._storage = storage
        self._by_row = {one.where: _gold_by_row(one, options, storage) for one in sets}
        by_row = [columns for _, columns in filter(None, self._by_row.values())]
        self.pairs = load_pairs(sets, options, storage) if len(by_row) < len(self._by_row) else None
        self.seen = set().union(*(grades_seen(columns[GOLD]) for columns in by_row))
        self.seen |= self.pairs.seen if self.pairs else set()

    def of(self, labels: LabelSet, rows: pa.RecordBatch) -> GoldRows:
        """Gold of some rows of a set; none of those whose label was taken from gold."""
        return self._joined(labels, rows).without_labels_from_gold(rows)

    def _joined(self, labels: LabelSet, rows: pa.RecordBatch) -> GoldRows:
        found = self._by_row[labels.where]
        if found is not None:
            how, columns = found
            return GoldRows(
                how,
                np.ones(rows.num_rows, dtype=bool),
                {name: column.take(rows["row_id"]) for name, column in columns.items()},
            )
        assert self.pairs is not None
        place_N = self.pairs.places(rows["query_id"], rows["doc_id"])
        return GoldRows(
            BY_IDS, place_N >= 0, {name: taken(column, place_N) for name, column in self.pairs.columns.items()}
        )

    def of_both(
        self, sets: Sequence[LabelSet], rows: Sequence[Labelled], match: Match, notes: list[str]
    ) -> tuple[GoldRows, np.ndarray | None]:
        """Gold of the rows that a teacher and a student share, by row where either can be joined so; and BM25 of those
        that have a grade, or a note why not.

        Raises:
            InputError: none has a grade.
        """
        places = match.teacher, match.student
        is_by_row = [self._by_row[one.where] is not None for one in sets]
        chosen = is_by_row.index(True) if any(is_by_row) else 0
        matched = [one.rows.take(pa.array(place_N)) for one, place_N in zip(rows, places, strict=True)]
        found = self._joined(sets[chosen], matched[chosen]).without_labels_from_gold(*matched)
        if found.num_from_gold and not found.counts["judged"]:
            raise InputError(all_from_gold(self.qrels, found.num_from_gold))
        if not found.counts["judged"]:
            raise InputError(
                f"none of the {len(places[0]):,} rows that {rows[0].where} and {rows[1].where} share has a grade in "
                f"{self.qrels}, joined by {found.how}. Do the ids mean the same things? --by and --doc name other "
                "columns."
            )
        with_texts = int(sets[0].plan is None)
        row_ids = rows[with_texts].row_ids[places[with_texts]]
        judged_ids = row_ids[found.columns[GOLD].is_valid().to_numpy(zero_copy_only=False)]
        return found, lexical_scores(sets[with_texts], judged_ids, self._storage, notes)


def load_pairs(sets: Iterable[LabelSet], options: JudgingOptions, storage: Storage) -> PairGrades:
    """The qrels as one grade a pair, with the further columns by which any of the sets is judged.

    Raises:
        InputError: they can't be read, or a pair has several grades.
    """
    qrels = load_qrels(
        str(options.qrels),
        storage,
        grade=options.grade or DEFAULT_GRADE,
        by=options.by or "query_id",
        doc=options.doc,
        grade_map=options.grade_map,
        further=gold_columns(name for one in sets for name in one.columns),
    )
    release_unused()
    return grades_by_pair(qrels, options.duplicates, str(options.qrels))


def _gold_by_row(
    labels: LabelSet, options: JudgingOptions, storage: Storage
) -> tuple[str, Mapping[str, pa.Array]] | None:
    """How a set is joined with the qrels by row, and their columns in the order of its row ids; None by pair."""
    qrels = str(options.qrels)
    grade = options.grade
    if labels.plan is None:
        if place_of(labels.where) != place_of(qrels):
            return None
        return "row: labels and grades are in one file", load_qrels(
            qrels,
            storage,
            grade=grade or DEFAULT_GRADE,
            by=options.by or "query_id",
            doc=options.doc,
            is_by_row=True,
            grade_map=options.grade_map,
        )
    own = own_input(labels.plan, qrels, grade, storage)
    if own is None:
        return None
    files, column = own
    further = further_of_input(files, gold_columns(labels.columns), storage, where=qrels)
    is_implied = further and has_implied_grades(column, column_names(files[0], storage), further)
    written = None if is_implied else load_gold_by_row(files, column, storage)
    grades = graded(
        written,
        further,
        column,
        options.grade_map,
        path=qrels,
    )
    return "row_id: the qrels are the run's own input", {GOLD: grades, **further}


def gold_files(path: str | None) -> list[str]:
    """What must not be written over where these are the gold grades: the path as given, and the local files that a
    pattern matches.
    """
    return [] if path is None else [path] if is_url(path) else [path, *glob.glob(path, recursive=True)]  # noqa: PTH207 (an absolute pattern is beyond Path.glob)


def scale_of(sets: Sequence[LabelSet], seen: set[int], options: JudgingOptions) -> tuple[int, list[str]]:
    """K: of the runs, of distributions, as given, or one more than the highest grade, which a note says."""
    found: dict[str, int] = {}
    highest = 0
    highest_gold = max(seen, default=0)
    for one in sets:
        if one.grades is not None:
            found[one.where] = one.grades if options.label_map is None else max(options.label_map.values()) + 1
            continue
        for part in one.parts():
            if "probs" in part.schema.names:
                found[one.where] = pc.list_value_length(part["probs"].drop_null()[:1])[0].as_py()
            highest = max(highest, *grades_seen(part["grade"]), 0)
    listed = ", ".join(f"{where} has {grades} grades" for where, grades in found.items())
    if len(set(found.values())) > 1:
        raise InputError(
            f"labels are on different scales ({listed}). Judge them apart, or bring them to one scale first "
            "(`evaluate` takes --map-labels)."
        )
    if found and options.grades not in (None, *found.values()):
        raise UsageError(f"--grades {options.grades}: {listed}.")
    if found or options.grades is not None:
        return next(iter(found.values()), options.grades or 0), []
    grades = max(2, highest + 1, highest_gold + 1)
    if grades > MOST_GRADES:
        raise InputError(
            f"labels go up to {highest} and gold grades up to {highest_gold}: more than {MOST_GRADES} grades are no "
            "scale. Are --label and --grade the right columns? Else bring both to one scale with --map and "
            "--map-labels."
        )
    apart = f"Labels go up to {highest}, gold grades to {highest_gold}: if these are two scales, see --map and "
    remark = f"the scale is taken to be 0 to {grades - 1}, after the highest grade there is; --grades sets it"
    return grades, [remark + (f". {apart}--map-labels" if highest != highest_gold else "")]


# ------------------------------------------------------------------------------
# Texts of a run's input.


def run_pairs(
    where: str, plan: Plan, storage: Storage, row_ids: np.ndarray, *, reads: Reads = QUERY_AND_DOCUMENT
) -> list[Pair]:
    """Pairs of the input that a run labelled, in the order of the row ids.

    Raises:
        InputError, ManifestError: the input is gone, or is not any more what was labelled.
    """
    return read_pairs(open_run_input(where, plan, storage, reads=reads), row_ids)


def lexical_scores(
    labels: LabelSet | None, row_ids: np.ndarray, storage: Storage, notes: list[str]
) -> np.ndarray | None:
    """BM25 of some rows of a run, float64 [N]; None where it can't be had, and why not among the notes.

    Args:
        labels: whose rows they are; None or a label file has no texts.
    """
    try:
        if labels is None or labels.plan is None:
            raise InputError("the texts of these labels are not known")
        if len(row_ids) > MOST_LEXICAL:
            raise InputError(f"of more than {MOST_LEXICAL:,} rows it would take long")
        pairs = run_pairs(labels.where, labels.plan, storage, row_ids)
    except (InputError, ManifestError) as exc:
        notes.append(f"no lexical baseline: {exc}")
        return None
    return bm25([(pair.query, pair.document) for pair in pairs])


# ------------------------------------------------------------------------------
# The train, dev and test sides of a student's split: by default a student is judged by its test side alone, since rows
# that it learned from flatter its figures. A manifest says how queries were split, by a hash of the query, and which
# queries the student had (`distill/students/examples.py`): a query that it never had is test.

UNKNOWN = len(SIDES)
"""Side of a query whose text is not known, where the split is by text."""
_NAMES = (*SIDES, "unknown")


class EmptySideError(InputError):
    """No row is on the side that is judged."""


class Sides(SideCut):
    """The cut of some sets by all students among them.

    Args:
        sets: those that are judged together.
        side: as the user named it; None for `test` where a split is known, else all rows.
    Raises:
        UsageError: a side was named, and no set's split is known.
    """

    def __init__(self, sets: Sequence[LabelSet], side: Side | None, storage: Storage) -> None:
        super().__init__(side or "all", [])
        self._sides_of: list[Callable[[pa.Array], np.ndarray]] = []
        for one in (one for one in sets if one.kind != "run"):
            found = _splits_of(one, storage)
            if isinstance(found, str):
                self.unknown[one.where] = found
            else:
                self.students.append(one.where)
                self._sides_of += [_side_of(split, one, storage) for split in found]
                if any(split.learned_queries is None for split in found):
                    self.assumed = [*(self.assumed or ()), one.where]
        if self.students and side is None:
            self.side = "test"
        if side not in (None, "all") and not self.students:
            why = "; ".join(f"{path}: {text}" for path, text in self.unknown.items()) or "none is a student's"
            raise UsageError(f"--side {side}: the split of no set is known ({why}). Leave it out to judge all rows.")

    def kept(self, where: str, query_ids: pa.Array) -> pa.Array:
        """Places of the rows of a set that are on the side; all are counted, where a split is known. A query of several
        students is where it taught most: on the first of train, dev and test that any has it on.
        """
        if not self.students:
            return pa.array(np.arange(len(query_ids)))
        code_N, names = codes_of(query_ids.cast(pa.large_binary()))
        side_Q = np.full(len(names), UNKNOWN, dtype=np.int8)
        for side_of in self._sides_of:
            side_Q = np.minimum(side_Q, side_of(names))
        side_N = side_Q[code_N]
        count = self.rows.setdefault(where, dict.fromkeys(_NAMES, 0))
        for name, number in zip(_NAMES, np.bincount(side_N, minlength=len(_NAMES)).tolist(), strict=True):
            count[name] += number
        return pa.array(np.flatnonzero((side_N == _NAMES.index(self.side)) if self.side != "all" else side_N >= 0))

    def parts(self, where: str, whole: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """The rows of a set that are on the side."""
        self.rows.pop(where, None)  # a set is read several times
        for part in whole():
            if "query_id" not in part.schema.names:
                raise UsageError(f"{where}: has no query ids, so the side of its rows is not known. See --by.")
            yield part.take(self.kept(where, part["query_id"]))

    def check(self) -> None:
        """
        Raises:
            EmptySideError: a set was read, and none of its rows is on the side.
        """
        for path, count in self.rows.items():
            if self.side != "all" and not count[self.side]:
                raise EmptySideError(
                    f"{path}: none of its {sum(count.values()):,} rows is on the {self.side} side of the student. "
                    "Score rows that it did not learn from, or judge all of them with --side all: the figures flatter."
                )


def cut_sets(sets: Sequence[LabelSet], side: Side | None, storage: Storage, *, students: Sequence[str] = ()) -> Sides:
    """Cut sets to one side, see `Sides`; `students` are outputs whose split counts too."""
    others = [path for path in students if path not in {one.where for one in sets}]
    opened = [label_set(open_run_labels(path, storage, allow_partial=True)) for path in others]
    sides = Sides([*sets, *opened], side, storage)
    for one in sets if sides.students else ():
        one.parts = partial(sides.parts, one.where, one.parts)
    return sides


def _splits_of(labels: LabelSet, storage: Storage) -> list[SplitFacts] | str:
    """The splits of the student that made the scores, or why they are not known."""
    if labels.kind == "file":
        return labels.doubt
    path, manifest = manifest_of_scorer(labels.where, storage)
    if isinstance(manifest, str):
        return manifest
    return _lineage(manifest, seen={Path(path).resolve()}) or f"the manifest of {path} does not say how it was split"


def manifest_of_scorer(scores: str, storage: Storage) -> tuple[str, dict[str, Any] | str]:
    """Where the student or bundle lies that made some scores, and its manifest, or why it is not known."""
    manifest = load_manifest(open_run_store(scores, storage))
    if manifest is None:
        return "", "it is not finished, and only a manifest says which student it is of, so its split is not known"
    path = str(manifest.spec.get("engine", {}).get("model"))
    try:
        data = Path(path, "manifest.json").read_bytes()
    except OSError:
        return path, f"its student is not at {path} any more, so nobody knows which rows trained it"
    made_by = (one.get("details", {}).get("manifest_sha256") for one in manifest.engines)
    if sha256_bytes(data) not in made_by:
        return path, f"the student at {path} is another one by now, so nobody knows which rows trained it"
    return path, json.loads(data)


def _lineage(held: dict[str, Any], *, seen: set[Path]) -> list[SplitFacts]:
    """The split of a student or bundle, and those of the students that it starts from; empty where it has none."""
    of_bundle = held.get("lineage")
    split = (of_bundle or held).get("split")
    if not isinstance(split, dict):
        return []
    model = (of_bundle["student"] if of_bundle else held).get("model") or {}
    base = Path(str(model.get("reference"))).resolve()
    found = [checked(SplitFacts, split)]
    if base not in seen and (base / "student.json").is_file():
        found += _lineage(json.loads((base / "manifest.json").read_bytes()), seen={*seen, base})
    return found


def _side_of(split: SplitFacts, labels: LabelSet, storage: Storage) -> Callable[[pa.Array], np.ndarray]:
    """Gives query ids their sides, int8 [Q]. Where the split is by text, that of the run's input counts, and an id of
    several texts is where any is first.
    """
    sides_of = query_sides(split)
    if split.by != "query":
        return lambda names: sides_of(texts_of(names))
    assert labels.plan is not None
    pairs = run_pairs(labels.where, labels.plan, storage, np.arange(labels.plan.rows))
    code_N, ids = codes_of(ids_of(pair.query_id for pair in pairs))
    side_P = np.full(len(ids) + 1, UNKNOWN, dtype=np.int8)
    np.minimum.at(side_P, code_N, sides_of([folded(pair.query) for pair in pairs]))
    return lambda names: side_P[pc.index_in(names, value_set=ids).fill_null(len(ids)).to_numpy()]


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
    return compare_named(
        paths,
        None,
        options,
        gates,
        storage,
        resamples=resamples,
        seed=seed,
    )


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
    if teacher is None:
        others = (name for name, one in named.items() if one.kind != "student" and name != "student")
        teacher = TEACHER if TEACHER in named else next(others, next(iter(named)))
    named = {teacher: named.pop(teacher), **named}
    sets = list(named.values())
    sides = cut_sets(sets, options.side, storage, students=options.students)
    golds = None if options.qrels is None else Golds(sets, options, storage)
    seen = golds.seen if golds else set()
    grades, notes = scale_of(sets, seen, options)
    check_scale(seen, grades, where=str(options.qrels), option="--map")
    gathered = (gather(one.parts(), grades=grades, where=one.where, option="--map-labels") for one in sets)
    ours = next(gathered)
    first = sets[0].plan
    comparisons = []
    for (name, labels), theirs in zip(list(named.items())[1:], gathered, strict=True):
        pair = (sets[0], labels)
        rows = (ours, theirs)
        second = labels.plan
        is_same_input = first and second and not changed_files(first.files, tuple(second.files))
        match = match_rows(*rows, is_same_input=bool(is_same_input))
        if not len(match.teacher):
            sides.check()
            sizes = " and ".join(f"{len(one.grades):,}" for one in rows)
            begins = " ".join(f"{one.where} begins with {first_pairs(one.query_ids, one.doc_ids)}." for one in rows)
            raise InputError(
                f"{rows[0].where} and {rows[1].where} have no row in common: {sizes} labels were compared by "
                f"{match.how}. {begins} Do the ids mean the same things? --by and --doc name other columns of a file."
            )
        remarks: list[str] = []
        gold, lexical = golds.of_both(pair, rows, match, remarks) if golds else (None, None)
        drawn: dict[str, Any] = {"grades": grades, "resamples": resamples, "seed": seed, "pass_at": options.pass_at}
        found = compare(
            *rows,
            match,
            gold,
            **drawn,
            lexical=lexical,
            qrels=str(options.qrels),
        )
        found.notes.extend(remarks)
        verdicts = judge_gates(gates, *_figures(found))
        comparisons.append(
            ComparedStudent(
                **vars(found),
                teacher=teacher,
                student=name,
                joined_by=gold and gold.how,
                gates=verdicts,
            )
        )
    return ComparedSets(
        sets=[
            labels.origin
            | {"name": name, "role": "teacher" if name == teacher else "student", "path": labels.where}
            | {"kind": labels.kind, "quarantined": labels.num_quarantined}
            for name, labels in named.items()
        ],
        side=sides,
        qrels=options.qrels,
        grades=grades,
        resamples=resamples,
        seed=seed,
        comparisons=comparisons,
        notes=[*(note for one in sets for note in one.notes), *notes],
        exit_code=int(
            Exit.DONE if all(verdict.has_passed for one in comparisons for verdict in one.gates) else Exit.GATE
        ),
    )


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
