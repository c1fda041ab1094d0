"""CPU time and memory of `relabel evaluate`, this tree against another one, in turns.

    git worktree add /tmp/before 45d9ca7
    python benchmarks/evaluate_million.py /tmp/before --rounds 3

A million labels with distributions over four grades, in 50,000 queries, judged by a million qrels in another order;
1,000 resamples. Each turn is a process of its own with one thread. Prints seconds of CPU and peak memory of each turn,
the ratios, and the largest difference of any figure that both trees give.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from paired import paired_ratio, turns

HERE = Path(__file__).resolve().parents[1]
MIB = 1024


def write_world(folder: Path, *, rows: int, queries: int, grades: int) -> None:
    """labels.parquet and qrels.parquet of the same pairs."""
    random = np.random.default_rng(1)
    gold = random.integers(0, grades, rows)
    probs = random.dirichlet(np.ones(grades), rows) + 0.7 * np.eye(grades)[gold]
    probs = (probs / probs.sum(1, keepdims=True)).astype(np.float32)
    query = np.sort(random.integers(0, queries, rows))
    ids = {
        "query_id": pa.array([f"q{number}" for number in query]),
        "doc_id": pa.array([f"d{number}" for number in range(rows)]),
    }
    lists = pa.FixedSizeListArray.from_arrays(pa.array(probs.ravel()), grades).cast(pa.list_(pa.float32()))
    pq.write_table(pa.table({**ids, "grade": probs.argmax(1), "probs": lists}), folder / "labels.parquet")
    pq.write_table(pa.table({**ids, "grade": gold}).take(random.permutation(rows)), folder / "qrels.parquet")


def turn(tree: Path, folder: Path, resamples: int) -> tuple[float, float, dict[str, Any]]:
    """CPU seconds, peak MiB and JSON of one command."""
    program = f"import sys; sys.path.insert(0, {str(tree)!r}); from relabel.jobs.cli import main; main()"
    arguments = [
        "evaluate",
        "labels.parquet",
        "--qrels",
        "qrels.parquet",
        "--resamples",
        str(resamples),
        "--output",
        "json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{tree}: status {status}"
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / MIB, json.loads(out)


def difference(one: Any, other: Any) -> float:
    """The largest difference of two numbers in the same place, of keys that both have; all else must be equal."""
    if isinstance(one, dict):
        return max((difference(one[key], other[key]) for key in one if key in other), default=0.0)
    if isinstance(one, list):
        assert len(one) == len(other)
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    assert one == other, (one, other)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--grades", type=int, default=4)
    parser.add_argument("--resamples", type=int, default=1000)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "now": HERE}
    spent: dict[str, list[float]] = {name: [] for name in trees}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder, rows=options.rows, queries=options.queries, grades=options.grades)
        for number in range(options.rounds):
            for side in turns(list(trees), number):
                cpu_s, peak_mib, found[side] = turn(trees[side], folder, options.resamples)
                spent[side].append(cpu_s)
                print(f"{side}: {cpu_s:.1f} s CPU, {peak_mib:.0f} MiB", flush=True)
    before, now = (found[side]["figures"] for side in trees)
    added = [name for name in now if name not in before]
    print(f"before / now: {paired_ratio(spent['before'], spent['now'])}")
    print(f"largest difference: {difference(before, now):.1e}; figures that are new: {', '.join(added) or 'none'}")


if __name__ == "__main__":
    main()
