"""What a small model learns by `relabel train` from trusted grades, on queries that it never saw.

    python benchmarks/teacher_sft.py PAIRS.parquet MODEL_DIR ENCODER --to OUT [--train 800] [--test 400]
        [--learning-rate 5e-5] [--epochs 1] [--batch 8] [--precision auto] [--short]
        [--set key=value ...]

PAIRS has the columns query_id, query, doc_id, title and grade (0 to 3). Queries are split by a seed, a third of them
for the test. The rows to train on are drawn evenly over the grades, those of the test are half of grade 0, as far as
there are so many. Compared on the test rows: the labeler `direct` with the model as it is; with the model trained on
the grades (`method: sft`); and an encoder student distilled from the same grades. Printed are the ROC area of P(grade
0) and quadratic kappa, with 95 % bounds by a bootstrap over queries, and the differences, paired.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pyarrow import Table
from real_runs import RESAMPLES, label, labels, relabel
from sklearn.metrics import cohen_kappa_score, roc_auc_score

GRADES = 4
SHORT = {
    "system.j2": "Grade from 0 (another product) to 3 (what the shopper asked for).",
    "user.j2": "Query: {{ query }}\nProduct: {{ document }}",
}
"""Templates with a quarter of the built-in prompt's tokens."""


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("encoder")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--train", type=int, default=800)
    parser.add_argument("--test", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--precision", default="auto", help="of the training: bf16 is 2.5 times as fast on a CPU with AVX512-BF16"
    )
    parser.add_argument("--short", action="store_true", help="prompts of two lines, for the model as it is too")
    parser.add_argument("--set", action="append", default=[], help="of the engine: args.dtype=bfloat16")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    train, test = drawn(pq.read_table(asked.pairs).to_pylist(), asked.train, asked.test)
    for name, rows in (("train", train), ("test", test)):
        columns = ("query_id", "query", "doc_id", "title", "grade")
        table = Table.from_pylist([{column: row[column] for column in columns} for row in rows])
        pq.write_table(table, asked.to / f"{name}.parquet")
    print(
        f"{len(train)} rows to train on, {len(test)} of {len({row['query_id'] for row in test})} other queries to test"
    )
    templates = short_templates(asked.to / "templates") if asked.short else None
    teacher = taught(asked, templates)
    pairs = asked.to / "test.parquet"
    found = {
        name: probs_of(
            label("direct", pairs, model, asked.to / name, asked.set, chunk_rows=64, grades=GRADES, templates=templates)
        )
        for name, model in (("untrained", asked.model), ("trained", teacher))
    }
    found["encoder student"] = probs_of(student_scores(asked))
    report(test, found)


def drawn(rows: list[dict[str, Any]], num_train: int, num_test: int) -> tuple[list[Any], list[Any]]:
    """Rows to train on, evenly over grades, and rows of other queries, half of them of grade 0."""
    rng = np.random.default_rng(15)
    rows = [{**row, "doc_id": f"{row['query_id']}/{row['doc_id']}"} for row in rows]
    queries = sorted({row["query_id"] for row in rows})
    held = set(rng.permutation(queries)[: len(queries) // 3])

    def some(wanted: Callable[[dict[str, Any]], bool], count: int) -> list[dict[str, Any]]:
        found = [row for row in rows if wanted(row)]
        return [found[place] for place in np.sort(rng.permutation(len(found))[:count])]

    train = [
        row
        for grade in range(GRADES)
        for row in some(lambda row, g=grade: row["query_id"] not in held and row["grade"] == g, num_train // GRADES)
    ]
    none = some(lambda row: row["query_id"] in held and row["grade"] == 0, num_test // 2)
    others = some(lambda row: row["query_id"] in held and row["grade"] > 0, num_test - len(none))
    return train, none + others


def short_templates(folder: Path) -> str:
    """The folder, with the short prompts in it."""
    folder.mkdir(exist_ok=True)
    for name, text in SHORT.items():
        (folder / name).write_text(text)
    return str(folder.absolute())


def taught(asked: argparse.Namespace, templates: str | None) -> Path:
    """The teacher's folder."""
    labeler = {"name": "direct", "grades": GRADES, **({} if templates is None else {"templates": templates})}
    spec = {
        "name": "direct-sft",
        "method": "sft",
        "init": str(asked.model),
        "labeler": labeler,
        "data": {"gold": {"path": str(asked.to / "train.parquet"), "grade": "grade"}},
        "train": {
            "epochs": asked.epochs,
            "batch_size": asked.batch,
            "learning_rate": asked.learning_rate,
            "precision": asked.precision,
            "max_tokens": 512,
            "save_every": 50,
        },
        "output": str(asked.to / "teacher"),
    }
    file = asked.to / "teacher.yaml"
    file.write_text(json.dumps(spec))
    started = time.perf_counter()
    relabel("train", file, "--resume", "--done-ok")
    print(f"train: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return asked.to / "teacher"


def student_scores(asked: argparse.Namespace) -> Path:
    """Labels of an encoder that learned the same grades."""
    spec = {
        "name": "encoder",
        "labels": [],
        "gold": {"path": str(asked.to / "train.parquet"), "grade": "grade"},
        "student": {"kind": "encoder", "model": asked.encoder},
        "loss": {"gold_weight": 1.0},
        "train": {"epochs": 4, "batch_size": 32, "learning_rate": 2.0e-4, "max_tokens": 96, "seed": 7},
        "split": {"by": "query_id", "dev": 0.1, "test": 0.1},
        "output": str(asked.to / "student"),
    }
    file, scores = asked.to / "student.yaml", asked.to / "scores"
    file.write_text(json.dumps(spec))
    relabel("distill", file, "--resume", "--done-ok")
    relabel("score", asked.to / "student", "--input", asked.to / "test.parquet", "--to", scores, "--done-ok")
    return scores


def probs_of(run: Path) -> dict[str, list[float]]:
    """The distribution over grades of each document."""
    return {row["doc_id"]: row["probs"] for row in labels(run, "doc_id", "probs")}


def report(test: list[dict[str, Any]], found: dict[str, dict[str, list[float]]]) -> None:
    """A line for each model, and for each difference to the trained one."""
    rows = [row for row in test if all(row["doc_id"] in held for held in found.values())]
    gold = np.array([row["grade"] for row in rows])
    _, query_N = np.unique([row["query_id"] for row in rows], return_inverse=True)
    probs = {name: np.array([held[row["doc_id"]] for row in rows]) for name, held in found.items()}
    rng = np.random.default_rng(7)
    members = [np.flatnonzero(query_N == query) for query in range(query_N.max() + 1)]
    draws = [
        np.concatenate([members[q] for q in rng.integers(len(members), size=len(members))]) for _ in range(RESAMPLES)
    ]

    def area(name: str, at: np.ndarray) -> float:
        return float(roc_auc_score(gold[at] == 0, probs[name][at, 0]))

    def kappa(name: str, at: np.ndarray) -> float:
        return float(cohen_kappa_score(gold[at], probs[name][at].argmax(1), weights="quadratic"))

    print(f"n = {len(rows)}, of grade 0: {np.sum(gold == 0)}\n")
    print("| model | AUC of grade 0 | quadratic kappa |\n|---|---|---|")
    everything = np.arange(len(rows))
    for name in probs:
        cells = [shown(measure(name, everything), [measure(name, at) for at in draws]) for measure in (area, kappa)]
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    for name in probs:
        if name != "trained":
            less = [
                shown(
                    measure("trained", everything) - measure(name, everything),
                    [measure("trained", at) - measure(name, at) for at in draws],
                )
                for measure in (area, kappa)
            ]
            print(f"| trained less {name} | {less[0]} | {less[1]} |")


def shown(value: float, drawn: list[float]) -> str:
    """A value with its bounds."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
