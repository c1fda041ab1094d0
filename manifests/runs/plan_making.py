"""How a plan is made: footers and the query-id column are read and nothing else. The same input and spec give the same
plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from relabel.manifests.digests import digest_of
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.runs.cutting import cut_queries
from relabel.manifests.runs.plans import Plan, RowIdFile, ShardPlan, row_id_file
from relabel.manifests.runs.query_scan import rows_of_shards, scan_queries
from relabel.manifests.runs.spills import BLOCK_ROWS, SpilledFiles


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
