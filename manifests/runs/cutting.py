"""How the work is cut: shards of whole queries, and chunks within them, by sizes and weights of queries alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from relabel.manifests.runs.spills import BLOCK_ROWS, Column, blocks_of

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
    place_S = np.searchsorted(starts.shard, np.arange(shards + 1))
    query_bounds, bounds = starts.query[place_S].tolist(), starts.row[place_S].tolist()
    chunks = []
    for queries, (start, stop) in zip(itertools.pairwise(query_bounds), itertools.pairwise(bounds), strict=True):
        sizes = (block.tolist() for block in blocks_of(sizes_Q, *queries, block_rows))
        fitting = chunk_rows or fitting_chunk_rows(stop - start)
        chunks.append(_cut_chunks(itertools.chain.from_iterable(sizes), fitting, whole=whole))
    return Cut(query_bounds, bounds, chunks, np.diff(starts.weight[place_S]).tolist())


class ShardStarts(NamedTuple):
    """The first query and row of shards, and the weight before them; columns of one length."""

    shard: np.ndarray
    query: np.ndarray
    row: np.ndarray
    weight: np.ndarray


def _shard_starts(sizes_Q: Column, weights_Q: Column, shards: int, block_rows: int) -> ShardStarts:
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
        found.append(ShardStarts(shard_of[begin], first + begin, rows_before[begin], before[begin]))
        shard, row, weight = shard_of[-1], rows_before[-1], before[-1]
    found.append(ShardStarts(*(np.array([end]) for end in (shards, queries, row, weight))))
    return ShardStarts(*map(np.concatenate, zip(*found, strict=True)))


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
