"""What the query ids of an input say: which queries there are, how large each is, and where its rows lie.

Nothing here grows in memory with rows or queries. An id is known by a hash of its text; records of ids go to parts by
their hash, where those of one query meet; what comes of it is put in order by the query's first row. All of it is
spilled (`spills.py`) as soon as it is more than a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import InputError
from manifests.inputs.dataset import Dataset, open_parquet
from manifests.inputs.input_faults import reading
from manifests.runs.spills import Parted, Spilled

# Shape legend: R rows, D distinct ids of one batch, S shards

BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""

_ID = np.dtype([("key", "<i8"), ("check", "<i8"), ("first", "<i8"), ("rows", "<i4"), ("tokens", "<f8")])
_QUERY = np.dtype([("first", "<i8"), ("rows", "<i8"), ("tokens", "<f8")])
_PLACE = np.dtype([("first", "<i8"), ("query", "<i8")])


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
    by_first, places = (Parted(dtype, parts, block_rows=block_rows) for dtype in (_QUERY, _PLACE))
    for part in ids.parts():
        found = part[np.lexsort((part["check"], part["key"]))]
        is_new = np.ones(len(found), bool)
        is_new[1:] = (found["key"][1:] != found["key"][:-1]) | (found["check"][1:] != found["check"][:-1])
        starts, query_of = np.flatnonzero(is_new), np.cumsum(is_new) - 1
        queries = np.empty(len(starts), _QUERY)
        queries["first"] = found["first"][starts]
        queries["rows"] = np.bincount(query_of, found["rows"], len(starts))
        queries["tokens"] = np.bincount(query_of, found["tokens"], len(starts))
        by_first.append(queries["first"] // block_rows, queries)
        place = np.empty(len(found), _PLACE)
        place["first"], place["query"] = found["first"], queries["first"][query_of]
        places.append(place["first"] // block_rows, place)
    firsts, sizes, weights, of_ids = (Spilled(kind, block_rows=block_rows) for kind in ("<i8", "<i8", "<f8", "<i8"))
    for queries, place in zip(by_first.parts(), places.parts(), strict=True):
        order_Q = np.argsort(queries["first"])
        for column, name in ((firsts, "first"), (sizes, "rows"), (weights, "tokens")):
            column.append(queries[name][order_Q])
        of_ids.append(place["query"][np.argsort(place["first"])])
    return Queries(firsts, sizes, weights, of_ids, num_runs)


def _ids_by_key(dataset: Dataset, parts: int, block_rows: int) -> tuple[Parted, int]:
    """Every distinct id of every batch, parted by its hash, and how many runs of equal ids the rows form."""
    ids = Parted(_ID, parts, block_rows=block_rows)
    first_row, num_runs, last = 0, 0, None
    for values, codes_R, weight in _coded_batches(dataset):
        found = np.empty(len(values), _ID)
        found["key"], found["check"] = _hashes(values)
        found["first"] = first_row + np.flatnonzero(np.diff(np.maximum.accumulate(codes_R), prepend=-1))
        found["rows"] = np.bincount(codes_R)
        found["tokens"] = found["rows"] * weight
        ids.append(found["key"].view(np.uint64) % parts, found)
        num_runs += int(np.count_nonzero(np.diff(codes_R))) + int(values[codes_R[0]] != last)
        first_row, last = first_row + len(codes_R), values[codes_R[-1]]
    return ids, num_runs


def _hashes(values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Two hashes of each id, int64. Python's own, of texts: with 128 bits of a keyed hash, a billion ids are mistaken
    for each other once in 10^20 plans.
    """
    texts = values if isinstance(values[0], str) else list(map(str, values))
    again = (text + "\0" for text in texts)
    count = len(texts)
    return np.fromiter(map(hash, texts), np.int64, count), np.fromiter(map(hash, again), np.int64, count)


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
    for values, codes_R, _ in _coded_batches(dataset):
        found = np.empty(len(codes_R), _PLACE)
        query_D = queries.of_ids[done : done + len(values)]
        part_D = part_S[used_S[np.searchsorted(first_S, query_D, side="right") - 1]]
        found["first"], found["query"] = first_row + np.arange(len(codes_R)), query_D[codes_R]
        rows.append(part_D[codes_R], found)
        done, first_row = done + len(values), first_row + len(codes_R)
    shards = iter(itertools.pairwise(bounds))
    for found, num_shards in zip(rows.parts(), np.bincount(part_S, minlength=parts).tolist(), strict=True):
        in_order, taken = found["first"][np.argsort(found["query"], kind="stable")], 0
        for start, stop in itertools.islice(shards, num_shards):
            yield in_order[taken : taken + stop - start]
            taken += stop - start


def _coded_batches(dataset: Dataset) -> Iterator[tuple[list[Any], np.ndarray, float]]:
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
                for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[number], columns=[name]):
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
