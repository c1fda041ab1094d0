"""Which search is better: compares systems' rankings by a judge's labels and the grades of a few humans.

`compare_systems` reads rankings, labels and gold, computes the figures of each query by both, and puts them together as
`manifests/metrics/prediction_powered.py` says. `unjudged_pairs` gives what the judge has still to label.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.jobs.compared_systems import (
    ComparedPair,
    ComparedSystems,
    Estimate,
    FigureDifference,
    JudgingPlan,
    SystemFigures,
    figure_title,
    pair_sentence,
)
from relabel.jobs.evaluate import (
    JudgingOptions,
    Sides,
    load_pairs,
    manifest_of_scorer,
    named_path,
    open_set,
    scale_of,
)
from relabel.manifests.errors import InputError, RelabelError, UsageError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.forms import form_by_suffix
from relabel.manifests.gold import (
    FROM_GOLD,
    GOLD,
    Duplicates,
    GradeMap,
    PairGrades,
    check_scale,
    columns_of_owner,
    grades_by_pair,
    taken,
)
from relabel.manifests.label_sets import LabelSet, is_run, label_set, no_labels, put_together
from relabel.manifests.labels import codes_of, pair_codes, texts_of
from relabel.manifests.metrics.metric import places_in_query
from relabel.manifests.metrics.prediction_powered import (
    FEWEST_FOR_DIFFERENCES,
    FEWEST_FOR_LEVELS,
    FEWEST_TO_FIT,
    PoweredMean,
    gold_needed,
    plain_mean,
    powered_mean,
)
from relabel.manifests.metrics.top import BAD, FIGURES, NDCG, PRECISION, Cut, expected_grades, ideal_gains, top_figures
from relabel.manifests.rankings import TABLES, Ranking, RankingColumns, load_rankings, refuse_run_file
from relabel.manifests.run_labels import open_run_labels

PAGE = "docs/which-search-is-better.md"
SHOWN = 5
"""Query ids in a message."""


class TooFewGoldError(InputError):
    """Humans graded none of the compared queries, or too few."""


MadeBy: TypeAlias = Literal["judge", "student", "other"]


@dataclass(frozen=True)
class SystemsOptions:
    """Options of `relabel systems`.

    Args:
        labels: the judge's.
        gold: the humans'; None where there are none.
        k: documents of a query that are looked at.
        relevant: the least grade that is relevant; None for the upper half of the scale.
        made_by: by a system's name, where its scores come from, as the user declares it.
        is_plan: name the queries that humans should judge next.
        width: half of an interval that is wanted.
        seed: of the order of these queries.
        has_table: a system is a table, so that `by` and `doc` may be of its columns alone.
    """

    labels: str
    gold: str | None = None
    k: int = 10
    relevant: int | None = None
    label: str = "grade"
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    score: str | None = None
    grades: int | None = None
    grade_map: GradeMap | None = None
    label_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    made_by: Mapping[str, MadeBy] = field(default_factory=dict)
    is_plan: bool = False
    width: float = 0.02
    seed: int = 7
    allow_partial: bool = False
    has_table: bool = False

    @property
    def columns(self) -> RankingColumns:
        """Of a ranking that is a table."""
        return RankingColumns(query=self.by or "query_id", doc=self.doc, score=self.score)

    @property
    def judging(self) -> JudgingOptions:
        """How labels and gold are read."""
        return JudgingOptions(
            qrels=self.gold,
            label=self.label,
            grade=self.grade,
            by=self.by,
            doc=self.doc,
            may_lack=self.has_table,
            grades=self.grades,
            grade_map=self.grade_map,
            label_map=self.label_map,
            duplicates=self.duplicates,
            allow_partial=self.allow_partial,
        )


# ------------------------------------------------------------------------------
# Rankings and grades on the queries that are compared.
#
# Letters: N ranked rows, G compared queries.


@dataclass(frozen=True)
class RankedRows:
    """A system's rows of the queries that are compared, the best document of each query first.

    Args:
        query: int64, 0..G-1, ascending.
        place: int64, of the row in its query, from 0.
    """

    query: np.ndarray
    place: np.ndarray
    query_ids: pa.LargeBinaryArray
    doc_ids: pa.LargeBinaryArray

    def top(self, k: int) -> RankedRows:
        """The first k of each query."""
        rows = pa.array(np.flatnonzero(self.place < k))
        return RankedRows(
            query=self.query[rows],
            place=self.place[rows],
            query_ids=self.query_ids.take(rows),
            doc_ids=self.doc_ids.take(rows),
        )


def ranked_rows(ranking: Ranking, queries: pa.LargeBinaryArray) -> RankedRows:
    """The rows of some queries.

    Args:
        queries: in the order of their ids.
    """
    query_N = pc.index_in(ranking.query_ids, value_set=queries)
    rows = pa.array(np.flatnonzero(query_N.is_valid().to_numpy(zero_copy_only=False)))
    kept_N = query_N.take(rows).to_numpy(zero_copy_only=False).astype(np.int64)
    return RankedRows(
        query=kept_N,
        place=places_in_query(kept_N, len(queries)),
        query_ids=ranking.query_ids.take(rows),
        doc_ids=ranking.doc_ids.take(rows),
    )


@dataclass(frozen=True)
class GradedTop:
    """A system's figures by query as one source of grades has them, float64 [G] each: without regard to unjudged
    documents, with all of these irrelevant, and with all of them of the highest grade.
    """

    condensed: dict[str, np.ndarray]
    worst: dict[str, np.ndarray]
    best: dict[str, np.ndarray]


class Assessor:
    """Who graded pairs: the judge, or humans.

    The best ranking of a query, by which its nDCG is measured, is of all documents with a grade. Humans grade few: of
    the others that the judge labelled it takes what humans are expected to give them, see `expected_grades`. Else nDCG
    by humans would be measured by a worse ranking than nDCG by the judge, and be another figure.

    Args:
        labels: the judge's, where humans are the assessor.
    Attributes:
        is_assessed: bool [G], the queries of which a pair has a grade.
        num_expected: int64 [G], documents of each query whose grade is expected.
    """

    def __init__(
        self, pairs: PairGrades, queries: pa.LargeBinaryArray, cut: Cut, *, labels: PairGrades | None = None
    ) -> None:
        self._pairs = pairs
        self._cut = cut
        query_M, grade_M = _graded_pairs(pairs, queries)
        self.is_assessed = np.bincount(query_M, minlength=len(queries)) > 0
        query_U = np.empty(0, dtype=np.int64)
        if labels is not None:
            query_U, grade_U = self._expected(labels, queries)
            query_M, grade_M = np.concatenate([query_M, query_U]), np.concatenate([grade_M, grade_U])
        self.num_expected = np.bincount(query_U, minlength=len(queries))
        self._ideal_G = ideal_gains(query_M, grade_M, num_queries=len(queries), cut=cut)

    def _expected(self, labels: PairGrades, queries: pa.LargeBinaryArray) -> tuple[np.ndarray, np.ndarray]:
        """Queries and expected grades of the documents that have a label alone, int64 and float64 [U]."""
        query_P = _places_of_queries(labels, queries)
        label_P = _as_floats(labels.columns[GOLD])
        rows = np.flatnonzero((query_P >= 0) & ~np.isnan(label_P))
        rows = rows[self.is_assessed[query_P[rows]]]
        query_ids = labels.queries.take(pa.array(labels.keys[rows] // len(labels.docs)))
        doc_ids = labels.docs.take(pa.array(labels.keys[rows] % len(labels.docs)))
        grade_N = _as_floats(taken(self._pairs.columns[GOLD], self._pairs.places(query_ids, doc_ids)))
        is_open_N = np.isnan(grade_N)
        if is_open_N.all():
            return np.empty(0, dtype=np.int64), np.empty(0)
        label_N = label_P[rows]
        expected_U = expected_grades(label_N[~is_open_N], grade_N[~is_open_N], label_N[is_open_N])
        return query_P[rows[is_open_N]], expected_U

    def only(self, is_kept_G: np.ndarray) -> Assessor:
        """The same, of fewer queries."""
        kept = copy.copy(self)
        kept.is_assessed = self.is_assessed & is_kept_G
        return kept

    def num_graded(self, rows: RankedRows) -> np.ndarray:
        """Documents of each query's top k that have a grade: int64 [G]."""
        is_graded_N = self._is_top(rows) & ~np.isnan(self.grades(rows))
        return np.bincount(rows.query[is_graded_N], minlength=len(self.is_assessed))

    def grades(self, rows: RankedRows) -> np.ndarray:
        """Of each row, float64 [N]; NaN where it has none."""
        return _as_floats(taken(self._pairs.columns[GOLD], self._pairs.places(rows.query_ids, rows.doc_ids)))

    def graded_top(self, rows: RankedRows, *, best: float) -> GradedTop:
        """A system's figures.

        Args:
            best: the highest grade.
        """
        grade_N = self.grades(rows)
        is_open_N = np.isnan(grade_N) & (rows.place < self._cut.k)
        fillings = (grade_N, np.where(is_open_N, 0.0, grade_N), np.where(is_open_N, best, grade_N))
        return GradedTop(*(top_figures(rows.query, one, self._ideal_G, cut=self._cut) for one in fillings))

    def is_unjudged(self, rows: RankedRows) -> np.ndarray:
        """Which rows of the top k have no grade, of the queries of which any has: bool [N]."""
        return np.asarray(self._is_top(rows) & np.isnan(self.grades(rows)))

    def num_top(self, rows: RankedRows) -> int:
        """Documents in the top k of the queries of which any has a grade."""
        return int(self._is_top(rows).sum())

    def _is_top(self, rows: RankedRows) -> np.ndarray:
        return np.asarray((rows.place < self._cut.k) & self.is_assessed[rows.query])


def _places_of_queries(pairs: PairGrades, queries: pa.LargeBinaryArray) -> np.ndarray:
    """Of each pair, the place of its query among some queries, int64 [P]; -1 where it is none of them."""
    place_Q = pc.index_in(pairs.queries, value_set=queries).fill_null(-1).to_numpy().astype(np.int64)
    return np.asarray(place_Q[pairs.keys // len(pairs.docs)])


def _graded_pairs(pairs: PairGrades, queries: pa.LargeBinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """Queries and grades of the pairs that have one, of some queries: int64 and float64 [M]."""
    query_P = _places_of_queries(pairs, queries)
    grade_P = _as_floats(pairs.columns[GOLD])
    is_used_P = (query_P >= 0) & ~np.isnan(grade_P)
    return query_P[is_used_P], grade_P[is_used_P]


def _as_floats(grades: pa.Array) -> np.ndarray:
    return np.asarray(grades.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


@dataclass(frozen=True)
class PartlyGraded:
    """A query of which humans graded some documents: `graded` of the `documents` in a system's top k, of the system of
    which they graded the smallest share.
    """

    query_id: str
    graded: int
    documents: int


@dataclass(frozen=True)
class Comparison:
    """What figures are made of: rankings by name, and who graded their documents.

    Args:
        humans: of the gold queries alone.
        in_part: queries that humans graded too little of to be gold queries.
    """

    rankings: Mapping[str, Ranking]
    rows: Mapping[str, RankedRows]
    queries: pa.LargeBinaryArray
    judge: Assessor
    humans: Assessor | None
    cut: Cut
    grades: int
    in_part: tuple[PartlyGraded, ...] = ()

    @property
    def is_gold(self) -> np.ndarray:
        """Which queries humans graded: see `gold_queries_alone`."""
        if self.humans is None:
            return np.zeros(len(self.queries), dtype=bool)
        return self.humans.is_assessed

    def unanswered(self, name: str) -> pa.LargeBinaryArray:
        """Queries that a system returns nothing for."""
        is_missing_G = np.bincount(self.rows[name].query, minlength=len(self.queries)) == 0
        return self.queries.filter(pa.array(is_missing_G))

    @property
    def num_gold(self) -> int:
        """Gold queries: see `gold_queries_alone`."""
        return int(self.is_gold.sum())


# ------------------------------------------------------------------------------
# Estimates.


@dataclass(frozen=True)
class SystemByQuery:
    """Figures of a system by query, of the judge and of humans; the latter repeat the judge's where there is no gold,
    and are not looked at.
    """

    judge: GradedTop
    humans: GradedTop


def figures_by_query(name: str, comparison: Comparison) -> SystemByQuery:
    """The figures of one system."""
    rows = comparison.rows[name]
    best = float(comparison.grades - 1)
    judge = comparison.judge.graded_top(rows, best=best)
    if comparison.humans is None:
        return SystemByQuery(judge, judge)
    return SystemByQuery(judge, comparison.humans.graded_top(rows, best=best))


def fits_weight(figure: str, num_gold: int) -> bool:
    """Whether the judge's weight is fitted: of a share of bad documents always, else from enough gold queries on."""
    return figure == BAD or num_gold >= FEWEST_TO_FIT


def _mean(figure: str, human_G: np.ndarray, judge_G: np.ndarray, is_gold_G: np.ndarray) -> Estimate:
    """The mean by humans and judge; by the judge alone without gold."""
    num_gold = int(is_gold_G.sum())
    if not num_gold:
        return _estimate(plain_mean(judge_G))
    found = powered_mean(
        human_G[is_gold_G], judge_G[is_gold_G], judge_G[~is_gold_G], is_fitted=fits_weight(figure, num_gold)
    )
    return _estimate(found)


def _estimate(found: PoweredMean) -> Estimate:
    return Estimate(
        value=float(found.value), low=float(found.low), high=float(found.high), judge_weight=float(found.weight)
    )


def _within_bounds(found: Estimate) -> Estimate:
    """A system's own figure is from 0 to 1. The correction by humans and Student's t may go beyond, and what lies there
    can't be: cutting it off takes nothing from the coverage.
    """
    return replace(
        found,
        value=min(max(found.value, 0.0), 1.0),
        low=min(max(found.low, 0.0), 1.0),
        high=min(max(found.high, 0.0), 1.0),
    )


def figure_difference(
    figure: str, names: tuple[str, str], first: SystemByQuery, second: SystemByQuery, is_gold_G: np.ndarray
) -> FigureDifference:
    """The second system minus the first.

    Args:
        names: of the two.
    """
    human_G = second.humans.condensed[figure] - first.humans.condensed[figure]
    judge_G = second.judge.condensed[figure] - first.judge.condensed[figure]
    difference = _mean(figure, human_G, judge_G, is_gold_G)
    # with gold, what the judge leaves out is an error of the judge like others, which the humans correct
    low_G = second.judge.worst[figure] - first.judge.best[figure]
    high_G = second.judge.best[figure] - first.judge.worst[figure]
    if is_gold_G.any():
        low_G = high_G = judge_G
    low = _mean(figure, second.humans.worst[figure] - first.humans.best[figure], low_G, is_gold_G)
    high = _mean(figure, second.humans.best[figure] - first.humans.worst[figure], high_G, is_gold_G)
    ends = (low.value, difference.value, high.value)
    is_decided = difference.low > 0 or difference.high < 0
    is_second_better = (difference.value > 0) != (figure == BAD)
    return FigureDifference(
        difference=difference,
        humans=_estimate(plain_mean(human_G[is_gold_G])) if is_gold_G.any() else None,
        judge=_estimate(plain_mean(judge_G)),
        lowest=min(ends),
        highest=max(ends),
        is_decided=is_decided,
        better=names[is_second_better] if is_decided else None,
    )


MOST_UNANSWERED = 0.1
"""Beyond this share of queries that a system returns nothing for, that leads the sentence: it may be all it says."""


def compared_pair(
    names: tuple[str, str],
    figures: Mapping[str, SystemByQuery],
    comparison: Comparison,
    options: SystemsOptions,
) -> ComparedPair:
    """The differences of two systems, and what nDCG says of them."""
    first, second = (figures[name] for name in names)
    is_gold_G = comparison.is_gold
    differences = {
        f"{figure}@{options.k}": figure_difference(figure, names, first, second, is_gold_G) for figure in FIGURES
    }
    needed = None
    if is_gold_G.any():
        human_G = second.humans.condensed[NDCG] - first.humans.condensed[NDCG]
        judge_G = second.judge.condensed[NDCG] - first.judge.condensed[NDCG]
        needed = gold_needed(
            human_G[is_gold_G], judge_G[is_gold_G], judge_G[~is_gold_G], width=options.width, fits=False
        )
    more = None if needed is None else needed - comparison.num_gold
    headline = differences[f"{NDCG}@{options.k}"]
    sentence = pair_sentence(
        names,
        headline,
        more,
        k=options.k,
        width=options.width,
        is_opinion=not is_gold_G.any(),
        unjudged=int((~is_gold_G).sum()),
    )
    for name in names:
        if len(comparison.unanswered(name)) > MOST_UNANSWERED * len(comparison.queries):
            sentence = f"{_unanswered_text(name, comparison)}. {sentence}"
    return ComparedPair(
        a=names[0],
        b=names[1],
        sentence=sentence,
        figures=differences,
        more_queries=more,
    )


def equal_notes(figures: Mapping[str, SystemByQuery], comparison: Comparison) -> list[str]:
    """Remarks on figures in which two systems are equal in every query, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for first, second in itertools.combinations(figures, 2):
        for reason, titles in _equal_figures((first, second), figures, comparison).items():
            found.setdefault((" and ".join(titles), reason), []).append(f"{second} - {first}")
    return [
        f"{', '.join(pairs)}: the difference in {titles} is 0 in every query, since {reason}"
        for (titles, reason), pairs in found.items()
    ]


def _equal_figures(
    names: tuple[str, str], figures: Mapping[str, SystemByQuery], comparison: Comparison
) -> dict[str, list[str]]:
    """The titles of figures in which two systems are equal in every query, by the reason."""
    by_reason: dict[str, list[str]] = {}
    k = comparison.cut.k
    for figure in FIGURES:
        first, second = (_values(figure, figures[name], comparison.is_gold) for name in names)
        if not np.array_equal(first, second):
            continue
        reason = "both have the same value in each"
        if figure in (PRECISION, BAD) and _have_same_top(names, comparison):
            reason = (
                f"both have the same documents in the top {k}, whose order does not count here; a smaller --k compares "
                "fewer"
            )
        elif (first == first[0]).all():
            reason = f"both have {first[0]:.4f} in each"
        by_reason.setdefault(reason, []).append(figure_title(f"{figure}@{k}"))
    return by_reason


def _values(figure: str, system: SystemByQuery, is_gold_G: np.ndarray) -> np.ndarray:
    """All values of a figure that its estimate is made of."""
    return np.concatenate([system.judge.condensed[figure], system.humans.condensed[figure][is_gold_G]])


def _have_same_top(names: tuple[str, str], comparison: Comparison) -> bool:
    """Whether two systems have the same documents in the top k of each query, in any order."""
    tops = [comparison.rows[name].top(comparison.cut.k) for name in names]
    query_ids = pa.concat_arrays([top.query_ids for top in tops])
    doc_ids = pa.concat_arrays([top.doc_ids for top in tops])
    first, second = np.split(pair_codes(query_ids, doc_ids), [len(tops[0].query)])
    return np.array_equal(np.sort(first), np.sort(second))


def system_figures(
    name: str, figures: SystemByQuery, comparison: Comparison, options: SystemsOptions, made_by: str | None
) -> SystemFigures:
    """A system's counts, and its levels where there are enough gold queries."""
    rows = comparison.rows[name]
    ranking = comparison.rankings[name]
    is_missing_G = np.bincount(rows.query, minlength=len(comparison.queries)) == 0
    missing = texts_of(comparison.queries.filter(pa.array(is_missing_G)))
    humans = comparison.humans
    levels = None
    if comparison.num_gold >= FEWEST_FOR_LEVELS:
        levels = {
            f"{figure}@{options.k}": _within_bounds(
                _mean(
                    figure,
                    figures.humans.condensed[figure],
                    figures.judge.condensed[figure],
                    comparison.is_gold,
                )
            )
            for figure in FIGURES
        }
    return SystemFigures(
        name=name,
        path=ranking.path,
        form=ranking.form,
        queries=len(comparison.queries) - len(missing),
        without_documents=missing,
        documents=comparison.judge.num_top(rows),
        unlabelled=int(comparison.judge.is_unjudged(rows).sum()),
        gold_documents=humans.num_top(rows) if humans else 0,
        ungraded=int(humans.is_unjudged(rows).sum()) if humans else 0,
        made_by=made_by,
        levels=levels,
    )


# ------------------------------------------------------------------------------
# Systems, labels and gold are opened, and checked to go together.


def named_paths(arguments: Sequence[str], *, fewest: int = 2) -> dict[str, str]:
    """Paths by the systems' names: `NAME=PATH`, or the file's name without its suffix.

    Raises:
        UsageError: two of one name, or fewer than `fewest`.
    """
    paths: dict[str, str] = {}
    for argument in arguments:
        name, path = named_path(argument)
        name = name or PurePosixPath(path).stem
        if name in paths:
            raise UsageError(f"SYSTEM: two systems are called {name}. Name them apart: NAME=PATH.")
        paths[name] = path
    for (first, path), (second, again) in itertools.combinations(paths.items(), 2):
        if place_of(path) == place_of(again):
            raise UsageError(f"SYSTEM: {first} and {second} are the same ranking, {path}. Name each once.")
    if len(paths) < fewest:
        raise UsageError("SYSTEM: one is named; two or more are compared.")
    return paths


def compare_systems(arguments: Sequence[str], options: SystemsOptions, storage: Storage) -> ComparedSystems:
    """Compare every two systems.

    Args:
        arguments: two or more of `PATH` or `NAME=PATH`.
    Raises:
        InputError: a file is off, ids do not go together, or there are too few gold queries.
        ManifestError: a run is unfinished, over its limit or damaged.
        UsageError: options that contradict each other.
    """
    paths = named_paths(arguments)
    unknown = [name for name in options.made_by if name not in paths]
    if unknown:
        raise UsageError(f"--made-by {unknown[0]}: no system is called so; there are {', '.join(paths)}.")
    rankings = load_rankings(paths, storage, options.columns, allow_partial=options.allow_partial)
    has_table = any(form_by_suffix(path, TABLES) is not None for path in paths.values())
    options = replace(options, has_table=has_table)
    labels = open_judge(options.labels, options, storage)
    judged = label_pairs(labels, options)
    gold = open_gold(labels, options, storage)
    grades, notes = scale_of([labels], gold.seen if gold else judged.seen, options.judging)
    check_scale(judged.seen, grades, where=options.labels, option="--map-labels")
    if gold is not None:
        check_scale(gold.seen, grades, where=str(options.gold), option="--map")
    comparison = prepare(rankings, judged, gold, grades, options)
    notes = [*labels.notes, *notes, *comparison_notes(comparison, judged, gold)]
    if gold is not None:
        notes = [*gold.notes, *notes]
    judged_so_far = comparison.is_gold
    if gold is not None and comparison.num_gold < FEWEST_FOR_DIFFERENCES:
        comparison = replace(comparison, humans=None)
    made_by = {
        name: options.made_by.get(name) or made_by_judge(ranking, labels, storage) for name, ranking in rankings.items()
    }
    figures = {name: figures_by_query(name, comparison) for name in rankings}
    pairs = [compared_pair(names, figures, comparison, options) for names in itertools.combinations(rankings, 2)]
    notes += equal_notes(figures, comparison)
    return ComparedSystems(
        labels=options.labels,
        gold=options.gold,
        k=options.k,
        relevant=comparison.cut.relevant,
        grades=grades,
        queries=len(comparison.queries),
        gold_queries=comparison.num_gold,
        is_opinion=comparison.humans is None,
        systems=[system_figures(name, figures[name], comparison, options, made_by[name]) for name in rankings],
        pairs=pairs,
        warnings=[
            *warnings_of(comparison, made_by, None if gold is None else int(judged_so_far.sum())),
            *filter(None, (learned_text(name, ranking, comparison, storage) for name, ranking in rankings.items())),
            *grade_warnings(comparison, judged, gold, options),
        ],
        notes=notes,
        plan=judging_plan(comparison, judged_so_far, pairs, options) if options.is_plan else None,
    )


def open_judge(path: str, options: SystemsOptions, storage: Storage) -> LabelSet:
    """The judge's labels.

    Raises:
        InputError: they can't be read, are a run file, or hold grades of humans that `relabel combine` took over.
    """
    try:
        return open_set(path, options.judging, storage, wants_ids=True)
    except InputError:
        refuse_run_file(path, storage, option="--labels")
        raise


def label_pairs(labels: LabelSet, options: SystemsOptions) -> PairGrades:
    """One label a pair.

    Raises:
        InputError: a pair has several, none has one, or some were taken from gold.
    """
    wanted = ("query_id", "doc_id", "grade", FROM_GOLD)
    parts = [part.select([name for name in part.schema.names if name in wanted]) for part in labels.parts()]
    rows = put_together([no_labels(), *parts])
    if options.gold is not None and FROM_GOLD in rows.schema.names and pc.any(rows[FROM_GOLD]).as_py():
        raise InputError(
            f"{labels.where}: {pc.sum(rows[FROM_GOLD]).as_py():,} of its labels are grades of humans, taken over by "
            "`relabel combine`, so that humans would be compared with themselves. Give the labels of before, or leave "
            "out --gold."
        )
    rows = rows.filter(rows["grade"].is_valid())
    if not rows.num_rows:
        raise InputError(f"{labels.where}: holds no label. Name the column of labels with --label.")
    columns = {"query_id": rows["query_id"], "doc_id": rows["doc_id"], GOLD: rows["grade"]}
    return grades_by_pair(columns, options.duplicates, labels.where)


def open_gold(labels: LabelSet, options: SystemsOptions, storage: Storage) -> PairGrades | None:
    """The humans' grades; None without gold.

    Raises:
        InputError: they can't be read, or are a run file.
    """
    if options.gold is None:
        return None
    judging = options.judging
    columns = columns_of_owner([labels.plan], options.gold, storage)
    if columns is not None:  # the options name columns of the systems' tables
        judging = replace(judging, by=columns.query_id, doc=columns.doc_id, grade=options.grade or columns.gold)
    try:
        return load_pairs([labels], judging, storage)
    except InputError:
        refuse_run_file(options.gold, storage, option="--gold")
        raise


def prepare(
    rankings: Mapping[str, Ranking], judged: PairGrades, gold: PairGrades | None, grades: int, options: SystemsOptions
) -> Comparison:
    """The queries that are compared, with their rows and grades.

    Raises:
        InputError: ids do not go together, or there are too few queries.
    """
    labelled = _graded_queries(judged)
    for ranking in rankings.values():
        if not pc.any(pc.is_in(ranking.queries, value_set=labelled)).as_py():
            raise InputError(
                f"{ranking.path}: none of its {len(ranking.queries):,} queries has a label in {options.labels}: it "
                f"ranks for {_first(ranking.queries)}, labels are of {_first(labelled)}. Do the ids mean the same "
                "things? --by names another column of a table."
            )
    ranked = pa.concat_arrays([ranking.queries for ranking in rankings.values()])
    queries = codes_of(labelled.filter(pc.is_in(labelled, value_set=ranked)))[1]
    if len(queries) < 2:
        raise InputError(f"{options.labels}: labels one query alone that a system ranks; two or more are compared.")
    cut = Cut(options.k, grades // 2 if options.relevant is None else options.relevant)
    comparison = Comparison(
        rankings=rankings,
        rows={name: ranked_rows(ranking, queries) for name, ranking in rankings.items()},
        queries=queries,
        judge=Assessor(judged, queries, cut),
        humans=None if gold is None else Assessor(gold, queries, cut, labels=judged),
        cut=cut,
        grades=grades,
    )
    _check_documents(comparison, comparison.judge, options.labels, "--labels")
    if gold is None:
        return comparison
    _check_gold_ids(comparison, gold, options)
    comparison = gold_queries_alone(comparison)
    if comparison.num_gold < FEWEST_FOR_DIFFERENCES and not options.is_plan:
        raise _too_few(comparison, options)
    return comparison


def _check_documents(comparison: Comparison, assessor: Assessor, where: str, option: str) -> None:
    """At least one document of each system's top k has a grade.

    Raises:
        InputError: names the system.
    """
    for name, rows in comparison.rows.items():
        num_top = assessor.num_top(rows)
        if num_top and int(assessor.is_unjudged(rows).sum()) == num_top:
            raise InputError(
                f"{comparison.rankings[name].path}: none of the {num_top:,} documents in its top {comparison.cut.k} is "
                f"in {option} {where}; it begins with document {texts_of(rows.doc_ids[:1])[0]}. Do the ids mean the "
                "same things? --doc names another column of a table."
            )


LEAST_GRADED = 0.8
"""Share of the documents in each system's top k that humans graded of a gold query. With fewer, the documents that are
left are few and much the same for two systems, so that every difference comes out too small, and its interval with it.
"""


def gold_queries_alone(comparison: Comparison) -> Comparison:
    """The same, where gold queries are those of which humans graded `LEAST_GRADED` of each system's top k."""
    humans = comparison.humans
    assert humans is not None
    num_queries = len(comparison.queries)
    graded_SG = np.stack([humans.num_graded(rows) for rows in comparison.rows.values()])
    top_SG = np.stack(
        [
            np.bincount(rows.query[rows.place < comparison.cut.k], minlength=num_queries)
            for rows in comparison.rows.values()
        ]
    )
    share_SG = np.where(top_SG > 0, graded_SG / np.maximum(top_SG, 1), 1.0)
    is_whole_G = share_SG.min(0) >= LEAST_GRADED
    in_part = []
    for query in np.flatnonzero(humans.is_assessed & ~is_whole_G):
        system = share_SG[:, query].argmin()
        in_part.append(
            PartlyGraded(
                query_id=texts_of(comparison.queries[query : query + 1])[0],
                graded=int(graded_SG[system, query]),
                documents=int(top_SG[system, query]),
            )
        )
    return replace(comparison, humans=humans.only(is_whole_G), in_part=tuple(in_part))


def _check_gold_ids(comparison: Comparison, gold: PairGrades, options: SystemsOptions) -> None:
    """Humans graded documents of the systems.

    Raises:
        InputError: ids do not go together.
    """
    assert comparison.humans is not None
    if not comparison.num_gold:
        graded = _first(_graded_queries(gold)) or "none"
        raise TooFewGoldError(
            f"--gold {options.gold}: none of its queries is compared: it grades {graded}; labels and systems have "
            f"{_first(comparison.queries)}. Do the ids mean the same things? --by names another column. Judgments that "
            "know a query by its text get ids by `relabel convert --queries`."
        )
    _check_documents(comparison, comparison.humans, str(options.gold), "--gold")


def _too_few(comparison: Comparison, options: SystemsOptions) -> TooFewGoldError:
    num_gold = comparison.num_gold
    percent = round(100 * LEAST_GRADED)
    text = (
        f"--gold {options.gold}: {num_gold} of the compared queries have grades of humans for {percent} % or more of "
        f"each system's top {options.k}. Differences want {FEWEST_FOR_DIFFERENCES} and a system's own figures "
        f"{FEWEST_FOR_LEVELS}: with fewer, 95 % intervals do not hold what they say. Judge "
        f"{FEWEST_FOR_DIFFERENCES - num_gold} more (--plan names them), or leave out --gold for the judge's opinion."
    )
    if comparison.in_part:
        text += f" {in_part_text(comparison)}"
    return TooFewGoldError(text)


def in_part_text(comparison: Comparison) -> str:
    """That queries are graded in part, and what to do; call it where there are some."""
    found = comparison.in_part
    shown = ", ".join(f"{one.query_id} ({one.graded} of {one.documents})" for one in found[:SHOWN])
    if len(found) > SHOWN:
        shown += ", …"
    k = comparison.cut.k
    what = "query is graded in part and does" if len(found) == 1 else "queries are graded in part and do"
    return (
        f"{len(found):,} {what} not count: {shown}. Grade all documents of a query's top {k} of every system; pairs "
        "drawn at random over all queries, as `relabel review` draws them, make no gold query."
    )


def _graded_queries(pairs: PairGrades) -> pa.LargeBinaryArray:
    """Queries of which a pair has a grade."""
    is_graded_P = pairs.columns[GOLD].is_valid().to_numpy(zero_copy_only=False)
    return pairs.queries.take(pa.array(np.unique(pairs.keys[is_graded_P] // len(pairs.docs))))


def _first(queries: pa.LargeBinaryArray) -> str:
    """The first few queries, for messages."""
    return ", ".join(texts_of(queries[:SHOWN])) + (", …" if len(queries) > SHOWN else "")


# ------------------------------------------------------------------------------
# Where a system's scores come from.


def made_by_judge(ranking: Ranking, labels: LabelSet, storage: Storage) -> MadeBy | None:
    """Whether an output of relabel was scored by the judge itself, or by a student that learned from the judge's
    labels; None where that is not known.
    """
    if not is_run(ranking.path, storage):
        return None
    if place_of(ranking.path) == place_of(labels.where):
        return "judge"
    plan = open_run_labels(ranking.path, storage, allow_partial=True).plan
    judge = labels.origin
    if judge.get("model") is not None and plan.facts.model == judge["model"]:
        return "judge"
    if plan.facts.kind not in ("student", "reranker"):
        return "other"
    _, manifest = manifest_of_scorer(ranking.path, storage)
    if isinstance(manifest, str):
        return None
    learned = (manifest.get("lineage") or manifest).get("labels") or []
    return "student" if any(_is_of_judge(one, labels) for one in learned) else "other"


def _is_of_judge(learned: Mapping[str, Any], labels: LabelSet) -> bool:
    """Whether labels that a student learned from are the judge's, or of the same model."""
    if "path" in learned and place_of(str(learned["path"])) == place_of(labels.where):
        return True
    return any(learned.get(name) and learned[name] == labels.origin.get(name) for name in ("fingerprint", "model"))


def learned_text(name: str, ranking: Ranking, comparison: Comparison, storage: Storage) -> str:
    """That a system is a student which learned from compared queries, as its manifest says; empty where it did not, or
    where that is not known: of rankings in files, of students that are gone, and of those of earlier relabels.
    """
    if not is_run(ranking.path, storage):
        return ""
    try:
        scores = label_set(open_run_labels(ranking.path, storage, allow_partial=True))
        sides = Sides([scores], None, storage)
        if not sides.students or sides.assumed:
            return ""
        counts = []
        for queries in (comparison.queries, comparison.queries.filter(pa.array(comparison.is_gold))):
            sides.rows_of_side(ranking.path, queries)
            counts.append(sides.rows.pop(ranking.path)["train"])
    except RelabelError:  # its split is by text, and the scored input is not there any more
        return ""
    learned, learned_gold = counts
    if not learned:
        return ""
    gold = f" ({learned_gold:,} of the {comparison.num_gold:,} gold queries)" if comparison.num_gold else ""
    return (
        f"{name}: its student learned from {learned:,} of the {len(comparison.queries):,} compared queries{gold}, and "
        "ranks these better than new ones. Compare it on queries that it did not learn from."
    )


# ------------------------------------------------------------------------------
# What a reader should know.

OPINION = (
    "these are the judge's opinions. Levels are not shown, since most judges overrate. "
    "29 published judges decided wrongly in 0.7 % of the pairs of lexical systems, in 3.0 % of rankings by other LLMs, "
    "and in 44 % where one ranking was their own. With ten random queries that a human judges (--plan, then --gold) "
    f"each was below 1 %: {PAGE}."
)


def warnings_of(comparison: Comparison, made_by: Mapping[str, str | None], num_judged: int | None) -> list[str]:
    """What to read before any figure.

    Args:
        num_judged: compared queries that humans judged, which may be too few for any figure; None without gold.
    """
    warnings = []
    if comparison.humans is None:
        reason = "No human judged anything here"
        if num_judged is not None:
            reason = f"Humans judged {num_judged} of the compared queries, and figures want {FEWEST_FOR_DIFFERENCES}"
        warnings.append(f"{reason}: {OPINION}")
    for name, maker in made_by.items():
        if maker not in ("judge", "student"):
            continue
        whose = "the judge" if maker == "judge" else "a student of the judge"
        if comparison.humans is None:
            effect = "the judge prefers what resembles it, so that its opinion of this system is worth nothing"
        else:
            effect = "the judge prefers what resembles it; the gold queries correct for that, with wider intervals"
        warnings.append(f"{name}: its scores are those of {whose}: {effect}.")
    for name in comparison.rows:
        missing = comparison.unanswered(name)
        if len(missing):
            warnings.append(f"{_unanswered_text(name, comparison)}: {_first(missing)}")
    warnings += filter(None, (tied_text(name, ranking) for name, ranking in comparison.rankings.items()))
    warnings += filter(None, (unjudged_text(name, comparison) for name in comparison.rows))
    return warnings


def _unanswered_text(name: str, comparison: Comparison) -> str:
    counts = f"{len(comparison.unanswered(name)):,} of {len(comparison.queries):,}"
    return f"{name} returns nothing for {counts} queries, which count as 0"


def tied_text(name: str, ranking: Ranking) -> str:
    """A warning where all documents have one score in half of the queries that have several; else empty."""
    query_N, queries = codes_of(ranking.query_ids)
    first_G = np.searchsorted(query_N, np.arange(len(queries)))
    has_several_G = np.bincount(query_N) > 1
    is_tied_G = np.maximum.reduceat(ranking.scores, first_G) == np.minimum.reduceat(ranking.scores, first_G)
    num_several = int(has_several_G.sum())
    num_tied = int((has_several_G & is_tied_G).sum())
    if not num_tied or 2 * num_tied < num_several:
        return ""
    return (
        f"{name}: in {num_tied:,} of {num_several:,} queries all documents have one score, so that their ids decide "
        f"the order, as in trec_eval; the ranks of a run file are not read. Are these the scores of {ranking.path}?"
    )


def unjudged_text(name: str, comparison: Comparison) -> str:
    """A warning where a system's top has documents without a label, or without a human's grade; else empty."""
    rows = comparison.rows[name]
    passed_over = "They are passed over, and the next take their places; "
    bounds = "the column `worst to best` bounds what they may change"
    texts = []
    if count := int(comparison.judge.is_unjudged(rows).sum()):
        effect = bounds if comparison.humans is None else "they widen the interval, and do not move it on average"
        texts.append(f"{count:,} of {comparison.judge.num_top(rows):,} documents have no label. {passed_over}{effect}")
    if comparison.humans is not None and (count := int(comparison.humans.is_unjudged(rows).sum())):
        of = f"{count:,} of {comparison.humans.num_top(rows):,} documents of the gold queries have no grade of a human"
        texts.append(f"{of}. {passed_over}{bounds}")
    if not texts:
        return ""
    return (
        f"{name}, top {comparison.cut.k}: {'; '.join(texts)}. `relabel pairs unjudged` writes such documents, to be "
        "judged."
    )


LEAST_ALIKE = 30
"""Documents of which humans and a judge do not agree on all."""


def grade_warnings(
    comparison: Comparison, judged: PairGrades, gold: PairGrades | None, options: SystemsOptions
) -> list[str]:
    """Warnings of grades that do not mean what they are given for."""
    warnings = []
    if comparison.in_part:
        warnings.append(f"{options.gold}: {in_part_text(comparison)}")
    num_alike = 0 if comparison.humans is None else _num_alike(comparison, comparison.humans)
    if num_alike >= LEAST_ALIKE:
        warnings.append(
            f"{options.gold}: its grades are the labels', for all {num_alike:,} documents of a system that both "
            "grade. If it holds labels of a judge, the judge is compared with itself: give grades of humans, or leave "
            "out --gold."
        )
    least = comparison.cut.relevant
    sources = {options.labels: judged.seen, str(options.gold): set() if gold is None else gold.seen}
    for where, seen in sources.items():
        if seen and max(seen) < least:
            warnings.append(
                f"{where}: its grades go up to {max(seen)}, and documents are relevant from {least} on, so that P and "
                "RR have no relevant document there. --map and --map-labels bring two scales to one, --relevant sets "
                "the least relevant grade."
            )
    return warnings


def _num_alike(comparison: Comparison, humans: Assessor) -> int:
    """Rows of all systems that humans and judge graded, where both gave each the same grade; else 0."""
    count = 0
    for rows in comparison.rows.values():
        human_N = humans.grades(rows)
        judge_N = comparison.judge.grades(rows)
        has_both_N = ~np.isnan(human_N) & ~np.isnan(judge_N)
        if (human_N[has_both_N] != judge_N[has_both_N]).any():
            return 0
        count = max(count, int(has_both_N.sum()))
    return count


def comparison_notes(comparison: Comparison, judged: PairGrades, gold: PairGrades | None) -> list[str]:
    """Remarks on what is left out or counts as nothing."""
    notes = []
    ranked = pa.concat_arrays([ranking.queries for ranking in comparison.rankings.values()])
    num_ranked = len(codes_of(ranked)[1])
    if num_ranked > len(comparison.queries):
        notes.append(
            f"queries that systems rank and that have no label, left out: {num_ranked - len(comparison.queries):,}"
        )
    num_unranked = len(_graded_queries(judged)) - len(comparison.queries)
    if num_unranked:
        notes.append(f"queries with labels for which no system returns anything, left out: {num_unranked:,}")
    if gold is not None:
        num_unused = len(_graded_queries(gold)) - comparison.num_gold - len(comparison.in_part)
        if num_unused:
            notes.append(f"gold queries that are not compared, left out: {num_unused:,}")
    if comparison.humans is not None:
        is_partly_G = comparison.is_gold & (comparison.humans.num_expected > 0)
        if is_partly_G.any():
            notes.append(
                f"humans graded fewer documents than the judge labelled in {int(is_partly_G.sum()):,} of "
                f"{comparison.num_gold:,} gold queries: in the best ranking, by which nDCG is measured, the others "
                "have the mean of what humans gave to documents with their label. A system's own nDCG is rather too "
                f"high then: {PAGE}#the-best-ranking"
            )
    return notes


# ------------------------------------------------------------------------------
# Which queries a human should judge next.


def judging_plan(
    comparison: Comparison, is_gold_G: np.ndarray, pairs: Sequence[ComparedPair], options: SystemsOptions
) -> JudgingPlan:
    """Queries in a random order that the seed fixes: a plan for more queries begins with the same.

    Args:
        is_gold_G: the queries that humans judged, few as they may be.
    """
    order = np.random.default_rng(options.seed).permutation(len(comparison.queries))
    open_G = order[~is_gold_G[order]]
    num_gold = int(is_gold_G.sum())
    wanted = [pair.more_queries for pair in pairs if pair.more_queries is not None]
    for_levels = FEWEST_FOR_LEVELS - num_gold
    least = f"{FEWEST_FOR_LEVELS} gold queries are the least for all figures"
    if num_gold < FEWEST_FOR_DIFFERENCES:
        count = for_levels
        reason = f"{least}; how many more is known after them"
    elif len(wanted) < len(pairs):
        count = len(open_G)
        reason = f"no number of queries shows {options.width:g} for each pair"
    elif max(wanted) < for_levels:
        count = for_levels
        reason = least
    elif max(wanted) <= 0:
        count = 0
        reason = f"a difference of {options.width:g} in nDCG@{options.k} is shown already for each pair"
    else:
        count = max(wanted)
        reason = f"{count:,} more would show a difference of {options.width:g} in nDCG@{options.k} for each pair"
    if count > len(open_G):
        reason += f"; nobody judged {len(open_G):,} of those that there are, so queries have to be added"
    chosen_G = np.zeros(len(comparison.queries), dtype=bool)
    chosen_G[open_G[:count]] = True
    queries = texts_of(comparison.queries.take(pa.array(open_G[:count])))
    documents: dict[str, set[str]] = {query: set() for query in queries}
    for rows in comparison.rows.values():
        is_shown = pa.array(chosen_G[rows.query] & (rows.place < options.k))
        ids = (texts_of(held.filter(is_shown)) for held in (rows.query_ids, rows.doc_ids))
        for query, doc in zip(*ids, strict=True):
            documents[query].add(doc)
    return JudgingPlan(
        queries=queries,
        documents={query: sorted(docs) for query, docs in documents.items()},
        pairs=sum(map(len, documents.values())),
        width=options.width,
        seed=options.seed,
        reason=reason,
    )
