"""What may become of an input while it is labelled: the worker is killed, the file becomes a folder or the folder a
file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.distill.students.labels import load_labels
from relabel.distill.students.spec import LabelSource
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.plan import ShardPlan
from relabel.manifests.readings import FOLDER, Readings
from relabel.manifests.rows import read_chunks
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalRunStore
from tests.jobs.conftest import Outcome
from tests.jobs.test_rewritten_input import GROUP, ROWS, labels, write

Cli = Callable[..., Outcome]
WriteJob = Callable[..., str]


@pytest.mark.parametrize(
    ("point", "is_kept"), [("before_reading", False), ("after_reading", True), ("before_receipt", True)]
)
def test_a_kill_between_reading_a_row_group_and_committing_its_rows(
    relabel: Cli, write_job: WriteJob, folder: Path, point: str, is_kept: bool
) -> None:
    """What was read is kept before a row of it is asked about, so who goes on asks about the same text."""
    write()
    job = write_job({"shards": 1})
    line = [sys.executable, "-m", "relabel", "run", str(folder / job)]
    killed = subprocess.run(
        line,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RELABEL_FAILPOINT": point},
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(Path("out/ecom/receipts").rglob("*.json")) == []
    assert Path("out/ecom", FOLDER, "00000-000000.json").exists() == is_kept
    write(new="b", groups=(0,))
    if is_kept:
        relabel("run", job).refused(3, "pairs.parquet: row group 0 holds another `query`, `title` than when")
        write()
    assert relabel("run", job).code == 0
    assert relabel("verify", job).code == 0
    letters = {
        pair.document[0]
        for pair in load_labels(LabelSource(path="out/ecom"), Storage(), allow_over_limit=False).pairs
        if pair.row_id < GROUP
    }
    assert letters == {"a" if is_kept else "b"}


def into_folder(path: Path) -> None:
    held = path.rename("held")
    path.mkdir()
    held.rename(path / "part.parquet")


def into_file(path: Path) -> None:
    held = (path / "part.parquet").rename("held")
    path.rmdir()
    held.rename(path)


@pytest.mark.parametrize("change", [into_folder, into_file])
@pytest.mark.parametrize("is_rewritten", [False, True], ids=["equal", "rewritten"])
def test_a_file_that_becomes_a_folder_between_two_shards_is_known_by_what_it_holds(
    relabel: Cli, write_job: WriteJob, folder: Path, change: Callable[[Path], None], is_rewritten: bool
) -> None:
    data = Path("data.parquet")
    write(data)
    if change is into_file:
        into_folder(data)
    job = write_job({"input": {"path": "data.parquet"}})
    assert relabel("run", job).code == 0
    undisturbed = labels()
    shutil.rmtree("out")
    assert relabel("run", job, "--shard", "0/4").code == 0
    change(data)
    if is_rewritten:
        write(data / "part.parquet" if data.is_dir() else data, new="b", groups=(0, 1, 2))
        relabel("run", job).refused(3, "row group 0 holds another `query`, `title` than when out/ecom first read it")
        return
    assert relabel("run", job).code == 0
    assert labels() == undisturbed


@pytest.mark.parametrize("change", [into_folder, into_file, "gone"])
def test_a_file_that_becomes_a_folder_while_it_is_read_ends_the_run_by_its_name(
    folder: Path, change: Callable[[Path], None] | str
) -> None:
    data = Path("data.parquet")
    write(data)
    if change is into_file:
        into_folder(data)
    dataset = open_dataset(InputSpec(path=("data.parquet",)), Storage())
    readings = Readings(LocalRunStore("out"), where="out", block_rows=GROUP, keeps=True)
    shard = ShardPlan(ROWS, 0, None, [GROUP] * 3, 0, 0)
    chunks = read_chunks(dataset, shard, None, range(3), readings=readings)
    assert len(next(chunks).pairs) == GROUP
    if callable(change):
        change(data)
    else:
        data.unlink()
    with pytest.raises(InputError, match=r"^data\.parquet"):
        list(chunks)


@pytest.mark.parametrize("is_scattered", [False, True], ids=["together", "scattered"])
def test_a_million_shards_over_ten_rows_cost_what_ten_do(
    relabel: Cli, write_job: WriteJob, folder: Path, is_scattered: bool
) -> None:
    """By CPU time, so that a busy machine does not count: plan 0.7 s with its imports, run 0.2 s (2026-11-22)."""
    write(scattered=is_scattered)
    job = write_job({"shards": 1_000_000, "input": {"limit": 10}})
    start_s = time.process_time()
    for command in ("plan", "run", "status", "verify"):
        assert relabel(command, job).code == 0
    assert time.process_time() - start_s < 5
    assert relabel("run", job, "--shard", "999999/1000000").code in (0, 10)
