"""What the query ids of an input say: which queries there are, how large each is, and where its rows lie.

Nothing here grows in memory with rows or queries. An id is known by a hash of its text; records of ids go to parts by
their hash, where those of one query meet; what comes of it is put in order by the query's first row. All of it is
spilled (`spills.py`) as soon as it is more than a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.runs.query_ids import coded_batches, hashes_of
from relabel.manifests.runs.spills import Parted, Spilled

# Shape legend: R rows, D distinct ids of one batch, S shards


class _Ids(NamedTuple):
    """Distinct ids of batches: two hashes, the first row, how many rows and their estimated tokens."""

    key: np.ndarray
    check: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray


class _Sizes(NamedTuple):
    """Queries, by their first row."""

    first: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray


class _Places(NamedTuple):
    """The first row of an id in a batch, or a row, and its query's first row."""

    first: np.ndarray
    query: np.ndarray


_ColumnsT = TypeVar("_ColumnsT", _Ids, _Sizes, _Places)
_ID = np.dtype(list(zip(_Ids._fields, ("<i8", "<i8", "<i8", "<i4", "<f8"), strict=True)))
_SIZE = np.dtype(list(zip(_Sizes._fields, ("<i8", "<i8", "<f8"), strict=True)))
_PLACE = np.dtype(list(zip(_Places._fields, ("<i8", "<i8"), strict=True)))


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
        found = _columns(_Ids, part)
        order = np.lexsort((found.check, found.key))
        found = _Ids(*(column[order] for column in found))
        is_new = np.ones(len(part), bool)
        is_new[1:] = (found.key[1:] != found.key[:-1]) | (found.check[1:] != found.check[:-1])
        starts, query_of = np.flatnonzero(is_new), np.cumsum(is_new) - 1
        first_Q = found.first[starts]
        rows_Q, tokens_Q = (np.bincount(query_of, column, len(starts)) for column in (found.rows, found.tokens))
        by_first.append(first_Q // block_rows, _packed(_Sizes(first_Q, rows_Q, tokens_Q), _SIZE))
        places.append(found.first // block_rows, _packed(_Places(found.first, first_Q[query_of]), _PLACE))
    firsts, sizes, weights, of_ids = (Spilled(kind, block_rows=block_rows) for kind in ("<i8", "<i8", "<f8", "<i8"))
    for size_part, place_part in zip(by_first.parts(), places.parts(), strict=True):
        queries, place = _columns(_Sizes, size_part), _columns(_Places, place_part)
        order_Q = np.argsort(queries.first)
        for column, values in zip((firsts, sizes, weights), queries, strict=True):
            column.append(values[order_Q])
        of_ids.append(place.query[np.argsort(place.first)])
    return Queries(firsts, sizes, weights, of_ids, num_runs)


def _columns(kind: type[_ColumnsT], records: np.ndarray) -> _ColumnsT:
    """The columns of records."""
    return kind(*(records[name] for name in kind._fields))


def _packed(columns: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Records of columns."""
    records = np.empty(len(columns[0]), dtype)
    for name, column in zip(dtype.fields or (), columns, strict=True):
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
        ids.append(key.view(np.uint64) % parts, _packed(_Ids(key, check, first, rows, rows * weight), _ID))
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
        rows.append(part_D[codes_R], _packed(_Places(row_R, query_D[codes_R]), _PLACE))
        done, first_row = done + len(values), first_row + len(codes_R)
    shards = iter(itertools.pairwise(bounds))
    for part, num_shards in zip(rows.parts(), np.bincount(part_S, minlength=parts).tolist(), strict=True):
        found, taken = _columns(_Places, part), 0
        in_order = found.first[np.argsort(found.query, kind="stable")]
        for start, stop in itertools.islice(shards, num_shards):
            yield in_order[taken : taken + stop - start]
            taken += stop - start
