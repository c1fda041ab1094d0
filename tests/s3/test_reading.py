"""What a shard reads from S3 is what its columns weigh; a file that is replaced while it is read is reported."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError, StoreUnreachableError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.plan import Plan
from relabel.manifests.rows import read_chunks
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import TAIL_BYTES, UrlFile, read_url
from tests import seaweed
from tests.s3.conftest import put_parquet

ROWS, GROUP = 4000, 500


def text(chance: random.Random, length: int) -> str:
    """Text that does not compress away."""
    return "".join(chance.choices(string.ascii_letters + string.digits, k=length))


@pytest.fixture
def table() -> pa.Table:
    """Queries of ten rows each, with a column that no job reads and that is twenty times as large as the others."""
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
    plan, plan_files = make_plan(dataset, {}, name="job", shards=shards, chunk_rows=64)
    return dataset, plan, plan_files


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
        rows = [pair for chunk in read_chunks(dataset, shard, None, range(len(shard.chunks))) for pair in chunk.pairs]
        assert len(rows) == shard.rows
        fetched = sum(seen.sent_bytes for seen in proxy.seen)
        touched = range(shard.first_row // GROUP, (shard.first_row + shard.rows - 1) // GROUP + 1)
        weighs = weight(data, touched)
        assert weighs <= fetched <= 1.2 * weighs + TAIL_BYTES, f"shard {number}: {fetched} for {weighs}"
        assert len(proxy.seen) <= 4 * len(touched) + 1


def test_a_file_that_is_replaced_while_it_is_read_is_reported(table: pa.Table, s3: str) -> None:
    url = f"{s3}/pairs.parquet"
    put_parquet(url, table, row_group_size=GROUP)
    dataset, plan, _ = planned(url, shards=1)
    chunks = read_chunks(dataset, plan.shards[0], None, range(len(plan.shards[0].chunks)))
    next(chunks)
    put_parquet(url, table.slice(0, ROWS - 10), row_group_size=GROUP)
    with pytest.raises(InputError, match="replaced while it was read"):
        list(chunks)
    with pytest.raises(InputError, match="changed while this run was under way"):
        next(read_chunks(dataset, plan.shards[0], None, [0]))


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
