"""Makes one set of labels out of several judges': the mean of their distributions, or Dawid and Skene's model of who
errs how; a few gold queries may anchor it.

With gold, pairs of gold queries enter with their grade fixed, and the grade of every other pair is no longer the most
probable one: pairs are put in the order of their expected grade and cut so that grades occur as often as in the gold
(pairs of the same expected grade get the same grade). Dawid and Skene order pairs well, but their most probable grade
follows how often judges give a grade, not how often people do. `probs` are not cut.

Source: Dawid and Skene, "Maximum Likelihood Estimation of Observer Error-Rates Using the EM Algorithm" (1979). Ours
adds `SMOOTHING` to every count, so that what a judge never did is not impossible.
"""

# Shape legend: J judges, P pairs, K grades, R resamples, G gold queries

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.evaluate import JudgingOptions, is_same_input, load_pairs, open_set, scale_of, with_columns_of_owner
from relabel.jobs.sections import Cell, Paragraph, Remarks, Table, as_text
from relabel.jobs.tables import written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.gold import FROM_GOLD, GOLD, GradeMap, check_scale, parse_map, taken
from relabel.manifests.label_sets import LabelSet, gather, map_labels
from relabel.manifests.labels import codes_of, pair_codes
from relabel.manifests.metrics.comparison import Labelled
from relabel.manifests.metrics.judged import METRICS, Judged
from relabel.manifests.metrics.metric import (
    NOTHING_DRAWN,
    MetricSet,
    MetricValue,
    WeightedStatistic,
    bootstrap,
    finite,
)
from relabel.manifests.records import as_object
from relabel.manifests.run_labels import open_run_labels, own_columns, read_labels
from relabel.manifests.secrets import counted, redacted_values

_MAP = re.compile(r"-?\d+=-?\d+(,-?\d+=-?\d+)*")
WAYS = ("mean", "dawid-skene")
SMOOTHING = 0.1
TOLERANCE = 1e-6
"""EM ends where no probability moves by more."""
FOLDS = 5
"""Of gold queries: each is measured by labels that the other folds anchored."""
SAME_IDS = "its labels are taken as they are. Do the ids mean the same things in all?"
FIGURES = {"auc": "AUC, mean of cuts", "kappa": "Cohen kappa", "kappa_quadratic": "quadratic kappa"}


@dataclass(frozen=True)
class Votes:
    """What judges say of pairs; a judge that lacks a pair has zeros there.

    Args:
        row_ids, query_ids, doc_ids: of each pair, [P]: `row_ids` by the first judge that has it.
        grade_JPK: 1 at the judge's grade.
        probs_JPK: the judge's distribution; 1 at its grade where it gave none.
        is_from_gold_JP: bool, whether the judge, combined of others, has its grade from gold.
    """

    names: list[str]
    row_ids: np.ndarray
    query_ids: pa.LargeBinaryArray
    doc_ids: pa.LargeBinaryArray
    grade_JPK: np.ndarray  # noqa: N815
    probs_JPK: np.ndarray  # noqa: N815
    is_from_gold_JP: np.ndarray  # noqa: N815

    @classmethod
    def of(cls, judges: Sequence[Labelled], grades: int) -> Votes:
        """Votes of label sets, joined by query and document; several labels of a pair by one judge are averaged."""
        query_ids = pa.concat_arrays([judge.query_ids for judge in judges])
        doc_ids = pa.concat_arrays([judge.doc_ids for judge in judges])
        _, first_P, pair_N = np.unique(pair_codes(query_ids, doc_ids), return_index=True, return_inverse=True)
        judge_N = np.repeat(np.arange(len(judges)), [len(judge.grades) for judge in judges])
        grade_NK = np.eye(grades)[np.concatenate([judge.grades for judge in judges])]
        probs_NK = np.concatenate([_distributions(judge, grades) for judge in judges])
        probs_NK = np.where(np.isnan(probs_NK), grade_NK, probs_NK)
        shape = (len(judges), len(first_P), grades)
        count_JPK = np.zeros(shape)
        grade_JPK = np.zeros(shape)
        probs_JPK = np.zeros(shape)
        np.add.at(count_JPK, (judge_N, pair_N), 1.0)
        np.add.at(grade_JPK, (judge_N, pair_N), grade_NK)
        np.add.at(probs_JPK, (judge_N, pair_N), probs_NK)
        is_from_gold_JP = np.zeros(shape[:2], dtype=bool)
        from_gold_N = np.concatenate([_is_from_gold(judge) for judge in judges])
        is_from_gold_JP[judge_N[from_gold_N], pair_N[from_gold_N]] = True
        num_labels_JPK = np.maximum(count_JPK, 1)
        return cls(
            names=[judge.where for judge in judges],
            row_ids=np.concatenate([judge.row_ids for judge in judges])[first_P],
            query_ids=query_ids.take(pa.array(first_P)),
            doc_ids=doc_ids.take(pa.array(first_P)),
            grade_JPK=grade_JPK / num_labels_JPK,
            probs_JPK=probs_JPK / num_labels_JPK,
            is_from_gold_JP=is_from_gold_JP,
        )


def _alone(votes: Votes) -> list[str]:
    """Judges whose labels are combined with nobody's."""
    has_label_JP = np.asarray(votes.grade_JPK.any(axis=2))
    is_shared_P = has_label_JP.sum(0) > 1
    return [name for name, own_P in zip(votes.names, has_label_JP, strict=True) if not (own_P & is_shared_P).any()]


def _distributions(judge: Labelled, grades: int) -> np.ndarray:
    """float64 [N, K], NaN where the judge gave none."""
    if judge.probs is None:
        return np.full((len(judge.grades), grades), np.nan)
    return judge.probs


def _is_from_gold(judge: Labelled) -> np.ndarray:
    """bool [N]: see `FROM_GOLD`."""
    if FROM_GOLD not in judge.rows.schema.names:
        return np.zeros(len(judge.grades), dtype=bool)
    return np.asarray(judge.rows[FROM_GOLD].fill_null(False).to_numpy(zero_copy_only=False))


def dawid_skene(grade_JPK: np.ndarray, gold_P: np.ndarray) -> np.ndarray:
    """The distribution of each pair's grade, by EM over the judges' grades: float64 [P, K].

    Args:
        grade_JPK: as that of `Votes`.
        gold_P: int64, a grade that is known, -1 for none.
    """
    grades = grade_JPK.shape[-1]
    is_gold_P = gold_P >= 0
    probs_PK = np.asarray(grade_JPK.sum(0) / grade_JPK.sum((0, 2))[:, None])
    probs_PK[is_gold_P] = np.eye(grades)[gold_P[is_gold_P]]
    for _ in range(1000):
        prior_K = probs_PK.sum(0) + SMOOTHING
        # of a judge: rows the true grade, columns the one that it gives
        confusion_JKK = np.einsum("pt,jpk->jtk", probs_PK, grade_JPK) + SMOOTHING
        log_JKK = np.log(confusion_JKK / confusion_JKK.sum(-1, keepdims=True))
        log_PK = np.log(prior_K / prior_K.sum()) + np.einsum("jpk,jtk->pt", grade_JPK, log_JKK)
        next_PK = np.exp(log_PK - log_PK.max(1, keepdims=True))
        next_PK /= next_PK.sum(1, keepdims=True)
        next_PK[is_gold_P] = probs_PK[is_gold_P]
        moved = np.abs(next_PK - probs_PK).max()
        probs_PK = next_PK
        if moved < TOLERANCE:
            break
    return np.asarray(probs_PK)


def combine_votes(votes: Votes, by: str, gold_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grade, int64 [P], and distribution, float64 [P, K], of each pair; see the module.

    Args:
        gold_P: int64, the grade that gold gives a pair, -1 for none.
    """
    is_gold_P = gold_P >= 0
    grades = votes.grade_JPK.shape[-1]
    if by == "mean":
        probs_PK = votes.probs_JPK.sum(0) / votes.grade_JPK.any(-1).sum(0)[:, None]
    else:
        probs_PK = dawid_skene(votes.grade_JPK, gold_P)
    if not is_gold_P.any():
        # 1e-9: machines may differ in what comes after, and a tie must be one
        return np.round(probs_PK, 9).argmax(1), probs_PK
    share_K = np.bincount(gold_P[is_gold_P], minlength=grades) / is_gold_P.sum()
    expected = np.round(probs_PK[~is_gold_P] @ np.arange(grades), 9)
    _, level, counts = np.unique(expected, return_inverse=True, return_counts=True)
    # of all pairs of one expected grade: the share of pairs below their middle
    middle = (np.cumsum(counts) - counts / 2) / max(1, len(expected))
    grade_of_level = np.searchsorted(np.cumsum(share_K)[:-1], middle, side="right")
    grade_P = gold_P.copy()
    grade_P[~is_gold_P] = grade_of_level[level]
    probs_PK[is_gold_P] = np.eye(grades)[gold_P[is_gold_P]]
    return grade_P, probs_PK


def held_out(votes: Votes, by: str, gold_P: np.ndarray, query_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `combine_votes`, where a gold query has what gold of the other folds' queries makes of it; other pairs have
    zeros.

    Args:
        query_P: int64, of which query each pair is.
    """
    fold_P = np.where(gold_P >= 0, np.searchsorted(np.unique(query_P[gold_P >= 0]), query_P) % FOLDS, -1)
    grade_P = np.zeros_like(gold_P)
    probs_PK = np.zeros(votes.grade_JPK.shape[1:])
    for fold in np.unique(fold_P[gold_P >= 0]):
        is_fold_P = fold_P == fold
        of_others = combine_votes(votes, by, np.where(is_fold_P, -1, gold_P))
        grade_P[is_fold_P] = of_others[0][is_fold_P]
        probs_PK[is_fold_P] = of_others[1][is_fold_P]
    return grade_P, probs_PK


def order_and_grade(
    gold_P: np.ndarray, query_P: np.ndarray, grade_P: np.ndarray, probs_PK: np.ndarray, has_P: np.ndarray
) -> WeightedStatistic:
    """How well labels order gold pairs (`auc`, the mean over those cuts of the scale that gold has both sides of) and
    how well they grade them (`kappa`, `kappa_quadratic`), by weights of the gold's queries in the order of `query_P`.

    Args:
        gold_P: int64, -1 for none; some pair of `has_P` has one.
        has_P: pairs that have a label.
    """
    rows = np.flatnonzero((gold_P >= 0) & has_P)
    queries = np.unique(query_P[gold_P >= 0])
    judged = Judged(
        grades=probs_PK.shape[1],
        gold=gold_P[rows],
        labels=grade_P[rows],
        queries=np.searchsorted(queries, query_P[rows]),
        num_queries=len(queries),
        docs=np.zeros(len(rows), np.int64),
        probs=probs_PK[rows],
        num_correct=None,
        num_samples=None,
    )
    metrics = [metric for metric in METRICS if metric.name in ("auc_{}", "kappa", "kappa_quadratic")]
    metric_set = MetricSet(metrics, judged, num_groups=len(queries))
    cuts = [name for name, value in metric_set.values.items() if name.startswith("auc_") and np.isfinite(value)]

    def values(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        drawn = metric_set.resampled(weight_RG)
        auc_R = np.full(len(weight_RG), np.nan)
        if cuts:
            auc_R = np.mean([drawn[name] for name in cuts], axis=0)
        return {"auc": auc_R, "kappa": drawn["kappa"], "kappa_quadratic": drawn["kappa_quadratic"]}

    return values


@dataclass(frozen=True)
class RatedLabels:
    """Labels of a judge, or of one of `WAYS`.

    Args:
        pairs: that it labels.
        agreement: the share of them that have the grade that was written.
        by_gold: `FIGURES` by name, empty without gold.
    """

    name: str
    pairs: int
    agreement: float
    by_gold: dict[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class Combined:
    """A label file that was made of several judges' labels.

    Args:
        gold: where gold grades came from; `gold_pairs` of `gold_queries` queries have one.
        by_grade: pairs of each grade.
        labels: each judge and, with gold, each of `WAYS`.
    """

    output: str
    by: str
    judges: list[str]
    gold: str | None
    gold_pairs: int
    gold_queries: int
    grades: int
    pairs: int
    queries: int
    by_grade: list[int]
    labels: list[RatedLabels]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        counts = ", ".join(f"{count:,} of grade {grade}" for grade, count in enumerate(self.by_grade))
        head = f"{self.output}: {counted(self.pairs, 'pair')} of {self.queries:,} queries by {self.by}: {counts}"
        figures = FIGURES if self.gold else {}
        rows: list[list[Cell]] = []
        for rated in self.labels:
            by_gold = [_figure(rated.by_gold.get(name)) for name in figures]
            rows.append([rated.name, rated.pairs, rated.agreement, *by_gold])
        title = "agreement with the labels that were written"
        notes = list(self.notes)
        if self.gold:
            title += ", and by gold, with 95 % intervals over queries"
            notes.append(
                f"{self.gold_pairs:,} gold pairs of {self.gold_queries:,} queries anchor what was written. The lines "
                f"{' and '.join(WAYS)} show what to expect of pairs without gold: each gold query is measured by "
                f"labels that the other gold queries anchored ({FOLDS} folds). `evaluate` leaves these queries out"
            )
        table = Table(title, ["labels", "pairs", "agreement", *figures.values()], rows)
        return [as_text([Paragraph(head), table, Remarks(notes)])]


def label_maps_of(texts: Sequence[str], judges: Sequence[str]) -> dict[str | None, GradeMap]:
    """The maps of `--map-labels`: those of single judges, `JUDGE=OLD=NEW,…`, by place, and that of all others by None.

    Args:
        judges: paths of label sets.
    Raises:
        UsageError: a text is no map, or there are two for one judge.
    """
    maps: dict[str | None, GradeMap] = {}
    for text in texts:
        judge, written_map = _judge_and_map(text, judges)
        try:
            grade_map = parse_map(written_map, "--map-labels")
        except UsageError as exc:
            example = f"--map-labels {judges[0]}=0=0,1=1"
            raise UsageError(
                f"{exc}. For one judge alone, put the judge in front as LABELS names it: {example}"
            ) from exc
        judge_place = None if judge is None else place_of(judge)
        if judge_place in maps:
            raise UsageError(f"--map-labels: two maps for {judge or 'all judges'}. Leave one out.")
        assert grade_map is not None
        maps[judge_place] = grade_map
    return maps


def _judge_and_map(text: str, judges: Sequence[str]) -> tuple[str | None, str]:
    """The judge that a map is of, None for all, and the map; a path may hold `=`, too."""
    if _MAP.fullmatch(text) is None:
        for end in re.finditer("=", text):
            judge = text[: end.start()]
            if judge and any(place_of(judge) == place_of(path) for path in judges):
                return judge, text[end.end() :]
    return None, text


def _doubtful_scales(sets: Sequence[LabelSet], judges: Sequence[Labelled], grades: int) -> list[str]:
    """Remarks on label files that never use the highest grade: theirs may be a shorter scale.

    Args:
        grades: of the scale that all are taken to be on.
    """
    notes = []
    for labels, judge in zip(sets, judges, strict=True):
        highest = int(judge.grades.max(initial=0))
        if labels.grades is None and labels.label_map is None and judge.probs is None and highest < grades - 1:
            notes.append(
                f"{labels.where}: its labels go up to {highest}, and the scale to {grades - 1}. If its own scale ends "
                f"at {highest}, bring it to this one: --map-labels {labels.where}=0=0,{highest}={grades - 1}"
            )
    return notes


def combine_labels(
    paths: Sequence[str],
    to: str,
    by: str,
    options: JudgingOptions,
    storage: Storage,
    *,
    label_maps: Mapping[str | None, GradeMap],
) -> Combined:
    """Write a label file with one label for each pair that any judge labelled.

    Args:
        paths: outputs of runs, or label files; or one run whose labels have the column `judge_probs`.
        options: gold is its `qrels`; intervals are those of its `resamples`.
        label_maps: see `label_maps_of`.
    Raises:
        UsageError: one judge alone.
        InputError: a file or column is off, scales differ, or gold has none of the pairs.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    sets = []
    for path in paths:
        label_map = label_maps.get(place_of(path), label_maps.get(None))
        sets.append(open_set(path, replace(options, label_map=label_map), storage, wants_ids=True))
    gold = None
    if options.qrels is not None:
        gold = load_pairs((), with_columns_of_owner(sets, options, storage), storage)
    advice = " --map-labels JUDGE=OLD=NEW,… maps one judge alone."
    grades, scale_notes = scale_of(sets, gold.seen if gold else set(), options, advice=advice)
    notes = list(chain.from_iterable(labels.notes for labels in sets))
    if len(sets) > 1:
        judges = []
        for labels in sets:
            judges.append(gather(labels.parts(), grades=grades, where=labels.where, option="--map-labels"))
        notes += _doubtful_scales(sets, judges, grades)
    else:
        judges = _instructions(sets[0], grades, options, storage)
    votes = Votes.of(judges, grades)
    del judges
    notes += [f"{name} shares no pair with another judge: {SAME_IDS}" for name in _alone(votes)]
    query_P, queries = codes_of(votes.query_ids)
    gold_P = np.full(len(query_P), -1)
    if gold is not None:
        notes += scale_notes
        check_scale(gold.seen, grades, where=str(options.qrels), option="--map")
        gold_grades = taken(gold.columns[GOLD], gold.places(votes.query_ids, votes.doc_ids))
        gold_P = gold_grades.fill_null(-1).to_numpy().astype(np.int64)
        if gold_P.max(initial=-1) < 0:
            raise InputError(f"{options.qrels}: has none of the {len(gold_P):,} pairs that the judges labelled.")
    grade_P, probs_PK = combine_votes(votes, by, gold_P)
    result = Combined(
        output=to,
        by=by,
        judges=votes.names,
        gold=options.qrels,
        gold_pairs=int((gold_P >= 0).sum()),
        gold_queries=len(np.unique(query_P[gold_P >= 0])),
        grades=grades,
        pairs=len(grade_P),
        queries=len(queries),
        by_grade=np.bincount(grade_P, minlength=grades).tolist(),
        labels=_rated(votes, gold_P, query_P, grade_P, options),
        notes=notes,
    )
    made_of = {name: getattr(result, name) for name in ("by", "judges", "gold", "gold_pairs")}
    columns = _columns_of(votes, grade_P, probs_PK, gold_P)
    if not all(is_same_input(sets[0], other) for other in sets[1:]):
        del columns["row_id"]  # it would count in one input for some rows, and in another for others
    table = pa.table(columns, metadata={"relabel.combine": json.dumps(redacted_values(made_of))})
    with written(to, storage) as file:
        pq.write_table(table, file, compression="zstd")
    return result


def _columns_of(votes: Votes, grade_P: np.ndarray, probs_PK: np.ndarray, gold_P: np.ndarray) -> dict[str, Any]:
    """The columns of a combined file."""
    columns = {
        "row_id": votes.row_ids,
        "query_id": votes.query_ids.cast(pa.large_string()),
        "doc_id": votes.doc_ids.cast(pa.large_string()),
        "grade": grade_P,
        "probs": pa.FixedSizeListArray.from_arrays(probs_PK.ravel(), probs_PK.shape[1]).cast(pa.list_(pa.float64())),
    }
    is_from_gold_P = (gold_P >= 0) | votes.is_from_gold_JP.any(0)
    if is_from_gold_P.any():
        columns[FROM_GOLD] = is_from_gold_P
    return columns


def _instructions(labels: LabelSet, grades: int, options: JudgingOptions, storage: Storage) -> list[Labelled]:
    """The judges of one run: its instructions.

    Args:
        grades: of what is written; the run has others where its labels are mapped.
    """
    if labels.plan is None or "judge_probs" not in own_columns(labels.plan.parts):
        raise UsageError(f"{labels.where}: one judge alone. Name two or more, or one run of `labeler: ensemble`.")
    run = open_run_labels(labels.where, storage, allow_partial=options.allow_partial)
    names = ["row_id", "query_id", "doc_id", "judge_probs"]
    table = pa.concat_tables([read_labels(run.folder, file, names) for file in run.found.labels])
    asked_grades = labels.plan.parts["labeler"]["grades"]
    judges_NJK = np.array(table["judge_probs"].to_pylist(), np.float64).reshape(table.num_rows, -1, asked_grades)
    ids = {name: table[name].combine_chunks() for name in names[:3]}
    ids |= {name: ids[name].cast(pa.large_binary()) for name in names[1:3]}
    judges = []
    for number, probs_NK in enumerate(np.moveaxis(judges_NJK, 1, 0), 1):
        where = f"{labels.where}: instruction {number}"
        columns = {
            **ids,
            "grade": probs_NK.argmax(1),
            "probs": pa.array(list(probs_NK), pa.large_list(pa.float64())),
        }
        part = map_labels(pa.RecordBatch.from_pydict(columns), labels.label_map, where=where)
        judges.append(gather([part], grades=grades, where=where))
    return judges


def _rated(
    votes: Votes, gold_P: np.ndarray, query_P: np.ndarray, written_P: np.ndarray, options: JudgingOptions
) -> list[RatedLabels]:
    """Each judge by what was written and by gold; with gold each of `WAYS`, too.

    Args:
        written_P: the grades that were written.
    """
    is_gold_P = gold_P >= 0
    num_queries = len(np.unique(query_P[is_gold_P]))

    def by_gold(grade_P: np.ndarray, probs_PK: np.ndarray, has_P: np.ndarray) -> dict[str, MetricValue]:
        num_gold = int((has_P & is_gold_P).sum())
        if not num_gold:
            return {}
        statistic = order_and_grade(gold_P, query_P, grade_P, probs_PK, has_P)
        drawn = bootstrap(statistic, num_groups=num_queries, resamples=options.resamples, seed=options.seed)
        figures = {}
        for figure, (value,) in statistic(np.ones((1, num_queries))).items():
            low, high = drawn.get(figure, NOTHING_DRAWN)
            figures[figure] = MetricValue(
                value=finite(value),
                low=finite(low),
                high=finite(high),
                over=num_gold,
                unit="rows",
            )
        return figures

    def agreement(grade_P: np.ndarray, counted_P: np.ndarray) -> float:
        return float((grade_P == written_P)[counted_P].mean()) if counted_P.any() else 0.0

    rated = []
    for judge, name in enumerate(votes.names):
        grade_P = votes.grade_JPK[judge].argmax(-1)
        has_P = votes.grade_JPK[judge].any(-1)
        is_own_P = has_P & ~votes.is_from_gold_JP[judge]
        figures = by_gold(grade_P, votes.probs_JPK[judge], is_own_P)
        rated.append(RatedLabels(name, int(has_P.sum()), agreement(grade_P, has_P), figures))
    if is_gold_P.any():
        for way in WAYS:
            grade_P, probs_PK = held_out(votes, way, gold_P, query_P)
            figures = by_gold(grade_P, probs_PK, np.ones(len(gold_P), dtype=bool))
            rated.append(RatedLabels(way, int(is_gold_P.sum()), agreement(grade_P, is_gold_P), figures))
    return rated


def _figure(figure: MetricValue | None) -> Cell:
    if figure is None or figure.value is None:
        return None
    if figure.low is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})"
