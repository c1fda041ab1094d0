"""How the work is cut: shards of whole queries, and chunks within them.

Deciding is pure (`cut_queries`); `make_plan` reads footers and the query-id column and nothing else. The same input and
spec give the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from manifests.digests import digest_of
from manifests.inputs.dataset import Dataset
from manifests.runs.plans import Plan, RowIdFile, ShardPlan, row_id_file
from manifests.runs.query_scan import rows_of_shards, scan_queries
from manifests.runs.spills import BLOCK_ROWS, Column, SpilledFiles, blocks_of

# Shape legend: R rows, Q queries, S shards

CHUNKS_OF_A_SHARD = 16
"""About as many chunks has a shard by default: what a kill costs is then a small part of it, however slow the engine
is."""
FEWEST_CHUNK_ROWS, MOST_CHUNK_ROWS = 8, 256
"""Below it a commit costs more than the rows that it saves; a shard of 4,096 rows or more has the larger size."""


class Cut(NamedTuple):
    """Shards as ranges over the queries, and over the rows in shard order (shards + 1 bounds of each); the row counts
    of the chunks of each shard, and its weight.
    """

    query_bounds: list[int]
    bounds: list[int]
    chunks: list[list[int]]
    weights: list[float]


def cut_queries(
    sizes_Q: Column,
    weights_Q: Column,
    *,
    shards: int,
    chunk_rows: int | None,
    whole: bool = False,
    block_rows: int = BLOCK_ROWS,
) -> Cut:
    """Cut queries, in their order, into shards of nearly equal weight and chunks of whole queries.

    Args:
        sizes_Q: rows per query, int64, each at least 1.
        weights_Q: estimated tokens per query, float64.
        shards: how many; with fewer queries than shards some stay empty.
        chunk_rows: most rows a chunk, None for what fits the shard; only a query larger than that is split over chunks.
        whole: not even that one is split; it is a chunk of its own.
        block_rows: queries that are looked at at a time.
    """
    starts = _shard_starts(sizes_Q, weights_Q, shards, block_rows)
    starts_S = starts[np.searchsorted(starts["shard"], np.arange(shards + 1))]
    query_bounds, bounds = starts_S["query"].tolist(), starts_S["row"].tolist()
    chunks = []
    for queries, (start, stop) in zip(itertools.pairwise(query_bounds), itertools.pairwise(bounds), strict=True):
        sizes = (block.tolist() for block in blocks_of(sizes_Q, *queries, block_rows))
        fitting = chunk_rows or fitting_chunk_rows(stop - start)
        chunks.append(_cut_chunks(itertools.chain.from_iterable(sizes), fitting, whole=whole))
    return Cut(query_bounds, bounds, chunks, np.diff(starts_S["weight"]).tolist())


_START = np.dtype([("shard", "<i8"), ("query", "<i8"), ("row", "<i8"), ("weight", "<f8")])


def _shard_starts(sizes_Q: Column, weights_Q: Column, shards: int, block_rows: int) -> np.ndarray:
    """Where the shards that hold a query begin, and the end as one more."""
    queries = len(sizes_Q)
    scale = shards / _total(weights_Q, 0, queries, block_rows)
    shard, row, weight = -1, 0, 0.0
    found = []
    for first in range(0, queries, block_rows):
        span = slice(first, min(first + block_rows, queries))
        weights = weights_Q[span]
        # one sum over all, whatever the blocks: what came before is its first term
        before = np.cumsum(np.concatenate([[weight], weights]))
        rows_before = np.cumsum(np.concatenate([[row], sizes_Q[span]]))
        shard_of = np.minimum(((before[1:] - weights / 2) * scale).astype(np.int64), shards - 1)
        begin = np.flatnonzero(np.diff(shard_of, prepend=shard))
        starts = np.empty(len(begin), _START)
        starts["shard"], starts["query"] = shard_of[begin], first + begin
        starts["row"], starts["weight"] = rows_before[begin], before[begin]
        found.append(starts)
        shard, row, weight = shard_of[-1], rows_before[-1], before[-1]
    return np.concatenate([*found, np.array([(shards, queries, row, weight)], _START)])


def _total(weights_Q: Column, start: int, stop: int, block_rows: int) -> float:
    """To the last bit the sum that numpy gives of the whole array: it adds by halves, down to 128 numbers, and so does
    this.
    """
    count = stop - start
    if count <= max(block_rows, 128):
        return float(np.sum(weights_Q[start:stop]))
    middle = start + count // 2 // 8 * 8
    return _total(weights_Q, start, middle, block_rows) + _total(weights_Q, middle, stop, block_rows)


def fitting_chunk_rows(shard_rows: int) -> int:
    """Rows of a chunk where the job names no number: by the shard's rows alone, so that the same input and spec give
    the same plan on any machine.
    """
    return min(max(-(-shard_rows // CHUNKS_OF_A_SHARD), FEWEST_CHUNK_ROWS), MOST_CHUNK_ROWS)


def _cut_chunks(sizes: Iterable[int], chunk_rows: int, *, whole: bool) -> list[int]:
    chunks: list[int] = []
    filled = 0
    for size in sizes:
        if filled and filled + size > chunk_rows:
            chunks.append(filled)
            filled = 0
        filled += size
        while filled > chunk_rows and not whole:
            chunks.append(chunk_rows)
            filled -= chunk_rows
    if filled:
        chunks.append(filled)
    return chunks


def make_plan(
    dataset: Dataset,
    parts: dict[str, Any],
    *,
    name: str,
    shards: int,
    chunk_rows: int | None,
    block_rows: int = BLOCK_ROWS,
) -> tuple[Plan, SpilledFiles]:
    """Read the query ids and cut the work, in memory that grows with chunks alone, and, where queries lie scattered,
    with the rows of the largest shard.

    Args:
        block_rows: rows and queries that are held at a time.
    Returns:
        The plan, and the files that must lie beside it: row ids of scattered shards.
    Raises:
        InputError: a null query id, or a file that can't be read.
        DiskFullError: ids that do not fit into a block do not fit into TMPDIR.
    """
    found = scan_queries(dataset, block_rows=block_rows)
    # no query is in two shards, so that those beyond the number of queries would be empty, and each costs time wherever
    # shards are counted
    cut = cut_queries(
        found.sizes,
        found.weights,
        shards=min(shards, len(found.sizes)),
        chunk_rows=chunk_rows,
        whole=dataset.reads.whole_query,
        block_rows=block_rows,
    )
    group_starts, group_bytes = _groups(dataset)
    beside = SpilledFiles()
    planned = []
    scattered: Iterator[np.ndarray | None] = itertools.repeat(None, len(cut.chunks))
    if found.is_scattered:
        scattered = rows_of_shards(dataset, found, cut.query_bounds, cut.bounds, block_rows=block_rows)
    for number, ((start, stop), rows_S) in enumerate(zip(itertools.pairwise(cut.bounds), scattered, strict=True)):
        row_ids: RowIdFile | None = None
        if rows_S is None:
            touched = _groups_of_range(group_starts, start, stop)
        else:
            touched = np.unique(np.searchsorted(group_starts, rows_S, side="right") - 1)
            if len(rows_S):
                row_ids, file = row_id_file(number, rows_S)
                beside.add(file)
        planned.append(
            ShardPlan(
                rows=stop - start,
                first_row=start if rows_S is None else None,
                row_ids=row_ids,
                chunks=cut.chunks[number],
                estimated_tokens=round(cut.weights[number]),
                read_bytes=int(group_bytes[touched].sum()),
            )
        )
    plan = Plan(
        name=name,
        fingerprint=digest_of(parts),
        parts=parts,
        rows=dataset.rows,
        queries=len(found.sizes),
        is_scattered=found.is_scattered,
        text_bytes=int(group_bytes.sum()),
        files=list(dataset.files),
        shards=planned,
    )
    return plan, beside


def _groups_of_range(group_starts: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Numbers of the row groups that hold the rows start..stop."""
    if start == stop:
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(group_starts, [start, stop - 1], side="right") - 1
    return np.arange(first, last + 1)


def _groups(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """First row id of every row group that is in use, and its bytes in the columns read."""
    flat = [group for groups in dataset.group_bytes for group in groups if group[0]]
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in flat])[:-1]]).astype(np.int64)
    in_use = starts < dataset.rows
    return starts[in_use], np.array([size for _, size in flat], dtype=np.int64)[in_use]
