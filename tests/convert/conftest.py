"""The folder, jobs and commands of tests/jobs, and files of rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.evaluate.conftest import run  # noqa: F401
from tests.jobs.conftest import committed, folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401


@pytest.fixture
def write_rows(folder: Path) -> Callable[..., str]:  # noqa: F811
    """`write_rows(rows, "rows.jsonl")`: one JSON object a line; its path."""

    def write(rows: list[dict[str, Any]], path: str = "rows.jsonl") -> str:
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def convert(relabel: Callable[..., Any]) -> Callable[..., Any]:  # noqa: F811
    """`convert("a.qrels", "b.jsonl")`: the conversion's JSON; it must end well."""

    def call(*arguments: str) -> Any:
        done = relabel("convert", *arguments, "--output", "json")
        assert done.code == 0, done
        return done.json

    return call


def rows_of(path: str) -> list[dict[str, Any]]:
    """A table's rows."""
    if path.endswith(".parquet"):
        return list(pq.read_table(path).to_pylist())
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
