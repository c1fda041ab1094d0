"""A few rows of an input by number or by query, outside of any plan: to be looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.labels import Pair
from relabel.manifests.runs.plans import ShardPlan
from relabel.manifests.runs.query_ids import id_batches
from relabel.manifests.runs.rows import read_chunks


def pairs_by_number(dataset: Dataset, rows: Sequence[int]) -> Iterator[Pair]:
    """The pairs of rows, in the order given; one is in memory at a time, unless the labeler sees whole queries. Then
    rows of one query lie together and are all of it.

    Raises:
        InputError: a file can't be read.
    """
    chunks = [len(rows)] if dataset.reads.siblings else [1] * len(rows)
    picked = ShardPlan(len(rows), None, None, chunks, 0, 0)
    for chunk in read_chunks(dataset, picked, np.array(rows, np.int64), range(len(chunks)), readings=None):
        yield from chunk.pairs


def rows_of_queries(dataset: Dataset, query_ids: Collection[str]) -> dict[str, list[int]]:
    """Row numbers of each query, ascending; reads one column of the whole input.

    Raises:
        InputError: a query id is null, or no row has one that is wanted.
    """
    found: dict[str, list[int]] = {one: [] for one in query_ids}
    wanted = pa.array(list(found), pa.large_string())
    first = 0
    for column, _, path in id_batches(dataset):
        with reading(path):
            ids = column.cast(pa.large_string())
            places = np.flatnonzero(pc.is_in(ids, wanted).to_numpy(zero_copy_only=False)).tolist()
            for place in places:
                found[ids[place].as_py()].append(first + place)
        first += len(column)
    if missing := [one for one, rows in found.items() if not rows]:
        raise InputError(f"no row of the input has the query id `{missing[0]}` (of {dataset.rows:,} rows).")
    return found
