"""CPU time of `relabel score BUNDLE` against `relabel score STUDENT`: the commands themselves, in turns, on one core.

    python -m benchmarks.score_bundle STUDENT BUNDLE PAIRS.parquet
        [--pairs 1024] [--rounds 7] [--core 0] [--batch-tokens 8192] [-- OPTIONS OF BOTH]

Each command is a process of its own, pinned to one core, so that both compute with one thread; its CPU time is the
system's, user and kernel. A round scores one row with each side too: what is left of the time after that is the pairs'
own. The figure is the median over rounds of (CPU seconds of the student) / (CPU seconds of the bundle); the order
alternates. The labels of the last round are compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.paired import paired_ratio, turns

ROOT = Path(__file__).parents[1]


class Call(NamedTuple):
    """What a command took, s of the CPU, and where its labels lie."""

    cpu_s: float
    output: Path


def call(line: list[str], to: Path) -> Call:
    """Run `relabel score`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "relabel", "score", *line, "--to", str(to), "--device", "cpu"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"relabel score {' '.join(line)} ended with {process.returncode}")
    return Call(usage.ru_utime + usage.ru_stime, to)


def labels(output: Path) -> pa.Table:
    """All labels of a finished run, by row."""
    manifest = json.loads((output / "manifest.json").read_bytes())
    found = pa.concat_tables([pq.read_table(output / file["path"]) for file in manifest["labels"]])
    return found.sort_by("row_id")


def agreement(ours: pa.Table, theirs: pa.Table) -> str:
    """How far two label sets lie apart."""
    first, second = (np.array(table["probs"].to_pylist()) for table in (ours, theirs))
    flips = first.argmax(1) != second.argmax(1)
    return f"{len(first)} labels: max |dp| {np.abs(first - second).max():.2g}, {flips.mean():.2%} of grades differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("student")
    parser.add_argument("bundle")
    parser.add_argument("pairs_file")
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("more", nargs="*", help="options of both commands, after --")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})  # the commands inherit it
    sides = {"student": args.student, "bundle": args.bundle}
    shared = ["--input", args.pairs_file, "--batch-tokens", str(args.batch_tokens), *args.more]
    whole: dict[str, list[float]] = {name: [] for name in sides}
    after_start: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as scratch:
        last = {}
        for number in range(args.rounds):
            for name in turns(list(sides), number):
                line = [sides[name], *shared]
                start = call([*line, "--limit", "1"], Path(scratch, f"{name}-{number}-start"))
                last[name] = call([*line, "--limit", str(args.pairs)], Path(scratch, f"{name}-{number}"))
                whole[name].append(last[name].cpu_s)
                after_start[name].append(last[name].cpu_s - start.cpu_s)
            print(
                f"round {number}: "
                + ", ".join(
                    f"{name} {whole[name][-1]:.1f} s ({after_start[name][-1]:.1f} after the start)" for name in sides
                ),
                flush=True,
            )
        print(agreement(labels(last["student"].output), labels(last["bundle"].output)))
    for what, found in (("whole commands", whole), ("after the start", after_start)):
        ratio = paired_ratio(found["student"], found["bundle"])
        rates = ", ".join(f"{name} {args.pairs / float(np.median(found[name])):.1f} pairs/CPU s" for name in sides)
        print(f"{what}: student over bundle {ratio} in CPU time; {rates}")


if __name__ == "__main__":
    main()
