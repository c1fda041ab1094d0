"""How a plan is made: query ids are scanned, and whole queries are cut into shards and chunks in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import DiskFullError, InputError
from relabel.manifests.input_files import reading
from relabel.manifests.inputs import Dataset, open_parquet
from relabel.manifests.plan import Plan, RowIdFile, ShardPlan, row_id_file
from relabel.manifests.records import digest_of

# ------------------------------------------------------------------------------
# More records than a process should hold, in unnamed temporary files: they go with the process, however it ends.
#
# `Spilled` keeps records in order and gives them back by slices, as an array does; `Parted` keeps them by part. Both
# hold up to `block_rows` in memory, so that what is small never meets the disk.


BLOCK_ROWS = 1 << 19
"""Records that are held, written and sorted at a time: 20 MB of the largest kind."""


class Column(Protocol):
    """Values in order, read by slices: an array, or a `Spilled`."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> Any: ...


def blocks_of(column: Column, start: int, stop: int, block_rows: int) -> Iterator[np.ndarray]:
    """The values start..stop, some at a time."""
    for first in range(start, stop, block_rows):
        yield column[first : min(first + block_rows, stop)]


@contextlib.contextmanager
def spilling(what: str) -> Iterator[None]:
    """Errors while writing a copy, as opposed to errors while reading its source.

    Raises:
        DiskFullError: in place of any OSError.
    """
    try:
        yield
    except OSError as exc:
        raise DiskFullError(
            f"{tempfile.gettempdir()}: can't spill {what} ({exc.strerror or exc}). Free some space or point TMPDIR "
            "elsewhere."
        ) from exc


class Spilled:
    """Records of one kind in the order in which they were added."""

    def __init__(self, dtype: np.typing.DTypeLike, *, block_rows: int = BLOCK_ROWS) -> None:
        self._dtype = np.dtype(dtype)
        self._block_rows = block_rows
        self._file: BinaryIO | None = None
        self._num_written = 0
        self._held: list[np.ndarray] = []
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_written + self._num_held

    def append(self, records: np.ndarray) -> None:
        """Add records at the end.

        Raises:
            DiskFullError: there is no room for them in TMPDIR.
        """
        self._held.append(records.astype(self._dtype, copy=False))
        self._num_held += len(records)
        if self._num_held < self._block_rows:
            return
        with spilling("what a plan is made of"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="relabel-plan-", buffering=0)  # noqa: SIM115 (lives as we do)
                weakref.finalize(self, self._file.close)
            for held in self._held:
                left = np.ascontiguousarray(held).view(np.uint8).data
                while left:
                    left = left[self._file.write(left) :]
        self._num_written += self._num_held
        self._held, self._num_held = [], 0

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        pieces = [self._read(start, min(stop, self._num_written))] if start < self._num_written else []
        if stop > self._num_written:
            if len(self._held) > 1:
                self._held = [np.concatenate(self._held)]
            pieces.append(self._held[0][max(0, start - self._num_written) : stop - self._num_written])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, self._dtype), *pieces])

    def _read(self, start: int, stop: int) -> np.ndarray:
        assert self._file is not None
        size = self._dtype.itemsize
        found = np.empty(max(0, stop - start), self._dtype)
        left, place = found.view(np.uint8).data, start * size
        while left:
            count = os.preadv(self._file.fileno(), [left], place)
            left, place = left[count:], place + count
        return found


class Parted:
    """Records of one kind by part, each part in the order in which its records were added."""

    def __init__(self, dtype: np.typing.DTypeLike, parts: int, *, block_rows: int = BLOCK_ROWS) -> None:
        self._sorted = Spilled(dtype, block_rows=block_rows)
        self._block_rows = block_rows
        self._parts = parts
        self._bounds_P: list[np.ndarray] = []  # of each block that was sorted by part
        self._held: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_held = 0

    def append(self, part_R: np.ndarray, records: np.ndarray) -> None:
        """Add records, each to its part.

        Raises:
            DiskFullError: as `Spilled.append`.
        """
        self._held.append((part_R.astype(np.uint16), records))
        self._num_held += len(records)
        if self._num_held >= self._block_rows:
            self._sort()

    def parts(self) -> Iterator[np.ndarray]:
        """Each part's records."""
        if self._held:
            self._sort()
        for number in range(self._parts):
            pieces = [self._sorted[slice(*bounds_P[number : number + 2].tolist())] for bounds_P in self._bounds_P]
            yield np.concatenate([self._sorted[0:0], *pieces])

    def _sort(self) -> None:
        part_R, records = (np.concatenate(pieces) for pieces in zip(*self._held, strict=True))
        order = np.argsort(part_R, kind="stable")
        before = len(self._sorted)
        self._bounds_P.append(before + np.searchsorted(part_R[order], np.arange(self._parts + 1)))
        self._sorted.append(records[order])
        self._held, self._num_held = [], 0


class SpilledFiles(Mapping[str, bytes]):
    """Files by name, of which memory holds about one."""

    def __init__(self) -> None:
        self._bytes = Spilled(np.uint8)
        self._spans: dict[str, slice] = {}

    def add(self, files: Mapping[str, bytes]) -> None:
        """Take in more.

        Raises:
            DiskFullError: as `Spilled.append`.
        """
        for name, data in files.items():
            start = len(self._bytes)
            self._bytes.append(np.frombuffer(data, np.uint8))
            self._spans[name] = slice(start, start + len(data))

    def __getitem__(self, name: str) -> bytes:
        return self._bytes[self._spans[name]].tobytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


# ------------------------------------------------------------------------------
# An input's query ids, as its files hold them: a batch at a time, with the estimated tokens a row.


BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""


def coded_batches(dataset: Dataset) -> Iterator[tuple[list[str], np.ndarray, float]]:
    """For each run of rows within a row group: its distinct ids by first appearance, the place of each row's among
    them, and the estimated tokens a row.
    """
    for column, weight, path in id_batches(dataset):
        with reading(path):
            encoded = column.dictionary_encode()
            values = encoded.dictionary.to_pylist()
        yield values, encoded.indices.to_numpy(), weight


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


def hashes_of(values: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Two hashes of each id, int64. Python's own, of texts: with 128 bits of a keyed hash, a billion ids are mistaken
    for each other once in 10^20 plans.
    """
    again, count = (text + "\0" for text in values), len(values)
    return np.fromiter(map(hash, values), np.int64, count), np.fromiter(map(hash, again), np.int64, count)


# ------------------------------------------------------------------------------
# What the query ids of an input say: which queries there are, how large each is, and where its rows lie.
#
# Nothing here grows in memory with rows or queries. An id is known by a hash of its text; records of ids go to parts by
# their hash, where those of one query meet; what comes of it is put in order by the query's first row. All of it is
# spilled (`spills.py`) as soon as it is more than a block.


# Shape legend: R rows, D distinct ids of one batch, S shards


_ID = np.dtype([("key", "<i8"), ("check", "<i8"), ("first", "<i8"), ("rows", "<i4"), ("tokens", "<f8")])
"""A distinct id of a batch: two hashes, its first row, how many rows it has and their estimated tokens."""
_SIZE = np.dtype([("first", "<i8"), ("rows", "<i8"), ("tokens", "<f8")])
"""A query, by its first row."""
_PLACE = np.dtype([("first", "<i8"), ("query", "<i8")])
"""The first row of an id in a batch, or a row, and its query's first row."""


class Queries(NamedTuple):
    """Queries in order of first appearance.

    Args:
        firsts: first row of each, int64.
        sizes, weights: its rows, int64, and estimated prompt tokens, float64.
        of_ids: for each distinct id of each batch, in the order in which they are read, its query's first row, int64.
        num_runs: of equal ids in the order of rows; as many as queries where each query's rows lie together.
    """

    firsts: Spilled
    sizes: Spilled
    weights: Spilled
    of_ids: Spilled
    num_runs: int

    @property
    def is_scattered(self) -> bool:
        return self.num_runs != len(self.sizes)


def scan_queries(dataset: Dataset, *, block_rows: int) -> Queries:
    """One pass over the query ids.

    Raises:
        InputError: as `id_batches`.
        DiskFullError: what does not fit into memory does not fit into TMPDIR.
    """
    parts = -(-dataset.rows // block_rows)
    ids, num_runs = _ids_by_key(dataset, parts, block_rows)
    by_first, places = (Parted(dtype, parts, block_rows=block_rows) for dtype in (_SIZE, _PLACE))
    for part in ids.parts():
        found = part[np.lexsort((part["check"], part["key"]))]
        is_new = np.ones(len(found), bool)
        is_new[1:] = (found["key"][1:] != found["key"][:-1]) | (found["check"][1:] != found["check"][:-1])
        starts, query_of = np.flatnonzero(is_new), np.cumsum(is_new) - 1
        first_Q = found["first"][starts]
        rows_Q, tokens_Q = (np.bincount(query_of, found[name], len(starts)) for name in ("rows", "tokens"))
        by_first.append(first_Q // block_rows, _records(_SIZE, first_Q, rows_Q, tokens_Q))
        places.append(found["first"] // block_rows, _records(_PLACE, found["first"], first_Q[query_of]))
    firsts, sizes, weights, of_ids = (Spilled(kind, block_rows=block_rows) for kind in ("<i8", "<i8", "<f8", "<i8"))
    for queries, place in zip(by_first.parts(), places.parts(), strict=True):
        order_Q = np.argsort(queries["first"])
        for column, name in ((firsts, "first"), (sizes, "rows"), (weights, "tokens")):
            column.append(queries[name][order_Q])
        of_ids.append(place["query"][np.argsort(place["first"])])
    return Queries(firsts, sizes, weights, of_ids, num_runs)


def _records(dtype: np.dtype, *columns: np.ndarray) -> np.ndarray:
    """Records of columns, in the order of their fields."""
    records = np.empty(len(columns[0]), dtype)
    for name, column in zip(dtype.names or (), columns, strict=True):
        records[name] = column
    return records


def _ids_by_key(dataset: Dataset, parts: int, block_rows: int) -> tuple[Parted, int]:
    """Every distinct id of every batch, parted by its hash, and how many runs of equal ids the rows form."""
    ids = Parted(_ID, parts, block_rows=block_rows)
    first_row, num_runs, last = 0, 0, None
    for values, codes_R, weight in coded_batches(dataset):
        key, check = hashes_of(values)
        first = first_row + np.flatnonzero(np.diff(np.maximum.accumulate(codes_R), prepend=-1))
        rows = np.bincount(codes_R)
        ids.append(key.view(np.uint64) % parts, _records(_ID, key, check, first, rows, rows * weight))
        num_runs += int(np.count_nonzero(np.diff(codes_R))) + int(values[codes_R[0]] != last)
        first_row, last = first_row + len(codes_R), values[codes_R[-1]]
    return ids, num_runs


def rows_of_shards(
    dataset: Dataset, queries: Queries, query_bounds: Sequence[int], bounds: Sequence[int], *, block_rows: int
) -> Iterator[np.ndarray]:
    """Each shard's row ids, int64: by query in order of first appearance, in row order within one. A second pass over
    the query ids; in memory are those of a shard, or of as many shards as a block holds.

    Args:
        query_bounds, bounds: of the shards, in queries and in rows by query; one more than shards.
    Raises:
        InputError: as `id_batches`.
        DiskFullError: there is no room in TMPDIR.
    """
    parts = -(-dataset.rows // block_rows)
    rows = Parted(_PLACE, parts, block_rows=block_rows)
    part_S = np.array(bounds[:-1]) // block_rows
    used_S = np.flatnonzero(np.diff(query_bounds))
    first_S = np.array([queries.firsts[first : first + 1][0] for first in np.array(query_bounds)[used_S].tolist()])
    done = first_row = 0
    for values, codes_R, _ in coded_batches(dataset):
        query_D = queries.of_ids[done : done + len(values)]
        part_D = part_S[used_S[np.searchsorted(first_S, query_D, side="right") - 1]]
        row_R = first_row + np.arange(len(codes_R))
        rows.append(part_D[codes_R], _records(_PLACE, row_R, query_D[codes_R]))
        done, first_row = done + len(values), first_row + len(codes_R)
    shards = iter(itertools.pairwise(bounds))
    for part, num_shards in zip(rows.parts(), np.bincount(part_S, minlength=parts).tolist(), strict=True):
        in_order, taken = part["first"][np.argsort(part["query"], kind="stable")], 0
        for start, stop in itertools.islice(shards, num_shards):
            yield in_order[taken : taken + stop - start]
            taken += stop - start


# ------------------------------------------------------------------------------
# How the work is cut: shards of whole queries, and chunks within them, by sizes and weights of queries alone.


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
        block_rows: queries that are read at a time.
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


# ------------------------------------------------------------------------------
# How a plan is made: footers and the query-id column are read and nothing else. The same input and spec give the same
# plan.


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
        The plan, and the files that must lie next to it: row ids of scattered shards.
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
    # first row id of every row group that is in use, and its bytes in the columns read
    flat = [group for groups in dataset.group_bytes for group in groups if group[0]]
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in flat])[:-1]]).astype(np.int64)
    in_use = starts < dataset.rows
    group_starts, group_bytes = starts[in_use], np.array([size for _, size in flat], dtype=np.int64)[in_use]
    plan_files = SpilledFiles()
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
                plan_files.add(file)
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
    return plan, plan_files


def _groups_of_range(group_starts: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Numbers of the row groups that hold the rows start..stop."""
    if start == stop:
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(group_starts, [start, stop - 1], side="right") - 1
    return np.arange(first, last + 1)
