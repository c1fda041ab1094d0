"""How a plan is made: query ids are scanned, and whole queries are cut into shards and chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.input_files import reading
from relabel.manifests.inputs import Dataset, open_parquet
from relabel.manifests.plan import Plan, RowIdFile, ShardPlan, row_id_file
from relabel.manifests.records import digest_of

# ------------------------------------------------------------------------------
# An input's query ids, as its files hold them: a batch at a time, with the estimated tokens a row.


# Shape legend: R rows, Q queries, S shards

BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""


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
                for batch in parquet.plain_batches([name], ids=[name], batch_rows=BATCH_ROWS, row_groups=[number]):
                    column = batch.column(name).slice(0, dataset.rows - done)
                    if not len(column):
                        return
                    if column.null_count:
                        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0]) + done - before
                        raise InputError(
                            f"{file.path}: `{name}` is null in row {row} of the file. Every row needs a query id; "
                            "fix it."
                        )
                    yield column, weight, file.path
                    done += len(column)


class Queries(NamedTuple):
    """Queries, numbered in order of first appearance.

    Args:
        of_rows: the query of each row, int32.
        sizes, weights: its rows, int64, and estimated prompt tokens, float64.
    """

    of_rows: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray

    @property
    def is_scattered(self) -> bool:
        """Whether the rows of some query do not lie together."""
        return int(np.count_nonzero(self.of_rows[1:] != self.of_rows[:-1])) + 1 != len(self.sizes)


CODED_ROWS = 1 << 23
"""Rows whose ids are held as text at a time, at least."""


CodedBatch = tuple[pa.DictionaryArray, float]
"""Ids, and the estimated tokens a row."""


def _coded_batches(dataset: Dataset) -> Iterator[CodedBatch]:
    for column, weight, path in id_batches(dataset):
        with reading(path):
            coded = column.dictionary_encode()
            coded.dictionary.validate(full=True)
        yield coded, weight


def _next_rows(batches: Iterator[CodedBatch], rows: int) -> Iterator[CodedBatch]:
    """Batches until they have so many rows."""
    while rows > 0 and (batch := next(batches, None)) is not None:
        yield batch
        rows -= len(batch[0])


def scan_queries(dataset: Dataset) -> Queries:
    """One pass over the query ids.

    Raises:
        InputError: as `id_batches`.
    """
    known, codes, weights = pa.array([], pa.large_string()), list[np.ndarray](), list[float]()
    batches = _coded_batches(dataset)
    while some := list(_next_rows(batches, max(CODED_ROWS, len(known)))):  # each time all that are known are hashed
        nobody = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), known)
        first, *others = pa.chunked_array([nobody, *(batch for batch, _ in some)]).unify_dictionaries().chunks
        known = first.dictionary
        codes += [batch.indices.to_numpy() for batch in others]
        weights += [weight for _, weight in some]
    sizes_Q, weights_Q = (np.zeros(len(known), kind) for kind in (np.int64, np.float64))
    for codes_R, weight in zip(codes, weights, strict=True):
        query_D, rows_D = np.unique(codes_R, return_counts=True)
        sizes_Q[query_D] += rows_D
        weights_Q[query_D] += rows_D * weight
    return Queries(np.concatenate(codes), sizes_Q, weights_Q)


# ------------------------------------------------------------------------------
# How the work is cut: shards of whole queries, and chunks within them, by sizes and weights of queries alone.


CHUNKS_OF_A_SHARD = 16
"""About as many chunks has a shard by default: what a kill costs is then a small part of it, however slow the engine
is."""
FEWEST_CHUNK_ROWS, MOST_CHUNK_ROWS = 8, 256
"""Below it a commit costs more than the rows that it saves; a shard of 4,096 rows or more has the larger size."""


class Cut(NamedTuple):
    """Shards as ranges over the rows in shard order (shards + 1 bounds); the row counts of the chunks of each shard,
    and its weight.
    """

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
    """
    middles_Q = np.cumsum(weights_Q) - weights_Q / 2
    shard_of_Q = np.minimum((middles_Q * (shards / weights_Q.sum())).astype(np.int64), shards - 1)
    query_bounds = np.searchsorted(shard_of_Q, np.arange(shards + 1))
    bounds = np.append(0, np.cumsum(sizes_Q))[query_bounds]
    chunks = [
        _cut_chunks(sizes_S.tolist(), chunk_rows or fitting_chunk_rows(int(sizes_S.sum())), whole=whole)
        for sizes_S in np.split(sizes_Q, query_bounds[1:-1])
    ]
    return Cut(bounds.tolist(), chunks, np.diff(np.append(0.0, np.cumsum(weights_Q))[query_bounds]).tolist())


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


# ------------------------------------------------------------------------------
# How a plan is made: footers and the query-id column are read and nothing else. The same input and spec give the same
# plan.


def make_plan(
    dataset: Dataset, parts: dict[str, Any], *, name: str, shards: int, chunk_rows: int | None
) -> tuple[Plan, dict[str, bytes]]:
    """Read the query ids and cut the work.

    Returns:
        The plan, and the files that must lie next to it, by name: row ids of scattered shards.
    Raises:
        InputError: a null query id, or a file that can't be read.
    """
    found = scan_queries(dataset)
    # no query is in two shards, so that those beyond the number of queries would be empty, and each costs time wherever
    # shards are counted
    cut = cut_queries(
        found.sizes,
        found.weights,
        shards=min(shards, len(found.sizes)),
        chunk_rows=chunk_rows,
        whole=dataset.reads.whole_query,
    )
    # first row id of every row group that is in use, and its bytes in the columns read
    flat = [group for groups in dataset.group_bytes for group in groups if group[0]]
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in flat])[:-1]]).astype(np.int64)
    in_use = starts < dataset.rows
    group_starts, group_bytes = starts[in_use], np.array([size for _, size in flat], dtype=np.int64)[in_use]
    order_R = np.argsort(found.of_rows, kind="stable") if found.is_scattered else None
    plan_files: dict[str, bytes] = {}
    planned = []
    for number, (start, stop) in enumerate(itertools.pairwise(cut.bounds)):
        row_ids: RowIdFile | None = None
        if order_R is None:
            touched = _groups_of_range(group_starts, start, stop)
        else:
            rows_S = order_R[start:stop]
            touched = np.unique(np.searchsorted(group_starts, rows_S, side="right") - 1)
            if len(rows_S):
                row_ids, file = row_id_file(number, rows_S)
                plan_files |= file
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
        queries=len(found.sizes),
        is_scattered=found.is_scattered,
        text_bytes=int(group_bytes.sum()),
        files=list(dataset.files),
        shards=planned,
    )
    return plan, plan_files


def _groups_of_range(group_starts: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Numbers of the row groups that hold the rows start..stop."""
    if start == stop:
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(group_starts, [start, stop - 1], side="right") - 1
    return np.arange(first, last + 1)
