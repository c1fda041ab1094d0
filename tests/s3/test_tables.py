"""Tables in a bucket: their metadata and files are reached as everything else is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec
from relabel.manifests.table_snapshots import open_table
from tests import seaweed
from tests.jobs.conftest import relabel  # noqa: F401
from tests.real_tables import Delta, Iceberg, pairs


@pytest.fixture(params=["iceberg", "delta"])
def table(request: pytest.FixtureRequest, s3: str, s3_server: seaweed.Server, tmp_path: Path) -> dict[str, Any]:
    """`input` of a table of two appends of eight rows."""
    if request.param == "iceberg":
        access = {"access-key-id": seaweed.KEY, "secret-access-key": seaweed.SECRET, "region": "us-east-1"}
        options = {f"s3.{name}": value for name, value in {**access, "endpoint": s3_server.url}.items()}
        made: Iceberg | Delta = Iceberg(tmp_path, s3, **options)
        path = f"{s3}/db/pairs"
    else:
        made, path = Delta(tmp_path), f"{s3}/delta"
    for first in (0, 8):
        made.append(pairs(first, first + 8))
    if isinstance(made, Delta):  # deltalake's own writer asks for more than the server has
        fsspec.filesystem("s3").put(made.path, path, recursive=True)
    return {"path": path, "table": request.param}


def opened(table: dict[str, Any], **read: Any) -> Any:
    return open_table(InputSpec(**{**table, "path": (table["path"],), **read}), Storage())


def test_a_job_over_a_table_in_a_bucket_runs_and_is_verified(
    table: dict[str, Any],
    s3: str,
    tmp_path: Path,
    relabel: Callable[..., Any],  # noqa: F811
) -> None:
    job = {"name": "s3", "input": table, "labeler": {"name": "direct"}, "output": f"{s3}/out", "shards": 2}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**job, "engine": {"name": "fake"}, "run": {"chunk_rows": 4}}))
    shown = relabel("plan", str(path), "--output", "json").json
    assert (shown["rows"], shown["table"]["format"], shown["table"]["path"]) == (16, table["table"], table["path"])
    assert relabel("run", str(path)).code == 0
    assert relabel("verify", str(path)).code == 0
    assert relabel("run", str(path)).code == 10
    assert {file["path"].rpartition("/")[0] for file in json.loads(_plan(s3))["files"]} <= {
        table["path"],
        f"{table['path']}/data",
    }


def _plan(s3: str) -> bytes:
    found: bytes = fsspec.filesystem("s3").cat(f"{s3}/out/plan.json")
    return found


def test_an_object_that_vanished_is_named(table: dict[str, Any]) -> None:
    path = opened(table).paths[1]
    fsspec.filesystem("s3").rm(path)
    with pytest.raises(InputError, match=f"{path}: no such file"):
        open_dataset(InputSpec(**{**table, "path": (table["path"],)}), Storage())
