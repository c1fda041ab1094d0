"""1,000,000 pairs in 1,000 files: seconds and peak memory of the commands around a run, on the local disk or on S3.

    python -m benchmarks.show_million [--files 1000] [--rows 1000] [--s3] [--repeats 3]

Each command is a process of its own. Its peak memory is the kernel's (`ru_maxrss` of the child), which begins with that
of the process that started it; this one imports nothing heavy and prints its own too. Texts are short. The run
between plan and no-op is the fake engine's.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.shown_jobs import Ended, Place, call, seaweed_place

DOCS_PER_QUERY = 10
WRITE = "from benchmarks.show_million import write_pairs; from benchmarks.shown_jobs import Place; import json, sys; \
root, variables, files, rows = json.loads(sys.argv[1]); write_pairs(Place(root, variables), files, rows)"


def write_pairs(place: Place, files: int, rows: int) -> None:
    """Files of short texts, ten rows a query."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, root = place.filesystem()
    filesystem.create_dir(f"{root}/pairs")
    for number in range(files):
        ids = range(number * rows, (number + 1) * rows)
        table = {
            "query_id": [f"q{row // DOCS_PER_QUERY}" for row in ids],
            "query": [f"red shoes number {row // DOCS_PER_QUERY}" for row in ids],
            "doc_id": [f"d{row}" for row in ids],
            "document": [f"Red running shoes, size {row % 50}, for number {row // DOCS_PER_QUERY}." for row in ids],
        }
        pq.write_table(pa.table(table), f"{root}/pairs/part-{number:05d}.parquet", filesystem=filesystem)


def write_pairs_apart(place: Place, files: int, rows: int) -> None:
    """The same in another process, so that this one stays small."""
    written = json.dumps([place.root, place.variables, files, rows])
    subprocess.run([sys.executable, "-c", WRITE, written], check=True)


def write_job(folder: Path, place: Place) -> Path:
    """The job file, labeler `direct`."""
    job = {
        "name": "million",
        "input": {"path": f"{place.root}/pairs/"},
        "labeler": {"name": "direct"},
        "engine": {"name": "fake"},
        "output": f"{place.root}/out",
        "shards": 64,
        "run": {"chunk_rows": 2048},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


@contextlib.contextmanager
def chosen_place(folder: Path, *, is_s3: bool) -> Iterator[Place]:
    """A folder, or a bucket of a SeaweedFS."""
    if is_s3:
        with seaweed_place(folder / "weed") as place:
            yield place
    else:
        yield Place(str(folder), {})


def show(what: str, ended: Sequence[Ended]) -> None:
    """One row of a Markdown table: the median's seconds, all of them, and the highest peak."""
    seconds = [one.seconds for one in ended]
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}" if len(seconds) > 1 else "once"
    print(
        (
            f"| {what} | {ended[0].code} | {statistics.median(seconds):.2f} | {spread} | "
            f"{max(one.peak_mb for one in ended):.0f} |"
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1000, help="of each file")
    parser.add_argument("--repeats", type=int, default=3, help="of status and no-op")
    parser.add_argument("--s3", action="store_true")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="relabel-show-") as scratch,
        chosen_place(Path(scratch), is_s3=args.s3) as place,
    ):
        write_pairs_apart(place, args.files, args.rows)
        job = write_job(Path(scratch), place)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{args.files * args.rows:,} pairs in {args.files:,} files, {'S3' if args.s3 else 'local disk'}; load "
            f"{os.getloadavg()[0]:.1f}"
        )
        print(
            f"this process: {own:.0f} MB\n\n| command | exit | seconds | spread | peak MB |\n|---|---|---|---|---|",
            flush=True,
        )
        show("plan", [call("plan", job, place=place)])
        show("plan, again", [call("plan", job, place=place) for _ in range(args.repeats)])
        show("status, nothing done", [call("status", job, place=place) for _ in range(args.repeats)])
        show("run", [call("run", job, place=place)])
        show("status, all done", [call("status", job, place=place) for _ in range(args.repeats)])
        show("run, nothing to do", [call("run", job, place=place, codes=(10,)) for _ in range(args.repeats)])
        show("verify", [call("verify", job, place=place)])


if __name__ == "__main__":
    main()
