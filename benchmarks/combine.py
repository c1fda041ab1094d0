"""Several judges as one, on published labels: the best judge, the mean and Dawid-Skene, by human grades.

    python -m benchmarks.combine DATA

The rule, set before anything was measured: TREC Deep Learning 2019, 2020 and 2021, each for itself; all judges of
`DATA/llm_labels` that labelled at least 99 % of a year's judged pairs; a pair that one of them lacks or left
unreadable counts by the others. A judge that says relevant or not says grade 2 or 0 (TREC counts a passage as relevant
from 2 on); one that grades 0 to 5 says that grade times 3/5, rounded.

Without gold every query is measured, and a way gives its most probable grade. With gold, 5 queries drawn at random
anchor and the others are measured; 10 draws (seeds 0 to 9), and figures are their means; also with the most probable
grade instead of the one that is cut. The best judge is the one with
the highest AUC (kappa) of all queries: chosen by what is measured, so in its favour. AUC is the mean over the cuts
0/123, 01/23 and 012/3, kappa Cohen's over four grades, and then with quadratic weights. Differences are to the best
judge on the same queries, their 95 % intervals percentiles of 1,000 resamples of queries (seed 7); with gold the mean
bounds of 10 draws.

What ties do to AUC: above, a grade without a distribution is sure, so that at each cut a judge says yes or no. A second
table gives a way as many pairs of each grade as the best judge has, in the order of its expected grade (ties at random,
seed 0), which are then sure too; and AUC of expected grades against the best order by a single judge's grades, all four
at each cut.
"""

import argparse
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from relabel.jobs.combine import WAYS, Votes, combine_votes, order_and_grade
from relabel.manifests.labels import codes_of, ids_of
from relabel.manifests.metrics.comparison import Labelled
from relabel.manifests.metrics.metric import Order, WeightedStatistic, bootstrap

GRADES = 4
YES_OR_NO = {"0": 0, "1": 2}
FIVE = {str(grade): round(grade * 3 / 5) for grade in range(6)}
FIGURES = ("auc", "kappa", "kappa_quadratic")


def minus(second: WeightedStatistic, first: WeightedStatistic) -> WeightedStatistic:
    """The difference of two statistics in the same resamples."""
    return lambda weight_RG: {name: value_R - first(weight_RG)[name] for name, value_R in second(weight_RG).items()}


def read_votes(rows: pl.DataFrame) -> tuple[Votes, np.ndarray]:
    """Votes of a year's judges, and the human grade of each pair."""
    human = rows.select("query_id", "doc_id", gold="human_grade").unique(["query_id", "doc_id"])
    judges = []
    for (name,), one in sorted(rows.group_by("judge")):
        scale = YES_OR_NO if name.startswith("binary_") else FIVE if name.startswith("exam_") else None
        label = pl.col("llm_label").str.strip_chars(" .\n")
        label = label.cast(pl.Int64, strict=False) if scale is None else label.replace_strict(scale, default=None)
        held = one.with_columns(grade=label).filter(pl.col("grade").is_between(0, GRADES - 1))
        held = held.unique(["query_id", "doc_id"], keep="first", maintain_order=True)
        if len(held) >= 0.99 * len(human):
            ids = {key: ids_of(held[key]) for key in ("query_id", "doc_id")}
            labels = {"row_id": np.arange(len(held)), **ids, "grade": held["grade"].to_numpy()}
            judges.append(Labelled(str(name), pa.RecordBatch.from_pydict(labels), None))
    votes = Votes.of(judges, GRADES)
    pairs = zip(*([one.decode() for one in ids.to_pylist()] for ids in (votes.query_ids, votes.doc_ids)), strict=True)
    gold = {(query, doc): grade for query, doc, grade in human.iter_rows()}
    return votes, np.array([gold[pair] for pair in pairs])


def order_alone(score_N: np.ndarray, human_N: np.ndarray, query_N: np.ndarray) -> WeightedStatistic:
    """AUC of one score at every cut, and their mean."""
    orders = [Order(score_N, human_N >= cut, query_N) for cut in range(1, GRADES)]

    def values(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        return {"auc": np.mean([one.area(one.weighted(weight_RG)) for one in orders], axis=0)}

    return values


def show_ties(votes: Votes, judge: str, human_P: np.ndarray, query_P: np.ndarray) -> None:
    """The second table, next to a judge."""
    has_JP, one_R, none_P = votes.grade_JPK.any(-1), np.ones((1, query_P.max() + 1)), np.full(len(human_P), -1)
    found = list(zip(votes.grade_JPK.argmax(-1), has_JP, strict=True))
    alone = [order_alone(grade_P[has_P], human_P[has_P], query_P[has_P]) for grade_P, has_P in found]
    grade_P, has_P = found[votes.names.index(judge)]
    sure = order_and_grade(human_P, query_P, grade_P, np.eye(GRADES)[grade_P], has_P)
    rivals = (sure, max(alone, key=lambda one: one(one_R)["auc"][0]))
    share_K = np.bincount(grade_P[has_P], minlength=GRADES) / has_P.sum()
    shown = [f"{one(one_R)['auc'][0]:.3f}" for one in rivals]
    print(f"| ties | best judge | {' | '.join(shown)} |")
    for way in WAYS:
        expected = np.round(combine_votes(votes, way, none_P)[1] @ np.arange(GRADES), 9)
        order, cut_P = np.lexsort((np.random.default_rng(0).random(len(expected)), expected)), np.empty_like(none_P)
        middle = (np.arange(len(order)) + 0.5) / len(order)
        cut_P[order] = np.searchsorted(np.cumsum(share_K)[:-1], middle, side="right")
        cut = order_and_grade(human_P, query_P, cut_P, np.eye(GRADES)[cut_P], none_P < 0)
        cells = []
        for first, second in zip(rivals, (cut, order_alone(expected, human_P, query_P)), strict=True):
            drawn = bootstrap(minus(second, first), num_groups=one_R.shape[1], resamples=1000, seed=7)
            value, (low, high) = second(one_R)["auc"][0], drawn["auc"]
            cells.append(f"{value:.3f} ({value - first(one_R)['auc'][0]:+.3f}: {low:+.3f} to {high:+.3f})")
        print(f"| ties | {way} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    labels = pl.read_parquet(parser.parse_args().data / "llm_labels" / "llm_labels.parquet")
    for year in ("dl19", "dl20", "dl21"):
        votes, human_P = read_votes(labels.filter(pl.col("dataset") == year))
        query_P, queries = codes_of(votes.query_ids)
        has_JP, all_P = votes.grade_JPK.any(-1), np.ones(len(human_P), dtype=bool)
        probs_JPK = np.where(has_JP[:, :, None], votes.probs_JPK, np.nan)
        judges = dict(zip(votes.names, zip(votes.grade_JPK.argmax(-1), probs_JPK, has_JP, strict=True), strict=True))
        one_R = np.ones((1, len(queries)))
        alone = {name: order_and_grade(human_P, query_P, *judge)(one_R) for name, judge in judges.items()}
        best = [max(alone, key=lambda name: alone[name][figure][0]) for figure in FIGURES]
        print(f"\n{year}: {len(human_P):,} pairs of {len(queries)} queries, {len(judges)} judges; best {best}")
        show_ties(votes, best[0], human_P, query_P)
        for anchored, ways in ((0, WAYS), (5, (*WAYS, *(f"{way}, most probable" for way in WAYS)))):
            found: dict[str, list[list[float]]] = {way: [] for way in ("best judge", *ways)}
            for seed in range(10 if anchored else 1):
                is_anchor_P = np.isin(query_P, np.random.default_rng(seed).permutation(len(queries))[:anchored])
                measured_P, gold_P = np.where(is_anchor_P, -1, human_P), np.where(is_anchor_P, human_P, -1)
                left, one_R = len(queries) - anchored, np.ones((1, len(queries) - anchored))
                first = {name: order_and_grade(measured_P, query_P, *judges[name]) for name in set(best)}
                found["best judge"] += [
                    [first[name](one_R)[figure][0], 0, 0, 0] for name, figure in zip(best, FIGURES, strict=True)
                ]
                for way in ways:
                    grade_P, probs_PK = combine_votes(votes, way.partition(",")[0], gold_P)
                    grade_P = np.round(probs_PK, 9).argmax(1) if "," in way else grade_P
                    second = order_and_grade(measured_P, query_P, grade_P, probs_PK, all_P)
                    drawn = {
                        name: bootstrap(minus(second, one), num_groups=left, resamples=1000, seed=7)
                        for name, one in first.items()
                    }
                    for name, figure in zip(best, FIGURES, strict=True):
                        value = second(one_R)[figure][0]
                        found[way].append([value, value - first[name](one_R)[figure][0], *drawn[name][figure][:2]])
            for way, values in found.items():
                means = np.array(values).reshape(-1, len(FIGURES), 4).mean(0)
                cells = [f"{value:.3f} ({step:+.3f}: {low:+.3f} to {high:+.3f})" for value, step, low, high in means]
                print(f"| {anchored} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
