"""What may become of an input while it is labelled: the file becomes a folder, or the folder a file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.plan import ShardPlan
from relabel.manifests.rows import read_chunks
from relabel.manifests.specs import InputSpec
from tests.jobs.conftest import Outcome
from tests.jobs.test_rewritten_input import GROUP, ROWS, labels, write

Cli = Callable[..., Outcome]
WriteJob = Callable[..., str]


def into_folder(path: Path) -> None:
    held = path.rename("held")
    path.mkdir()
    held.rename(path / "part.parquet")


def into_file(path: Path) -> None:
    held = (path / "part.parquet").rename("held")
    path.rmdir()
    held.rename(path)


@pytest.mark.parametrize("change", [into_folder, into_file])
def test_a_file_that_becomes_a_folder_between_two_shards_is_known_by_what_it_holds(
    relabel: Cli, write_job: WriteJob, folder: Path, change: Callable[[Path], None]
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
    assert relabel("run", job).code == 0
    assert labels() == undisturbed


@pytest.mark.parametrize("change", [into_folder, into_file, "gone"])
def test_a_file_that_becomes_a_folder_while_it_is_read_ends_the_run_by_its_name(
    folder: Path, change: Callable[[Path], None] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.manifests.rows.BATCH_ROWS", GROUP)
    data = Path("data.parquet")
    write(data)
    if change is into_file:
        into_folder(data)
    dataset = open_dataset(InputSpec(path=("data.parquet",)), Storage())
    shard = ShardPlan(ROWS, 0, None, [GROUP] * 3, 0, 0)
    chunks = read_chunks(dataset, shard, None, range(3))
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
