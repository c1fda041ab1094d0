"""Rows of a shard as pairs, chunk by chunk, in the shard's own order, with memory that does not grow with the data.

Where queries lie together a shard is a row range: its row groups are streamed, and those without a pending chunk are
skipped. Where they lie scattered, the row groups that hold the shard's rows are streamed once, its rows are spilled to
a temporary Arrow file, and chunks are taken from that file by memory map, so that the operating system decides what
stays in memory.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.inputs.column_types import STRUCT_KINDS
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.labels import Pair
from relabel.manifests.runs.plans import ShardPlan
from relabel.manifests.runs.readings import Readings
from relabel.manifests.runs.row_batches import batches_in, scattered_batches
from relabel.manifests.runs.row_pairs import pairs_of
from relabel.manifests.runs.spills import spilling


class ChunkRows(NamedTuple):
    """One pending chunk: its number within the shard and its pairs in order."""

    chunk: int
    pairs: list[Pair]


def read_chunks(
    dataset: Dataset,
    shard: ShardPlan,
    row_ids: np.ndarray | None,
    pending: Sequence[int],
    *,
    readings: Readings | None,
    wanted: dict[int, set[int]] | None = None,
) -> Iterator[ChunkRows]:
    """Yield the pending chunks of a shard in order.

    Args:
        shard: the shard's plan.
        row_ids: the shard's row ids, for a scattered shard; None for a row range.
        pending: chunk numbers, ascending.
        readings: what was read of these files before, which is held against what they hold now; None for files that no
            run has read.
        wanted: row ids to keep, by chunk; all rows of a chunk that is not in it.
    Raises:
        InputError: a file can't be read, or holds another text than when it was read first.
        DiskFullError: no space to spill a scattered shard.
    """
    if not pending:
        return
    bounds = [0, *itertools.accumulate(shard.chunks)]
    spans = [(chunk, bounds[chunk], bounds[chunk + 1]) for chunk in pending]
    found = (
        _from_range(dataset, readings, shard.first_row or 0, spans)
        if row_ids is None
        else _from_spill(dataset, readings, row_ids, spans)
    )
    for chunk, rows in found:
        pairs = _with_siblings(rows) if dataset.reads.siblings else rows
        keep = wanted.get(chunk) if wanted is not None else None
        yield ChunkRows(chunk, pairs if keep is None else [pair for pair in pairs if pair.row_id in keep])


def _with_siblings(pairs: list[Pair]) -> list[Pair]:
    """The pairs of a chunk of whole queries, each with its query's."""
    found: list[Pair] = []
    for _, rows in itertools.groupby(pairs, key=lambda pair: pair.query_id):
        siblings = tuple(rows)
        found += [pair._replace(siblings=siblings) for pair in siblings]
    return found


def _from_range(
    dataset: Dataset, readings: Readings | None, first: int, spans: list[tuple[int, int, int]]
) -> Iterator[tuple[int, list[Pair]]]:
    waiting: list[Pair] = []
    for _, group in itertools.groupby(enumerate(spans), key=lambda item: item[1][0] - item[0]):
        # runs of consecutive chunks
        run = [span for _, span in group]
        batches = batches_in(dataset, readings, first + run[0][1], first + run[-1][2])
        for chunk, start, stop in run:
            while len(waiting) < stop - start:
                waiting.extend(pairs_of(*next(batches), dataset))
            yield chunk, waiting[: stop - start]
            del waiting[: stop - start]


def _from_spill(
    dataset: Dataset, readings: Readings | None, row_ids: np.ndarray, spans: list[tuple[int, int, int]]
) -> Iterator[tuple[int, list[Pair]]]:
    needed = np.sort(np.concatenate([row_ids[start:stop] for _, start, stop in spans]))
    ends: list[int] = []  # of each spilled batch, counted in spilled rows
    kinds = _spilled_types(dataset)
    with tempfile.TemporaryFile(prefix="relabel-rows-") as spill:
        writer = None
        for rows, batch, path in scattered_batches(dataset, readings, needed):
            with reading(path):
                kept = pa.array(np.flatnonzero(np.isin(rows, needed, assume_unique=True)))
                columns = [_spilled(batch.column(name).take(kept), kinds[name]) for name in dataset.text_columns]
                plain = pa.RecordBatch.from_arrays(columns, names=dataset.text_columns)
            with spilling("a shard's rows"):
                writer = writer or pa.ipc.new_file(spill, plain.schema)
                writer.write_batch(plain)
            ends.append(plain.num_rows + (ends[-1] if ends else 0))
        with spilling("a shard's rows"):
            if writer is not None:
                writer.close()
            spill.flush()
        with pa.memory_map(f"/proc/self/fd/{spill.fileno()}") as mapped:
            spilled = pa.ipc.open_file(mapped)
            for chunk, start, stop in spans:
                wanted = row_ids[start:stop]
                taken = _taken(spilled, np.array(ends), np.searchsorted(needed, wanted))
                yield chunk, list(pairs_of(wanted, taken, "the spilled rows", dataset))


def _taken(spilled: pa.RecordBatchFileReader, ends: np.ndarray, places: np.ndarray) -> pa.RecordBatch:
    """Spilled rows in the order of `places`. Batch by batch, since pyarrow's `take` of a table of several batches
    copies the whole table: over a shard's chunks that is quadratic (2,000,000 rows: 127 ms for a chunk of 256, against
    6 ms; 2026-11-20).
    """
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    numbers = np.searchsorted(ends, ascending, side="right")
    pieces = []
    for number in np.unique(numbers).tolist():
        first = int(ends[number - 1]) if number else 0
        pieces.append(spilled.get_batch(number).take(pa.array(ascending[numbers == number] - first)))
    whole = pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return whole.take(pa.array(back))


def _spilled_types(dataset: Dataset) -> dict[str, pa.DataType]:
    """One type for each column that is read, whatever a file's is, so that batches of all files go into one spill."""
    own = {one.name: one.kind for one in dataset.reads.columns}
    if dataset.columns.context is not None:
        own[dataset.columns.context] = "list<string>"
    found = {}
    for name in dataset.text_columns:
        kind = own.get(name, "string")
        item = STRUCT_KINDS.get(kind, pa.large_string())
        found[name] = pa.large_list(item) if kind.startswith("list") else item
    return found


def _spilled(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as its type; of structs the fields that are read."""
    is_of_structs = pa.types.is_large_list(kind) and pa.types.is_struct(kind.value_type)
    return pa.array(column.to_pylist(), kind) if is_of_structs else column.cast(kind)
