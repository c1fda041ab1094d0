"""Shards partition the input into whole queries, chunks partition the shards, and the same input
gives the same plan.
"""

from __future__ import annotations

from pathlib import Path

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


def test_same_input_and_spec_give_the_same_plan_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b", "a", "c", "b"] * 9)
    plans = []
    for name in ("one", "two"):
        store = LocalRunStore(tmp_path / name)
        write_plan(store, *plan_of(tmp_path / "a.parquet"))
        plans.append(store.read("plan.json"))
    assert plans[0] == plans[1]


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
