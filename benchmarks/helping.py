"""What workers that share one shard ask in vain, and how long they take: the fake engine with a delay.

python -m benchmarks.helping [--rows 2000] [--workers 4] [--chunk-rows 60] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("rows", 2000), ("workers", 4), ("chunk-rows", 60), ("capacity", 16), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--slow-s", type=float, default=0.05)
    args = parser.parse_args()
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as scratch:
            result = json.loads(
                subprocess.run(command(Path(scratch), args), check=True, capture_output=True, text=True).stdout
            )
        did = result["this_run"]
        vain = did.get("in_vain", {}).get("pairs", did["pairs"] - result["rows"])
        share = vain / result["rows"]
        print(
            f"{args.workers} workers, {result['rows']:,} rows: {vain:,} in vain ({share:.1%}), {did['seconds']:.1f} s",
            flush=True,
        )


def command(folder: Path, args: argparse.Namespace) -> list[str]:
    """A run of one shard whose engine takes its time over every ask."""
    numbers = range(args.rows)
    table = {
        "query_id": [f"q{row // 5}" for row in numbers],
        "query": [f"red shoes {row // 5}" for row in numbers],
        "doc_id": [f"d{row}" for row in numbers],
        "document": [f"Red running shoes, size {row % 7}." for row in numbers],
    }
    pq.write_table(pa.table(table), folder / "pairs.parquet")
    job = {
        "name": "helping",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": {"name": "direct"},
        "engine": {"name": "fake", "args": {"p_slow": 1.0, "slow_s": args.slow_s, "capacity": args.capacity}},
        "output": str(folder / "out"),
        "run": {"chunk_rows": args.chunk_rows, "max_failed_fraction": 1.0},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return [
        sys.executable,
        "-P",
        "-m",
        "jobs",
        "run",
        str(folder / "job.yaml"),
        "--workers",
        str(args.workers),
        "--output",
        "json",
    ]


if __name__ == "__main__":
    main()
