"""How long the commands take that a scheduler calls again and again: help, a no-op run, a plan over many files, status.

    python benchmarks/commands.py [--files 1000] [--rows 10000]

Each figure is the median of five whole processes, with a raw baseline in the same run: pyarrow reading the same
footers and the same column. Help is compared with a bare interpreter, 40 times in turns.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAW_READ = """
import sys, pathlib, pyarrow.parquet as pq
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with pq.ParquetFile(path) as file:
        file.read(columns=["query_id"])
"""


def write_files(folder: Path, files: int, rows: int) -> None:
    """Many small files of ten rows a query; the text is one word, since nothing here reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(files):
        first = number * rows
        ids = [f"q{row // 10}" for row in range(first, first + rows)]
        table = {
            "query_id": ids,
            "query": ids,
            "doc_id": [f"d{row}" for row in range(rows)],
            "document": ["text"] * rows,
        }
        pq.write_table(pa.table(table), folder / f"part-{number:05d}.parquet")


def seconds(command: list[str], *, codes: tuple[int, ...] = (0,), repeats: int = 5, before: object = None) -> float:
    """Median wall seconds of a process, after one warm-up."""
    taken = []
    for _ in range(repeats + 1):
        if callable(before):
            before()
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=False)
        taken.append(time.perf_counter() - started)
        assert done.returncode in codes, done.stderr.decode()
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000)
    args = parser.parse_args()
    python, relabel = sys.executable, str(Path(sys.executable).with_name("relabel"))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        sides = {"bare": [python, "-c", "pass"], "click": [python, "-c", "import click"], "help": [relabel, "--help"]}
        turns = [{name: seconds(side, repeats=1) for name, side in sides.items()} for _ in range(40)]
        bare, click, helped = (statistics.median(turn[name] for turn in turns) * 1e3 for name in sides)
        ratio = statistics.median(turn["help"] / turn["bare"] for turn in turns)
        print(
            f"relabel --help       {helped:7.0f} ms: {ratio:.2f} bare interpreters of {bare:.0f} ms (click alone takes "
            f"{click:.0f} ms)",
            flush=True,
        )
        write_files(root / "small", 4, 5_000)
        job = root / "small.yaml"
        job.write_text(_job(root / "small", root / "out-small"))
        first = subprocess.run([relabel, "run", str(job)], capture_output=True, check=False)
        assert first.returncode == 0, first.stderr.decode()
        again = seconds([relabel, "run", str(job)], codes=(10,))
        print(f"finished run again   {again * 1e3:7.0f} ms (20,000 rows, no engine started)", flush=True)
        write_files(root / "many", args.files, args.rows)
        job = root / "many.yaml"
        out = root / "out-many"
        job.write_text(_job(root / "many", out))
        planned = seconds([relabel, "plan", str(job)], before=lambda: shutil.rmtree(out, ignore_errors=True), repeats=3)
        raw = seconds([python, "-c", RAW_READ, str(root / "many")], repeats=3)
        rows = args.files * args.rows
        print(
            f"plan                 {planned:7.2f} s for {args.files:,} files x {args.rows:,} rows ({rows:,})",
            flush=True,
        )
        print(
            f"  raw pyarrow        {raw:7.2f} s for the same footers and column: {planned / raw:.2f} times", flush=True
        )
        print(f"status               {seconds([relabel, 'status', str(job)], repeats=3):7.2f} s", flush=True)


def _job(pairs: Path, out: Path) -> str:
    return (
        f"name: bench\ninput: {{path: {pairs}}}\nlabeler: {{name: direct}}\nengine: {{name: fake}}\n"
        f"output: {out}\nshards: 64\nrun: {{chunk_rows: 2048}}\n"
    )


if __name__ == "__main__":
    main()
