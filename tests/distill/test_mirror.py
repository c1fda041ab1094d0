"""Copies of checkpoints elsewhere: what is there is whole, and what is not whole is not fetched."""

import json
from pathlib import Path

import pytest

from relabel.distill.training.mirror import DIGESTS, Mirror
from relabel.manifests.errors import LockHeldError, StaleRunError
from relabel.manifests.files import Storage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of a training, on this machine."""
    made = tmp_path / "out" / "checkpoints"
    (made / "rollouts").mkdir(parents=True)
    (made / "training.json").write_text("{}")
    return made


def write(folder: Path, step: int) -> None:
    """A whole checkpoint, and the part of the rollouts that it names."""
    (folder / "rollouts" / f"step-{step:06d}.parquet").write_text(f"rollouts of {step}")
    scratch = folder / f".part-{step}"
    scratch.mkdir()
    (scratch / "weights.safetensors").write_text(f"weights of {step}")
    (scratch / DIGESTS).write_text(json.dumps({}))
    scratch.rename(folder / f"checkpoint-{step:06d}")


def mirror_at(tmp_path: Path, folder: Path) -> Mirror:
    return Mirror(str(tmp_path / "elsewhere"), Storage(), folder, lambda _: None)


def test_another_folder_gets_the_last_whole_checkpoint_and_what_it_names(folder: Path, tmp_path: Path) -> None:
    with mirror_at(tmp_path, folder).held("new"):
        write(folder, 2)
        write(folder, 4)
    there = tmp_path / "elsewhere"
    (there / "checkpoint-000006").mkdir()
    (there / "checkpoint-000006" / "weights.safetensors").write_text("a copy that was cut off")
    other = tmp_path / "other" / "checkpoints"
    other.mkdir(parents=True)
    with mirror_at(tmp_path, other).held("resume"):
        assert sorted(path.name for path in other.iterdir()) == ["checkpoint-000004", "rollouts", "training.json"]
        assert (other / "checkpoint-000004" / "weights.safetensors").read_text() == "weights of 4"
        assert (other / "rollouts" / "step-000004.parquet").read_text() == "rollouts of 4"
        write(other, 8)
    assert (there / "checkpoint-000008" / DIGESTS).exists()
    assert not (there / "checkpoint-000006" / "weights.safetensors").exists()


def test_what_is_there_is_taken_up_or_started_over_and_never_by_two(folder: Path, tmp_path: Path) -> None:
    with mirror_at(tmp_path, folder).held("new"):
        write(folder, 2)
        with pytest.raises(LockHeldError), mirror_at(tmp_path, folder).held("resume"):
            pass
    is_refused = pytest.raises(StaleRunError, match="checkpoint-000002 of a training is there")
    with is_refused, mirror_at(tmp_path, tmp_path / "new").held("new"):
        pass
    with mirror_at(tmp_path, tmp_path / "new").held("restart"):
        assert not list((tmp_path / "elsewhere").glob("checkpoint-*/*"))


def test_a_newer_checkpoint_here_is_not_replaced_by_an_older_one_there(folder: Path, tmp_path: Path) -> None:
    with mirror_at(tmp_path, folder).held("new"):
        write(folder, 2)
    write(folder, 4)
    with mirror_at(tmp_path, folder).held("resume"):
        assert (folder / "checkpoint-000004").exists()
    assert (tmp_path / "elsewhere" / "checkpoint-000004" / DIGESTS).exists()
