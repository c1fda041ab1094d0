"""Which pairs should a human look at first? Shares of wrong labels among the first 5 % by several orders, on published
judges of TREC DL 2019 to 2021 and on CrowdFlower's e-commerce pairs.

The rule, set before the first run:

- A label is wrong where judge and gold differ on relevant or not (grade 2 of 0 to 3 or more). Off by two grades or more
  is shown too.
- The figure of an order is its lift: the share of wrong labels among the first 5 % of all pairs, by the share among
  all, which is what a random order gives. Ties are broken at random (seed 7). Its 95 % interval is a bootstrap of
  queries (500 resamples, the order cut again in each).
- The goal is a lift of 3. An order reaches it where the mean of its lifts is 3 or more, over the cases that have the
  order, and the low end of its interval is above 1 in each of these. Where more than a third of all labels is wrong, no
  order can reach 3: such a case is shown and is not in the mean.
- The order with the highest mean among those that reach it is the default of `relabel review`. Where none does, random
  is.

Cases:

- published: UMBRELA's prompt with GPT-4, DeepSeek-V3 and Llama-3-8B, 2019 and 2020; no distributions. The second
  opinion is cheap: Llama-3-8B, and of itself Flan-T5-large.
- prompts: Llama 3.2 and Mistral, 2020 and 2021, each with all prompts that ask for grades; the label is the most
  frequent answer (of equals the lowest), the distribution the shares of the answers. The second opinion is the other.
- crowdflower: a logistic regression on lexical scores of title and text, fitted to gold on other queries (5 folds); the
  second opinion is one that reads titles alone. Gold is shaky where its raters differ (variance above 0).

Orders:

- entropy: of the distribution, highest first; confidence: probability of the label, lowest first; other side: the
  probability that the pair is on the other side of relevant, highest first;
- second: distance of grades to the second opinion; others: to the mean of the other two published judges;
- student: distance to the grade that a ridge regression on lexical scores expects, fitted to the judge's labels of
  other queries (5 folds);
- bm25: distance between the pair's places in its query by the judge's grades and by BM25, as parts of the query;
- top: BM25's first documents of all queries, then the second ones, and so on;
- high: the judge's highest grades first, of equals those that BM25 ranks higher.

Then the error that is left in what the labels are for: the differences in nDCG@10 of all pairs of 22 lexical rankings,
by the judge against gold, mean absolute error, with gold in place of the judge's label for the first 5 % of each order;
as a part of the error with none replaced.

Then (`--intervals`) by how much the interval of such a difference shrinks per judged pair:

- No order of pairs has an interval that could be computed without knowing gold. What is shown for each is the
  half-width that would hold 95 % of the 231 differences: the 95 % quantile of their absolute errors, with gold for the
  first 5, 10, 20 and 40 % of the pairs; of a random order the mean over 5 draws.
- Two further rows take whole queries, drawn at random (50 draws), all of whose pairs are judged: *mixed* puts gold in
  place of their labels and is measured in the same way; *systems* is the half-width that `relabel systems` states for
  the mean over all queries, by its own estimator, which wants 5 such queries, with its share of intervals that hold the
  truth.
- Each figure is a part of the half-width with no pair judged, so that 1 is no gain; what a judged pair is worth is
  1 less that, by the share of pairs. An order is worth its name if its mean over the cases is below that of the random
  order at 10 %, and in no case above it by more than a tenth.

Run in a clone with RELABEL_DATA, the folder of `llm_labels`, `prompt_sensitivity`, `crowdflower_ecom` and `trec_*`:

    RELABEL_DATA=../data python -m benchmarks.review_order [--intervals]
"""

# Letters: N pairs, Q queries, K grades (4), S systems, F features, R resamples.

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.systems_coverage import BM25, figures_of, lexical_scores
from relabel.manifests.metrics.prediction_powered import FEWEST_FOR_DIFFERENCES, FEWEST_TO_FIT, powered_mean
from relabel.manifests.metrics.top import NDCG

KEYS = ["query_id", "doc_id"]
RELEVANT = 2
GRADES = 4
FIRST = 0.05
GOAL = 3.0
MOST_WRONG = 1 / 3
RESAMPLES = 500
FOLDS = 5
SEED = 7
RANDOM_DRAWS = 10
SHARES = (0.05, 0.1, 0.2, 0.4)
PAIR_DRAWS = 5
QUERY_DRAWS = 50
PUBLISHED = {
    "umbrela_zeroshot_gpt-4": "umbrela_zeroshot_bing_Llama-3-8B-Instruct",
    "umbrela_zeroshot_bing_DSV3": "umbrela_zeroshot_bing_Llama-3-8B-Instruct",
    "umbrela_zeroshot_bing_Llama-3-8B-Instruct": "4prompts_flant5large",
}
"""Judges, and the second opinion of each."""
PROMPTED = {"llama3.2": "mistral", "mistral": "llama3.2"}


@dataclass
class Pool:
    """Pairs that humans judged.

    Args:
        query: number of each pair's query, from 0, [N].
        doc: number of its document, [N].
        gold: grades, [N].
        scores: lexical scores by name, float64 [N] each.
    """

    query: np.ndarray
    doc: np.ndarray
    gold: np.ndarray
    scores: dict[str, np.ndarray]


@dataclass
class Case:
    """A judge's labels of a pool, and the value of each pair in each order, the highest first.

    Args:
        label: grades, [N].
        orders: by name, float64 [N].
        shaky: whether the raters of gold differed; None where unknown.
    """

    name: str
    pool: Pool
    label: np.ndarray
    orders: dict[str, np.ndarray]
    shaky: np.ndarray | None = None


# ------------------------------------------------------------------------------
# Cases.


def published_cases(folder: Path) -> Iterator[Case]:
    """Published judges of 2019 and 2020."""
    labels = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet")
    for year in ("dl19", "dl20"):
        own = labels.filter(pl.col("dataset") == year)
        rows, pool = trec_pool(folder, year, own)
        names = [*PUBLISHED, *PUBLISHED.values()]
        grades = {name: published_grades(rows, own, name) for name in names}
        for judge, second in PUBLISHED.items():
            label_N = grades[judge]
            others = [grades[name] for name in PUBLISHED if name != judge]
            orders = common_orders(pool, label_N)
            orders["second"] = np.abs(label_N - grades[second])
            orders["others"] = np.abs(label_N - np.mean(others, axis=0))
            yield Case(f"{year} {judge}", pool, label_N, orders)


def published_grades(rows: pl.DataFrame, labels: pl.DataFrame, judge: str) -> np.ndarray:
    """A judge's grades of the rows, 0 where it has none."""
    number = pl.col("llm_label").str.strip_chars(" .").cast(pl.Float64, strict=False)
    own = labels.filter(pl.col("judge") == judge).select(*KEYS, grade_of=number).unique(KEYS, keep="first")
    joined = rows.select(KEYS).join(own, on=KEYS, how="left", maintain_order="left")
    return joined["grade_of"].fill_null(0).to_numpy()


def prompted_cases(folder: Path) -> Iterator[Case]:
    """Two models with all prompts that ask for grades, 2020 and 2021."""
    number = pl.col("llm_label").str.strip_chars(" .").cast(pl.Int64, strict=False)
    labels = pl.scan_parquet(folder / "prompt_sensitivity" / "labels.parquet")
    labels = labels.filter(pl.col("method") == "graded", pl.col("model").is_in([*PROMPTED]))
    labels = labels.with_columns(grade_of=number).filter(pl.col("grade_of").is_between(0, GRADES - 1))
    counts = labels.group_by("dataset", "model", *KEYS, "grade_of").agg(count=pl.len()).collect()
    for year in ("dl20", "dl21"):
        of_year = counts.filter(pl.col("dataset") == year)
        rows, pool = trec_pool(folder, year, of_year)
        shares = {model: answer_shares(rows, of_year.filter(pl.col("model") == model)) for model in PROMPTED}
        for model, second in PROMPTED.items():
            share_NK = shares[model]
            label_N = share_NK.argmax(1).astype(float)
            orders = common_orders(pool, label_N) | distribution_orders(share_NK, label_N)
            orders["second"] = np.abs(label_N - shares[second].argmax(1))
            yield Case(f"{year} {model}, all prompts", pool, label_N, orders)


def answer_shares(rows: pl.DataFrame, counts: pl.DataFrame) -> np.ndarray:
    """Shares of the answers that are a grade, [N, K]; grade 0 is sure where there is none."""
    wide = counts.pivot("grade_of", index=KEYS, values="count")
    names = [str(grade) for grade in range(GRADES)]
    missing = [pl.lit(0).alias(name) for name in names if name not in wide.columns]
    joined = rows.select(KEYS).join(wide.with_columns(missing), on=KEYS, how="left", maintain_order="left")
    count_NK = joined.select(names).fill_null(0).to_numpy().astype(float)
    count_NK[count_NK.sum(1) == 0, 0] = 1
    return count_NK / count_NK.sum(1, keepdims=True)


def trec_pool(folder: Path, year: str, labels: pl.DataFrame) -> tuple[pl.DataFrame, Pool]:
    """A year's pairs of the queries that the judges labelled."""
    rows = pl.read_parquet(folder / f"trec_{year}" / "pairs.parquet").unique(KEYS, keep="first", maintain_order=True)
    rows = rows.filter(pl.col("query_id").is_in(labels["query_id"].unique().to_list())).sort(KEYS)
    return rows, pool_of(rows, rows["body"].fill_null("").to_list())


def crowdflower_case(folder: Path) -> Case:
    """A logistic regression on lexical scores, where raters say which gold is shaky."""
    rows = pl.read_parquet(folder / "crowdflower_ecom" / "pairs.parquet").sort(KEYS)
    titles = rows["title"].fill_null("").to_list()
    texts = [f"{title}\n{body}" for title, body in zip(titles, rows["body"].fill_null("").to_list(), strict=True)]
    pool = pool_of(rows, texts)
    title_scores = lexical_scores(rows["query"].to_list(), titles)
    probs_NK = logistic_probs(features(pool.scores), pool)
    second_NK = logistic_probs(features(title_scores), pool)
    label_N = probs_NK.argmax(1).astype(float)
    orders = common_orders(pool, label_N) | distribution_orders(probs_NK, label_N)
    orders["second"] = np.abs(probs_NK @ np.arange(GRADES) - second_NK @ np.arange(GRADES))
    shaky_N = (rows["relevance_variance"].fill_null(0) > 0).to_numpy()
    return Case("crowdflower, logistic regression", pool, label_N, orders, shaky_N)


def pool_of(rows: pl.DataFrame, texts: list[str]) -> Pool:
    """Numbered queries and documents, gold, and lexical scores of these texts."""
    return Pool(
        query=rows["query_id"].rank("dense").to_numpy().astype(np.int64) - 1,
        doc=rows["doc_id"].rank("dense").to_numpy().astype(np.int64),
        gold=rows["grade"].fill_null(0).cast(pl.Float64).to_numpy(),
        scores=lexical_scores(rows["query"].to_list(), texts),
    )


# ------------------------------------------------------------------------------
# Orders.


def common_orders(pool: Pool, label_N: np.ndarray) -> dict[str, np.ndarray]:
    """Those that want labels and texts alone."""
    place_N = place_in_query(pool.query, pool.scores[BM25])
    size_N = np.bincount(pool.query)[pool.query]
    return {
        "student": np.abs(label_N - student_grades(pool, label_N)),
        "bm25": np.abs(place_in_query(pool.query, label_N) - place_N) / size_N,
        "top": -place_N,
        "high": label_N - place_N / size_N,
    }


def distribution_orders(probs_NK: np.ndarray, label_N: np.ndarray) -> dict[str, np.ndarray]:
    """Those that want a distribution over grades."""
    safe_NK = np.maximum(probs_NK, 1e-12)
    relevant_N = probs_NK[:, RELEVANT:].sum(1)
    return {
        "entropy": -(probs_NK * np.log(safe_NK)).sum(1),
        "confidence": -probs_NK[np.arange(len(label_N)), label_N.astype(int)],
        "other side": np.where(label_N >= RELEVANT, 1 - relevant_N, relevant_N),
    }


def place_in_query(query_N: np.ndarray, score_N: np.ndarray) -> np.ndarray:
    """The place of each pair in its query by falling score, from 0; equals share their mean place."""
    frame = pl.DataFrame({"query": query_N, "score": -score_N})
    return frame.select(pl.col("score").rank("average").over("query") - 1).to_series().to_numpy()


def features(scores: dict[str, np.ndarray]) -> np.ndarray:
    """Scores and their logarithms, standardised, with a column of ones, [N, F]."""
    score_NF = np.stack(list(scores.values()), axis=1)
    both_NF = np.concatenate([score_NF, np.log1p(score_NF)], axis=1)
    spread_F = both_NF.std(0)
    scaled_NF = (both_NF - both_NF.mean(0)) / np.where(spread_F > 0, spread_F, 1)
    return np.concatenate([scaled_NF, np.ones((len(scaled_NF), 1))], axis=1)


def folds(pool: Pool) -> np.ndarray:
    """A fold of each pair, by its query, [N]."""
    num_queries = int(pool.query.max()) + 1
    return np.random.default_rng(SEED).permutation(num_queries)[pool.query] % FOLDS


def student_grades(pool: Pool, label_N: np.ndarray) -> np.ndarray:
    """What a ridge regression expects that learnt the labels of other queries, [N]."""
    feature_NF = features(pool.scores)
    fold_N = folds(pool)
    expected_N = np.zeros(len(label_N))
    for fold in range(FOLDS):
        known = feature_NF[fold_N != fold]
        weight_F = np.linalg.solve(
            known.T @ known + len(known) * 1e-3 * np.eye(known.shape[1]), known.T @ label_N[fold_N != fold]
        )
        expected_N[fold_N == fold] = feature_NF[fold_N == fold] @ weight_F
    return expected_N


def logistic_probs(feature_NF: np.ndarray, pool: Pool) -> np.ndarray:
    """A distribution over grades by one that learnt the gold of other queries, [N, K]."""
    fold_N = folds(pool)
    one_hot_NK = np.eye(GRADES)[pool.gold.astype(int)]
    probs_NK = np.zeros(one_hot_NK.shape)
    for fold in range(FOLDS):
        known_NF = feature_NF[fold_N != fold]
        gold_NK = one_hot_NK[fold_N != fold]
        weight_FK = np.zeros((feature_NF.shape[1], GRADES))
        for _ in range(200):
            slope_FK = known_NF.T @ (softmax(known_NF @ weight_FK) - gold_NK) / len(known_NF)
            weight_FK -= 0.1 * (slope_FK + 1e-3 * weight_FK)
        probs_NK[fold_N == fold] = softmax(feature_NF[fold_N == fold] @ weight_FK)
    return probs_NK


def softmax(logit_NK: np.ndarray) -> np.ndarray:
    """Probabilities, [N, K]."""
    raised_NK = np.exp(logit_NK - logit_NK.max(1, keepdims=True))
    return raised_NK / raised_NK.sum(1, keepdims=True)


# ------------------------------------------------------------------------------
# Figures.


@dataclass
class Lift:
    """Of one order: its lift with its interval, its lift for labels off by two or more, and among its first 5 % the
    shares of labels that are wrong, that are wrong against firm gold, and of shaky gold.
    """

    value: float
    low: float
    high: float
    far: float
    wrong: float
    wrong_firm: float
    shaky: float


def ordered(value_N: np.ndarray) -> np.ndarray:
    """Pairs by falling value, equals at random."""
    tie_N = np.random.default_rng(SEED).random(len(value_N))
    return np.lexsort((tie_N, -value_N))


def lift_of(case: Case, value_N: np.ndarray, weight_RQ: np.ndarray) -> Lift:
    """An order's figures; the weights say how often each query is in each resample."""
    order_N = ordered(value_N)
    wrong_N = (case.label >= RELEVANT) != (case.pool.gold >= RELEVANT)
    far_N = np.abs(case.label - case.pool.gold) >= 2
    first = order_N[: round(FIRST * len(order_N))]
    query_N = case.pool.query[order_N]
    drawn = [weighted_lift(wrong_N[order_N], weight_Q[query_N]) for weight_Q in weight_RQ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    shaky_N = np.zeros(len(order_N), dtype=bool) if case.shaky is None else case.shaky
    return Lift(
        value=wrong_N[first].mean() / wrong_N.mean(),
        low=low,
        high=high,
        far=far_N[first].mean() / far_N.mean(),
        wrong=wrong_N[first].mean(),
        wrong_firm=(wrong_N & ~shaky_N)[first].mean(),
        shaky=shaky_N[first].mean(),
    )


def weighted_lift(wrong_N: np.ndarray, weight_N: np.ndarray) -> float:
    """The lift of ordered pairs that count so often each."""
    upto_N = weight_N.cumsum()
    budget = FIRST * upto_N[-1]
    counted_N = np.clip(budget - (upto_N - weight_N), 0, weight_N)
    return float((counted_N @ wrong_N / budget) / (weight_N @ wrong_N / upto_N[-1]))


def differences(pool: Pool, grade_N: np.ndarray) -> np.ndarray:
    """Differences in mean nDCG@10 of all pairs of systems."""
    figure_SQ = figures_of(pool.query, pool.doc, pool.scores, grade_N)[NDCG]
    mean_S = np.nanmean(figure_SQ, axis=1)
    return np.array([second - first for first, second in itertools.combinations(mean_S, 2)])


def error_left(case: Case, order_N: np.ndarray, truth: np.ndarray, before: float) -> float:
    """The error of differences with gold for the first 5 %, as a part of that before."""
    first = order_N[: round(FIRST * len(order_N))]
    grade_N = case.label.copy()
    grade_N[first] = case.pool.gold[first]
    return float(np.abs(differences(case.pool, grade_N) - truth).mean() / before)


def random_error_left(case: Case, truth: np.ndarray, before: float) -> float:
    """The same of a random order, mean over draws."""
    chooser = np.random.default_rng(SEED)
    size = len(case.label)
    return float(np.mean([error_left(case, chooser.permutation(size), truth, before) for _ in range(RANDOM_DRAWS)]))


# ------------------------------------------------------------------------------
# How far an interval shrinks.


def half_width(case: Case, order_N: np.ndarray, share: float, truth: np.ndarray) -> float:
    """What holds 95 % of the errors of differences, with gold for the first pairs of an order."""
    first = order_N[: round(share * len(order_N))]
    grade_N = case.label.copy()
    grade_N[first] = case.pool.gold[first]
    return float(np.quantile(np.abs(differences(case.pool, grade_N) - truth), 0.95))


@dataclass
class Stated:
    """Of whole random queries: the half-width of `relabel systems`, that of their gold mixed with the judge's labels,
    and the share of the first's intervals that hold the truth; NaN where they are too few.
    """

    systems: float
    mixed: float
    covered: float


def stated(case: Case, share: float) -> Stated:
    """With so large a share of the queries judged."""
    human_SQ = figures_of(case.pool.query, case.pool.doc, case.pool.scores, case.pool.gold)[NDCG]
    judge_SQ = figures_of(case.pool.query, case.pool.doc, case.pool.scores, case.label)[NDCG]
    num_queries = human_SQ.shape[1]
    num_gold = round(share * num_queries)
    if num_gold < FEWEST_FOR_DIFFERENCES:
        return Stated(np.nan, np.nan, np.nan)
    chooser = np.random.default_rng(SEED)
    order_RQ = np.array([chooser.permutation(num_queries) for _ in range(QUERY_DRAWS)])
    widths, errors, covered = [], [], []
    for one, other in itertools.combinations(range(len(human_SQ)), 2):
        human_Q = np.nan_to_num(human_SQ[other] - human_SQ[one])
        judge_Q = np.nan_to_num(judge_SQ[other] - judge_SQ[one])
        human_RQ, judge_RQ = human_Q[order_RQ], judge_Q[order_RQ]
        found = powered_mean(
            human_RQ[:, :num_gold],
            judge_RQ[:, :num_gold],
            judge_RQ[:, num_gold:],
            is_fitted=num_gold >= FEWEST_TO_FIT,
        )
        truth = human_Q.mean()
        widths.append(((found.high - found.low) / 2).mean())
        covered.append(((found.low <= truth + 1e-12) & (truth - 1e-12 <= found.high)).mean())
        mixed_R = (human_RQ[:, :num_gold].sum(1) + judge_RQ[:, num_gold:].sum(1)) / num_queries
        errors.append(np.abs(mixed_R - truth))
    return Stated(float(np.mean(widths)), float(np.quantile(errors, 0.95)), float(np.mean(covered)))


def shrinkage(case: Case) -> dict[str, list[float]]:
    """By order, the half-width at each of `SHARES` as a part of that with no pair judged; of `covered`, the share."""
    truth = differences(case.pool, case.pool.gold)
    nothing = np.arange(0)
    before = half_width(case, nothing, 0.0, truth)
    chooser = np.random.default_rng(SEED)
    draws = [chooser.permutation(len(case.label)) for _ in range(PAIR_DRAWS)]
    found = {
        "random": [float(np.mean([half_width(case, draw, share, truth) for draw in draws])) for share in SHARES],
    }
    for name, value_N in case.orders.items():
        order_N = ordered(value_N)
        found[name] = [half_width(case, order_N, share, truth) for share in SHARES]
    whole = [stated(case, share) for share in SHARES]
    found["whole queries, mixed"] = [one.mixed for one in whole]
    found["whole queries, systems"] = [one.systems for one in whole]
    parts = {name: [width / before for width in widths] for name, widths in found.items()}
    return parts | {"covered": [one.covered for one in whole]}


def print_intervals(cases: list[Case]) -> None:
    """Each order over all cases."""
    by_case = {case.name: shrinkage(case) for case in cases}
    head = " | ".join(f"{share:.0%} of the pairs" for share in SHARES)
    print(f"\n| order | cases | {head} | least and most at 10 % | worth its name |")
    print(f"|{'---|' * (len(SHARES) + 4)}")
    at = SHARES.index(0.1)
    for name in dict.fromkeys(name for parts in by_case.values() for name in parts):
        held = {case: parts[name] for case, parts in by_case.items() if name in parts}
        widths = np.array(list(held.values()))
        is_there = ~np.isnan(widths)
        means = []
        for place, there in enumerate(is_there.T):
            mean = f"{widths[there, place].mean():.2f}" if there.any() else "–"
            means.append(mean if there.all() else f"{mean} ({there.sum()} of {len(there)})")
        random = np.array([by_case[case]["random"][at] for case in held])
        tenth = widths[:, at]
        ends = "–"
        verdict = ""
        if is_there[:, at].any():
            ends = f"{np.nanmin(tenth):.2f} to {np.nanmax(tenth):.2f}"
        if name not in ("random", "covered") and is_there[:, at].all():
            is_better = tenth.mean() < random.mean() and bool((tenth <= 1.1 * random).all())
            verdict = "yes" if is_better else "no"
        print(f"| {name} | {len(held)} | {' | '.join(means)} | {ends} | {verdict} |")


# ------------------------------------------------------------------------------
# Tables.


def print_case(case: Case) -> dict[str, Lift]:
    """A case's table."""
    wrong_N = (case.label >= RELEVANT) != (case.pool.gold >= RELEVANT)
    far_N = np.abs(case.label - case.pool.gold) >= 2
    num_queries = int(case.pool.query.max()) + 1
    chance = np.full(num_queries, 1 / num_queries)
    weight_RQ = np.random.default_rng(SEED).multinomial(num_queries, chance, RESAMPLES)
    truth = differences(case.pool, case.pool.gold)
    before = float(np.abs(differences(case.pool, case.label) - truth).mean())
    print(f"\n### {case.name}\n")
    print(
        f"{len(wrong_N):,} pairs of {num_queries} queries; wrong {wrong_N.mean():.1%}, off by two {far_N.mean():.1%}; "
        f"error of differences {before:.4f}"
    )
    if case.shaky is not None:
        wrong_firm = (wrong_N & ~case.shaky).mean()
        print(f"shaky gold {case.shaky.mean():.1%}; wrong against firm gold {wrong_firm:.1%} of all pairs")
    print("\n| order | wrong among the first 5 % | lift | off by two, lift | error left |")
    print("|---|---|---|---|---|")
    print(f"| random | {wrong_N.mean():.1%} | 1 | 1 | {random_error_left(case, truth, before):.2f} |")
    found = {}
    for name, value_N in case.orders.items():
        lift = lift_of(case, value_N, weight_RQ)
        left = error_left(case, ordered(value_N), truth, before)
        interval = f"{lift.value:.2f} ({lift.low:.2f} to {lift.high:.2f})"
        shaky = ""
        if case.shaky is not None:
            shaky = f"; {lift.wrong_firm:.1%} against firm gold; {lift.shaky:.1%} shaky gold"
        print(f"| {name} | {lift.wrong:.1%}{shaky} | {interval} | {lift.far:.2f} | {left:.2f} |", flush=True)
        if wrong_N.mean() <= MOST_WRONG:
            found[name] = lift
    return found


def print_verdict(found: list[dict[str, Lift]]) -> None:
    """Each order over the cases that count."""
    print("\n### All cases in which the goal can be reached\n")
    print("| order | cases | mean lift | least | low end above 1 in all | reaches the goal |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(name for lifts in found for name in lifts):
        lifts = [one[name] for one in found if name in one]
        mean = np.mean([lift.value for lift in lifts])
        is_above = all(lift.low > 1 for lift in lifts)
        reaches = mean >= GOAL and is_above
        least = min(lift.value for lift in lifts)
        cells = (name, len(lifts), f"{mean:.2f}", f"{least:.2f}", "yes" if is_above else "no")
        print(f"| {' | '.join(map(str, cells))} | {'yes' if reaches else 'no'} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", action="store_true", help="How far intervals shrink.")
    options = parser.parse_args()
    started = time.perf_counter()
    folder = Path(os.environ.get("RELABEL_DATA", "../data"))
    cases = itertools.chain(published_cases(folder), prompted_cases(folder), [crowdflower_case(folder)])
    if options.intervals:
        print_intervals(list(cases))
    else:
        print_verdict([print_case(case) for case in cases])
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
