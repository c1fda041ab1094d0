"""How the work is cut: shards of whole queries, and chunks within them.

Deciding is pure (`cut_queries`); `make_plan` reads footers and the query-id column and nothing else. The same input and
spec give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.digests import digest_of
from manifests.errors import InputError
from manifests.inputs.dataset import Dataset, open_parquet
from manifests.inputs.input_faults import reading
from manifests.runs.plans import Plan, RowIdFile, ShardPlan, row_id_file

# Shape legend: R rows, Q queries, S shards

BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""

CHUNKS_OF_A_SHARD = 16
"""About as many chunks has a shard by default: what a kill costs is then a small part of it, however slow the engine
is."""
FEWEST_CHUNK_ROWS, MOST_CHUNK_ROWS = 8, 256
"""Below it a commit costs more than the rows that it saves; a shard of 4,096 rows or more has the larger size."""


class Cut(NamedTuple):
    """Shards as ranges over the rows in shard order, the chunks of each, and the weight of each."""

    bounds: list[int]
    chunks: list[list[int]]
    weights: list[float]


def cut_queries(
    sizes_Q: np.ndarray, weights_Q: np.ndarray, *, shards: int, chunk_rows: int | None, whole: bool = False
) -> Cut:
    """Cut queries, in their order, into shards of nearly equal weight and chunks of whole queries.

    Args:
        sizes_Q: rows per query, int64, each at least 1.
        weights_Q: estimated tokens per query, float64.
        shards: how many; with fewer queries than shards some stay empty.
        chunk_rows: most rows a chunk, None for what fits the shard; only a query larger than that is split over chunks.
        whole: not even that one is split; it is a chunk of its own.
    Returns:
        `bounds` of length shards + 1 over the rows in query order, the chunks' row counts per shard, and the shards'
        weights.
    """
    middles_Q = np.cumsum(weights_Q) - weights_Q / 2
    total = float(weights_Q.sum())
    shard_of_Q = np.minimum((middles_Q * (shards / total)).astype(np.int64), shards - 1)
    query_bounds_S = np.searchsorted(shard_of_Q, np.arange(shards + 1))
    rows_before_Q = np.concatenate([[0], np.cumsum(sizes_Q)])
    of_shards = [
        sizes_Q[start:stop].tolist()
        for start, stop in zip(query_bounds_S[:-1].tolist(), query_bounds_S[1:].tolist(), strict=True)
    ]
    chunks = [_cut_chunks(sizes, chunk_rows or fitting_chunk_rows(sum(sizes)), whole=whole) for sizes in of_shards]
    weights_before_Q = np.concatenate([[0.0], np.cumsum(weights_Q)])
    return Cut(rows_before_Q[query_bounds_S].tolist(), chunks, np.diff(weights_before_Q[query_bounds_S]).tolist())


def fitting_chunk_rows(shard_rows: int) -> int:
    """Rows of a chunk where the job names no number: by the shard's rows alone, so that the same input and spec give
    the same plan on any machine.
    """
    return min(max(-(-shard_rows // CHUNKS_OF_A_SHARD), FEWEST_CHUNK_ROWS), MOST_CHUNK_ROWS)


def _cut_chunks(sizes: list[int], chunk_rows: int, *, whole: bool) -> list[int]:
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
    dataset: Dataset, parts: dict[str, Any], *, name: str, shards: int, chunk_rows: int | None
) -> tuple[Plan, dict[str, bytes]]:
    """Read the query ids and cut the work.

    Returns:
        The plan, and the files that must lie beside it (name → bytes): row ids of scattered shards.
    Raises:
        InputError: a null query id, or a file that can't be read.
    """
    found = _scan_queries(dataset)
    # no query is in two shards, so that those beyond the number of queries would be empty, and each costs time wherever
    # shards are counted
    cut = cut_queries(
        found.sizes_Q,
        found.weights_Q,
        shards=min(shards, len(found.sizes_Q)),
        chunk_rows=chunk_rows,
        whole=dataset.reads.whole_query,
    )
    is_scattered = found.num_runs != len(found.sizes_Q)
    order_R = _rows_by_query(dataset) if is_scattered else None
    group_starts, group_bytes = _groups(dataset)
    beside: dict[str, bytes] = {}
    planned = []
    for number, (start, stop) in enumerate(zip(cut.bounds[:-1], cut.bounds[1:], strict=True)):
        row_ids: RowIdFile | None = None
        if order_R is None:
            touched = _groups_of_range(group_starts, start, stop)
        else:
            rows_S = order_R[start:stop]
            touched = np.unique(np.searchsorted(group_starts, rows_S, side="right") - 1)
            if len(rows_S):
                row_ids, file = row_id_file(number, rows_S)
                beside |= file
        planned.append(
            ShardPlan(
                rows=stop - start,
                first_row=start if order_R is None else None,
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
        queries=len(found.sizes_Q),
        is_scattered=is_scattered,
        text_bytes=int(group_bytes.sum()),
        files=list(dataset.files),
        shards=planned,
    )
    return plan, beside


class _Queries(NamedTuple):
    """Queries in order of first appearance: rows and estimated prompt tokens of each, and how many runs of equal ids
    the rows form.
    """

    sizes_Q: np.ndarray  # noqa: N815
    weights_Q: np.ndarray  # noqa: N815
    num_runs: int


def _scan_queries(dataset: Dataset) -> _Queries:
    """One pass over the query ids; memory grows with queries, not with rows."""
    sizes_Q, weights_Q = np.zeros(0, np.int64), np.zeros(0, np.float64)
    num_runs, last = 0, -1
    for codes, weight in _coded_ids(dataset):
        # counted from here: a pass over all queries for each batch would make the whole quadratic
        first = int(codes.min())
        sizes = np.bincount(codes - first)
        stop = first + len(sizes)
        if stop > len(sizes_Q):
            grown = max(stop, 2 * len(sizes_Q))
            sizes_Q, weights_Q = (
                np.concatenate([old, np.zeros(grown - len(old), old.dtype)]) for old in (sizes_Q, weights_Q)
            )
        sizes_Q[first:stop] += sizes
        weights_Q[first:stop] += sizes * weight
        num_runs += int(np.count_nonzero(codes[1:] != codes[:-1])) + int(codes[0] != last)
        last = int(codes[-1])
    queries = int(np.count_nonzero(sizes_Q))
    return _Queries(sizes_Q[:queries], weights_Q[:queries], num_runs)


def _rows_by_query(dataset: Dataset) -> np.ndarray:
    """Row ids, int64, grouped by query in order of first appearance, in row order within a query."""
    codes_R = np.concatenate([codes.astype(np.int32) for codes, _ in _coded_ids(dataset)])
    return np.argsort(codes_R, kind="stable")


def _coded_ids(dataset: Dataset) -> Iterator[tuple[np.ndarray, float]]:
    """For each run of rows within a row group: a code per row, numbered by first appearance of its query, and the
    estimated tokens a row.
    """
    known: dict[Any, int] = {}
    for column, weight, path in id_batches(dataset):
        with reading(path):
            encoded = column.dictionary_encode()
            values = encoded.dictionary.to_pylist()
        codes = np.array([known.setdefault(value, len(known)) for value in values], np.int64)
        yield codes[encoded.indices.to_numpy()], weight


def id_batches(dataset: Dataset) -> Iterator[tuple[pa.Array, float, str]]:
    """For each run of rows within a row group: their query ids, the estimated tokens a row, and the file.

    What looks into an id does so under `reading`, since Parquet holds bytes that are no text as text. A footer knows a
    row group's bytes and no row's, so the estimate is flat within a row group.

    Raises:
        InputError: a null query id, or a file that can't be read.
    """
    name = dataset.columns.query_id
    done = 0
    for file, groups in zip(dataset.files, dataset.group_bytes, strict=True):
        if done >= dataset.rows:
            return
        before = done
        with open_parquet(file.path, dataset.storage) as parquet, reading(file.path):
            for number, (rows, size) in enumerate(groups):
                weight = TOKENS_PER_PROMPT + size / max(rows, 1) / BYTES_PER_TOKEN
                for batch in parquet.iter_batches(batch_size=1 << 17, row_groups=[number], columns=[name]):
                    column = batch.column(name).slice(0, dataset.rows - done)
                    if not len(column):
                        return
                    if column.null_count:
                        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0]) + done - before
                        raise InputError(
                            f"{file.path}: `{name}` is null in row {row} of the file. Every row needs a query id; "
                            "fix it."
                        )
                    if pa.types.is_dictionary(column.type):
                        column = column.cast(column.type.value_type)
                    yield column, weight, file.path
                    done += len(column)


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
