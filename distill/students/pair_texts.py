"""Texts of labelled rows, read from the pairs that were labelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.labels import Pair
from relabel.manifests.runs.plans import ShardPlan
from relabel.manifests.runs.readings import Readings
from relabel.manifests.runs.rows import read_chunks

READ_ROWS = 4096


def rejoin(columns: dict[str, list[Any]], dataset: Dataset, readings: Readings | None, where: str) -> list[Pair]:
    """The pair that each label is of.

    Args:
        columns: `row_id`, `query_id` and `doc_id` of the labels.
        where: they are, for errors.
    Raises:
        InputError: the pairs have other rows than the labels name.
    """
    rows = np.array(columns["row_id"], dtype=np.int64)
    total = sum(file.rows for file in dataset.files)
    beyond = rows[(rows < 0) | (rows >= total)]
    if len(beyond):
        raise InputError(
            f"{where}: label of row {int(beyond[0])}, while the pairs have rows 0 to {total - 1}. Are they the right "
            "pairs?"
        )
    pairs = read_pairs(dataset, rows, readings=readings)
    for number, pair in enumerate(pairs):
        ids = str(columns["query_id"][number]), str(columns["doc_id"][number])
        if ids != (pair.query_id, pair.doc_id):
            raise InputError(
                f"{where}: the label of row {pair.row_id} is of query {ids[0]}, document {ids[1]}; that row of the "
                f"pairs is query {pair.query_id}, document {pair.doc_id}. Are they the right pairs, in the right "
                "order?"
            )
    return pairs


def read_pairs(dataset: Dataset, rows: np.ndarray, *, readings: Readings | None) -> list[Pair]:
    """The rows with these ids, in their order; row groups without one are not read.

    Args:
        readings: of the run that labelled them (`read_chunks`); None for pairs that no run has read.
    """
    if not len(rows):
        return []
    distinct = np.unique(rows)
    sizes = [min(READ_ROWS, len(distinct) - start) for start in range(0, len(distinct), READ_ROWS)]
    is_range = len(distinct) == distinct[-1] - distinct[0] + 1
    shard = ShardPlan(len(distinct), int(distinct[0]) if is_range else None, None, sizes, 0, 0)
    found = {pair.row_id: pair for pair in _chunked(dataset, readings, shard, None if is_range else distinct)}
    return [found[row] for row in rows.tolist()]


def _chunked(dataset: Dataset, readings: Readings | None, shard: ShardPlan, rows: np.ndarray | None) -> Iterator[Pair]:
    for chunk in read_chunks(dataset, shard, rows, range(len(shard.chunks)), readings=readings):
        yield from chunk.pairs
