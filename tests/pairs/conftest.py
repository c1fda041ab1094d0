"""A folder to write tables into, and the CLI called in this process (both from the jobs' tests)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.conftest import folder, no_scheduler, relabel  # noqa: F401


@pytest.fixture
def write(folder: Path) -> Callable[..., str]:  # noqa: F811
    """`write("a.parquet", rows, schema=None)`: a table in the folder; its name."""

    def table(name: str, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> str:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), target)
        return name

    return table
