"""Input by URL reads like input on disk: any filesystem that fsspec knows."""

from __future__ import annotations

import io
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry as loaded

from relabel.manifests.errors import ConfigError, InputError, MissingExtraError
from relabel.manifests.files import Storage, filesystem_of
from relabel.manifests.inputs import open_dataset
from relabel.manifests.rows import read_chunks
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import InputSpec


@pytest.fixture
def bucket() -> str:
    filesystem = fsspec.filesystem("memory")
    for number in range(2):
        rows = range(number * 5, number * 5 + 5)
        table = {
            "query_id": [f"q{row // 3}" for row in rows],
            "query": ["q"] * 5,
            "doc_id": [str(row) for row in rows],
            "body": [f"b{row}" for row in rows],
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(table), sink, row_group_size=2)
        filesystem.pipe_file(f"/bucket/day/{number}.parquet", sink.getvalue())
    filesystem.pipe_file("/bucket/day/_SUCCESS", b"")
    return "memory://bucket/day"


@pytest.mark.parametrize("pattern", ["{}", "{}/*.parquet", "{}/"])
def test_a_folder_or_glob_by_url_gives_the_rows_in_name_order(bucket: str, pattern: str) -> None:
    opened = open_dataset(InputSpec(path=(pattern.format(bucket),)), Storage())
    plan, _ = make_plan(opened, {}, name="job", shards=2, chunk_rows=3)
    found = [
        pair
        for shard in plan.shards
        for chunk in read_chunks(opened, shard, None, range(len(shard.chunks)))
        for pair in chunk.pairs
    ]
    assert [(pair.row_id, pair.document) for pair in found] == [(row, f"b{row}") for row in range(10)]


def test_a_url_that_names_nothing_or_no_filesystem_is_reported(bucket: str) -> None:
    for path, message in (("memory://bucket/none.parquet", "no such file"), ("quux://bucket/x.parquet", "quux")):
        with pytest.raises((InputError, ConfigError), match=message):
            open_dataset(InputSpec(path=(path,)), Storage())


def test_a_url_whose_package_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(loaded, "s3", raising=False)  # a test before this one may have loaded it
    with pytest.raises(MissingExtraError, match=r"relabel-ir\[s3\]"):
        open_dataset(InputSpec(path=("s3://bucket/x.parquet",)), Storage())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:hidden-77@host/out",
        "https://hidden-77@host/pairs.parquet",
        "https://bucket.example/pairs.parquet?X-Amz-Expires=60&X-Amz-Signature=hidden-77",
        "https://account.example/box/pairs.parquet?sv=2024&sig=hidden-77",
        "s3://bucket/pairs.parquet?token=hidden-77",
    ],
)
def test_a_url_with_a_secret_in_it_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="holds a password, token or signature") as refused:
        filesystem_of(url, Storage())
    assert "hidden-77" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["memory://box@account/keys=1/pairs.parquet", "memory://box/day=2026-11-20/signature.parquet"]
)
def test_a_url_that_only_looks_like_it_is_taken(url: str) -> None:
    assert filesystem_of(url, Storage())[1].endswith(".parquet")
