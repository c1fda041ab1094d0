"""A file is known by its size, its footer and its stamp (ETag or time of change): written over, it is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.conftest import Outcome

ROWS, GROUP = 24, 8
Cli = Callable[..., Outcome]
WriteJob = Callable[..., str]


def write(
    path: str | Path = "pairs.parquet",
    *,
    old: str = "a",
    new: str = "",
    scattered: bool = False,
    groups: tuple[int, ...] = (),
) -> None:
    """Pairs of six queries in three row groups, whose texts are spelled with another letter in some of them. In place:
    size, footer, and the file itself stay.
    """
    path = Path(path)
    letters = [new if row // GROUP in groups else "a" for row in range(ROWS)]
    numbers = [row % 6 if scattered else row // 4 for row in range(ROWS)]
    table = pa.table(
        {
            "query_id": [f"q{number}" for number in numbers],
            "query": [f"{letter} shoe" for letter in letters],
            "doc_id": [f"d{row:02d}" for row in range(ROWS)],
            "title": [f"{letter * 20} {row:02d}" for row, letter in enumerate(letters)],
            "body": ["a red shoe"] * ROWS,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, compression="none", use_dictionary=False, write_statistics=False)
    with path.open("r+b" if path.exists() else "wb") as file:
        before = os.fstat(file.fileno()).st_size
        assert before in (0, file.write(sink.getvalue()))


@pytest.fixture
def half_done(relabel: Cli, write_job: WriteJob, folder: Path) -> str:
    """A job whose first of four shards is labelled."""
    write()
    job = write_job()
    assert relabel("run", job, "--shard", "0/4").code == 0
    return job


def labels(output: str = "out/ecom") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(output, "labels").rglob("*.parquet"))}


def test_a_file_that_was_written_over_with_equal_size_and_footer_is_named_in_the_log(
    half_done: str, relabel: Cli
) -> None:
    write(new="b", groups=(2,))
    done = relabel("run", half_done)
    assert done.code == 0, done
    assert done.err.count("pairs.parquet: written since it was planned; it is taken as unchanged by its size") == 1
    assert relabel("run", half_done).code == 10


def test_a_file_with_another_footer_is_refused(half_done: str, relabel: Cli) -> None:
    before = labels()
    pq.write_table(pq.read_table("pairs.parquet"), "pairs.parquet", row_group_size=GROUP - 1)
    relabel("run", half_done).refused(3, "pairs.parquet: changed since the plan", "Restore the files")
    assert labels() == before


@pytest.mark.parametrize("how", ["copied", "touched", "moved"])
def test_a_copy_of_equal_bytes_is_the_same_file_whatever_its_stamp(
    half_done: str, relabel: Cli, write_job: WriteJob, how: str
) -> None:
    if how == "touched":
        os.utime("pairs.parquet", (0, 0))
    else:
        shutil.copy("pairs.parquet", "copy.parquet")
        Path("copy.parquet").rename("pairs.parquet" if how == "copied" else "elsewhere.parquet")
    job = write_job({"input": {"path": "elsewhere.parquet"}}) if how == "moved" else half_done
    done = relabel("run", job)
    assert done.code == 0, done
    assert relabel("verify", job).code == 0


@pytest.mark.parametrize("to", ["qrels", "parquet"])
def test_a_conversion_of_a_run_reads_none_of_its_input(half_done: str, relabel: Cli, to: str) -> None:
    Path("pairs.parquet").unlink()
    ended = relabel("convert", "out/ecom", f"labels.{to}", "--to", to, "--allow-partial")
    assert ended.code == 0, ended
