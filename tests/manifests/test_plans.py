"""Shards partition the input into whole queries, chunks partition the shards, and the same input
gives the same plan.
"""

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests import rows as row_batches
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.plan import Plan, load_plan, shard_row_ids, write_plan
from relabel.manifests.rows import cut_queries, fitting_chunk_rows, make_plan, pairs_by_number, read_chunks
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalStore

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(sizes=SIZES, shards=st.integers(1, 12), chunk_rows=st.integers(1, 30))
def test_cut_keeps_every_row_once_and_every_query_whole(sizes: list[int], shards: int, chunk_rows: int) -> None:
    sizes_Q = np.array(sizes)
    bounds, cut, _ = cut_queries(sizes_Q, sizes_Q * 10.0, shards=shards, chunk_rows=chunk_rows)
    query_ends = {0, *np.cumsum(sizes_Q).tolist()}
    assert len(bounds) == shards + 1
    assert bounds[0] == 0
    assert bounds[-1] == sum(sizes)
    assert bounds == sorted(bounds)
    assert set(bounds) <= query_ends
    for start, stop, chunks in zip(bounds[:-1], bounds[1:], cut, strict=True):
        assert sum(chunks) == stop - start
        assert all(0 < rows <= chunk_rows for rows in chunks)


@given(sizes=SIZES, chunk_rows=st.integers(1, 30))
def test_where_siblings_are_wanted_no_chunk_cuts_a_query(sizes: list[int], chunk_rows: int) -> None:
    _, (chunks,), _ = cut_queries(np.array(sizes), np.array(sizes) * 1.0, shards=1, chunk_rows=chunk_rows, whole=True)
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
        store = LocalStore(tmp_path / name)
        write_plan(store, *plan_of(tmp_path / "a.parquet"))
        plans.append(store.read("plan.json"))
    assert plans[0] == plans[1]


def test_a_written_plan_reads_back_equal_and_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a", "b", "a"])
    plan, plan_files = plan_of(tmp_path / "a.parquet")
    store = LocalStore(tmp_path / "out")
    assert write_plan(store, plan, plan_files)
    assert load_plan(store) == plan
    other, plan_files = plan_of(tmp_path / "a.parquet", shards=2)
    assert not write_plan(store, other, plan_files)
    assert load_plan(store) == plan


# A plan is the one that an algorithm in a few lines makes, row by row: the same shards, chunks, weights and row ids to
# the last bit.


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
        own_Q, fitting = sizes_Q[queries], chunk_rows or fitting_chunk_rows(size)
        whole_cut = cut_queries(own_Q, own_Q * 1.0, shards=1, chunk_rows=fitting, whole=whole) if size else None
        chunks = whole_cut[1][0] if whole_cut else []
        found.append(Simple(rows, chunks, round(float(weight)), sum(groups[group][1] for group in touched)))
    return int(np.count_nonzero(np.diff(code_R))) + 1 != len(codes), found


def write_file(path: Path, ids: list[Any], group_rows: int) -> None:
    table = {
        "query_id": ids,
        "query": [f"query {one}" for one in ids],
        "doc_id": [f"d{row}" for row in range(len(ids))],
        "document": [f"text {'x' * (row * 7 % 40)}" for row in range(len(ids))],
    }
    pq.write_table(pa.table(table), path, row_group_size=group_rows)


def written_dataset(folder: Path, limit: int | None = None) -> Dataset:
    return open_dataset(InputSpec(path=(str(folder),), limit=limit), Storage())


def shards_of(folder: Path, plan: Plan, plan_files: Any) -> list[Simple]:
    store = LocalStore(folder / "out")
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
)
def test_shards_and_chunks_are_those_of_the_simple_algorithm(
    files: list[list[int]], group_rows: int, shards: int, chunk_rows: int | None, is_text: bool
) -> None:
    named = [[f"q{one}" if is_text else one - 20 for one in ids] for ids in files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        for number, ids in enumerate(named):
            write_file(folder / f"in/{number}.parquet", ids, group_rows)
        dataset = written_dataset(folder / "in")
        plan, plan_files = make_plan(dataset, {"x": 1}, name="job", shards=shards, chunk_rows=chunk_rows)
        groups = [group for groups in dataset.group_bytes for group in groups]
        is_scattered, wanted = simple_plan([*itertools.chain(*named)], groups, shards=shards, chunk_rows=chunk_rows)
        assert plan.is_scattered == is_scattered
        assert shards_of(folder, plan, plan_files) == wanted


# Whatever the files' layout, a shard's chunks hold the planned rows, in order, with the text that is in the files.


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[tuple[str, str | None, str | None]]], int, int, int]:
    """Files of (query id, title, body) rows, a row-group size, a number of shards and a chunk size."""
    query_ids = st.sampled_from(["a", "b", "c", "d", "ü"])
    is_sorted = draw(st.booleans())
    rows = draw(st.lists(st.tuples(query_ids, st.none() | TEXT, st.none() | TEXT), min_size=1, max_size=40))
    if is_sorted:
        rows.sort(key=lambda row: row[0])
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=2)))
    files = [rows[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return files, draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 8))


@settings(deadline=None, max_examples=50)
@given(layout=layouts(), keep=st.integers(0, 2**20), batch_rows=st.integers(1, 9))
def test_chunks_hold_the_planned_rows_in_order(layout: tuple, keep: int, batch_rows: int) -> None:  # type: ignore[type-arg]
    with mock.patch.object(row_batches, "BATCH_ROWS", batch_rows):
        check_chunks(layout, keep)


@settings(deadline=None, max_examples=25)
@given(layout=layouts(), keep=st.integers(0, 2**20))
def test_siblings_are_all_rows_of_the_query_in_row_order(layout: tuple, keep: int) -> None:  # type: ignore[type-arg]
    """However small the chunks, however scattered the rows, and however few of them are asked again."""
    check_chunks(layout, keep, Reads(siblings=True))


def check_chunks(layout: tuple, keep: int, reads: Reads = QUERY_AND_DOCUMENT) -> None:  # type: ignore[type-arg]
    files, group, shards, chunk_rows = layout
    flat = [row for rows in files for row in rows]
    with tempfile.TemporaryDirectory() as scratch:
        for number, rows in enumerate(files):
            columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
            table = pa.table(
                {
                    "query_id": pa.array(columns[0], pa.string()),
                    "query": pa.array(
                        [f"q {row[0]}" for row in rows], pa.string() if number % 2 else pa.large_string()
                    ),
                    "doc_id": pa.array(range(len(rows)), pa.int32()),
                    "title": pa.array(columns[1], pa.string()).dictionary_encode()
                    if number % 2
                    else pa.array(columns[1], pa.string()),
                    "body": pa.array(columns[2], pa.string()),
                }
            )
            pq.write_table(table, f"{scratch}/{number}.parquet", row_group_size=group)
        dataset = open_dataset(InputSpec(path=(scratch,)), Storage(), reads=reads)
        plan, plan_files = make_plan(dataset, {}, name="job", shards=shards, chunk_rows=chunk_rows)
        store = LocalStore(Path(scratch) / "out")
        write_plan(store, plan, plan_files)
        seen: list[int] = []
        for shard in plan.shards:
            planned = shard_row_ids(store, shard)
            pending = (
                [chunk for chunk in range(len(shard.chunks)) if keep >> chunk & 1 or chunk == 0] if shard.chunks else []
            )
            bounds = np.cumsum([0, *shard.chunks])
            read = functools.partial(read_chunks, dataset, shard, planned if shard.row_ids else None, pending)
            found = list(read())
            assert [chunk.chunk for chunk in found] == pending
            again = {chunk: {int(planned[bounds[chunk]])} for chunk in pending}
            for whole, part in zip(found, read(wanted=again), strict=True):
                assert part.pairs == whole.pairs[:1]
            for chunk in found:
                assert [pair.row_id for pair in chunk.pairs] == planned[
                    bounds[chunk.chunk] : bounds[chunk.chunk + 1]
                ].tolist()
                for pair in chunk.pairs:
                    query_id, title, body = flat[pair.row_id]
                    assert (pair.query_id, pair.query) == (query_id, f"q {query_id}")
                    assert pair.document == "\n\n".join(text for text in (title, body) if text)
                    rows_of_query = [row for row, (name, _, _) in enumerate(flat) if name == query_id]
                    assert [one.row_id for one in pair.siblings] == (rows_of_query if reads.siblings else [])
                    assert all(not one.siblings for one in pair.siblings)
                    seen.append(pair.row_id)
        assert len(seen) == len(set(seen))


def test_context_documents_are_read_when_asked_for_and_capped_at_four(tmp_path: Path) -> None:
    table = pa.table(
        {
            "query_id": ["a", "a"],
            "query": ["q", "q"],
            "doc_id": ["1", "2"],
            "document": ["x", "y"],
            "context": [list("abcdef"), None],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    for reads_context, expected in ((True, [("a", "b", "c", "d"), ()]), (False, [(), ()])):
        dataset = open_dataset(InputSpec(path=(str(tmp_path),)), Storage(), reads=Reads(context=reads_context))
        plan, _ = make_plan(dataset, {}, name="job", shards=1, chunk_rows=4)
        (chunk,) = read_chunks(dataset, plan.shards[0], None, [0])
        assert [pair.context for pair in chunk.pairs] == expected


def test_long_rows_are_decoded_few_at_a_time_and_picked_one_by_one(tmp_path: Path) -> None:
    """What a plan samples does not lie in memory at once, however long documents are."""
    text = "oak " * 1_000_000
    rows = [{"query_id": "q", "query": "oak", "doc_id": str(row), "document": text} for row in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    dataset = open_dataset(InputSpec(path=(str(tmp_path),)), Storage())
    assert max(batch.num_rows for _, batch, _ in row_batches.batches_in(dataset, 0, 12)) == 4
    picked = pairs_by_number(dataset, [11, 3, 4])
    assert [next(picked).doc_id for _ in range(3)] == ["11", "3", "4"]
    assert next(picked, None) is None
