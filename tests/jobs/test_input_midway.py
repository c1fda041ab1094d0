"""What may become of an input while it is labelled: the file becomes a folder, or the folder a file."""

from __future__ import annotations

import shutil
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
