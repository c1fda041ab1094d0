"""`relabel report` on a teacher that is being trained, from its first step to its manifest."""

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
from tests.teachers.conftest import plain_values, relabel
from tests.watching import steps_of, watched


def test_a_report_shows_what_the_last_checkpoint_holds_and_disturbs_nothing(
    base_dir: Path, pairs_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "short/system.j2").write_text("Grade.")
    (tmp_path / "short/user.j2").write_text("{{ query }}: {{ document }}")
    train = {"max_steps": 4, "batch_size": 4, "accumulation": 1, "save_every": 2, "max_tokens": 4000}
    held: dict[str, Any] = plain_values(base_dir, tmp_path) | {
        "method": "graph-grpo",
        "labeler": {"name": "graph-grpo", "max_text_tokens": 1, "templates": str(tmp_path / "short")},
        "data": {"gold": {"path": str(pairs_path)}},
        "rollouts": {"group": 2, "updates": 1},
        "credit": {"learn": False},
        "train": train,
    }
    out = tmp_path / "out"
    with watched(out) as seen:
        train_teacher(read_teacher_spec(held, where="here"), Storage())
    assert steps_of(seen["after_training_step"]) == ["TransientError", "TransientError", 2, 2]
    assert steps_of(seen["before_checkpoint"]) == ["TransientError", 2]
    assert steps_of(seen["after_checkpoint"]) == [2, 4]
    assert steps_of(seen["before_model"]) == [4]
    (last,) = seen["before_model"][0].unfinished
    curve = list(zip(*pq.read_table(out / CURVES_NAME).to_pydict().values(), strict=True))
    assert last.reached.curve == curve
    (early,) = seen["after_checkpoint"][0].unfinished
    assert early.reached.curve == [point for point in curve if point[0] <= 2]
    for page in (seen["after_checkpoint"][0], seen["before_model"][0]):
        assert "graph-grpo" in page.html
    assert relabel("report", str(out), "--to", str(tmp_path / "page.html")) == 0
    assert "not finished" not in capsys.readouterr().out


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

    train("undisturbed")
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
    with killed_at("after_training_step", 3):
        train("out", "restart")
    train("out", "resume")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")
    assert not kept.exists()
