"""What a cascade saves and costs, by random splits of the queries: a part calibrates, the others are labelled.

    python -m benchmarks.cascade TEACHER CHEAP… --grades K [--calibrate 36,49] [--alpha 0.05,0.08] [--splits 200]
    python -m benchmarks.cascade --trec DATA

TEACHER and CHEAP are outputs of runs or label files, as `cascade` takes them. `--trec` takes published labels of TREC
Deep Learning 2019 and 2020 (`DATA/llm_labels`): six open judges before GPT-4 with UMBRELA's prompt, relevant or not.

Printed for each number of calibration queries and alpha: the mean loss of the other queries over all splits (to be at
most alpha) and the share of splits above alpha, the same of the least threshold whose calibration loss is at most
alpha (`naive`) or whose normal 95 % bound is (`normal`), and the share of the others' pairs without the teacher.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from relabel.manifests.cascade import CheapAnswers, certified_threshold, keys_of, open_answers
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import Storage

TEACHER = "umbrela_zeroshot_gpt-4"
JUDGES = (
    "umbrela_zeroshot_bing_DSV3",
    "4prompts_llama70b",
    "4prompts_llama3-8b",
    "4prompts_flant5large",
    "umbrela_zeroshot_bing_Llama-3-8B-Instruct",
    "umbrela_zeroshot_basic_Llama-3-8B-Instruct",
)
RELEVANT = (0.0, 0.25, 0.75, 1.0)
"""Probability of relevance for a judge's grade 0 to 3, set before anything was measured with it."""


def write_trec(data: Path, folder: Path) -> list[str]:
    """The teacher's label file and the judges'."""
    labels = pl.read_parquet(data / "llm_labels" / "llm_labels.parquet")
    labels = labels.filter(pl.col("dataset").is_in(["dl19", "dl20"]))
    labels = labels.with_columns(pl.col("llm_label").str.strip_chars(" .\n").cast(pl.Int64, strict=False))
    paths = []
    for name in (TEACHER, *JUDGES):
        one = labels.filter(pl.col("judge") == name).drop_nulls("llm_label").unique(["query_id", "doc_id"])
        relevant = np.array(RELEVANT)[one["llm_label"].to_numpy()]
        found = one.select("query_id", "doc_id", grade=(pl.col("llm_label") >= 2).cast(pl.Int64))
        if name != TEACHER:
            found = found.with_columns(pl.Series("probs", np.stack([1 - relevant, relevant], axis=1).tolist()))
        found.sort("query_id", "doc_id").write_parquet(folder / f"{name}.parquet")
        paths.append(str(folder / f"{name}.parquet"))
    return paths


def uncertified(bound: Callable[[np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray, np.ndarray, float], float]:
    """Takes the least threshold of 200 where a function of the queries' losses is at most alpha."""

    def find(query_N: np.ndarray, confidence_N: np.ndarray, loss_N: np.ndarray, alpha: float) -> float:
        _, query_N, rows_Q = np.unique(query_N, return_inverse=True, return_counts=True)
        for threshold in np.quantile(confidence_N, np.linspace(0, 1, 200)):
            if bound(np.bincount(query_N, loss_N * (confidence_N > threshold)) / rows_Q) <= alpha:
                return float(threshold)
        return 1.0

    return find


RULES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, float], float]] = {
    "certified": lambda query, confidence, loss, alpha: certified_threshold(
        query, confidence, loss, alpha=alpha, highest=1.0
    ),
    "naive": uncertified(lambda loss_Q: float(loss_Q.mean())),
    "normal": uncertified(lambda loss_Q: float(loss_Q.mean() + 1.645 * loss_Q.std(ddof=1) / len(loss_Q) ** 0.5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help="TEACHER, then CHEAP")
    parser.add_argument("--trec", type=Path)
    parser.add_argument("--grades", type=int, default=2)
    parser.add_argument("--calibrate", default="36,49")
    parser.add_argument("--alpha", default="0.05,0.06,0.07,0.08")
    parser.add_argument("--splits", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_trec(options.trec, Path(folder)) if options.trec else options.sets
        teacher, *judges = (open_answers(path, Storage(), options.grades, "sets")[1] for path in paths)
    cheap = CheapAnswers(judges, 1 - np.eye(options.grades))
    place_N = cheap.places(keys_of(teacher))
    known_N = place_N >= 0
    place_N, grade_N = place_N[known_N], teacher.grades[known_N]
    query_N = np.unique(np.array(teacher.query_ids.to_pylist())[known_N], return_inverse=True)[1]
    loss_N, confidence_N = (cheap.grade_P[place_N] != grade_N).astype(float), cheap.confidence_P[place_N]
    rows_Q = np.bincount(query_N)
    print(f"{len(query_N):,} pairs of {len(rows_Q)} queries, {1 - loss_N.mean():.3f} of them answered as the teacher")
    print("calibrated  alpha  rule       mean loss  splits above  without the teacher")
    for calibrated in map(int, options.calibrate.split(",")):
        for alpha in map(float, options.alpha.split(",")):
            for name, rule in RULES.items():
                losses, shares = [], []
                random = np.random.default_rng(0)
                for _ in range(options.splits):
                    is_seen_N = np.isin(query_N, random.permutation(len(rows_Q))[:calibrated])
                    try:
                        threshold = rule(query_N[is_seen_N], confidence_N[is_seen_N], loss_N[is_seen_N], alpha)
                    except ConfigError as exc:
                        print(exc)
                        break
                    is_cheap_N = ~is_seen_N & (confidence_N > threshold)
                    loss_Q = np.bincount(query_N, loss_N * is_cheap_N) / rows_Q
                    losses.append(loss_Q.sum() / (len(rows_Q) - calibrated))
                    shares.append(is_cheap_N.sum() / (~is_seen_N).sum())
                if losses:
                    figures = (
                        f"{np.mean(losses):9.4f} {np.mean(np.array(losses) > alpha):13.3f} {np.mean(shares):20.3f}"
                    )
                    print(f"{calibrated:10} {alpha:6} {name:10} {figures}")


if __name__ == "__main__":
    main()
