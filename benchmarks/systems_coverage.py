"""Do the intervals of `relabel systems` hold what they say? Published LLM judges of TREC DL 2019 to 2021, whose humans
are known for every query, and rankings of three kinds made here over the judged pools:

- lexical: BM25 with 16 settings, shared words, and the like, 22 in all;
- foreign: rankings by other judges' grades (ties by BM25), and BM25;
- own: a ranking by the judge's own grades against each of the foreign ones.

Humans graded the whole pool, or, in the last table, the top ten of the two systems alone, as they would for `--plan`.

A draw is as many queries as the collection has, with replacement; the first few of them are the gold queries. The
truth is the mean over all queries of the collection. Run with RELABEL_DATA, the folder that holds `llm_labels` and
`trec_dl19` to `trec_dl21`:

    RELABEL_DATA=../data python benchmarks/systems_coverage.py
"""

import argparse
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from relabel.manifests.metrics.metric import places_in_query
from relabel.manifests.metrics.prediction_powered import (
    FEWEST_FOR_LEVELS,
    FEWEST_TO_FIT,
    PoweredMean,
    plain_mean,
    powered_mean,
)
from relabel.manifests.metrics.top import BAD, NDCG, Cut, expected_grades, ideal_gains, top_figures

YEARS = ("dl19", "dl20", "dl21")
CUT = Cut(k=10, relevant=2)
FIGURES = (NDCG, BAD)
SHOWN = 0.02
"""True differences in nDCG from here on are counted as decided or not."""
KINDS = ("lexical", "foreign", "own")


@dataclass
class Collection:
    """A year: figures by query of each system, as humans and each judge have them.

    Args:
        systems: names; those of judges' rankings are the judges' names.
        figures: by who graded, then by figure: float64 [systems, queries].
        query_of: query of each pooled document, from 0: int64 [N].
        orders: of each system, the places of all documents, the best of each query first.
        grades: of each document by who graded it, NaN where it is not.
    """

    year: str
    lexical: list[str]
    judges: list[str]
    systems: list[str]
    figures: dict[str, dict[str, np.ndarray]]
    query_of: np.ndarray
    orders: dict[str, np.ndarray]
    grades: dict[str, np.ndarray]

    def pairs(self, kind: str, judge: str) -> list[tuple[int, int]]:
        """Places of the two systems of each pair."""
        others = [name for name in self.judges if name != judge] + [BM25]
        named = {
            "lexical": list(itertools.combinations(self.lexical, 2)),
            "foreign": list(itertools.combinations(others, 2)),
            "own": [(judge, other) for other in others],
        }
        place = {name: number for number, name in enumerate(self.systems)}
        return [(place[first], place[second]) for first, second in named[kind]]


# ------------------------------------------------------------------------------
# Collections: grades, and rankings of the judged pools.

BM25 = "bm25 k1 0.9 b 0.4"
_WORD = re.compile(r"\w+")


def load_collections(folder: Path) -> list[Collection]:
    """All years."""
    labels = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet")
    return [load_collection(folder, year, labels.filter(pl.col("dataset") == year)) for year in YEARS]


def load_collection(folder: Path, year: str, labels: pl.DataFrame) -> Collection:
    """One year: the queries that the judges labelled."""
    keys = ["query_id", "doc_id"]
    rows = pl.read_parquet(folder / f"trec_{year}" / "pairs.parquet")
    rows = rows.unique(keys, keep="first", maintain_order=True)
    rows = rows.filter(pl.col("query_id").is_in(labels["query_id"].unique().to_list())).sort(keys)
    judges = labels["judge"].unique(maintain_order=True).to_list()
    grades = {"human": rows["grade"].fill_null(0).cast(pl.Float64).to_numpy()}
    number = pl.col("llm_label").str.strip_chars(" .").cast(pl.Float64, strict=False)
    for judge in judges:
        own = labels.filter(pl.col("judge") == judge).select(*keys, grade_of=number).unique(keys, keep="first")
        grades[judge] = rows.select(keys).join(own, on=keys, how="left", maintain_order="left")["grade_of"].to_numpy()
    scores = lexical_scores(rows["query"].to_list(), rows["body"].fill_null("").to_list())
    lexical = list(scores)
    tie = scores[BM25] / (1 + scores[BM25].max())
    scores |= {judge: np.nan_to_num(grades[judge], nan=-1) + tie for judge in judges}
    query_N = rows["query_id"].rank("dense").to_numpy().astype(np.int64) - 1
    doc_N = rows["doc_id"].rank("dense").to_numpy().astype(np.int64)
    orders = {name: np.lexsort((-doc_N, -score_N, query_N)) for name, score_N in scores.items()}
    figures = {who: figures_of(query_N, orders, grade_N) for who, grade_N in grades.items()}
    return Collection(year, lexical, judges, list(scores), figures, query_N, orders, grades)


def figures_of(query_N: np.ndarray, orders: dict[str, np.ndarray], grade_N: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of all systems by one source of grades, [systems, queries] each."""
    ideal_G = best_gains(query_N, grade_N)
    found = [top_figures(query_N[order], grade_N[order], ideal_G, cut=CUT) for order in orders.values()]
    return {figure: np.array([one[figure] for one in found]) for figure in FIGURES}


def best_gains(query_N: np.ndarray, grade_N: np.ndarray) -> np.ndarray:
    """DCG of the best ranking of the documents that have a grade, float64 [G]."""
    is_graded_N = ~np.isnan(grade_N)
    return ideal_gains(query_N[is_graded_N], grade_N[is_graded_N], num_queries=int(query_N.max()) + 1, cut=CUT)


def graded_at_the_top(collection: Collection, judge: str, pair: tuple[int, int], *, takes_labels: bool) -> np.ndarray:
    """nDCG of two systems, [2, queries], by humans who graded the top ten of both and nothing else.

    Args:
        takes_labels: the best ranking is of all that the judge labelled, with expected grades, as `relabel systems` has
            it; else of the graded documents.
    """
    query_N = collection.query_of
    orders = [collection.orders[collection.systems[place]] for place in pair]
    is_graded_N = np.zeros(len(query_N), dtype=bool)
    for order in orders:
        is_graded_N[order[places_in_query(query_N[order], int(query_N.max()) + 1) < CUT.k]] = True
    human_N = np.where(is_graded_N, collection.grades["human"], np.nan)
    label_N = collection.grades[judge]
    best_N = human_N.copy()
    if takes_labels:
        has_both_N = is_graded_N & ~np.isnan(label_N)
        is_open_N = ~is_graded_N & ~np.isnan(label_N)
        best_N[is_open_N] = expected_grades(label_N[has_both_N], human_N[has_both_N], label_N[is_open_N])
    ideal_G = best_gains(query_N, best_N)
    return np.array([top_figures(query_N[order], human_N[order], ideal_G, cut=CUT)[NDCG] for order in orders])


def lexical_scores(queries: list[str], documents: list[str]) -> dict[str, np.ndarray]:
    """22 scores from words alone, float64 [N] each; the passages of the pool are the collection."""
    words = [_WORD.findall(text.lower()) for text in documents]
    asked = [list(dict.fromkeys(_WORD.findall(text.lower()))) for text in queries]
    num_with = Counter(word for held in words for word in set(held))
    length_N = np.array([len(held) for held in words], dtype=float)
    terms = []
    for held, query in zip(words, asked, strict=True):
        counts = Counter(held)
        terms.append([(counts[word], idf(num_with[word], len(words))) for word in query])
    found = {}
    for k1, b in itertools.product((0.4, 0.9, 1.5, 3.0), (0.0, 0.4, 0.75, 1.0)):
        norm_N = k1 * (1 - b + b * length_N / length_N.mean())
        found[f"bm25 k1 {k1} b {b}"] = np.array(
            [
                sum(weight * count * (k1 + 1) / (count + norm) for count, weight in held)
                for held, norm in zip(terms, norm_N, strict=True)
            ]
        )
    shared_N = np.array([sum(count > 0 for count, _ in held) for held in terms], dtype=float)
    counted_N = np.array([sum(count for count, _ in held) for held in terms], dtype=float)
    asked_N = np.array([len(query) for query in asked], dtype=float)
    return found | {
        "shared words": shared_N / np.maximum(asked_N, 1),
        "idf of shared words": np.array([sum(weight for count, weight in held if count) for held in terms]),
        "counts": counted_N,
        "counts by length": counted_N / np.maximum(length_N, 1),
        "jaccard": shared_N / np.maximum([len({*held}) for held in words] + asked_N - shared_N, 1),
        "length": length_N,
    }


def idf(num_with: int, num_all: int) -> float:
    """As Lucene has it."""
    return float(np.log(1 + (num_all - num_with + 0.5) / (num_with + 0.5)))


# ------------------------------------------------------------------------------
# Draws.


@dataclass
class Outcome:
    """Of one judge and a kind of pairs, means over draws and pairs.

    Args:
        covered, covered_humans: shares of intervals that hold the truth: by both, and by the gold queries alone.
        width: of an interval by both, with that by humans as 1.
        decided, wrong: shares of the pairs that truly differ of which the interval excludes 0, and on the wrong side;
            by both, by humans, and by the judge alone.
    """

    covered: float
    covered_humans: float
    width: float
    decided: np.ndarray
    wrong: np.ndarray


def drawn(collection: Collection, draws: int, seed: int) -> np.ndarray:
    """Queries of each draw, int64 [draws, queries]."""
    num_queries = collection.figures["human"][NDCG].shape[1]
    return np.random.default_rng(seed).integers(0, num_queries, (draws, num_queries))


def simulate(human_PG: np.ndarray, judge_PG: np.ndarray, draw_RG: np.ndarray, *, gold: int, is_fitted: bool) -> Outcome:
    """Intervals of some differences, or levels, P, in every draw."""
    covered, covered_humans, width = [], [], []
    decided, wrong = [], []
    for human_G, judge_G in zip(human_PG, judge_PG, strict=True):
        truth = human_G.mean()
        human_RG, judge_RG = human_G[draw_RG], judge_G[draw_RG]
        both = powered_mean(human_RG[:, :gold], judge_RG[:, :gold], judge_RG[:, gold:], is_fitted=is_fitted)
        humans = plain_mean(human_RG[:, :gold])
        covered.append(holds(both, truth))
        covered_humans.append(holds(humans, truth))
        width.append([(one.high - one.low).mean() for one in (both, humans)])
        if abs(truth) >= SHOWN:
            each = (both, humans, plain_mean(judge_RG))
            decided.append([((one.low > 0) | (one.high < 0)).mean() for one in each])
            wrong.append([(one.high < 0).mean() if truth > 0 else (one.low > 0).mean() for one in each])
    mean_width = np.mean(width, axis=0)
    return Outcome(
        covered=float(np.mean(covered)),
        covered_humans=float(np.mean(covered_humans)),
        width=float(mean_width[0] / mean_width[1]),
        decided=np.mean(decided, axis=0) if decided else np.full(3, np.nan),
        wrong=np.mean(wrong, axis=0) if wrong else np.full(3, np.nan),
    )


def holds(found: PoweredMean, truth: float) -> float:
    """The share of intervals that hold the truth; an interval of no width does where rounding alone differs."""
    return float(((found.low <= truth + 1e-12) & (truth - 1e-12 <= found.high)).mean())


def outcomes(
    collections: list[Collection], kind: str, figure: str, gold: int, options: argparse.Namespace
) -> Iterator[Outcome]:
    """Of each judge of each year; `kind` is one of `KINDS`, or `level`: the lexical systems' own figures."""
    is_fitted = figure == BAD or gold >= FEWEST_TO_FIT
    for collection in collections:
        draw_RG = drawn(collection, options.draws, options.seed)
        chooser = np.random.default_rng(options.seed)
        for judge in collection.judges:
            figures = [collection.figures[who][figure] for who in ("human", judge)]
            if kind == "level":
                rows = [collection.systems.index(name) for name in collection.lexical]
                human_PG, judge_PG = (each[rows] for each in figures)
            else:
                pairs = np.array(collection.pairs(kind, judge))
                pairs = pairs[np.sort(chooser.permutation(len(pairs))[: options.pairs])]
                human_PG, judge_PG = (each[pairs[:, 1]] - each[pairs[:, 0]] for each in figures)
            yield simulate(human_PG, judge_PG, draw_RG, gold=gold, is_fitted=is_fitted)


# ------------------------------------------------------------------------------
# Tables.


def print_coverage(collections: list[Collection], options: argparse.Namespace) -> None:
    """Coverage and width by figure and number of gold queries."""
    print("| figure | gold queries | coverage, mean of judges | least of a judge | humans alone | width, humans = 1 |")
    print("|---|---|---|---|---|---|")
    named = (
        ("difference in nDCG@10", "lexical", NDCG),
        ("nDCG@10", "level", NDCG),
        ("difference in bad documents@10", "lexical", BAD),
        ("bad documents@10", "level", BAD),
    )
    for (title, kind, figure), gold in itertools.product(named, options.gold):
        found = list(outcomes(collections, kind, figure, gold, options))
        covered = [one.covered for one in found]
        widths = [one.width for one in found]
        humans = np.mean([one.covered_humans for one in found])
        width = f"{np.mean(widths):.2f} ({min(widths):.2f} to {max(widths):.2f})"
        cells = (title, gold, f"{np.mean(covered):.3f}", f"{min(covered):.3f}", f"{humans:.3f}", width)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_shallow(collections: list[Collection], options: argparse.Namespace) -> None:
    """Coverage of the truth by humans who graded all, where the gold queries' humans graded the top ten alone."""
    heads = ("top ten graded alone", "gold queries", "best ranking of", "coverage, mean", "least of a judge", "width")
    print(f"| {' | '.join(heads)} | too high by |")
    print("|---|---|---|---|---|---|---|")
    for is_level, gold, takes_labels in itertools.product((False, True), options.gold, (False, True)):
        if is_level and gold < FEWEST_FOR_LEVELS:
            continue
        found = [
            shallow_outcome(collection, judge, options, gold=gold, is_level=is_level, takes_labels=takes_labels)
            for collection in collections
            for judge in collection.judges
        ]
        covered, widths, excess = zip(*found, strict=True)
        title = "nDCG@10" if is_level else "difference in nDCG@10"
        ranked = "labelled documents" if takes_labels else "graded documents"
        means = [f"{np.mean(values):.3f}" for values in (covered, widths, excess)]
        cells = (title, gold, ranked, means[0], f"{min(covered):.3f}", *means[1:])
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def shallow_outcome(
    collection: Collection, judge: str, options: argparse.Namespace, *, gold: int, is_level: bool, takes_labels: bool
) -> tuple[float, float, float]:
    """The share of intervals that hold the truth by humans who graded all, their mean width, and by how much their
    middle is above the truth on average, of lexical systems.
    """
    draw_RG = drawn(collection, options.draws, options.seed)
    pairs = collection.pairs("lexical", judge)
    chosen = np.sort(np.random.default_rng(options.seed).permutation(len(pairs))[: options.shallow_pairs])
    covered, widths, excess = [], [], []
    for place in chosen:
        pair = pairs[place]
        whole, labelled = (collection.figures[who][NDCG][list(pair)] for who in ("human", judge))
        shallow = graded_at_the_top(collection, judge, pair, takes_labels=takes_labels)
        truth_G, human_G, judge_G = (one[1] if is_level else one[1] - one[0] for one in (whole, shallow, labelled))
        human_RG, judge_RG = human_G[draw_RG], judge_G[draw_RG]
        both = powered_mean(human_RG[:, :gold], judge_RG[:, :gold], judge_RG[:, gold:], is_fitted=gold >= FEWEST_TO_FIT)
        covered.append(holds(both, truth_G.mean()))
        widths.append((both.high - both.low).mean())
        excess.append((both.value - truth_G.mean()).mean())
    return float(np.mean(covered)), float(np.mean(widths)), float(np.mean(excess))


def print_decisions(collections: list[Collection], options: argparse.Namespace) -> None:
    """Decided, and decided wrongly, by the judge alone, humans alone and both."""
    print(f"| pairs whose nDCG@10 truly differs by {SHOWN} | gold queries | judge alone | humans alone | both |")
    print("|---|---|---|---|---|")
    for kind, gold in itertools.product(KINDS, options.gold):
        found = list(outcomes(collections, kind, NDCG, gold, options))
        decided = np.nanmean([one.decided for one in found], axis=0)
        wrong = np.nanmean([one.wrong for one in found], axis=0)
        cells = [f"{decided[place]:.0%} / {wrong[place]:.1%}" for place in (2, 1, 0)]
        print(f"| {kind} | {gold} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=60, help="Pairs of systems a judge at most, chosen at random.")
    parser.add_argument("--shallow-pairs", type=int, default=20, help="The same for gold of the top ten alone.")
    parser.add_argument("--gold", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    started = time.perf_counter()
    collections = load_collections(Path(os.environ.get("RELABEL_DATA", "../data")))
    judges = sum(len(one.judges) for one in collections)
    queries = ", ".join(f"{one.figures['human'][NDCG].shape[1]} queries of {one.year}" for one in collections)
    print(f"{judges} judges; {queries}; {options.draws} draws, seed {options.seed}")
    print_coverage(collections, options)
    print_decisions(collections, options)
    print_shallow(collections, options)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
