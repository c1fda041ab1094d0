"""`relabel report` on a student that is being trained, from its first step to its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.distill.training.curves import CURVES_NAME
from relabel.jobs.report.build import build_report
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.watching import steps_of, watched


def test_a_report_shows_what_the_last_checkpoint_holds_and_disturbs_nothing(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with watched(out) as seen:
        run(train={"max_steps": 4, "save_every": 2})
    assert steps_of(seen["after_training_step"]) == ["TransientError", "TransientError", 2, 2]
    assert steps_of(seen["after_checkpoint"]) == [2, 4]
    assert steps_of(seen["before_model"]) == [4]
    (last,) = seen["before_model"][0].unfinished
    curve = list(zip(*pq.read_table(out / CURVES_NAME).to_pydict().values(), strict=True))
    assert last.reached.curve == curve
    assert "trains" in seen["after_checkpoint"][0].html
    assert "a student" in seen["after_checkpoint"][0].html


def test_a_student_killed_while_it_was_written_is_no_finished_one(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its files are there but the manifest, which comes last."""
    with killed_at("before_temp_rename", 2):  # the first is the record's
        run(train={"max_steps": 2, "save_every": 1})
    assert (tmp_path / "out/student.json").is_file()
    built = build_report([str(tmp_path / "out")], Storage())
    assert [one.reached.step for one in built.unfinished] == [2]
    assert "student" not in built.sections
