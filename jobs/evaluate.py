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
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.distill.students.examples import SIDES, folded, query_sides, read_pairs
from relabel.distill.students.spec import SplitFacts
from relabel.export.bundles import HUB_RECORD_NAME
from relabel.jobs.output import Exit
from relabel.jobs.sections import ComparedSets, ComparedStudent, JudgedLabels, Side, SideCut
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.forms import FORMS, file_columns, form_of
from relabel.manifests.gold import (
    DEFAULT_GRADE,
    GOLD,
    SELECTION,
    SELECTION_COLUMNS,
    Duplicates,
    GoldRows,
    GradeMap,
    PairGrades,
    check_scale,
    column_names,
    columns_of_owner,
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
    selection_notes,
    taken,
)
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import (
    LabelSet,
    gather,
    is_run,
    label_set,
    labelled_parts,
    no_labels,
    on_scale_of,
    open_labels,
    open_ranking,
    put_together,
)
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Pair, Reads, codes_of, ids_of, release_unused, texts_of
from relabel.manifests.metrics.comparison import BY_IDS, Labelled, Match, StudentComparison, compare, match_rows
from relabel.manifests.metrics.evaluation import (
    BASELINE_NAMES,
    MOST_LEXICAL,
    TEACHER,
    Gate,
    GateVerdict,
    bm25,
    evaluate,
    judge_gates,
    outside_mass_text,
)
from relabel.manifests.metrics.judged import Judged, judged_rows, with_columns
from relabel.manifests.plan import Plan
from relabel.manifests.rankings import RankingColumns, load_ranking
from relabel.manifests.records import checked, sha256_bytes
from relabel.manifests.rows import open_run_input
from relabel.manifests.run_labels import open_run_labels
from relabel.manifests.run_manifest import load_manifest
from relabel.manifests.secrets import counted
from relabel.manifests.store import open_run_store

DEFAULT_LABEL = "grade"
"""Column of labels, where `--label` names no other."""
DEFAULT_DOC = "doc_id"
"""Column of document ids, where `--doc` names no other."""
MOST_GRADES = 10
"""As many as a labeler may have."""
TWO_SCALES = "if these are two scales, see --map and --map-labels"


@dataclass(frozen=True)
class JudgingOptions:
    """Options of `relabel evaluate`. `grade` and `by` are None where the user named no column, `qrels` without gold,
    `score` where labels are grades; `may_lack` as in `open_labels`; `baselines` are rankings, `PATH` or `NAME=PATH`;
    `pass_at` is empty where the k of pass@k were left open; `side` None takes the test side of a student: one of the
    sets, or one of `students`, outputs that are on the same page. `resamples` and `seed` are those of the intervals.
    """

    qrels: str | None = None
    label: str = DEFAULT_LABEL
    score: str | None = None
    baselines: Sequence[str] = ()
    grade: str | None = None
    by: str | None = None
    doc: str = DEFAULT_DOC
    may_lack: bool = False
    grades: int | None = None
    grade_map: GradeMap | None = None
    label_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    where: Mapping[str, str] = field(default_factory=dict)
    allow_partial: bool = False
    pass_at: tuple[int, ...] = ()
    side: Side | None = None
    students: tuple[str, ...] = ()
    gates: Sequence[Gate] = ()
    resamples: int = 1000
    seed: int = 7


def judge(paths: Sequence[str], options: JudgingOptions, storage: Storage) -> tuple[Judged, JudgedLabels]:
    """Join one set, or several as one, with gold grades, and compute all figures of them and the gates' verdicts.

    Raises:
        InputError: a file or column is off, grades are off the scale, or no label has a gold grade.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: options that contradict each other, or a set that is named twice.
    """
    for path, again in itertools.combinations(paths, 2):
        if place_of(path) == place_of(again):
            raise UsageError(f"LABELS: {path} and {again} are the same set, whose rows would count twice.")
    sets = [open_set(path, options, storage) for path in paths]
    _refuse_other_labels(sets, options)
    sides = cut_sets(sets, options.side, storage, students=options.students)
    release_unused()
    golds = Golds(sets, options, storage)
    grades, scale_notes = scale_of(sets, golds.seen, options)
    check_scale(golds.seen, grades, where=golds.qrels, option="--map")
    highest_gold = max(golds.seen, default=0)
    if not scale_notes and highest_gold < grades - 1:
        scale_notes = [f"labels go up to {grades - 1}, and no gold grade is above {highest_gold}: {TWO_SCALES}"]
    release_unused()
    rows, sizes, counts, joined_by = _joined(sets, golds, grades)
    sides.check()
    if not counts["judged"]:
        raise InputError(_nothing_judged(sets, golds, counts))
    release_unused()
    notes = [*golds.notes, *_outside_mass_notes(rows)]
    for labels in sets:
        notes += labels.notes
    notes += scale_notes
    lexical_notes: list[str] = []
    lexical = _lexical_of_judged(sets, sizes, rows, storage, lexical_notes)
    counts["quarantined"] = sum(labels.num_quarantined or 0 for labels in sets)
    has_ranking = any(labels.kind == "ranking" for labels in sets)
    label_facts = [
        {"path": labels.where, "kind": labels.kind, "grades": labels.grades, **labels.origin} for labels in sets
    ]
    num_null = 0 if golds.pairs is None else golds.pairs.num_null
    qrels = golds.qrels
    del golds, sets, labels  # what was read of files is in the rows by now, and as much again
    release_unused()
    judged = judged_rows(
        rows,
        grades,
        where=", ".join(paths),
        qrels=qrels,
        lexical=lexical,
    )
    has_docs = rows["doc_id"].null_count < rows.num_rows
    if options.baselines:
        judged = replace(judged, rankings=baseline_scores(rows.filter(rows[GOLD].is_valid()), options, storage, notes))
    del rows
    if judged.queries is not None and has_docs:
        pair_N = judged.queries * (judged.docs.max() + 1) + judged.docs
        counts["relabelled"] = len(pair_N) - len(pc.unique(pair_N))  # a tenth of the time of np.unique
    counts["queries"] = judged.num_queries
    notes += _count_notes(counts, num_null, options.duplicates)
    if counts["qrels_without_label"] and has_ranking:
        notes.append(
            f"{counts['qrels_without_label']:,} graded documents that are not ranked are not in nDCG's best order "
            "either, so that it may be higher than that of trec_eval, which `relabel systems` gives"
        )
    notes += lexical_notes
    if len(label_facts) > 1:
        notes.append(f"{len(label_facts)} sources are judged together, as one set of labels")
    evaluation = evaluate(judged, resamples=options.resamples, seed=options.seed, pass_at=options.pass_at)
    figures = {name: figure.value for name, figure in evaluation.figures.items()}
    verdicts = judge_gates(options.gates, figures, None)
    return judged, JudgedLabels(
        **vars(replace(evaluation, notes=[*notes, *evaluation.notes])),
        labels=label_facts,
        qrels=options.qrels,
        joined_by=sorted(joined_by),
        side=sides,
        counts=counts,
        resamples=options.resamples,
        seed=options.seed,
        gates=verdicts,
        exit_code=_exit_code(verdicts),
    )


def _exit_code(verdicts: Iterable[GateVerdict]) -> int:
    return int(Exit.DONE if all(verdict.has_passed for verdict in verdicts) else Exit.GATE)


def _joined(
    sets: Sequence[LabelSet], golds: Golds, grades: int
) -> tuple[pa.RecordBatch, list[int], Counter[str], set[str]]:
    """The labels of all sets with their gold, set by set, how many of them are of each, counts, and how they were
    joined. Rows without gold are there only where they may say something of their query, so that memory grows with what
    is judged, not with what is labelled.
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
    parts = [no_labels()]
    sizes = []
    is_labelled_P = np.zeros(0 if golds.pairs is None else len(golds.pairs.keys), dtype=bool)
    for labels in sets:
        size = 0
        for part in labelled_parts(
            labels.parts(),
            counts,
            grades=grades,
            where=labels.where,
            option="--map-labels",
        ):
            gold = golds.of(labels, part)
            joined_by.add(gold.how)
            counts.update({"labels": part.num_rows, **gold.counts})
            joined = with_columns(part, gold.columns)
            is_judged = gold.columns[GOLD].is_valid()
            if not labels.columns and not pc.all(is_judged).as_py():
                joined = joined.filter(is_judged)
            parts.append(joined)
            size += joined.num_rows
            if golds.pairs is not None and {"query_id", "doc_id"} <= set(part.schema.names):
                pair_N = gold.pairs
                if pair_N is None:
                    pair_N = golds.pairs.places(part["query_id"], part["doc_id"])
                is_labelled_P[pair_N[pair_N >= 0]] = True
        sizes.append(size)
    if golds.pairs is not None:
        is_graded_P = golds.pairs.columns[GOLD].is_valid().to_numpy(zero_copy_only=False)
        counts.update(
            qrels=len(golds.pairs.keys),
            qrels_repeated=golds.pairs.num_repeated,
            qrels_in_conflict=golds.pairs.num_conflicts,
            qrels_without_label=int((is_graded_P & ~is_labelled_P).sum()),
        )
    return put_together(parts), sizes, counts, joined_by


def all_from_gold(qrels: str, count: int) -> str:
    """Why nothing is judged where gold of all queries went into `combine`."""
    return (
        f"{qrels}: all {count:,} labels that it has a grade for are of queries whose gold went in when they were "
        "combined, so no figure would say anything. Judge by gold of other queries, or see what `relabel combine` "
        "printed: it measures each query without its own gold."
    )


def _outside_mass_notes(rows: pa.RecordBatch) -> list[str]:
    """A warning where the labels' distributions leave out much mass; none where they do not, or it is not known."""
    if "outside_mass" not in rows.schema.names:
        return []
    mass_N = rows["outside_mass"].drop_null().to_numpy()
    mass_N = mass_N[np.isfinite(mass_N)]
    text = outside_mass_text(float(mass_N.mean())) if len(mass_N) else ""
    return [text] if text else []


def _lexical_of_judged(
    sets: Sequence[LabelSet], sizes: Sequence[int], rows: pa.RecordBatch, storage: Storage, notes: list[str]
) -> np.ndarray | None:
    """BM25 of the rows that have a gold grade.

    Args:
        sizes: how many of the rows are of each set; row ids count from 0 in each.
    """
    judged = []
    start = 0
    for labels, size in zip(sets, sizes, strict=True):
        own = rows.slice(start, size)
        judged.append((labels, own["row_id"].filter(own[GOLD].is_valid()).to_numpy()))
        start += size
    return lexical_scores(judged, storage, notes)


def _count_notes(counts: Mapping[str, int], num_null: int, duplicates: Duplicates) -> list[str]:
    """What a reader should know of labels and qrels that say something several times, or nothing.

    Args:
        num_null: rows of the qrels without a grade.
    """
    notes = []
    if counts["relabelled"]:
        notes.append(f"judged labels beyond the first of their pair, each judged: {counts['relabelled']:,}")
    if counts.get("qrels_in_conflict"):
        rule = "mean of their grades, rounded, halves up" if duplicates == "mean" else "first of their grades"
        notes.append(f"pairs whose grades differ, which take the {rule}: {counts['qrels_in_conflict']:,}")
    if num_null:
        notes.append(f"qrels without a grade, which judge nothing: {num_null:,}")
    return notes


def baseline_scores(
    rows: pa.RecordBatch, options: JudgingOptions, storage: Storage, notes: list[str]
) -> dict[str, np.ndarray]:
    """The scores of other rankers for judged rows, by name: float64 [N], -inf for a document that one does not rank,
    which comes last in its query.

    Raises:
        InputError: a ranking can't be read, or has none of the rows.
        UsageError: two of one name.
    """
    if rows["query_id"].null_count or rows["doc_id"].null_count:
        raise UsageError("--baseline: rankings are joined by query and document ids, and some labels have none.")
    scores: dict[str, np.ndarray] = {}
    columns = RankingColumns(query=options.by or "query_id", doc=options.doc)
    for argument in options.baselines:
        name, path = named_path(argument)
        name = name or PurePosixPath(path).stem
        if name in scores or name in {*BASELINE_NAMES, *BASELINE_NAMES.values()}:
            raise UsageError(f"--baseline: two are called {name}. Name them apart: NAME=PATH.")
        ranking = load_ranking(path, storage, columns, allow_partial=options.allow_partial)
        score_N = ranking.scores_of(rows["query_id"], rows["doc_id"])
        num_ranked = int(np.isfinite(score_N).sum())
        if not num_ranked:
            raise InputError(
                f"--baseline {path}: ranks none of the {rows.num_rows:,} documents that are judged. Are its query and "
                "document ids those of the labels?"
            )
        if num_ranked < rows.num_rows:
            notes.append(
                f"baseline {name}: ranks {num_ranked:,} of {rows.num_rows:,} judged rows; the others come last"
            )
        scores[name] = score_N
    return scores


def _nothing_judged(sets: Sequence[LabelSet], golds: Golds, counts: Mapping[str, int]) -> str:
    if counts["from_gold"]:
        return all_from_gold(golds.qrels, counts["from_gold"])
    if counts["gold_null"]:
        return f"{golds.qrels}: all {counts['gold_null']:,} labels that were found there have a null grade."
    if golds.pairs is None or not counts["labels"]:
        return "no labels: nothing was found to judge."
    first = next(sets[0].parts())
    num_qrels = len(golds.pairs.keys) + golds.pairs.num_repeated
    advice = "Do the ids mean the same things? --by and --doc name other columns."
    if golds.are_by_text():
        advice = (
            "Such a file knows a query by its text. With the pairs that were labelled, it becomes one with ids: "
            f"relabel convert {shlex.quote(golds.qrels)} people.qrels --queries {_texts_of_queries(sets[0].plan)}"
        )
    return (
        f"no label found a gold grade: {counted(counts['labels'], 'label')} and {counted(num_qrels, 'gold grade')} "
        f"were compared by (query_id, doc_id). Labels begin with "
        f"{first_pairs(first['query_id'], first['doc_id'])}; {golds.qrels} with {golds.pairs.begins}. {advice}"
    )


def _texts_of_queries(plan: Plan | None) -> str:
    """The table that knows the queries' texts, with the options of `convert` that name its columns."""
    if plan is None or len(plan.files) > 1:
        return "PAIRS.parquet"
    words = [shlex.quote(plan.files[0].path)]
    columns = plan.facts.columns
    if columns.query_id != "query_id":
        words += ["--by", shlex.quote(columns.query_id)]
    if columns.query != "query":
        words += ["--query", shlex.quote(columns.query)]
    return " ".join(words)


def open_set(path: str, options: JudgingOptions, storage: Storage, *, wants_ids: bool = False) -> LabelSet:
    """A label set of the command line, whose rows are on the scale of `--map-labels`.

    Args:
        wants_ids: query and document ids must be there in any case; else only where labels are joined by them.
    """
    if options.score is not None:
        return _open_ranking(path, options, storage)
    is_one_file = options.qrels is not None and place_of(path) == place_of(options.qrels)
    if is_one_file and options.label == (options.grade or DEFAULT_GRADE):
        raise UsageError(
            f"{path}: labels and gold grades would both be column `{options.label}`. Name them with --label and "
            "--grade."
        )
    labels = open_labels(
        path,
        storage,
        allow_partial=options.allow_partial,
        label=options.label,
        by=options.by,
        doc=options.doc,
        where=options.where,
        wants_ids=wants_ids or not is_one_file,
        may_lack=options.may_lack or (not is_run(path, storage) and _qrels_have_columns(options, storage)),
    )
    return on_scale_of(labels, options.label_map)


def _qrels_have_columns(options: JudgingOptions, storage: Storage) -> bool:
    """Whether the qrels have the id columns that the user named, so that label files may have the usual ones: files of
    `relabel combine` and `relabel audit` always do, whatever a team's gold calls them.
    """
    if options.qrels is None or (options.by is None and options.doc == DEFAULT_DOC):
        return False
    return {options.by or "query_id", options.doc} <= set(file_columns(options.qrels, storage))


def _open_ranking(path: str, options: JudgingOptions, storage: Storage) -> LabelSet:
    """A ranking of the command line.

    Raises:
        UsageError: it is a run's output, or options of labels.
    """
    if options.label_map is not None:
        raise UsageError("--map-labels and --score: scores are on no scale of grades.")
    if is_run(path, storage):
        raise UsageError(f"--score: {path} is a run, whose labels rank by their expected grade. Leave the option out.")
    return open_ranking(
        path,
        storage,
        score=str(options.score),
        by=options.by,
        doc=options.doc,
        where=options.where,
    )


# ------------------------------------------------------------------------------
# Gold: by row of a set's own input or file, or by pair.


class Golds:
    """Gold of some label sets.

    Attributes:
        pairs: the qrels as one grade a pair; None where all sets are joined by row.
        seen: the grades that occur.
        notes: what a reader should know of them.
    Raises:
        InputError: they can't be read, a pair has several grades, or a set saw gold and does not say of which queries.
    """

    def __init__(self, sets: Sequence[LabelSet], options: JudgingOptions, storage: Storage) -> None:
        for one in sets:
            if one.unknown_gold:
                raise InputError(f"{one.where}: {one.unknown_gold}")
        self.qrels = str(options.qrels)
        self._storage = storage
        named = options
        if len(sets) > 1:  # one alone is joined by row with its own input
            options = with_columns_of_owner(sets, options, storage)
        self._by_row = {labels.where: _gold_by_row(labels, options, storage) for labels in sets}
        self.seen: set[int] = set()
        for gold in self._by_row.values():
            if gold is not None:
                _, columns = gold
                self.seen |= grades_seen(columns[GOLD])
        self.pairs: PairGrades | None = None
        self.notes: Sequence[str] = ()
        if None not in self._by_row.values():
            _refuse_other_queries(sets, named)
        else:
            self.pairs = load_pairs(sets, options, storage)
            self.notes = self.pairs.notes
            self.seen |= self.pairs.seen

    def are_by_text(self) -> bool:
        """Whether the qrels are of a form whose query ids are texts."""
        form = form_of(self.qrels, FORMS, self._storage)
        return form is not None and form.is_by_text

    def of(self, labels: LabelSet, rows: pa.RecordBatch) -> GoldRows:
        """Gold of some rows of a set; none of queries whose gold its labels have seen."""
        return self._joined(labels, rows).without_seen_queries(rows)

    def _joined(self, labels: LabelSet, rows: pa.RecordBatch) -> GoldRows:
        by_row = self._by_row[labels.where]
        if by_row is not None:
            how, columns = by_row
            return GoldRows(
                how=how,
                is_known=np.ones(rows.num_rows, dtype=bool),
                columns={name: column.take(rows["row_id"]) for name, column in columns.items()},
            )
        assert self.pairs is not None
        pair_N = self.pairs.places(rows["query_id"], rows["doc_id"])
        return GoldRows(
            how=BY_IDS,
            is_known=pair_N >= 0,
            columns={name: taken(column, pair_N) for name, column in self.pairs.columns.items()},
            pairs=pair_N,
        )

    def of_both(
        self, sets: Sequence[LabelSet], rows: Sequence[Labelled], match: Match, notes: list[str]
    ) -> tuple[GoldRows, np.ndarray | None]:
        """Gold of the rows that a teacher and a student share, by row where either can be joined so; and BM25 of those
        that have a grade, or a note why not.

        Raises:
            InputError: none has a grade.
        """
        matched_rows = match.teacher, match.student
        matched = [labelled.rows.take(pa.array(row_N)) for labelled, row_N in zip(rows, matched_rows, strict=True)]
        is_by_row = [self._by_row[labels.where] is not None for labels in sets]
        chosen = is_by_row.index(True) if any(is_by_row) else 0
        gold = self._joined(sets[chosen], matched[chosen]).without_seen_queries(*matched)
        num_judged = gold.counts["judged"]
        if not num_judged and gold.num_from_gold:
            raise InputError(all_from_gold(self.qrels, gold.num_from_gold))
        if not num_judged:
            raise InputError(
                f"none of the {len(match.teacher):,} rows that {rows[0].where} and {rows[1].where} share has a grade "
                f"in {self.qrels}, joined by {gold.how}. Do the ids mean the same things? --by and --doc name other "
                "columns."
            )
        with_texts = 1 if sets[0].plan is None else 0
        row_ids = rows[with_texts].row_ids[matched_rows[with_texts]]
        judged_ids = row_ids[gold.columns[GOLD].is_valid().to_numpy(zero_copy_only=False)]
        return gold, lexical_scores([(sets[with_texts], judged_ids)], self._storage, notes)


def _refuse_other_labels(sets: Sequence[LabelSet], options: JudgingOptions) -> None:
    """
    Raises:
        UsageError: `--label` names a column, and no set is a file.
    """
    if options.label != DEFAULT_LABEL and all(labels.plan is not None for labels in sets):
        raise UsageError(
            f"--label {options.label}: names the column of a label file, and {sets[0].where} is a run, whose grades "
            f"are in column `{DEFAULT_LABEL}`. Leave the option out."
        )


def _refuse_other_queries(sets: Sequence[LabelSet], options: JudgingOptions) -> None:
    """
    Raises:
        UsageError: `--by` names another column than that of the runs' query ids, and gold is their own input.
    """
    for labels in sets:
        if labels.plan is None:
            return
        own = labels.plan.facts.columns.query_id
        if options.by not in (None, own):
            raise UsageError(
                f"--by {options.by}: {labels.where} is a run, judged by its own input, whose query ids are in column "
                f"`{own}`. Leave the option out."
            )


def with_columns_of_owner(sets: Sequence[LabelSet], options: JudgingOptions, storage: Storage) -> JudgingOptions:
    """Options that name, where nobody does, the columns of the job whose own input the qrels are: outputs of other
    jobs, such as scores of the same pairs, are judged by them too.
    """
    columns = columns_of_owner((labels.plan for labels in sets), str(options.qrels), storage)
    if columns is None:
        return options
    return replace(
        options,
        grade=options.grade or columns.gold,
        by=options.by or columns.query_id,
        doc=columns.doc_id if options.doc == DEFAULT_DOC else options.doc,
    )


def load_pairs(sets: Sequence[LabelSet], options: JudgingOptions, storage: Storage) -> PairGrades:
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
        may_lack=options.may_lack or any(labels.plan is None for labels in sets),
        grade_map=options.grade_map,
        further=[*gold_columns(chain.from_iterable(labels.columns for labels in sets)), *SELECTION_COLUMNS],
    )
    release_unused()
    pairs = grades_by_pair(qrels, options.duplicates, str(options.qrels))
    columns = {name: column for name, column in pairs.columns.items() if name not in SELECTION}
    return replace(pairs, columns=columns, notes=selection_notes(pairs.columns))


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
    if path is None:
        return []
    if is_url(path):
        return [path]
    return [path, *glob.glob(path, recursive=True)]  # noqa: PTH207 (an absolute pattern is beyond Path.glob)


def scale_of(
    sets: Sequence[LabelSet], seen: set[int], options: JudgingOptions, *, advice: str = ""
) -> tuple[int, list[str]]:
    """K: of the runs, of distributions, as given, or one more than the highest grade, which a note says.

    Args:
        advice: what else brings sets of different scales to one.
    """
    scales: dict[str, int] = {}
    highest = 0
    for labels in sets:
        if labels.kind == "ranking":
            continue
        if labels.grades is not None:
            scales[labels.where] = labels.grades
            if labels.label_map is not None:
                scales[labels.where] = max(labels.label_map.values()) + 1
            continue
        for part in labels.parts():
            if "probs" in part.schema.names:
                scales[labels.where] = pc.list_value_length(part["probs"].drop_null()[:1])[0].as_py()
            highest = max(highest, *grades_seen(part["grade"]), 0)
    listed = ", ".join(f"{where} has {grades} grades" for where, grades in scales.items())
    if len(set(scales.values())) > 1:
        raise InputError(
            f"labels are on different scales ({listed}). Bring them to one with --map-labels OLD=NEW,…, for instance "
            f"{_example_map(scales.values())}: it maps every judge but those of as many grades as the new scale has."
            f"{advice}"
        )
    if scales and options.grades not in (None, *scales.values()):
        raise UsageError(f"--grades {options.grades}: {listed}.")
    if scales:
        return next(iter(scales.values())), []
    if options.grades is not None:
        return options.grades, []
    highest_gold = max(seen, default=0)
    if all(labels.kind == "ranking" for labels in sets):
        highest = highest_gold
    return _scale_of_grades(highest, highest_gold)


def _example_map(scales: Collection[int]) -> str:
    """A map of the largest scale to the smallest: the upper half is 1 where that has two grades, else cut above."""
    largest, smallest = max(scales), min(scales)
    new = [int(2 * grade >= largest) if smallest == 2 else min(grade, smallest - 1) for grade in range(largest)]
    return ",".join(f"{old}={grade}" for old, grade in enumerate(new))


def _scale_of_grades(highest: int, highest_gold: int) -> tuple[int, list[str]]:
    """K and a note of it, where the highest label and the highest gold grade are all that is known."""
    grades = max(2, highest + 1, highest_gold + 1)
    if grades > MOST_GRADES:
        raise InputError(
            f"labels go up to {highest} and gold grades up to {highest_gold}: more than {MOST_GRADES} grades are no "
            "scale. Are --label and --grade the right columns? Else bring both to one scale with --map and "
            "--map-labels."
        )
    note = f"the scale is taken to be 0 to {grades - 1}, after the highest grade there is; --grades sets it"
    if highest != highest_gold:
        note += f". Labels go up to {highest}, gold grades to {highest_gold}: {TWO_SCALES}"
    return grades, [note]


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
    judged: Sequence[tuple[LabelSet, np.ndarray]], storage: Storage, notes: list[str]
) -> np.ndarray | None:
    """BM25 of some rows of runs, float64 [N]; None where it can't be had, and why not among the notes.

    Args:
        judged: runs with row ids of theirs; a label file has no texts.
    """
    pairs: list[Pair] = []
    try:
        if sum(len(row_ids) for _, row_ids in judged) > MOST_LEXICAL:
            raise InputError(f"of more than {MOST_LEXICAL:,} rows it would take long")
        for labels, row_ids in judged:
            if labels.plan is None:
                raise InputError("the texts of these labels are not known")
            pairs += run_pairs(labels.where, labels.plan, storage, row_ids)
    except (InputError, ManifestError) as exc:
        notes.append(f"no BM25 baseline: {exc}")
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
        for labels in sets:
            if labels.kind == "run":
                continue
            splits = _splits_of(labels, storage)
            if isinstance(splits, str):
                self.unknown[labels.where] = splits
                continue
            self.students.append(labels.where)
            self._sides_of += [_side_of(split, labels, storage) for split in splits]
            if any(split.learned_queries is None for split in splits):
                self.assumed = [*(self.assumed or ()), labels.where]
        if self.students and side is None:
            self.side = "test"
        if side not in (None, "all") and not self.students:
            why = "; ".join(f"{path}: {text}" for path, text in self.unknown.items()) or "none is a student's"
            raise UsageError(f"--side {side}: the split of no set is known ({why}). Leave it out to judge all rows.")

    def rows_of_side(self, where: str, query_ids: pa.Array) -> pa.Array:
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
        if self.side == "all":
            return pa.array(np.arange(len(side_N)))
        return pa.array(np.flatnonzero(side_N == _NAMES.index(self.side)))

    def parts(self, where: str, whole: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """The rows of a set that are on the side."""
        self.rows.pop(where, None)  # a set is read several times
        for part in whole():
            if "query_id" not in part.schema.names:
                raise UsageError(f"{where}: has no query ids, so the side of its rows is not known. See --by.")
            yield part.take(self.rows_of_side(where, part["query_id"]))

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
    judged = {labels.where for labels in sets}
    others = [path for path in students if path not in judged]
    opened = [label_set(open_run_labels(path, storage, allow_partial=True)) for path in others]
    sides = Sides([*sets, *opened], side, storage)
    if sides.students:
        for labels in sets:
            labels.parts = partial(sides.parts, labels.where, labels.parts)
    return sides


def _splits_of(labels: LabelSet, storage: Storage) -> list[SplitFacts] | str:
    """The splits of the student that made the scores, or why they are not known."""
    if labels.kind == "file":
        return "a label file does not say whether what made it learned from these rows"
    if labels.kind == "ranking" and labels.plan is None:
        return "a ranking does not say whether what made it learned from these rows"
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
    if is_url(path):
        return path, "a server does not say which rows its model learned from"
    is_student = manifest.provenance.get("kind") != "reranker"
    try:
        data = Path(path, "manifest.json" if is_student else HUB_RECORD_NAME).read_bytes()
    except OSError:
        if is_student:
            return path, f"its student is not at {path} any more, so nobody knows which rows trained it"
        return path, f"{path} does not say which rows its model learned from"
    made_by = (engine.get("details", {}).get("manifest_sha256") for engine in manifest.engines)
    if sha256_bytes(data) not in made_by:
        return path, f"the student at {path} is another one by now, so nobody knows which rows trained it"
    return path, json.loads(data)


def _lineage(manifest: dict[str, Any], *, seen: set[Path]) -> list[SplitFacts]:
    """The split of a student or bundle, and those of the students that it starts from; empty where it has none."""
    of_bundle = manifest.get("lineage")
    split = (of_bundle or manifest).get("split")
    if not isinstance(split, dict):
        return []
    splits = [checked(SplitFacts, split)]
    student = of_bundle["student"] if of_bundle else manifest
    base = Path(str((student.get("model") or {}).get("reference"))).resolve()
    if base not in seen and (base / "student.json").is_file():
        splits += _lineage(json.loads((base / "manifest.json").read_bytes()), seen={*seen, base})
    return splits


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


def named_path(argument: str) -> tuple[str | None, str]:
    """Name and path of `NAME=PATH`; None and the path of anything else."""
    # a folder may be called `date=2026-11-20`
    match = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    if match is None:
        return None, argument
    return match["name"], match["path"]


def compare_sets(arguments: Sequence[str], options: JudgingOptions, storage: Storage) -> ComparedSets:
    """Compare every set with the teacher: the set of that name, else the first that is no student's output.

    Args:
        arguments: two or more of `PATH` or `NAME=PATH`.
    Raises:
        UsageError: two sets of one name, and see `compare_named`.
    """
    paths: dict[str, str] = {}
    for argument in arguments:
        name, path = named_path(argument)
        name = name or path
        if name in paths:
            raise UsageError(f"LABELS: two sets are called {name}. Name them apart: NAME=PATH.")
        paths[name] = path
    return compare_named(paths, None, options, storage)


def compare_named(
    paths: Mapping[str, str], teacher: str | None, options: JudgingOptions, storage: Storage
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
    _refuse_other_labels(list(named.values()), options)
    teacher = teacher or _teacher_of(named)
    named = {teacher: named.pop(teacher), **named}
    sets = list(named.values())
    ranking = next((labels.where for labels in sets if labels.kind == "ranking"), None)
    if ranking is not None:
        raise UsageError(
            f"{ranking}: its scores only rank, so there are no grades to compare. Judge it alone, or compare rankings "
            "with `relabel systems`."
        )
    if options.qrels is None:
        _refuse_input(sets, storage)
    sides = cut_sets(sets, options.side, storage, students=options.students)
    golds = None if options.qrels is None else Golds(sets, options, storage)
    seen = golds.seen if golds else set()
    grades, notes = scale_of(sets, seen, options)
    check_scale(seen, grades, where=str(options.qrels), option="--map")
    gathered = (gather(labels.parts(), grades=grades, where=labels.where, option="--map-labels") for labels in sets)
    ours = next(gathered)
    comparisons = []
    for (name, labels), theirs in zip(list(named.items())[1:], gathered, strict=True):
        pair = (sets[0], labels)
        rows = (ours, theirs)
        match = match_rows(ours, theirs, is_same_input=is_same_input(*pair))
        if not len(match.teacher):
            sides.check()
            raise InputError(_nothing_shared(rows, match))
        lexical_notes: list[str] = []
        gold, lexical = golds.of_both(pair, rows, match, lexical_notes) if golds else (None, None)
        comparison = compare(
            ours,
            theirs,
            match,
            gold,
            grades=grades,
            resamples=options.resamples,
            seed=options.seed,
            pass_at=options.pass_at,
            lexical=lexical,
            qrels=str(options.qrels),
        )
        comparison.notes.extend(lexical_notes)
        comparisons.append(
            ComparedStudent(
                **vars(comparison),
                teacher=teacher,
                student=name,
                joined_by=gold and gold.how,
                gates=judge_gates(options.gates, *_figures(comparison)),
            )
        )
    verdicts = chain.from_iterable(student.gates for student in comparisons)
    return ComparedSets(
        sets=[_set_facts(name, labels, is_teacher=name == teacher) for name, labels in named.items()],
        side=sides,
        qrels=options.qrels,
        grades=grades,
        resamples=options.resamples,
        seed=options.seed,
        comparisons=comparisons,
        notes=[
            *(golds.notes if golds else ()),
            *chain.from_iterable(labels.notes for labels in sets),
            *notes,
        ],
        exit_code=_exit_code(verdicts),
    )


def _refuse_input(sets: Sequence[LabelSet], storage: Storage) -> None:
    """
    Raises:
        UsageError: a set is the input of a run among them, whose grades are gold.
    """
    for run, other in itertools.permutations(sets, 2):
        if run.plan is not None and other.plan is None and own_input(run.plan, other.where, None, storage):
            raise UsageError(
                f"{other.where}: is the input of {run.where}, so its grades are gold, not labels of another judge: "
                f"give it as --qrels {other.where}"
            )


def _teacher_of(named: Mapping[str, LabelSet]) -> str:
    """The set that is called so, else the first that is no student's output, else the first."""
    if TEACHER in named:
        return TEACHER
    for name, labels in named.items():
        if labels.kind != "student" and name != "student":
            return name
    return next(iter(named))


def is_same_input(teacher: LabelSet, student: LabelSet) -> bool:
    """Whether two runs labelled the same files, so that their rows have the same ids."""
    if teacher.plan is None or student.plan is None:
        return False
    return not changed_files(teacher.plan.files, tuple(student.plan.files))


def _nothing_shared(rows: Sequence[Labelled], match: Match) -> str:
    first, second = rows
    begins = " ".join(
        f"{labelled.where} begins with {first_pairs(labelled.query_ids, labelled.doc_ids)}." for labelled in rows
    )
    return (
        f"{first.where} and {second.where} have no row in common: {len(first.grades):,} and {len(second.grades):,} "
        f"labels were compared by {match.how}. {begins} Do the ids mean the same things? --by and --doc name other "
        "columns of a file."
    )


def _set_facts(name: str, labels: LabelSet, *, is_teacher: bool) -> dict[str, Any]:
    """A set for the result: what it is of, its name and its part."""
    return {
        **labels.origin,
        "name": name,
        "role": "teacher" if is_teacher else "student",
        "path": labels.where,
        "kind": labels.kind,
        "quarantined": labels.num_quarantined,
    }


def _figures(
    comparison: StudentComparison,
) -> tuple[dict[str, float | None], dict[str, float | None] | None]:
    """What gates may name: the student's figures by gold grades and against its teacher (`teacher.kl`); and the
    teacher's.
    """
    against_teacher = {f"{TEACHER}.{name}": figure.value for name, figure in comparison.against_teacher.items()}
    gold = comparison.against_gold
    if gold is None:
        return against_teacher, None
    student = {name: figure.value for name, figure in gold.student.figures.items()}
    teacher = {name: figure.value for name, figure in gold.teacher.figures.items()}
    return {**student, **against_teacher}, teacher
