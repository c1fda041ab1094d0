"""Shards partition the input into whole queries, chunks partition the shards, and the same input
gives the same plan.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.manifests.errors import ManifestError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.plan import check_plan, load_plan, shard_row_ids, write_plan
from relabel.manifests.shards import cut_queries, make_plan
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(sizes=SIZES, shards=st.integers(1, 12), chunk_rows=st.integers(1, 30))
def test_cut_keeps_every_row_once_and_every_query_whole(sizes: list[int], shards: int, chunk_rows: int) -> None:
    sizes_Q = np.array(sizes)
    cut = cut_queries(sizes_Q, sizes_Q * 10.0, shards=shards, chunk_rows=chunk_rows)
    query_ends = {0, *np.cumsum(sizes_Q).tolist()}
    assert len(cut.bounds) == shards + 1
    assert cut.bounds[0] == 0
    assert cut.bounds[-1] == sum(sizes)
    assert cut.bounds == sorted(cut.bounds)
    assert set(cut.bounds) <= query_ends
    for start, stop, chunks in zip(cut.bounds[:-1], cut.bounds[1:], cut.chunks, strict=True):
        assert sum(chunks) == stop - start
        assert all(0 < rows <= chunk_rows for rows in chunks)


@given(sizes=SIZES, chunk_rows=st.integers(1, 30))
def test_where_siblings_are_wanted_no_chunk_cuts_a_query(sizes: list[int], chunk_rows: int) -> None:
    (chunks,) = cut_queries(np.array(sizes), np.array(sizes) * 1.0, shards=1, chunk_rows=chunk_rows, whole=True).chunks
    ends = np.cumsum(sizes).tolist()
    assert set(np.cumsum(chunks).tolist()) <= set(ends)
    assert sum(chunks) == sum(sizes)
    assert all(rows <= chunk_rows or rows in sizes for rows in chunks)


@given(sizes=SIZES, chunk_rows=st.integers(1, 30))
def test_only_a_query_larger_than_a_chunk_is_split(sizes: list[int], chunk_rows: int) -> None:
    cut = cut_queries(np.array(sizes), np.array(sizes) * 1.0, shards=1, chunk_rows=chunk_rows)
    ends = set(np.cumsum(cut.chunks[0]).tolist())
    start = 0
    for size in sizes:
        if size <= chunk_rows:
            assert not any(start < end < start + size for end in ends)
        start += size


@given(sizes=st.lists(st.integers(1, 5), min_size=40, max_size=80), shards=st.integers(2, 6))
def test_shards_are_balanced_to_within_the_largest_query(sizes: list[int], shards: int) -> None:
    cut = cut_queries(np.array(sizes), np.array(sizes) * 1.0, shards=shards, chunk_rows=8)
    per_shard = np.diff(cut.bounds)
    assert per_shard.max() - per_shard.min() <= 2 * max(sizes)


def write(path: Path, query_ids: list[str | int | None], group: int = 7) -> None:
    count = len(query_ids)
    table = pa.table(
        {
            "query_id": query_ids,
            "query": [f"query {number}" for number in query_ids],
            "doc_id": [f"d{row}" for row in range(count)],
            "document": [f"text of row {row}" for row in range(count)],
        }
    )
    pq.write_table(table, path, row_group_size=group)


def dataset_of(path: Path, **options: object) -> Dataset:
    return open_dataset(InputSpec(path=(str(path),), **options), Storage())  # type: ignore[arg-type]


def plan_of(path: Path, *, shards: int = 3, chunk_rows: int = 4, **options: object):  # type: ignore[no-untyped-def]
    return make_plan(dataset_of(path, **options), {"x": 1}, name="job", shards=shards, chunk_rows=chunk_rows)


def test_queries_that_lie_together_become_row_ranges(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a"] * 5 + ["b"] * 5 + ["c"] * 5)
    plan, plan_files = plan_of(tmp_path / "a.parquet")
    assert not plan.is_scattered
    assert not plan_files
    assert [shard.first_row for shard in plan.shards] == [0, 5, 10]
    assert plan.queries == 3


def test_scattered_queries_stay_whole_and_every_row_is_planned_once(tmp_path: Path) -> None:
    ids = ["a", "b", "c", "a", "b", "d", "e", "a", "c", "f"] * 3
    write(tmp_path / "a.parquet", ids)
    plan, plan_files = plan_of(tmp_path / "a.parquet")
    assert plan.is_scattered
    store = LocalRunStore(tmp_path / "out")
    assert write_plan(store, plan, plan_files)
    rows = [shard_row_ids(store, shard).tolist() for shard in plan.shards]
    assert sorted(row for shard in rows for row in shard) == list(range(len(ids)))
    queries = [{ids[row] for row in shard} for shard in rows]
    assert sum(len(found) for found in queries) == len(set(ids))
    assert 1 < plan.read_ratio <= 3  # three shards, and nearly every row group holds rows of each


def test_same_input_and_spec_give_the_same_plan_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b", "a", "c", "b"] * 9)
    plans = []
    for name in ("one", "two"):
        store = LocalRunStore(tmp_path / name)
        write_plan(store, *plan_of(tmp_path / "a.parquet"))
        plans.append(store.read("plan.json"))
    assert plans[0] == plans[1]


@given(
    ids=st.lists(st.integers(0, 20), min_size=1, max_size=200),
    group=st.integers(1, 50),
    shards=st.integers(1, 9),
    block_rows=st.sampled_from([3, 16, 100]),
)
def test_a_plan_is_the_same_however_few_rows_the_planner_holds_at_a_time(
    ids: list[int], group: int, shards: int, block_rows: int
) -> None:
    """Of rows that lie together too, where it need not sort."""
    for order in (ids, sorted(ids)):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder, "a.parquet"), order, group)
            dataset = dataset_of(Path(folder, "a.parquet"))
            options: dict[str, Any] = {"name": "job", "shards": shards, "chunk_rows": 4}
            assert make_plan(dataset, {}, **options, block_rows=block_rows) == make_plan(dataset, {}, **options)


def test_a_written_plan_reads_back_equal_and_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b", "a"])
    plan, plan_files = plan_of(tmp_path / "a.parquet")
    store = LocalRunStore(tmp_path / "out")
    assert write_plan(store, plan, plan_files)
    assert load_plan(store) == plan
    other, plan_files = plan_of(tmp_path / "a.parquet", shards=2)
    assert not write_plan(store, other, plan_files)
    assert load_plan(store) == plan


def test_limit_takes_the_first_rows_across_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a"] * 10)
    write(tmp_path / "b.parquet", ["b"] * 10)
    plan, _ = plan_of(tmp_path, limit=13)
    assert plan.rows == 13
    assert sum(shard.rows for shard in plan.shards) == 13
    assert plan.queries == 2


def test_a_damaged_row_id_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b", "a"])
    plan, plan_files = plan_of(tmp_path / "a.parquet", shards=1)
    store = LocalRunStore(tmp_path / "out")
    write_plan(store, plan, plan_files)
    name = plan.shards[0].row_ids.path
    store.put(name, store.read(name) + b"x")
    with pytest.raises(ManifestError, match="sha256"):
        shard_row_ids(store, plan.shards[0])


def test_changed_inputs_are_refused_with_the_list_of_what_changed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", [name] * 5)
    plan, _ = make_plan(dataset_of(tmp_path), {"inputs": "was"}, name="job", shards=1, chunk_rows=4)
    write(tmp_path / "b.parquet", ["b"] * 6)
    write(tmp_path / "c.parquet", ["c"] * 2)
    with pytest.raises(StaleRunError) as caught:
        check_plan(plan, dataset_of(tmp_path), {"inputs": "is"}, output="out")
    assert "b.parquet: changed since the plan (5 rows" in str(caught.value)
    assert "c.parquet: new since the plan" in str(caught.value)
    assert "a.parquet" not in str(caught.value)


def test_a_plan_without_a_part_that_readers_need_is_refused_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b"])
    plan, _ = make_plan(dataset_of(tmp_path), {"labeler": {"name": "r3a"}}, name="job", shards=1, chunk_rows=4)
    with pytest.raises(ManifestError, match=r"plan.json: its `parts` .*columns"):
        _ = plan.facts
