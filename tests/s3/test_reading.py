"""What a shard reads from S3 is what its columns weigh; a file that is replaced while it is read is reported."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.labels import load_labels
from relabel.distill.students.spec import LabelSource
from relabel.manifests.errors import InputError, StoreUnreachableError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.plan import Plan
from relabel.manifests.rows import read_chunks
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import TAIL_BYTES, UrlFile, open_object_run_store, read_url
from tests import seaweed
from tests.s3.conftest import Outcome, put_parquet

ROWS, GROUP = 4000, 500


def text(chance: random.Random, length: int) -> str:
    """Text that does not compress away."""
    return "".join(chance.choices(string.ascii_letters + string.digits, k=length))


@pytest.fixture
def table() -> pa.Table:
    """Queries of ten rows each, and beside what a job reads a column that weighs twenty times as much."""
    chance = random.Random(5)
    rows = range(ROWS)
    return pa.table(
        {
            "embedding": [text(chance, 2000) for _ in rows],
            "query_id": [f"q{row // 10}" for row in rows],
            "query": [text(chance, 20) for row in rows],
            "crawl": [text(chance, 400) for row in rows],
            "doc_id": [f"d{row}" for row in rows],
            "document": [text(chance, 300) for _ in rows],
        }
    )


def planned(url: str, *, shards: int) -> tuple[Dataset, Plan, dict[str, bytes]]:
    dataset = open_dataset(InputSpec(path=(url,)), Storage())
    plan, beside = make_plan(dataset, {}, name="job", shards=shards, chunk_rows=64)
    return dataset, plan, beside


def weight(data: bytes, groups: range, columns: tuple[str, ...] = ("query_id", "query", "doc_id", "document")) -> int:
    """Compressed bytes of the columns that a job reads, in some row groups."""
    metadata = pq.read_metadata(pa.BufferReader(data))
    leaves = [leaf for leaf in range(metadata.num_columns) if metadata.schema.column(leaf).path in columns]
    return sum(metadata.row_group(group).column(leaf).total_compressed_size for group in groups for leaf in leaves)


def test_a_shard_fetches_at_most_a_fifth_more_than_its_columns_weigh(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    data = put_parquet(f"{s3}/pairs.parquet", table, row_group_size=GROUP)
    proxy = through()
    dataset, plan, _ = planned(f"{s3}/pairs.parquet", shards=4)
    assert not plan.is_scattered
    for number, shard in enumerate(plan.shards):
        proxy.seen.clear()
        rows = [
            pair
            for chunk in read_chunks(dataset, shard, None, range(len(shard.chunks)), readings=None)
            for pair in chunk.pairs
        ]
        assert len(rows) == shard.rows
        fetched = sum(seen.sent_bytes for seen in proxy.seen)
        assert shard.first_row is not None
        touched = range(shard.first_row // GROUP, (shard.first_row + shard.rows - 1) // GROUP + 1)
        weighs = weight(data, touched)
        assert weighs <= fetched <= 1.2 * weighs + TAIL_BYTES, f"shard {number}: {fetched} for {weighs}"
        assert len(proxy.seen) <= 4 * len(touched) + 1


def test_a_row_group_without_an_open_chunk_is_not_fetched(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    data = put_parquet(f"{s3}/pairs.parquet", table, row_group_size=GROUP)
    proxy = through()
    dataset, plan, _ = planned(f"{s3}/pairs.parquet", shards=1)
    proxy.seen.clear()
    (chunk,) = read_chunks(dataset, plan.shards[0], None, [len(plan.shards[0].chunks) - 1], readings=None)
    assert chunk.pairs[-1].row_id == ROWS - 1
    assert sum(seen.sent_bytes for seen in proxy.seen) <= 1.2 * weight(data, range(7, 8)) + TAIL_BYTES


def test_scattered_shards_fetch_what_the_plan_said(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    """Half of the row groups hold only queries of the first half; the plan says which shard needs which."""
    ids = [f"q{row // 10}" if row < ROWS // 2 else f"q{(row - ROWS // 2) // 10 + 50}" for row in range(ROWS)]
    scattered = table.set_column(table.schema.get_field_index("query_id"), "query_id", pa.array(ids))
    data = put_parquet(f"{s3}/pairs.parquet", scattered, row_group_size=GROUP)
    proxy = through()
    dataset, plan, beside = planned(f"{s3}/pairs.parquet", shards=4)
    assert plan.is_scattered
    metadata = pq.read_metadata(pa.BufferReader(data))
    whole = weight(data, range(metadata.num_row_groups))
    for shard in plan.shards:
        assert shard.row_ids is not None
        row_ids = pq.read_table(pa.BufferReader(beside[shard.row_ids.path])).column("row_id").to_numpy()
        proxy.seen.clear()
        rows = [
            pair.row_id
            for chunk in read_chunks(dataset, shard, row_ids, range(len(shard.chunks)), readings=None)
            for pair in chunk.pairs
        ]
        assert rows == row_ids.tolist()
        fetched = sum(seen.sent_bytes for seen in proxy.seen)
        # the plan counts uncompressed bytes; all groups compress alike here
        said = shard.read_bytes / plan.text_bytes * whole
        assert fetched <= 1.2 * said + TAIL_BYTES


def test_planning_fetches_footers_and_query_ids_alone(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    data = put_parquet(f"{s3}/pairs.parquet", table, row_group_size=GROUP)
    proxy = through()
    planned(f"{s3}/pairs.parquet", shards=4)
    fetched = sum(seen.sent_bytes for seen in proxy.seen)
    assert fetched <= 1.2 * weight(data, range(8), ("query_id",)) + 2 * TAIL_BYTES + 5000


def test_a_file_that_is_replaced_while_it_is_read_is_reported(table: pa.Table, s3: str) -> None:
    url = f"{s3}/pairs.parquet"
    put_parquet(url, table, row_group_size=GROUP)
    dataset, plan, _ = planned(url, shards=1)
    chunks = read_chunks(dataset, plan.shards[0], None, range(len(plan.shards[0].chunks)), readings=None)
    next(chunks)
    put_parquet(url, table.slice(0, ROWS - 10), row_group_size=GROUP)
    with pytest.raises(InputError, match="replaced while it was read"):
        list(chunks)
    with pytest.raises(InputError, match="changed while this run was under way"):
        next(read_chunks(dataset, plan.shards[0], None, [0], readings=None))


def test_reads_are_tried_again_and_a_short_reply_is_no_file(
    table: pa.Table, s3: str, through: Callable[..., seaweed.Proxy]
) -> None:
    url = f"{s3}/pairs.parquet"
    data = put_parquet(url, table, row_group_size=GROUP)
    verdicts = iter(["cut", "503", "refuse", "drop", *["pass"] * 100])
    proxy = through(lambda exchange: next(verdicts))
    assert read_url(url, Storage()) == data
    proxy.decide = lambda exchange: "cut"
    with pytest.raises(StoreUnreachableError, match="no good answer"):
        UrlFile(url, Storage(retry_s=0.5))


def test_a_url_file_reads_and_seeks_as_a_file_does(s3: str, table: pa.Table) -> None:
    data = put_parquet(f"{s3}/pairs.parquet", table, row_group_size=GROUP)
    file = UrlFile(f"{s3}/pairs.parquet", Storage())
    chance = random.Random(3)
    for _ in range(20):
        start, length = chance.randrange(len(data) + 5), chance.randrange(100_000)
        assert file.seek(start) == start
        assert file.read(length) == data[start : start + length]
        assert file.tell() == max(min(start + length, len(data)), min(start, len(data)))
    assert file.seek(-4, 2) == len(data) - 4
    assert file.readall() == b"PAR1"


def test_an_object_that_is_written_over_with_equal_size_and_footer_is_refused_where_it_is_read_again(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    """The sha256 of each row group's columns is kept in the output on S3, too; a copy of equal bytes with another ETag
    passes.
    """
    plain: dict[str, Any] = {
        "row_group_size": 16,
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": False,
    }

    def put(letter: str) -> bytes:
        rows = range(60)
        columns: dict[str, list[str]] = {name: [f"{name} {row % 10}" for row in rows] for name in ("query_id", "query")}
        columns |= {"doc_id": [f"d{row:02d}" for row in rows], "document": [f"{letter} shoe {row:02d}" for row in rows]}
        return put_parquet(f"{s3}/pairs.parquet", pa.table(columns), **plain)

    job = write_job({"engine": {"args": {}}})
    first = put("a")
    assert relabel("run", job, "--shard", "0/3").returncode == 0
    names = sorted(open_object_run_store(f"{s3}/out", Storage()).names("inputs"))
    assert names == [f"inputs/00000-{group:06d}.json" for group in range(4)]
    second = put("b")
    assert len(first) == len(second)
    refused = relabel("run", job)
    assert refused.returncode == 3
    assert "pairs.parquet: row group 0 holds another `document` than when" in refused.stderr
    assert put("a") == first
    assert relabel("run", job).returncode == 0
    assert relabel("verify", job).returncode == 0
    put("b")
    with pytest.raises(InputError, match="row group 0 holds another `document`"):
        load_labels(LabelSource(path=f"{s3}/out"), Storage(), allow_over_limit=True)
