"""How fast the run loop is by itself: the fake engine on one core, from Parquet to committed, verified labels.

    python benchmarks/run_loop.py [--pairs 100000] [--labeler direct] [--memory | --against CHECKOUT | --journal]

Prints pairs/s, the ratio to a raw reader (pyarrow decoding the same columns to Python strings, on the same core,
interleaved), and the process's peak memory. `--memory` runs 100,000 and 1,000,000 pairs in processes of their own and
prints the ratio of their peaks. `--against` runs another checkout's loop (say, that of an earlier commit) in turns with
this one's, on the same file, and prints CPU time per pair of both and the median of the paired ratios. `--journal` does
so for this checkout's loop with and without the journal of answers.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS_PER_QUERY = 20
FEW = 1000
"""Pairs of the run that start-up is measured by."""
# a vocabulary of made-up words: lengths like English, no text of anybody's
WORDS = ["".join(random.Random(number).choices("aeioubcdfglmnprstv", k=3 + number % 7)) for number in range(4000)]


def write_pairs(path: Path, pairs: int) -> None:
    """A Parquet file of pairs with documents of about 0.8 KB, 20 a query, in row groups of 50,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(7)
    schema = pa.schema([(name, pa.string()) for name in ("query_id", "query", "doc_id", "document")])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, pairs, 50_000):
            rows = range(start, min(start + 50_000, pairs))
            documents = [" ".join(rng.choices(WORDS, k=122)) for _ in rows]
            queries = {
                number: " ".join(rng.choices(WORDS, k=4))
                for number in range(start // DOCS_PER_QUERY, rows[-1] // DOCS_PER_QUERY + 1)
            }
            table = {
                "query_id": [f"q{row // DOCS_PER_QUERY}" for row in rows],
                "query": [queries[row // DOCS_PER_QUERY] for row in rows],
                "doc_id": [f"d{row}" for row in rows],
                "document": documents,
            }
            writer.write_table(pa.table(table, schema=schema))


def label_once(pairs_file: Path, labeler: str, folder: Path, *, has_journal: bool = True) -> float:
    """Seconds of one whole run, plan and manifest included, imports excluded."""
    import relabel.jobs.run.label
    from relabel.jobs.job import build_job, open_run
    from relabel.jobs.output import Exit
    from relabel.jobs.run.label import label
    from relabel.jobs.run.progress import Progress
    from relabel.jobs.run.session import Session
    from relabel.jobs.run.stop import Stop

    if not has_journal:
        relabel.jobs.run.label.AnswerJournal = lambda *_, **__: None  # as the loop has it that keeps nothing
    shutil.rmtree(folder, ignore_errors=True)
    values = {
        "name": "bench",
        "input": {"path": str(pairs_file)},
        "labeler": {"name": labeler},
        "engine": {"name": "fake", "seed": 7},
        "output": str(folder),
        "shards": 4,
    }
    started = time.perf_counter()
    opened = open_run(build_job(values, where="benchmark"))
    session = Session(opened, list(range(4)), is_retry=False, stop=Stop(), progress=Progress())
    report = label(session)
    seconds = time.perf_counter() - started
    assert report.exit is Exit.DONE, report
    return seconds


def read_once(pairs_file: Path) -> float:
    """Seconds that pyarrow needs to decode the same columns to Python strings."""
    import pyarrow.parquet as pq

    started = time.perf_counter()
    for batch in pq.ParquetFile(pairs_file).iter_batches(batch_size=2048):
        for column in batch.columns:
            column.to_pylist()
    return time.perf_counter() - started


def peak_mb() -> float:
    """Peak resident memory of this process since it began. Not getrusage: its figure starts from the parent's at the
    fork.
    """
    for line in Path("/proc/self/status").read_text().split("\n"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


class Side(NamedTuple):
    """One of two loops that are compared."""

    checkout: Path
    has_journal: bool = True


def compare(file: Path, few: Path, pairs: int, labeler: str, other: Side, *, repeats: int) -> None:
    """Print CPU time per pair of this checkout's loop and another's, processes in turns, start-up subtracted."""
    taken: dict[Side, list[float]] = {Side(ROOT): [], other: []}
    for repeat in range(repeats + 1):
        for side in list(taken) if repeat % 2 else reversed(taken):
            spent = cpu_of_process(file, labeler, side) - cpu_of_process(few, labeler, side)
            if repeat:  # the first is a warm-up
                taken[side].append(spent / (pairs - FEW) * 1e6)
    ours, theirs = taken.values()
    ratios = [mine / its for mine, its in zip(ours, theirs, strict=True)]
    print(
        f"{labeler:11} {statistics.median(ours):.1f} us CPU a pair, the other {statistics.median(theirs):.1f}: "
        f"{statistics.median(ratios):.3f} of it (min {min(ratios):.3f}, max {max(ratios):.3f})",
        flush=True,
    )


def cpu_of_process(file: Path, labeler: str, side: Side) -> float:
    """CPU seconds (user and system) of one run by a checkout's code, in a process of its own."""
    command = [sys.executable, side.checkout / "benchmarks/run_loop.py", "--one", file, "--labeler", labeler]
    if not side.has_journal:
        command.append("--without-journal")
    environment = {**os.environ, "PYTHONPATH": str(side.checkout)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--labeler", action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--journal", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--without-journal", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    labelers = args.labeler or ["direct", "r3a", "graph-grpo"]
    if args.one:
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / "out"
            seconds = label_once(Path(args.one), labelers[0], output, has_journal=not args.without_journal)
        print(json.dumps({"seconds": seconds, "peak_mb": peak_mb()}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if args.memory:
            peaks = {}
            for pairs in (100_000, 1_000_000):
                file = Path(scratch) / f"{pairs}.parquet"
                write_pairs(file, pairs)
                for labeler in labelers:
                    command = [sys.executable, __file__, "--one", str(file), "--labeler", labeler]
                    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    peaks[labeler, pairs] = found["peak_mb"]
                    print(
                        (
                            f"{labeler:11} {pairs:>9,} pairs: {pairs / found['seconds']:>8,.0f} pairs/s, peak "
                            f"{found['peak_mb']:.0f} MB"
                        ),
                        flush=True,
                    )
            for labeler in labelers:
                print(
                    f"{labeler:11} peak at 1,000,000 over peak at 100,000: "
                    f"{peaks[labeler, 1_000_000] / peaks[labeler, 100_000]:.3f}"
                )
            return
        file = Path(scratch) / "pairs.parquet"
        write_pairs(file, args.pairs)
        if args.against is not None or args.journal:
            other = Side(ROOT, has_journal=False) if args.journal else Side(args.against.resolve())
            few = Path(scratch) / "few.parquet"
            write_pairs(few, FEW)
            for labeler in labelers:
                compare(file, few, args.pairs, labeler, other, repeats=args.repeats)
            return
        for labeler in labelers:
            rates, ratios = [], []
            for repeat in range(args.repeats + 1):
                raw = read_once(file)
                seconds = label_once(file, labeler, Path(scratch) / "out")
                if repeat:  # the first is a warm-up
                    rates.append(args.pairs / seconds)
                    ratios.append(raw / seconds)
            middle = len(rates) // 2
            print(
                f"{labeler:11} {sorted(rates)[middle]:>8,.0f} pairs/s (min {min(rates):,.0f}, max {max(rates):,.0f}), "
                f"{sorted(ratios)[middle]:.3f} of a raw reader's rate",
                flush=True,
            )
        print(f"peak {peak_mb():.0f} MB")


if __name__ == "__main__":
    main()
