"""Who trains is not who serves: every file and folder on the way has the mode that any new one has, and nothing is shut
to others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def modes(folder: Path) -> dict[str, str]:
    """Mode by name of all that lies at and below a folder and is not what a umask of this process makes of it."""
    probe = folder.parent / "probe-of-modes"
    probe.mkdir()
    (probe / "file").touch()
    wanted = {True: stat.S_IMODE(probe.stat().st_mode), False: stat.S_IMODE((probe / "file").stat().st_mode)}
    (probe / "file").unlink()
    probe.rmdir()
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    held = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in found if not path.is_symlink()}
    return {path: oct(mode) for path, mode in held.items() if mode != wanted[Path(path).is_dir()]}


@pytest.mark.parametrize("made", ["student", "decoder", "bundle", "decoder_bundle"])
def test_students_and_bundles_are_open_to_whom_the_umask_lets(made: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(made)
    assert modes(folder) == {}
    assert made != "student" or list(folder.rglob("*.safetensors"))


def test_checkpoints_are_open_to_whom_the_umask_lets(tmp_path: Path) -> None:
    import torch

    from relabel.distill.training.checkpoints import commit, save_state, save_weights
    from relabel.distill.training.output import WEIGHTS

    for umask in (0o022, 0o077, 0o002):
        was, scratch = os.umask(umask), tmp_path / f"scratch-{umask}"
        try:
            scratch.mkdir()
            save_weights(torch.nn.Linear(2, 2), scratch / WEIGHTS)
            save_state(scratch, {"optimizer": {"m": torch.ones(2)}})
            commit(scratch, tmp_path / f"checkpoint-{umask}")
            assert modes(tmp_path / f"checkpoint-{umask}") == {}
        finally:
            os.umask(was)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027])
def test_what_publish_and_pull_write_is_open_to_whom_the_umask_lets(
    bundle: Path, tmp_path: Path, relabel: Callable[..., Any], umask: int
) -> None:
    was = os.umask(umask)
    try:
        store, dest = tmp_path / "store", tmp_path / "dest"
        assert relabel("publish", str(bundle), str(store), "--channel", "stable", "--anyway").code == 0
        assert relabel("pull", f"{store}/tiny", str(dest)).code == 0
        ((dest / "current").resolve() / "README.md").unlink()
        assert relabel("pull", f"{store}/tiny", str(dest)).code == 0
        assert relabel("pull", "--rollback", str(dest)).code == 3
        assert {**modes(store), **modes(dest)} == {}
    finally:
        os.umask(was)


def test_tritons_view_takes_no_disk_of_its_own(bundle: Path, tmp_path: Path, relabel: Callable[..., Any]) -> None:
    relabel("publish", str(bundle), str(tmp_path / "store"), "--channel", "stable", "--anyway")
    relabel("pull", f"{tmp_path}/store/tiny", str(tmp_path / "dest"))
    for folder in (bundle, (tmp_path / "dest" / "current").resolve()):
        views = sorted(folder.glob("triton/*/1/model.onnx"))
        assert len(views) == 3
        models = {path.stat().st_ino for path in folder.glob("model*.onnx")}
        assert {path.stat().st_ino for path in views} == models, "another name of the same file"


def test_across_disks_tritons_view_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relabel.export.bundle_facts import ModelFile
    from relabel.export.exporting import write_repository

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    (tmp_path / "model.onnx").write_bytes(b"graph")
    monkeypatch.setattr(os, "link", refuse)
    model = ModelFile(format="onnx", precision="fp32", path="model.onnx", files=["model.onnx"])
    write_repository(tmp_path, "tiny", [model], ["input_ids"], {"relevance": 3})
    assert (tmp_path / "triton" / "tiny-fp32" / "1" / "model.onnx").read_bytes() == b"graph"
