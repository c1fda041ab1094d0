"""Batches of an input's rows, held together where a query is, within a limit of memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.manifests.inputs.dataset import Dataset, changed_under_way, open_planned
from relabel.manifests.inputs.file_stamps import stamp_of
from relabel.manifests.runs.readings import Readings, blocks_of

BATCH_ROWS, BATCH_BYTES = 2048, 16 << 20
"""Rows decoded at a time, a few megabytes of ordinary text, and of about how many bytes where rows are long."""
HELD_BYTES = 16 << 20
"""A block that is decoded before it is kept as the first reading is held if it is no larger, and else decoded once
more.
"""


def batches_in(
    dataset: Dataset, readings: Readings | None, start: int, stop: int
) -> Iterator[tuple[np.ndarray, pa.RecordBatch, str]]:
    """Row ids, columns and file of the rows start..stop, in order, touching only the row groups that hold them."""
    for row, batch, path in _group_batches(dataset, readings, lambda low, high: low < stop and high > start):
        low, high = max(start, row), min(stop, row + batch.num_rows)
        if low < high:
            yield np.arange(low, high), batch.slice(low - row, high - low), path


def _group_batches(
    dataset: Dataset, readings: Readings | None, wants: Callable[[int, int], bool]
) -> Iterator[tuple[int, pa.RecordBatch, str]]:
    """First row id, columns and file of every batch of the row groups low..high that are wanted. A
    file is opened once.
    """
    file_first = 0
    for number, (file, groups) in enumerate(zip(dataset.files, dataset.group_bytes, strict=True)):
        starts = list(itertools.accumulate((rows for rows, _ in groups), initial=file_first))
        touched = [
            group for group, (low, high) in enumerate(itertools.pairwise(starts)) if low < high and wants(low, high)
        ]
        if touched:
            stamp = stamp_of(file.path)
            longest = max(size / rows for rows, size in groups if rows)
            batch_rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))
            with open_planned(file, dataset) as opened:

                def batches(
                    some: Sequence[int], parquet: Any = opened.parquet, batch_rows: int = batch_rows
                ) -> Iterator[pa.RecordBatch]:
                    yield from parquet.plain_batches(
                        dataset.text_columns, ids=dataset.id_columns, batch_rows=batch_rows, row_groups=[*some]
                    )

                held: dict[tuple[int, ...], list[pa.RecordBatch]] = {}

                def decode(
                    block: range, held: dict[tuple[int, ...], list[pa.RecordBatch]] = held, batches: Any = batches
                ) -> None:
                    held.clear()
                    whole, size = [], 0
                    for batch in batches(block):
                        size += batch.nbytes
                        if size <= HELD_BYTES:
                            whole.append(batch)
                    if size <= HELD_BYTES:
                        held[tuple(block)] = whole

                found = opened.column_bytes(dataset.text_columns)
                for some, block in _together(touched, readings, [rows for rows, _ in groups]):
                    if readings is None:
                        found.hold(some)
                    else:
                        readings.prove(number, file.path, block, some, found, decode)
                    row = starts[some[0]]
                    for batch in held.pop(tuple(some), None) or batches(some):
                        if stamp_of(file.path) != stamp:
                            # before its rows are used: they may be another file's, or half of each
                            raise changed_under_way(file.path)
                        yield row, batch, file.path
                        row += batch.num_rows
        file_first += file.rows


def _together(
    touched: list[int], readings: Readings | None, group_rows: list[int]
) -> Iterator[tuple[list[int], range]]:
    """Row groups that are read in one go, without gaps, and the block that they lie in."""
    for block in blocks_of(group_rows, BATCH_ROWS if readings is None else readings.block_rows):
        inside = touched[bisect.bisect_left(touched, block.start) : bisect.bisect_left(touched, block.stop)]
        yield from ((some, block) for some in _runs(inside) if some)


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as runs without gaps."""
    gaps = [place for place, (before, after) in enumerate(itertools.pairwise(numbers), start=1) if after != before + 1]
    return [numbers[start:stop] for start, stop in itertools.pairwise([0, *gaps, len(numbers)])]


def scattered_batches(
    dataset: Dataset, readings: Readings | None, needed: np.ndarray
) -> Iterator[tuple[np.ndarray, pa.RecordBatch, str]]:
    """Batches of the row groups that hold a needed row, in row order; the others are not read."""

    def wants(low: int, high: int) -> bool:
        first, last = np.searchsorted(needed, [low, high])
        return bool(first < last)

    for row, batch, path in _group_batches(dataset, readings, wants):
        yield np.arange(row, row + batch.num_rows), batch, path
