"""Whatever the files' layout, a shard's chunks hold the planned rows, in order, with the text that
is in the files.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests import rows as row_batches
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.plan import shard_row_ids, write_plan
from relabel.manifests.rows import pairs_by_number, read_chunks
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore

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
        store = LocalRunStore(Path(scratch) / "out")
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
