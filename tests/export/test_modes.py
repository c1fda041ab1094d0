"""Who trains is not who serves: every file and folder on the way has the mode that any new one has, and nothing is shut
to others.
"""

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


@pytest.mark.parametrize("form", ["hf", "rerank"])
def test_a_folder_for_other_libraries_is_open_to_whom_the_umask_lets(
    student: Path, tmp_path: Path, relabel: Callable[..., Any], form: str
) -> None:
    was = os.umask(0o027)
    try:
        assert relabel("export", str(student), "--to", str(tmp_path / "out"), "--format", form).code == 0
        assert list((tmp_path / "out").rglob("*.safetensors"))
        assert modes(tmp_path / "out") == {}
    finally:
        os.umask(was)


@pytest.mark.parametrize("umask", [0o022, 0o027])
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
