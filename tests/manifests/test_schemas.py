"""Files of label rows are read without anything that outlives the reading."""

from __future__ import annotations

import subprocess
import sys

from relabel.manifests.schemas import QUARANTINE, QuarantineRow, parquet_bytes, table_bytes, table_of

COUNT_THREADS = """
import os
import pyarrow as pa
from relabel.manifests.schemas import table_bytes, table_of
data = table_bytes(pa.table({"row_id": list(range(256)), "text": ["red shoes"] * 256}))
before = len(os.listdir("/proc/self/task"))
assert table_of(data).num_rows == table_of(data, ["row_id"]).num_rows == 256
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_file_is_read_as_it_was_written_whole_or_by_column() -> None:
    tries = [{"stage": "verdict", "attempt": 1, "finish": "stop", "text": "?", "reason": "no tags"}]
    rows = [QuarantineRow(row, "q", f"d{row}", "format", "no tags", tries, 10, 1) for row in range(3)]
    table = table_of(parquet_bytes(rows, QUARANTINE))
    assert table.schema.equals(QUARANTINE)
    assert [QuarantineRow(**row) for row in table.to_pylist()] == rows
    assert table_of(table_bytes(table), ["row_id"]).column_names == ["row_id"]


def test_reading_a_file_starts_no_native_thread_that_could_abort_the_process_at_its_end() -> None:
    """A thread of Arrow's that lets go of Python's bytes while the interpreter ends turns exit code 0 into 134."""
    found = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"
