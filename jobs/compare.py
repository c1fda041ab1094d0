"""Compares two runs end to end, with gold grades where there are any."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate import Golds, JudgingOptions, Sides, cut_sets, run_pairs
from relabel.jobs.output import Exit
from relabel.jobs.sections import (
    Block,
    Cell,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Remarks,
    Section,
    Series,
    Table,
    as_text,
    both_table,
    cell_text,
    confusion_table,
    difference_text,
    figures_plot,
    figures_table,
    level_text,
    resampled_text,
    top_texts,
    unjudged_text,
)
from relabel.manifests.errors import InputError, RelabelError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.forms import refuse_job_file
from relabel.manifests.gold import GOLD, GoldRows, check_scale, parse_map
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import LabelSet, gather, is_run, label_set, put_together
from relabel.manifests.labels import LABELS, QUARANTINE, texts_of
from relabel.manifests.metrics.comparison import (
    BY_IDS,
    BY_ROW,
    PAIRED,
    Labelled,
    Match,
    PairedRows,
    PairedStatistics,
    judge_both,
    match_rows,
    paired_rows,
)
from relabel.manifests.metrics.evaluation import BothByGold, Evaluation
from relabel.manifests.metrics.judged import title_of, with_columns
from relabel.manifests.metrics.metric import Difference, MetricValue
from relabel.manifests.plan import recipe_differences
from relabel.manifests.records import plain
from relabel.manifests.run_labels import RunLabels, open_run_labels
from relabel.manifests.secrets import shortened

# ------------------------------------------------------------------------------
# Which rows two runs share, the rows whose grade changed most, and the queries whose scores changed most.


def open_both(
    first: str, second: str, storage: Storage, *, allow_partial: bool
) -> tuple[RunLabels, RunLabels, str, list[str]]:
    """The two runs, checked to be comparable; how rows of both are known to be the same, and remarks on it: by row
    where both labelled the very same input, else by ids.

    Raises:
        UsageError: one run twice.
        InputError: not a run, or runs of different scales.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    if place_of(first).rstrip("/") == place_of(second).rstrip("/"):
        raise UsageError(f"{first} and {second} are one run. Name two outputs.")
    for path in (first, second):
        is_missing = not is_url(path) and not Path(path).exists()  # which opening it reports
        if not is_missing and not is_run(path, storage):
            refuse_job_file(path)
            raise InputError(
                f"{path}: no run's output folder. `relabel evaluate` compares label files with each other."
            )
    ours, theirs = (open_run_labels(path, storage, allow_partial=allow_partial) for path in (first, second))
    if ours.grades != theirs.grades:
        raise InputError(
            f"{first} has {ours.grades} grades, {second} {theirs.grades}: their rows cannot be compared. "
            "Label with one scale, or judge each by gold grades: relabel evaluate RUN --qrels FILE --map-labels "
            "OLD=NEW,…"
        )
    changed = changed_files(ours.plan.files, tuple(theirs.plan.files))
    ids = [(run.plan.facts.columns.query_id, run.plan.facts.columns.doc_id) for run in (ours, theirs)]
    if not changed and ids[0] == ids[1]:
        return ours, theirs, BY_ROW, []
    others = f"they read ids from other columns ({ids[0]} and {ids[1]})"
    why = f"their inputs differ ({changed[0]})" if changed else others
    return ours, theirs, BY_IDS, [f"rows are matched by query_id and doc_id, since {why}"]


@dataclass(frozen=True)
class RowCounts:
    """All rows of two runs by what each has of them: a label, a place in quarantine, or nothing.

    Args:
        both: labelled by both.
        only_a, only_b: labelled by one, and absent from the other or in quarantine there.
        repeated: rows beyond the first of pairs that occur several times in both runs.
    """

    both: int
    labelled_a: int
    labelled_b: int
    only_a: int
    only_b: int
    quarantined_a_only: int
    quarantined_b_only: int
    quarantined_both: int
    quarantined_elsewhere_absent: int
    repeated: int

    def notes(self) -> list[str]:
        """A remark on each group of rows that is left out."""
        texts = {
            "rows that only run A has, left out": self.only_a,
            "rows that run A alone has in quarantine, left out": self.quarantined_a_only,
            "rows that only run B has, left out": self.only_b,
            "rows that run B alone has in quarantine, left out": self.quarantined_b_only,
            "rows in quarantine in one run and absent from the other": self.quarantined_elsewhere_absent,
            "pairs that occur several times in both runs are matched in order; rows beyond the first": self.repeated,
        }
        return [f"{text}: {count:,}" for text, count in texts.items() if count]


def match_runs(
    runs: Sequence[RunLabels], labels: Sequence[Labelled], sides: Sides, *, is_same_input: bool
) -> tuple[Match, RowCounts]:
    """The rows that both runs labelled, and all rows by what each run has of them.

    Args:
        labels: of each run, on the side to compare.
    """
    all_a, all_b = (_with_quarantined(run, own, sides) for run, own in zip(runs, labels, strict=True))
    match = match_rows(all_a, all_b, is_same_input=is_same_input)
    has_label_a = _has_label(all_a)
    has_label_b = _has_label(all_b)
    is_a = has_label_a[match.teacher]
    is_b = has_label_b[match.student]
    # both are in the order of row ids, so a label's place is the number of labels before it
    place_a = (np.cumsum(has_label_a) - 1)[match.teacher[is_a & is_b]]
    place_b = (np.cumsum(has_label_b) - 1)[match.student[is_a & is_b]]
    labelled_a, labelled_b = (len(own.grades) for own in labels)
    only_a = labelled_a - int(is_a.sum())
    only_b = labelled_b - int(is_b.sum())
    num_unmatched = all_a.rows.num_rows + all_b.rows.num_rows - 2 * len(is_a)
    counts = RowCounts(
        both=int((is_a & is_b).sum()),
        labelled_a=labelled_a,
        labelled_b=labelled_b,
        only_a=only_a,
        only_b=only_b,
        quarantined_a_only=int((~is_a & is_b).sum()),
        quarantined_b_only=int((is_a & ~is_b).sum()),
        quarantined_both=int((~is_a & ~is_b).sum()),
        quarantined_elsewhere_absent=num_unmatched - only_a - only_b,
        repeated=match.num_repeated,
    )
    return Match(match.how, place_a, place_b, match.num_repeated), counts


def _has_label(rows: Labelled) -> np.ndarray:
    return np.asarray(rows.rows["grade"].is_valid().to_numpy(zero_copy_only=False))


def _with_quarantined(run: RunLabels, labels: Labelled, sides: Sides) -> Labelled:
    """All rows of a run in their order, to be matched; those in quarantine have no grade."""
    ids = pa.schema([labels.rows.schema.field(name) for name in ("row_id", "query_id", "doc_id")])
    parts = [labels.rows.select([*ids.names, "grade"])]
    for file in run.found.quarantine:
        lost = run.folder.table(file, QUARANTINE, ids.names).cast(ids).combine_chunks()
        parts += lost.take(sides.rows_of_side(run.root, lost["query_id"].combine_chunks())).to_batches()
    rows = put_together(parts)
    return Labelled(run.root, rows.take(pa.array(np.argsort(rows["row_id"].to_numpy()))), None)


# ------------------------------------------------------------------------------
# Queries that moved: those whose mean score changed most, with what became of their order.


TINY = 1e-6
"""Changes below this are float32's."""


def _rounded(value: Any) -> Any:
    """A figure as JSON has it: float to 6 digits, NaN as null, all others as they are."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else round(value, 6)


@dataclass(frozen=True)
class MovedQueries:
    """How many queries moved.

    Args:
        queries: all of them; of these `moved` have another mean score, `up` a higher and `down` a lower one.
        top_changed: with other documents in their top `depth`.
        first_changed: with another first document.
        moved_most: the largest changes first: the query's id, and all that `PairedStatistics.moves` has of it.
    """

    queries: int
    moved: int
    up: int
    down: int
    top_changed: int
    first_changed: int
    depth: int
    moved_most: list[dict[str, Any]]


def moved_queries(
    moves: Mapping[str, np.ndarray], names: pa.LargeBinaryArray, count: int, *, depth: int
) -> MovedQueries:
    """How many queries moved, and so many of them, the largest change first.

    Args:
        names: the queries' ids.
        depth: of the top that was compared.
    """
    change_G = moves["change"]
    is_moved_G = np.abs(change_G) > TINY
    shown = [place for place in np.argsort(-np.abs(change_G), kind="stable")[:count] if is_moved_G[place]]
    furthest = [
        {
            "query_id": name,
            **{key: _rounded(values_G[query].item()) for key, values_G in moves.items()},
        }
        for query, name in zip(shown, texts_of(names.take(pa.array(shown, pa.int64()))), strict=True)
    ]
    return MovedQueries(
        queries=len(change_G),
        moved=int(is_moved_G.sum()),
        up=int((change_G > TINY).sum()),
        down=int((change_G < -TINY).sum()),
        top_changed=int((moves["entered_top"] > 0).sum()),
        first_changed=int(moves["first_changed"].sum()),
        depth=depth,
        moved_most=furthest,
    )


# ------------------------------------------------------------------------------
# Rows whose grade changed, the largest changes first, with their texts rejoined through the run's input and both
# answers' reasoning.


TEXT_CHARACTERS = 1000
"""Shown of a query, a document or a reasoning."""


FILE = "file"


def with_files(labels: LabelSet, run: RunLabels) -> LabelSet:
    """A run's labels with the further column `file`: in which of the run's files each is."""
    file_N = np.repeat(np.arange(len(run.found.labels)), [file.rows for file in run.found.labels])

    def parts() -> Iterator[pa.RecordBatch]:
        start = 0
        for part in labels.parts():
            yield with_columns(part, {FILE: pa.array(file_N[start : start + part.num_rows])})
            start += part.num_rows

    return replace(labels, parts=parts)


@dataclass(frozen=True)
class ShownLabel:
    """What one run says of a row; the reasoning is cut."""

    grade: int | None
    expected_grade: float | None
    probs: list[float] | None
    reasoning: str | None


@dataclass(frozen=True)
class Flip:
    """A row whose grade changed: its numbers in both runs, its texts where they can be read, and both labels."""

    row_a: int
    row_b: int
    query_id: str
    doc_id: str
    query: str | None
    document: str | None
    change: float
    a: ShownLabel
    b: ShownLabel

    @property
    def row(self) -> str:
        """The row in words."""
        return str(self.row_a) if self.row_a == self.row_b else f"{self.row_a}, {self.row_b}"


@dataclass(frozen=True)
class Flips:
    """Rows that changed their grade: how many, and the largest changes."""

    rows: int
    up: int
    down: int
    examples: list[Flip]


def examples(
    runs: Sequence[RunLabels],
    labels: Sequence[Labelled],
    places: Sequence[np.ndarray],
    change: Sequence[float],
    storage: Storage,
) -> tuple[list[Flip], list[str]]:
    """Rows with both labels and their texts, and remarks: texts are left out, with the reason, where they can't be read
    any more.

    Args:
        labels: of each run, with `with_files`.
        places: of the rows in these.
        change: of each row.
    """
    if not change:
        return [], []
    ids_a, ids_b = (own.row_ids[rows_N] for own, rows_N in zip(labels, places, strict=True))
    try:
        pairs = {pair.row_id: pair for pair in run_pairs(runs[0].root, runs[0].plan, storage, ids_a)}
        notes = []
    except RelabelError as exc:
        pairs = {}
        notes = [f"texts of the examples are left out: {exc}"]
    labels_a, labels_b = (
        _labels_in(run, set(own.rows[FILE].take(pa.array(rows_N)).to_pylist()))
        for run, own, rows_N in zip(runs, labels, places, strict=True)
    )
    flips = list[Flip]()
    for row_a, row_b, step in zip(ids_a.tolist(), ids_b.tolist(), change, strict=True):
        pair = pairs.get(row_a)
        flips.append(
            Flip(
                row_a=row_a,
                row_b=row_b,
                query_id=labels_a[row_a]["query_id"],
                doc_id=labels_a[row_a]["doc_id"],
                query=_cut(pair.query) if pair else None,
                document=_cut(pair.document) if pair else None,
                change=round(step, 6),
                a=_shown(labels_a[row_a]),
                b=_shown(labels_b[row_b]),
            )
        )
    return flips, notes


def _labels_in(run: RunLabels, files: set[int]) -> dict[int, dict[str, Any]]:
    """The labels of some files, by row id."""
    columns = ["row_id", "query_id", "doc_id", "grade", "expected_grade", "probs", "reasoning"]
    labels: dict[int, dict[str, Any]] = {}
    for number in files:
        table = run.folder.table(run.found.labels[number], LABELS, columns, check_bytes=False)
        for row in table.to_pylist():
            labels[row["row_id"]] = row
    return labels


def _shown(label: dict[str, Any]) -> ShownLabel:
    return ShownLabel(
        grade=label["grade"],
        expected_grade=label["expected_grade"],
        probs=label["probs"],
        reasoning=_cut(label["reasoning"]),
    )


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + " …"


# ------------------------------------------------------------------------------
# The result of `relabel compare`, and its sections for terminal and page. Differences are run B minus run A.


SHOWN = 60
"""Characters of a query or document in a table."""


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    path: str
    name: str
    labeler: str
    model: str | None
    fingerprint: str
    labelled: int
    quarantined: int


@dataclass(frozen=True)
class ComparedByGold:
    """Both runs by gold grades.

    Args:
        judged, unjudged, gold_null: matched rows with a grade, without one, with a null one.
        queries: that have a judged row.
        a, b, difference: figures of each run, and B minus A.
        only_a_right, only_b_right: rows where one run alone is right.
    """

    qrels: str
    joined_by: str
    judged: int
    unjudged: int
    gold_null: int
    queries: int
    a: Evaluation
    b: Evaluation
    difference: Mapping[str, Difference]
    only_a_right: int
    only_b_right: int


@dataclass(frozen=True)
class ComparedRuns:
    """All of what `compare_runs` finds.

    Args:
        differences: parts of the recipe that differ, each with its differing names.
        matched_by: how rows were matched, in words.
        side: of a split; all rows where no run is a student's.
        confusion: rows by grade of A, columns by grade of B.
        gold: None without gold grades.
        html: the page that was written.
    """

    a: ComparedRun
    b: ComparedRun
    differences: Mapping[str, list[str]]
    matched_by: str
    grades: int
    side: Sides
    counts: RowCounts
    figures: Mapping[str, MetricValue]
    confusion: list[list[int]]
    gold: ComparedByGold | None
    flips: Flips
    queries: MovedQueries
    resamples: int
    seed: int
    notes: list[str]
    html: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return {**plain(self), "exit_code": int(Exit.DONE)}

    def lines(self) -> list[str]:
        """The result for people."""
        return [as_text(chain.from_iterable(section.blocks for section in comparison_sections(self)))]


def comparison_sections(result: ComparedRuns) -> list[Section]:
    """The comparison for a terminal or a page: verdicts first."""
    return [
        Section("matched", "Rows", [*top_texts(verdicts_of(result), result.side), _facts(result)]),
        Section("figures", "Figures", _figures(result)),
        Section("gold", "Both against gold", _gold(result.gold) if result.gold else []),
        Section("flips", "Flips", _flips(result.flips)),
        Section("queries", "Queries that moved", _queries(result.queries)),
        Section("remarks", "Remarks", [Remarks(result.notes)] if result.notes else []),
    ]


def verdicts_of(result: ComparedRuns) -> list[str]:
    """Whether B differs from A by gold, and both from the baselines; without gold, how far they agree."""
    gold = result.gold
    if gold is None:
        agreement = result.figures["agreement"]
        interval = "no interval" if agreement.low is None else f"{agreement.low:.4f} to {agreement.high:.4f}"
        return [f"B against A: equal grades in {cell_text(agreement.value)} of {agreement.over:,} rows ({interval})"]
    return [
        difference_text("B against A, by gold", gold.difference, gold.b),
        level_text(gold.a, who="A: "),
        level_text(gold.b, who="B: "),
    ]


def _facts(result: ComparedRuns) -> Facts:
    counts = result.counts
    queries = result.queries.queries
    parts = [f"{part} ({', '.join(names)})" if names else part for part, names in result.differences.items()]
    rows: list[tuple[str, Cell]] = [
        ("A", _run_text(result.a)),
        ("B", _run_text(result.b)),
        ("made", f"differently in {'; '.join(parts) or 'nothing that either run records'}"),
        (
            "both",
            f"{counts.both:,} rows of {queries:,} queries, by {result.matched_by}; {result.grades} grades",
        ),
        ("one", f"{counts.only_a:,} rows that only A has, {counts.only_b:,} that only B has"),
        (
            "quarantined",
            f"{counts.quarantined_a_only:,} in A alone, {counts.quarantined_b_only:,} in B alone, "
            f"{counts.quarantined_both:,} in both, {counts.quarantined_elsewhere_absent:,} in one and absent "
            "from the other",
        ),
        ("resampled", resampled_text("queries", queries, result.resamples, result.seed)),
    ]
    return Facts("The two runs", rows)


def _run_text(run: ComparedRun) -> str:
    return f"{run.path}: {run.name}, {run.labeler}, {run.labelled:,} rows labelled"


def _figures(result: ComparedRuns) -> list[Block]:
    grades = list(map(str, range(result.grades)))
    ours = [sum(row) for row in result.confusion]
    theirs = [sum(row) for row in zip(*result.confusion, strict=True)]
    return [
        figures_table("B and A", result.figures, title=lambda figure: title_of(figure, PAIRED)),
        confusion_table(result.confusion, "A", "B"),
        Plot(
            title="Grades of both",
            form="bars",
            series=[Series("A", grades, ours), Series("B", grades, theirs)],
            label="grade",
            value="rows",
        ),
    ]


def _gold(gold: ComparedByGold) -> list[Block]:
    unjudged = unjudged_text({"unjudged": gold.unjudged, "gold_null": gold.gold_null})
    judged = f"{gold.judged:,} rows, joined by {gold.joined_by}; {unjudged}"
    right = f"A alone {gold.only_a_right:,}, B alone {gold.only_b_right:,} rows"
    return [
        Facts("", [("gold", gold.qrels), ("judged", judged), ("right", right)]),
        both_table(
            caption=f"both against {gold.qrels}",
            names=("A", "B"),
            first=gold.a,
            second=gold.b,
            difference=gold.difference,
        ),
        figures_plot("A and B by gold grades", {"A": gold.a.figures, "B": gold.b.figures}),
    ]


def _flips(flips: Flips) -> list[Block]:
    head = ("row", "A", "B", "change", "query", "document")
    rows: list[list[Cell]] = []
    folds: list[Fold] = []
    for flip in flips.examples:
        query = flip.query or flip.query_id
        document = flip.document or flip.doc_id
        change = f"{flip.change:+.3f}"
        texts = [shortened(" ".join(text.split()), SHOWN) for text in (query, document)]
        rows.append([flip.row, flip.a.grade, flip.b.grade, change, *texts])
        facts: list[tuple[str, Cell]] = [
            ("query", query),
            ("document", document),
            *_label_facts("A", flip.a),
            *_label_facts("B", flip.b),
        ]
        folds.append(Fold(f"row {flip.row}, {change}: {texts[0]}", [Facts("", facts)]))
    text = f"flips: {flips.rows:,} rows changed their grade, {flips.up:,} up, {flips.down:,} down"
    blocks: list[Block] = [Paragraph(text)]
    if rows:
        blocks.append(Table("the largest flips", head, rows))
    return [*blocks, *folds]


def _label_facts(letter: str, label: ShownLabel) -> list[tuple[str, Cell]]:
    facts: list[tuple[str, Cell]] = []
    if label.probs is not None:
        facts.append((f"{letter}: p", " · ".join(f"{p:.3f}" for p in label.probs)))
    if label.reasoning is not None:
        facts.append((f"{letter}: reasoning", label.reasoning))
    return facts


def _queries(moved: MovedQueries) -> list[Block]:
    depth = moved.depth
    text = (
        f"queries: {moved.moved:,} of {moved.queries:,} moved, {moved.up:,} up, {moved.down:,} down; "
        f"{moved.top_changed:,} have other documents in their top {depth}, {moved.first_changed:,} another first"
    )
    head = ("query", "rows", "mean A", "mean B", "change", "tau", f"new in top {depth}")
    rows: list[list[Cell]] = [
        [
            shortened(query["query_id"], SHOWN),
            query["rows"],
            query["mean_a"],
            query["mean_b"],
            f"{query['change']:+.3f}",
            query["kendall_tau"],
            f"{query['entered_top']} of {query['top']}",
        ]
        for query in moved.moved_most
    ]
    blocks: list[Block] = [Paragraph(text)]
    if rows:
        blocks.append(Table("queries that moved furthest", head, rows))
    return blocks


# ------------------------------------------------------------------------------
# Compares two runs end to end, with gold grades where there are any.


@dataclass(frozen=True)
class CompareOptions:
    """What `relabel compare` was given.

    Args:
        qrels, grade, by, doc, grade_map, duplicates, side, allow_partial: see `JudgingOptions`; no gold without
            `qrels`.
        examples, queries: flips and moved queries to show.
        depth: of the top of a query that is compared.
        html: the page to write, over one that is there with `force`.
    """

    qrels: str | None
    html: str | None
    grade: str | None
    by: str | None
    doc: str
    grade_map: str | None
    duplicates: Any
    examples: int
    queries: int
    depth: int
    resamples: int
    seed: int
    side: Any
    allow_partial: bool
    force: bool

    @property
    def judging(self) -> JudgingOptions:
        """How gold grades are read.

        Raises:
            UsageError: `grade_map` is no map.
        """
        return JudgingOptions(
            qrels=self.qrels,
            grade=self.grade,
            by=self.by,
            doc=self.doc,
            grade_map=parse_map(self.grade_map, "--map"),
            duplicates=self.duplicates,
            allow_partial=self.allow_partial,
            side=self.side,
            resamples=self.resamples,
            seed=self.seed,
        )


def compare_runs(first: str, second: str, options: CompareOptions, storage: Storage) -> ComparedRuns:
    """Compare two finished runs, A and B; differences are B minus A.

    Raises:
        UsageError: one run twice.
        InputError: not a run, different scales, no row in common, or qrels that are off.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    judging = options.judging
    ours, theirs, how, notes = open_both(first, second, storage, allow_partial=options.allow_partial)
    sets = with_files(label_set(ours), ours), with_files(label_set(theirs), theirs)
    sides = cut_sets(sets, options.side, storage)
    golds = None if options.qrels is None else Golds(sets, judging, storage)
    if golds is not None:
        check_scale(golds.seen, ours.grades, where=golds.qrels, option="--map")
    labels = [gather(labels.parts(), grades=ours.grades, where=labels.where) for labels in sets]
    first_labels, second_labels = labels
    match, counts = match_runs((ours, theirs), labels, sides, is_same_input=how == BY_ROW)
    if not counts.both:
        sides.check()
        raise InputError(
            f"{first} and {second} have no labelled row in common: {counts.labelled_a:,} and {counts.labelled_b:,} "
            f"labels were compared by {how}. Did both label the same pairs?"
        )
    rows, query_names = paired_rows(first_labels, second_labels, match, ours.grades)
    statistics = PairedStatistics(rows, len(query_names), ours.grades, depth=options.depth)
    change_N = rows.scores[1] - rows.scores[0]
    changed = np.flatnonzero(rows.grades[0] != rows.grades[1])
    furthest = changed[np.argsort(-np.abs(change_N)[changed], kind="stable")][: options.examples]
    flips, flip_notes = examples(
        runs=(ours, theirs),
        labels=labels,
        places=(match.teacher[furthest], match.student[furthest]),
        change=change_N[furthest].tolist(),
        storage=storage,
    )
    notes = [*ours.notes, *theirs.notes, *notes, *counts.notes(), *flip_notes]
    num_up = int((rows.grades[1] > rows.grades[0]).sum())
    num_down = int((rows.grades[0] > rows.grades[1]).sum())
    by_gold = None
    if golds is not None:
        gold_rows, lexical = golds.of_both(sets, labels, match, notes)
        both = judge_both(
            first_labels,
            second_labels,
            match,
            gold_rows,
            grades=ours.grades,
            resamples=options.resamples,
            seed=options.seed,
            lexical=lexical,
            qrels=golds.qrels,
        )
        by_gold = _by_gold(rows, gold_rows, both, golds.qrels)
    return ComparedRuns(
        a=_about(ours),
        b=_about(theirs),
        differences=recipe_differences(ours.plan.parts, theirs.plan.parts),
        matched_by=how,
        grades=ours.grades,
        side=sides,
        counts=counts,
        figures=statistics.figures(resamples=options.resamples, seed=options.seed),
        confusion=statistics.counts.by_group.sum(0).tolist(),
        gold=by_gold,
        flips=Flips(rows=num_up + num_down, up=num_up, down=num_down, examples=flips),
        queries=moved_queries(statistics.moves, query_names, options.queries, depth=options.depth),
        resamples=options.resamples,
        seed=options.seed,
        notes=notes,
        html=options.html,
    )


def _by_gold(rows: PairedRows, gold: GoldRows, both: BothByGold, qrels: str) -> ComparedByGold:
    gold_N = gold.columns[GOLD].fill_null(-1).to_numpy()
    is_a = rows.grades[0] == gold_N
    is_b = rows.grades[1] == gold_N
    return ComparedByGold(
        qrels=qrels,
        joined_by=gold.how,
        **gold.counts,
        queries=both.teacher.num_groups,
        a=both.teacher,
        b=both.student,
        difference=both.difference,
        only_a_right=int((is_a & ~is_b).sum()),
        only_b_right=int((~is_a & is_b).sum()),
    )


def _about(run: RunLabels) -> ComparedRun:
    return ComparedRun(
        path=run.root,
        name=run.plan.name,
        labeler=run.plan.facts.labeler.name,
        model=run.plan.facts.model,
        fingerprint=run.plan.fingerprint,
        labelled=sum(file.rows for file in run.found.labels),
        quarantined=run.found.tally.num_quarantined,
    )
