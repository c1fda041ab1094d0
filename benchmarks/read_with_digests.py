"""CPU seconds of reading pairs with and without the sha256 of row groups, and of the plain pyarrow reader, in one
process and taking turns.

    python benchmarks/read_with_digests.py PAIRS.parquet [--rounds 9]

All sides read the columns that a job reads, from the page cache, batch by batch. `arrow` decodes them with
`ParquetFile.iter_batches` and drops the batches. `pairs` is relabel's reader (`read_chunks`) without readings: pairs as
Python objects. `first` is the same with a new output, so that each row group is hashed, decoded once to its end, and
kept before a row of it is used; `again` with what that kept, so that each is hashed and compared. Ratios are medians
over rounds of CPU seconds of all threads, each with its interval; the order alternates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.paired import paired_ratio, turns
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset, open_parquet
from relabel.manifests.plan import ShardPlan
from relabel.manifests.readings import Readings
from relabel.manifests.rows import BATCH_ROWS, read_chunks
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore

CHUNK_ROWS = 256
SIDES = ("arrow", "pairs", "first", "again")


def read_plain(dataset: Dataset) -> None:
    """Decode every row with pyarrow alone."""
    for file in dataset.files:
        with open_parquet(file.path, Storage()) as parquet:
            for _ in parquet.iter_batches(batch_size=BATCH_ROWS, columns=dataset.text_columns):
                pass


def read_pairs(dataset: Dataset, readings: Readings | None) -> None:
    """Read every row as a run does."""
    sizes = [min(CHUNK_ROWS, dataset.rows - start) for start in range(0, dataset.rows, CHUNK_ROWS)]
    for _ in read_chunks(
        dataset, ShardPlan(dataset.rows, 0, None, sizes, 0, 0), None, range(len(sizes)), readings=readings
    ):
        pass


def cpu_s(side: str, dataset: Dataset, output: Path) -> float:
    """CPU seconds of one side."""
    if side == "first":
        shutil.rmtree(output, ignore_errors=True)
    readings = (
        Readings(LocalRunStore(str(output)), where="out", block_rows=CHUNK_ROWS, keeps=True)
        if side in ("first", "again")
        else None
    )
    start_s = time.process_time()
    if side == "arrow":
        read_plain(dataset)
    else:
        read_pairs(dataset, readings)
    return time.process_time() - start_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    dataset = open_dataset(InputSpec(path=(str(options.pairs),)), Storage())
    metadata = pq.read_metadata(options.pairs)
    print(
        f"{dataset.rows:,} rows in {metadata.num_row_groups} row groups, {os.path.getsize(options.pairs) / 1e6:.0f} MB"  # noqa: PTH202
    )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            cpu_s(side, dataset, Path(folder, "out"))  # warm
        for number in range(options.rounds):
            for side in turns(SIDES, number):
                times[side].append(cpu_s(side, dataset, Path(folder, "out")))
    for side, held in times.items():
        print(f"{side:6} {min(held):7.3f} s CPU at least")
    for above, below in (
        ("pairs", "arrow"),
        ("first", "pairs"),
        ("again", "pairs"),
        ("first", "arrow"),
        ("again", "arrow"),
    ):
        print(f"{above} / {below}: {paired_ratio(times[above], times[below])}")


if __name__ == "__main__":
    main()
