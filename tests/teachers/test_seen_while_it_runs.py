"""The curves of a teacher that is being trained, with its checkpoints from the first one on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.distill.training.curves import CURVES_NAME, PLOT_NAME
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.teachers.conftest import plain_values


def test_the_curves_are_whole_files_with_the_checkpoints_from_the_first_one_on(
    base_dir: Path, pairs_path: Path, tmp_path: Path
) -> None:
    held: dict[str, Any] = plain_values(base_dir, tmp_path) | {
        "labeler": {"name": "direct", "grades": 3},
        "data": {"gold": {"path": str(pairs_path)}},
        "train": {"max_steps": 4, "batch_size": 4, "save_every": 1},
    }

    def train(output: str, start: Any = "new", **changes: Any) -> None:
        spec = read_teacher_spec({**held, **changes, "output": str(tmp_path / output)}, where="here")
        train_teacher(spec, Storage(), start=start)

    def files_of(folder: Path) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in (CURVES_NAME, PLOT_NAME)}

    kept = tmp_path / "out" / "checkpoints"
    with killed_at("before_checkpoint"):
        train("out")
    with killed_at("after_checkpoint", 2):
        train("out", "resume")
    second = files_of(kept)
    assert set(pq.read_table(kept / CURVES_NAME)["step"].to_pylist()) == {1, 2}
    assert b"</svg>" in second[PLOT_NAME]
    with killed_at("before_temp_rename", 2):  # the claim's record, then the curves
        train("out", "resume")
    assert files_of(kept) == second
    with killed_at("after_training_step"):  # what another training left is not taken for this one's
        train("out", "restart", train={**held["train"], "learning_rate": 1e-4})
    assert not (kept / CURVES_NAME).exists()
    assert not (kept / PLOT_NAME).exists()
