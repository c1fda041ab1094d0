"""A folder with pairs and a job file in it, and the CLI called in this process."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main

SCHEDULERS = ("RELABEL_", "SLURM_", "AWS_BATCH_", "JOB_COMPLETION_")

JOB: dict[str, Any] = {
    "name": "ecom",
    "input": {
        "path": "pairs.parquet",
        "columns": {"query_id": "query_id", "query": "query", "doc_id": "doc_id", "document": ["title", "body"]},
        "limit": 200,
    },
    "labeler": {"name": "graph-grpo"},
    "engine": {"name": "fake", "seed": 7},
    "output": "out/ecom",
    "shards": 4,
    "run": {"chunk_rows": 4},
}


class Outcome(NamedTuple):
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one JSON object that it must be."""
        assert self.out.count("\n") == 1, f"stdout is not one line of JSON: {self}"
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def refused(self, code: int, *parts: str) -> None:
        """It ended with `code`, stdout is empty, and stderr is a message that holds every one of `parts`, not a
        traceback.
        """
        assert self.code == code, self
        assert self.out == "", self
        assert "Traceback" not in self.err, self
        for part in parts:
            assert part in self.err, f"{part!r} is not in: {self.err}"


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests reaches a command."""
    for name in list(os.environ):
        if name.startswith(SCHEDULERS):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pairs() -> list[dict[str, Any]]:
    """Six queries of four documents each."""
    return [
        {
            "query_id": f"q{query}",
            "query": f"red shoe {query}",
            "doc_id": f"d{query}-{document}",
            "title": f"shoe {document}",
            "body": f"a red shoe of kind {query * 4 + document}",
            "grade": document % 3,
        }
        for query in range(6)
        for document in range(4)
    ]


@pytest.fixture
def write_pairs(folder: Path, pairs: list[dict[str, Any]]) -> Callable[..., Path]:
    """`write_pairs(rows or table, path="pairs.parquet", **writer options)`; the fixture's pairs without an argument."""

    def write(rows: list[dict[str, Any]] | pa.Table | None = None, path: str = "pairs.parquet", **options: Any) -> Path:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(pairs if rows is None else rows)
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target, **options)
        return target

    return write


@pytest.fixture
def write_job(folder: Path) -> Callable[..., str]:
    """`write_job({"engine": {"seed": 3}}, path="job.yaml")`: the job of this folder with changes laid over it; None
    removes a key.
    """

    def write(changes: dict[str, Any] | None = None, path: str = "job.yaml") -> str:
        values = copy.deepcopy(JOB)
        _lay_over(values, changes or {})
        (folder / path).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture
def relabel(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`relabel("run", "job.yaml")`: the command in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capsys.readouterr()
        return Outcome(end.value.code, out, err)

    return call


@pytest.fixture
def committed(folder: Path) -> Callable[..., dict[int, dict[str, Any]]]:
    """`committed("quarantine")`: the finished run's rows by row id, found through the manifest; each id occurs once."""

    def read(kind: str = "labels", output: str = "out/ecom") -> dict[int, dict[str, Any]]:
        manifest = json.loads((folder / output / "manifest.json").read_bytes())
        rows = [row for file in manifest[kind] for row in pq.read_table(folder / output / file["path"]).to_pylist()]
        found = {row["row_id"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    return read


def _lay_over(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, change in changes.items():
        if change is None:
            values.pop(key, None)
        elif isinstance(change, dict) and isinstance(values.get(key), dict):
            _lay_over(values[key], change)
        else:
            values[key] = change
