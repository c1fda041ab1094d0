"""A plan is the one that an algorithm in a few lines makes, which holds everything in memory: the same shards, chunks,
weights and row ids to the last bit, however little memory the planner may use.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.plan import Plan, shard_row_ids, write_plan
from relabel.manifests.shards import fitting_chunk_rows, make_plan
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore

BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN, TOKENS_PER_PROMPT = 4.0, 250.0


class Simple(NamedTuple):
    """A shard as the simple algorithm cuts it."""

    rows: list[int]
    chunks: list[int]
    estimated_tokens: int
    read_bytes: int


def simple_plan(
    ids: list[Any], groups: list[tuple[int, int]], *, shards: int, chunk_rows: int | None, whole: bool = False
) -> tuple[bool, list[Simple]]:
    """How a plan was cut when it held a number for every row.

    Args:
        groups: rows and bytes of each row group.
    Returns:
        Whether queries lie scattered, and the shards.
    """
    codes = {one: number for number, one in enumerate(dict.fromkeys(ids))}
    code_R = np.array([codes[one] for one in ids])
    sizes_Q, weights_Q = np.zeros(len(codes), np.int64), np.zeros(len(codes))
    group_starts = np.cumsum([0, *(rows for rows, _ in groups)])
    for (rows, size), start in zip(groups, group_starts.tolist(), strict=False):
        for first in range(start, min(start + rows, len(ids)), BATCH_ROWS):
            counts = np.bincount(code_R[first : min(first + BATCH_ROWS, start + rows)], minlength=len(codes))
            sizes_Q += counts
            weights_Q += counts * (TOKENS_PER_PROMPT + size / rows / BYTES_PER_TOKEN)
    shards = min(shards, len(codes))
    middles_Q = np.cumsum(weights_Q) - weights_Q / 2
    shard_of_Q = np.minimum((middles_Q * (shards / float(weights_Q.sum()))).astype(np.int64), shards - 1)
    weights_before_Q = np.concatenate([[0.0], np.cumsum(weights_Q)])
    order_R = np.argsort(code_R, kind="stable")
    found, done = [], 0
    for shard in range(shards):
        queries = np.flatnonzero(shard_of_Q == shard)
        first_query = int(np.searchsorted(shard_of_Q, shard))
        size = int(sizes_Q[queries].sum())
        rows = order_R[done : done + size].tolist()
        done += size
        touched = {int(np.searchsorted(group_starts, row, side="right")) - 1 for row in rows}
        weight = weights_before_Q[first_query + len(queries)] - weights_before_Q[first_query]
        chunks = simple_chunks(sizes_Q[queries].tolist(), chunk_rows or fitting_chunk_rows(size), whole=whole)
        found.append(Simple(rows, chunks, round(float(weight)), sum(groups[group][1] for group in touched)))
    return int(np.count_nonzero(np.diff(code_R))) + 1 != len(codes), found


def simple_chunks(sizes: list[int], chunk_rows: int, *, whole: bool) -> list[int]:
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
    return [*chunks, filled] if filled else chunks


def write_file(path: Path, ids: list[Any], group_rows: int) -> None:
    table = {
        "query_id": ids,
        "query": [f"query {one}" for one in ids],
        "doc_id": [f"d{row}" for row in range(len(ids))],
        "document": [f"text {'x' * (row * 7 % 40)}" for row in range(len(ids))],
    }
    pq.write_table(pa.table(table), path, row_group_size=group_rows)


def dataset_of(folder: Path, limit: int | None = None) -> Dataset:
    return open_dataset(InputSpec(path=(str(folder),), limit=limit), Storage())


def shards_of(folder: Path, plan: Plan, plan_files: Any) -> list[Simple]:
    store = LocalRunStore(folder / "out")
    assert write_plan(store, plan, plan_files)
    assert all((shard.first_row is None) == plan.is_scattered for shard in plan.shards)
    return [
        Simple(shard_row_ids(store, shard).tolist(), shard.chunks, shard.estimated_tokens, shard.read_bytes)
        for shard in plan.shards
    ]


@st.composite
def query_ids(draw: st.DrawFn) -> list[int]:
    """Ids of up to 480 rows: together, scattered, or nearly together."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=40))
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    kind = draw(st.sampled_from(["together", "scattered", "one apart"]))
    if kind == "scattered":
        np.random.default_rng(draw(st.integers(0, 99))).shuffle(ids)
    elif kind == "one apart":
        ids.append(ids[0])
    return ids


@settings(max_examples=30, deadline=None)
@given(
    files=st.lists(query_ids(), min_size=1, max_size=3),
    group_rows=st.integers(1, 50),
    shards=st.integers(1, 9),
    chunk_rows=st.none() | st.integers(1, 20),
    is_text=st.booleans(),
    block_rows=st.sampled_from([3, 16, 100, 1000]),
)
def test_shards_and_chunks_are_those_of_the_simple_algorithm(
    files: list[list[int]], group_rows: int, shards: int, chunk_rows: int | None, is_text: bool, block_rows: int
) -> None:
    named = [[f"q{one}" if is_text else one - 20 for one in ids] for ids in files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        for number, ids in enumerate(named):
            write_file(folder / f"in/{number}.parquet", ids, group_rows)
        dataset = dataset_of(folder / "in")
        plan, plan_files = make_plan(
            dataset, {"x": 1}, name="job", shards=shards, chunk_rows=chunk_rows, block_rows=block_rows
        )
        groups = [group for groups in dataset.group_bytes for group in groups]
        is_scattered, wanted = simple_plan([*itertools.chain(*named)], groups, shards=shards, chunk_rows=chunk_rows)
        assert plan.is_scattered == is_scattered
        assert shards_of(folder, plan, plan_files) == wanted


def test_a_row_group_of_several_batches_is_weighed_in_their_order(tmp_path: Path) -> None:
    ids = [row * 7919 % 40_009 for row in range(280_000)]
    (tmp_path / "in").mkdir()
    for number, part in enumerate((ids[:150_001], ids[150_001:])):
        write_file(tmp_path / f"in/{number}.parquet", part, 140_000)
    dataset = dataset_of(tmp_path / "in", 279_000)
    plan, plan_files = make_plan(dataset, {"x": 1}, name="job", shards=5, chunk_rows=None, block_rows=20_000)
    groups = [group for groups in dataset.group_bytes for group in groups]
    is_scattered, wanted = simple_plan(ids[:279_000], groups, shards=5, chunk_rows=None)
    assert plan.is_scattered
    assert is_scattered
    assert shards_of(tmp_path, plan, plan_files) == wanted
