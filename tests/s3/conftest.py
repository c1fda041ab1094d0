"""One SeaweedFS for all tests of this folder, a prefix of its bucket for each test, and the job of those tests."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.manifests.files import LEASE_S, Storage
from relabel.manifests.store import ObjectStore, open_run_store
from tests import seaweed

_numbers = itertools.count()
ROWS = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.s3)


@pytest.fixture
def s3(s3_server: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://labels/<a prefix of this test>`; this process's variables lead to the server."""
    seaweed.lead_to(s3_server.environment, monkeypatch)
    return f"s3://{seaweed.BUCKET}/test-{next(_numbers)}"


@pytest.fixture
def through(
    s3_server: seaweed.Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., seaweed.Proxy]]:
    """`through(decide)`: from here on this process's variables lead to a proxy in front of the server."""
    opened = []

    def start(decide: seaweed.Decide = lambda exchange: "pass") -> seaweed.Proxy:
        manager = seaweed.proxying(s3_server, decide)
        opened.append(manager)
        proxy = manager.__enter__()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        seaweed.forget_connections()
        return proxy

    yield start
    for manager in opened:
        manager.__exit__(None, None, None)


@pytest.fixture
def open_fresh(s3: str) -> Callable[..., ObjectStore]:
    """`open_fresh(lease_s=3)`: the store of this test's output with connections of its own, as another process would
    have.
    """

    def start(*, lease_s: float = LEASE_S) -> ObjectStore:
        seaweed.forget_connections()
        return open_run_store(f"{s3}/out", Storage(lease_s=lease_s))

    return start


@pytest.fixture
def write_job(tmp_path: Path, s3: str) -> Callable[..., Path]:
    """`write_job({"shards": 2}, slow_s=0.05)`: sixty pairs of ten scattered queries at `s3/pairs.parquet`, and a job
    over them.
    """

    def write(
        changes: dict[str, Any] | None = None, *, args: dict[str, Any] | None = None, name: str = "job.yaml"
    ) -> Path:
        rows = range(ROWS)
        table = {
            "query_id": [f"q{row % 10}" for row in rows],
            "query": [f"red shoes number {row % 10}" for row in rows],
            "doc_id": [f"d{row % 55}" for row in rows],
            "document": [f"Red running shoes, size {row % 7}, for number {row % 10}." * (row % 3) for row in rows],
        }
        put_parquet(f"{s3}/pairs.parquet", pa.table(table), row_group_size=16)
        job = {
            "name": "s3",
            "input": {"path": f"{s3}/pairs.parquet"},
            "labeler": {"name": "r3a", "attempts": 2},
            "engine": {
                "name": "fake",
                "seed": 3,
                "args": {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.05, **(args or {})},
            },
            "output": f"{s3}/out",
            "shards": 3,
            "run": {"chunk_rows": 6, "max_failed_fraction": 1.0},
        }
        for key, value in (changes or {}).items():
            held = job.get(key)
            job[key] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
        path = tmp_path / name
        path.write_text(yaml.safe_dump(job))
        return path

    return write


def put_parquet(url: str, table: pa.Table, **options: Any) -> bytes:
    """Write a table to a URL; returns its bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    data = sink.getvalue().to_pybytes()
    folder, _, name = url.rpartition("/")
    open_run_store(folder, Storage(), single_writer=True).put(name, data)
    return data


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "relabel", *map(str, arguments), "--output", "json"]


def call(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real `relabel` in a fresh interpreter."""
    return subprocess.run(
        command(*arguments), env={**os.environ, **environment}, capture_output=True, text=True, timeout=90, check=False
    )


class Outcome(NamedTuple):
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def relabel(
    s3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """`relabel("run", job)`: the command in this process, which is quicker than a fresh one, over connections of its
    own.
    """
    from relabel.jobs.cli import main

    def run(*arguments: str | Path, **environment: str) -> Outcome:
        seaweed.forget_connections()
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main([*map(str, arguments), "--output", "json"])
        return Outcome(end.value.code, *capsys.readouterr())

    yield run
    seaweed.forget_connections()


def labels(output: str) -> dict[str, str]:
    """What a reader of a finished run sees: label and quarantine files by name, with the digests
    that their bytes have.
    """
    import hashlib

    store = open_run_store(output, Storage())
    manifest = json.loads(store.read("manifest.json"))
    assert manifest["rows"]["in"] == manifest["rows"]["labelled"] + manifest["rows"]["quarantined"] == ROWS
    files = manifest["labels"] + manifest["quarantine"]
    found = {file["path"]: hashlib.sha256(store.read(file["path"])).hexdigest() for file in files}
    assert found == {file["path"]: file["sha256"] for file in files}
    return found
