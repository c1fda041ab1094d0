"""Memory does not grow with the rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars
import pytest

SLACK_KIB = 320 * 1024
"""What an allocator and threads that run ahead may keep. Seven million rows are 400 MB in a frame, and 900 where a sink
held them.
"""


def peak_kib(*arguments: str | Path) -> int:
    """Peak resident memory of a conversion in a process of its own. Not getrusage's, which starts from the parent's at
    the fork.
    """
    code = (
        "import pathlib, re, sys\nfrom relabel.jobs.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    return int(done.stderr.split()[-1])


@pytest.mark.full
@pytest.mark.parametrize("target", ["x.run", "x.qrels", "x.jsonl"])
def test_eight_times_the_rows_take_hardly_more_memory(tmp_path: Path, target: str) -> None:
    found = []
    for rows in (1_000_000, 8_000_000):  # fewer than a million do not fill the buffers that are there anyway
        file = tmp_path / f"{rows}.parquet"
        numbers = polars.DataFrame({"row": polars.int_range(rows, eager=True)})
        numbers.select(
            query_id=polars.format("query-{}", polars.col("row") // 50),
            doc_id=polars.format("document-with-a-long-name-{}", polars.col("row")),
            grade=polars.col("row") % 4,
            score=(polars.col("row") * 7919 % 10_007).cast(polars.Float32),
        ).write_parquet(file, row_group_size=50_000)
        found.append(peak_kib(file, tmp_path / f"{rows}-{target}"))
    assert found[1] - found[0] < SLACK_KIB, found
