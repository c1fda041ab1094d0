"""What commands cost next to plain anchors, as one table; next to another commit, too, so that a loss of speed is seen.

    python benchmarks/ratios.py [--vs CHECKOUT] [--rounds 5] [--rows 20000]

CPU seconds (user and system) of whole processes with one thread, which take turns, so that a busy machine slows all of
them alike. Each command is shown as a multiple of its anchor: a bare interpreter for the commands that a scheduler
calls again and again, a bare asyncio pipeline for labeling with the fake engine, pyarrow reading all columns of the
label files for what reads an output, scikit-learn's point estimates for `evaluate` with 200 resamples. With --vs, ends
with 1 where a command takes more than 5 % more than the other checkout's.
"""

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from commands import write_files
from evaluate_million import write_world
from paired import Ratio, paired_ratio, turns

HERE = Path(__file__).resolve().parents[1]
FOLDERS = ("relabel", "jobs", "labelers", "manifests", "distill", "export")
LOSS = 1.05
OURS = "this"
THEIRS = "other"

COMMAND = "import sys; sys.path.insert(0, sys.argv.pop(1)); from relabel.__main__ import main; main()"
PIPELINE = """
import asyncio, pathlib, sys, pyarrow as pa, pyarrow.parquet as pq
async def label(rows, queue):
    while rows:
        row = rows.pop()
        await asyncio.sleep(0)
        await queue.put((row["query_id"], row["doc_id"], hash(row["document"]) % 3))
async def main():
    queue = asyncio.Queue()
    rows = pq.read_table(sys.argv[1]).to_pylist()
    await asyncio.gather(*(label(rows, queue) for _ in range(64)))
    labels = [queue.get_nowait() for _ in range(queue.qsize())]
    columns = dict(zip(("query_id", "doc_id", "grade"), map(list, zip(*labels))))
    pq.write_table(pa.table(columns), pathlib.Path(sys.argv[2]))
asyncio.run(main())
"""
READ = """
import pathlib, sys, pyarrow.parquet as pq
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.parquet")):
    pq.read_table(path, use_threads=False)
"""
PEER = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from sklearn.metrics import cohen_kappa_score, f1_score, roc_auc_score
labels = pq.read_table("labels.parquet")
keys = ["query_id", "doc_id"]
rows = labels.select(keys).append_column("row", pa.array(np.arange(len(labels))))
both = rows.join(pq.read_table("qrels.parquet").rename_columns([*keys, "gold"]), keys, use_threads=False)
gold = both["gold"].to_numpy()
grade = labels["grade"].to_numpy()[both["row"].to_numpy()]
probs = labels["probs"].combine_chunks().flatten().to_numpy().reshape(len(labels), -1)[both["row"].to_numpy()]
f1_score(gold, grade, average="macro"), cohen_kappa_score(gold, grade)
for cut in (1, 2, 3):
    roc_auc_score(gold >= cut, probs[:, cut:].sum(1))
"""


@dataclass
class Row:
    """A command and its anchor, as programs with arguments; `before` is done to the side's folder each time.

    Args:
        anchor: None for a bare interpreter.
    """

    name: str
    anchor_name: str
    anchor: list[str]
    command: list[str]
    code: int = 0
    clears: str = ""
    spent: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, side: str, folder: Path, program: list[str], code: int) -> None:
        """Run once, and keep the CPU seconds."""
        if self.clears:
            shutil.rmtree(folder / self.clears, ignore_errors=True)
        self.spent.setdefault(side, []).append(cpu_s(program, folder, code))

    def ratio(self, side: str, to: str) -> Ratio:
        """CPU seconds of a side over another's, without the warm-up."""
        return paired_ratio(self.spent[side][1:], self.spent[to][1:])


def cpu_s(program: list[str], folder: Path, code: int) -> float:
    """CPU seconds of a process in a folder.

    Raises:
        RuntimeError: it ends with another code.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the warm-up compiles what libraries were not compiled
    words = [sys.executable, "-c", *program]
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise RuntimeError(f"{program[1:]} ended with {process.returncode}: {said}")
    return usage.ru_utime + usage.ru_stime


def rows_of_table() -> list[Row]:
    """In an order in which each finds what it needs: the run first, which writes the output."""
    bare = ["pass"]
    read = [READ, "out/labels"]
    return [
        Row("run", "asyncio pipeline", [PIPELINE, "pairs", "anchor.parquet"], ["run", "job.yaml"], clears="out"),
        Row("run again", "bare interpreter", bare, ["run", "job.yaml"], code=10),
        Row("status", "bare interpreter", bare, ["status", "job.yaml"]),
        Row("plan", "bare interpreter", bare, ["plan", "job.yaml"]),
        Row("ask", "bare interpreter", bare, ["ask", "job.yaml"]),
        Row("verify", "pyarrow read", read, ["verify", "out"]),
        Row("report", "pyarrow read", read, ["report", "out", "--to", "page.html", "--force"]),
        Row(
            "evaluate",
            "scikit-learn",
            [PEER],
            ["evaluate", "labels.parquet", "--qrels", "qrels.parquet", "--resamples", "200"],
        ),
    ]


def make_world(folder: Path, rows: int) -> None:
    """Inputs of one side."""
    folder.mkdir()
    write_files(folder / "pairs", 4, rows // 4)
    job = "name: bench\ninput: {path: pairs}\nlabeler: {name: direct}\nengine: {name: fake}\noutput: out\nshards: 4\n"
    (folder / "job.yaml").write_text(job)
    write_world(folder, rows=10 * rows, queries=rows // 2, grades=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vs", type=Path, help="another checkout, say a worktree of an earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    trees = {OURS: HERE}
    if options.vs is not None:
        trees[THEIRS] = options.vs.resolve()
    for tree in trees.values():
        for name in FOLDERS:
            compileall.compile_dir(tree / name, quiet=2)
    table = rows_of_table()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {side: Path(scratch) / side for side in trees}
        for folder in folders.values():
            make_world(folder, options.rows)
        for row in table:
            for number in range(options.rounds + 1):
                for side in turns(list(trees), number):
                    row.measure(side, folders[side], [COMMAND, str(trees[side]), *row.command], row.code)
                row.spent.setdefault("anchor", []).append(cpu_s(row.anchor, folders[OURS], 0))
            print_row(row)
    lost = [row.name for row in table if THEIRS in row.spent and row.ratio(OURS, THEIRS).median > LOSS]
    if lost:
        sys.exit(f"slower than the other checkout by more than 5 %: {', '.join(lost)}")


def print_row(row: Row) -> None:
    """A line of the table."""
    line = f"{row.name:10} {row.ratio(OURS, 'anchor')!s:24} of {row.anchor_name:17}"
    if THEIRS in row.spent:
        line += f" the other {row.ratio(THEIRS, 'anchor').median:7.3f}; this/other {row.ratio(OURS, THEIRS)}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
