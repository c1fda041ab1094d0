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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.evaluate import JudgingOptions, load_pairs, open_set, scale_of
from relabel.jobs.sections import Block, Cell, Paragraph, Remarks, Table
from relabel.jobs.tables import written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import FROM_GOLD, GOLD, check_scale, taken
from relabel.manifests.label_sets import LabelSet, gather
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
from relabel.manifests.run_labels import open_run_labels, own_columns, read_labels
from relabel.manifests.secrets import redacted_values

WAYS = ("mean", "dawid-skene")
SMOOTHING = 0.1
TOLERANCE = 1e-6
"""EM ends where no probability moves by more."""
FOLDS = 5
"""Of gold queries: each is measured by labels that the other folds anchored."""
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
        query_ids = pa.concat_arrays([one.query_ids for one in judges])
        doc_ids = pa.concat_arrays([one.doc_ids for one in judges])
        _, first_P, place_N = np.unique(pair_codes(query_ids, doc_ids), return_index=True, return_inverse=True)
        judge_N = np.repeat(np.arange(len(judges)), [len(one.grades) for one in judges])
        sure_NK = np.eye(grades)[np.concatenate([one.grades for one in judges])]
        probs_NK = np.concatenate([np.full((len(one.grades), grades), np.nan) if one.probs is None else one.probs
                                   for one in judges])  # fmt: skip
        count, *sums = np.zeros((3, len(judges), len(first_P), grades))
        for held, value in (
            (count, 1.0),
            (sums[0], sure_NK),
            (sums[1], np.where(np.isnan(probs_NK), sure_NK, probs_NK)),
        ):
            np.add.at(held, (judge_N, place_N), value)
        row_ids = np.concatenate([one.row_ids for one in judges])[first_P]
        is_from_gold_JP = np.zeros(count.shape[:2], dtype=bool)
        from_gold_N = np.concatenate([_is_from_gold(one) for one in judges])
        is_from_gold_JP[judge_N[from_gold_N], place_N[from_gold_N]] = True
        num_labels = np.maximum(count, 1)
        return cls(
            names=[one.where for one in judges],
            row_ids=row_ids,
            query_ids=query_ids.take(pa.array(first_P)),
            doc_ids=doc_ids.take(pa.array(first_P)),
            grade_JPK=sums[0] / num_labels,
            probs_JPK=sums[1] / num_labels,
            is_from_gold_JP=is_from_gold_JP,
        )


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
    probs_PK = (
        votes.probs_JPK.sum(0) / votes.grade_JPK.any(-1).sum(0)[:, None]
        if by == "mean"
        else dawid_skene(votes.grade_JPK, gold_P)
    )
    if not is_gold_P.any():
        # 1e-9: machines may differ in what comes after, and a tie must be one
        return np.round(probs_PK, 9).argmax(1), probs_PK
    share_K = np.bincount(gold_P[is_gold_P], minlength=grades) / is_gold_P.sum()
    expected = np.round(probs_PK[~is_gold_P] @ np.arange(grades), 9)
    _, place, counts = np.unique(expected, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / max(1, len(expected))
    grade_P = gold_P.copy()
    grade_P[~is_gold_P] = np.searchsorted(np.cumsum(share_K)[:-1], middle, side="right")[place]
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
        is_held_P = fold_P == fold
        grade_P[is_held_P], probs_PK[is_held_P] = (
            one[is_held_P] for one in combine_votes(votes, by, np.where(is_held_P, -1, gold_P))
        )
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
    place_N = np.searchsorted(queries, query_P[rows])
    docs_N = np.zeros(len(rows), np.int64)
    judged = Judged(
        grades=probs_PK.shape[1],
        gold=gold_P[rows],
        labels=grade_P[rows],
        queries=place_N,
        num_queries=len(queries),
        docs=docs_N,
        probs=probs_PK[rows],
        num_correct=None,
        num_samples=None,
    )
    metrics = [one for one in METRICS if one.name in ("auc_{}", "kappa", "kappa_quadratic")]
    found = MetricSet(metrics, judged, num_groups=len(queries))
    cuts = [name for name, value in found.values.items() if name.startswith("auc_") and np.isfinite(value)]

    def values(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        held = found.resampled(weight_RG)
        auc_R = np.mean([held[name] for name in cuts] or [np.full(len(weight_RG), np.nan)], axis=0)
        return {"auc": auc_R, "kappa": held["kappa"], "kappa_quadratic": held["kappa_quadratic"]}

    return values


def combine_labels(paths: Sequence[str], to: str, by: str, options: JudgingOptions, storage: Storage) -> dict[str, Any]:
    """Write a label file with one label for each pair that any judge labelled.

    Args:
        paths: outputs of runs, or label files; or one run whose labels have the column `judge_probs`.
        options: gold is its `qrels`; intervals are those of its `resamples`.
    Raises:
        UsageError: one judge alone.
        InputError: a file or column is off, scales differ, or gold has none of the pairs.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    Returns:
        Counts of what was written, and `labels`: for each judge and, with gold, each of `WAYS` its `name`, the `pairs`
        that it labels, `agreement` (the share of them that have the grade that was written), and `by_gold`:
        `FIGURES` by name, empty without gold.
    """
    sets = [open_set(path, options, storage, wants_ids=True) for path in paths]
    gold = None if options.qrels is None else load_pairs((), options, storage)
    grades, notes = scale_of(sets, gold.seen if gold else set(), options)
    votes = Votes.of(
        [gather(one.parts(), grades=grades, where=one.where) for one in sets]
        if len(sets) > 1
        else _instructions(sets[0], grades, storage, allow_partial=options.allow_partial),
        grades,
    )
    query_P, queries = codes_of(votes.query_ids)
    gold_P = np.full(len(query_P), -1)
    if gold is not None:
        check_scale(gold.seen, grades, where=str(options.qrels), option="--map")
        found = taken(gold.columns[GOLD], gold.places(votes.query_ids, votes.doc_ids))
        gold_P = found.fill_null(-1).to_numpy().astype(np.int64)
        if gold_P.max(initial=-1) < 0:
            raise InputError(f"{options.qrels}: has none of the {len(gold_P):,} pairs that the judges labelled.")
    grade_P, probs_PK = combine_votes(votes, by, gold_P)
    columns = {
        "row_id": votes.row_ids,
        "query_id": votes.query_ids.cast(pa.large_string()),
        "doc_id": votes.doc_ids.cast(pa.large_string()),
        "grade": grade_P,
        "probs": pa.FixedSizeListArray.from_arrays(probs_PK.ravel(), grades).cast(pa.list_(pa.float64())),
    }
    is_from_gold_P = (gold_P >= 0) | votes.is_from_gold_JP.any(0)
    if is_from_gold_P.any():
        columns[FROM_GOLD] = is_from_gold_P
    made_of = {"by": by, "judges": votes.names, "gold": options.qrels, "gold_pairs": int((gold_P >= 0).sum())}
    rated = _rated(
        votes=votes,
        gold_P=gold_P,
        query_P=query_P,
        written_P=grade_P,
        resamples=options.resamples,
        seed=options.seed,
    )
    with written(to, storage) as file:
        pq.write_table(
            pa.table(columns, metadata={"relabel.combine": json.dumps(redacted_values(made_of))}),
            file,
            compression="zstd",
        )
    return {
        "output": to,
        **made_of,
        "gold_queries": len(np.unique(query_P[gold_P >= 0])),
        "grades": grades,
        "pairs": len(grade_P),
        "queries": len(queries),
        "by_grade": np.bincount(grade_P, minlength=grades).tolist(),
        "labels": rated,
        "notes": [*(note for one in sets for note in one.notes), *(notes if gold else ())],
    }


def _instructions(found: LabelSet, grades: int, storage: Storage, *, allow_partial: bool) -> list[Labelled]:
    """The judges of one run: its instructions."""
    if found.plan is None or "judge_probs" not in own_columns(found.plan.parts):
        raise UsageError(f"{found.where}: one judge alone. Name two or more, or one run of `labeler: ensemble`.")
    run = open_run_labels(found.where, storage, allow_partial=allow_partial)
    names = ["row_id", "query_id", "doc_id", "judge_probs"]
    table = pa.concat_tables([read_labels(run.folder, file, names) for file in run.found.labels])
    judges_NJK = np.array(table["judge_probs"].to_pylist(), np.float64).reshape(table.num_rows, -1, grades)
    ids = {name: table[name].combine_chunks() for name in names[:3]}
    ids |= {name: ids[name].cast(pa.large_binary()) for name in names[1:3]}
    return [
        Labelled(
            f"{found.where}: instruction {number}",
            pa.RecordBatch.from_pydict({**ids, "grade": probs_NK.argmax(1)}),
            probs_NK,
        )
        for number, probs_NK in enumerate(np.moveaxis(judges_NJK, 1, 0), 1)
    ]


def _rated(
    votes: Votes, gold_P: np.ndarray, query_P: np.ndarray, written_P: np.ndarray, resamples: int, seed: int
) -> list[dict[str, Any]]:
    everywhere = np.ones(len(gold_P), dtype=bool)
    is_gold_P = gold_P >= 0
    labels = []
    for judge, name in enumerate(votes.names):
        has_P = votes.grade_JPK[judge].any(-1)
        grade_P = votes.grade_JPK[judge].argmax(-1)
        probs_PK = votes.probs_JPK[judge]
        labels.append((name, grade_P, probs_PK, has_P & ~votes.is_from_gold_JP[judge], has_P))
    if is_gold_P.any():
        labels += [(way, *held_out(votes, way, gold_P, query_P), everywhere, is_gold_P) for way in WAYS]
    found: list[dict[str, Any]] = []
    num_queries = len(np.unique(query_P[is_gold_P]))
    for name, grade_P, probs_PK, has_P, counted_P in labels:
        figures = {}
        num_gold = int((has_P & is_gold_P).sum())
        if num_gold:
            statistic = order_and_grade(
                gold_P,
                query_P,
                grade_P,
                probs_PK,
                has_P,
            )
            drawn = bootstrap(statistic, num_groups=num_queries, resamples=resamples, seed=seed)
            for figure, (value,) in statistic(np.ones((1, num_queries))).items():
                low, high = drawn.get(figure, NOTHING_DRAWN)
                figures[figure] = MetricValue(
                    finite(value),
                    finite(low),
                    finite(high),
                    num_gold,
                    "rows",
                )
        agreement = float((grade_P == written_P)[counted_P].mean()) if counted_P.any() else 0.0
        found.append({"name": name, "pairs": int(counted_P.sum()), "agreement": agreement, "by_gold": figures})
    return found


def combined_blocks(result: dict[str, Any]) -> list[Block]:
    """What `combine_labels` returns, for a terminal."""
    head = f"{result['output']}: {result['pairs']:,} pairs of {result['queries']:,} queries by {result['by']}"
    counts = ", ".join(f"{count:,} of grade {grade}" for grade, count in enumerate(result["by_grade"]))
    shown = FIGURES if result["gold"] else {}
    rows: list[list[Cell]] = [
        [
            *(one[name] for name in ("name", "pairs", "agreement")),
            *(_figure(one["by_gold"].get(name)) for name in shown),
        ]
        for one in result["labels"]
    ]
    title = "agreement with what was written" + (", and by gold, with 95 % intervals over queries" if shown else "")
    split = (
        f"{result['gold_pairs']:,} gold pairs of {result['gold_queries']:,} queries anchor what was written. By gold, "
        f"{' and '.join(WAYS)} are measured on each query by labels that other gold queries anchored ({FOLDS} folds). "
        "`evaluate` with the same gold would find it again"
    )
    return [
        Paragraph(f"{head}: {counts}"),
        Table(title, ["labels", "pairs", "agreement", *shown.values()], rows),
        Remarks([*result["notes"], *([split] if shown else [])]),
    ]


def _figure(found: MetricValue | None) -> Cell:
    bounds = "" if found is None or found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    return None if found is None or found.value is None else f"{found.value:.3f}{bounds}"
