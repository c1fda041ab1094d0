"""Does a judge's weakness travel through distillation? A teacher, a student of its labels and a student of gold are
audited on the same held-out pairs.

Set before the first run: crowdflower's product pairs (titles alone, grade 0 to 3); 100 queries by a hash of their id
are held out, 600 pairs of the others train both students (the same base, steps and seed); 100 held-out pairs are
audited, every probe, seed 7. A weakness travelled if the student of the labels moves the wrong way, and more than both
the student of gold and the pairs asked again, with intervals that do not meet. A student's mean move is in grades, too,
so the moves of the three can be compared as they are.

    RELABEL_DATA=../data python benchmarks/audit_travels.py TEACHER-FOLDER MINILM-FOLDER WORK-FOLDER
    RELABEL_DATA=../data python benchmarks/audit_travels.py … --training-pairs 40 --audited-pairs 4      # does it work?
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT_QUERIES = 100
COLUMNS = {"document": ["title"]}


def write_pairs(data: Path, work: Path, training_pairs: int) -> None:
    """`train.parquet` and `audit.parquet`, of different queries; rows of a query in the order of a hash."""
    rows = pq.read_table(data / "crowdflower_ecom/pairs.parquet").to_pylist()

    def draw(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    queries = sorted({row["query_id"] for row in rows}, key=draw)
    turn: dict[str, int] = {}
    drawn = []
    for row in sorted(rows, key=lambda row: draw(row["doc_id"])):
        turn[row["query_id"]] = turn.get(row["query_id"], 0) + 1
        drawn.append((turn[row["query_id"]], row))
    drawn.sort(key=lambda pair: pair[0])
    held_out = set(queries[:HELD_OUT_QUERIES])
    parts = {
        "audit": [row for _, row in drawn if row["query_id"] in held_out],
        "train": [row for _, row in drawn if row["query_id"] not in held_out][:training_pairs],
    }
    for name, part in parts.items():
        part.sort(key=lambda row: (row["query_id"], row["doc_id"]))
        columns = {key: [row[key] for row in part] for key in ("query_id", "query", "doc_id", "title", "grade")}
        pq.write_table(pa.table(columns), work / f"{name}.parquet")


def student(name: str, base: str, **labels: Any) -> dict[str, Any]:
    """A student's spec."""
    return {
        "name": name,
        **labels,
        "gold": {"path": "train.parquet", "grade": "grade"},
        "student": {"kind": "encoder", "model": base, "heads": {"relevance": 4}},
        "train": {"epochs": 3, "batch_size": 16, "learning_rate": 2e-4, "max_tokens": 64, "seed": 7},
        "split": {"by": "query_id", "dev": 0.1, "test": 0.15},
        "output": name,
    }


def relabel(work: Path, *words: str) -> None:
    """A command, whose time is shown."""
    started_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "relabel", *words], cwd=work, check=False)
    print(f"[{' '.join(words)}: exit {done.returncode}, {time.perf_counter() - started_s:.0f} s]", flush=True)
    assert done.returncode in (0, 10)


def main() -> None:
    """Label, train, audit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--training-pairs", type=int, default=600)
    parser.add_argument("--audited-pairs", type=int, default=100)
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_pairs(Path(os.environ.get("RELABEL_DATA", "../data")), work, options.training_pairs)
    job = {
        "name": "teacher",
        "input": {"path": "train.parquet", "columns": COLUMNS},
        "labeler": {"name": "direct"},
        "engine": {"name": "transformers", "model": str(options.teacher.resolve())},
        "output": "teacher",
    }
    base = str(options.base.resolve())
    specs = {
        "job": job,
        "of-labels": student("of-labels", base, labels=["teacher"]),
        "of-gold": student("of-gold", base, labels=[], loss={"gold_weight": 1}),
    }
    for name, spec in specs.items():
        (work / f"{name}.yaml").write_text(json.dumps(spec))
    relabel(work, "run", "job.yaml", "--done-ok")
    for name in ("of-labels", "of-gold"):
        relabel(work, "distill", f"{name}.yaml", "--done-ok")
    pairs = ("--pairs", "audit.parquet", "--rows", str(options.audited_pairs))
    for name in ("of-labels", "of-gold"):
        relabel(work, "audit", name, *pairs, "--columns", "document=title")
    relabel(work, "audit", "job.yaml", *pairs)


if __name__ == "__main__":
    main()
