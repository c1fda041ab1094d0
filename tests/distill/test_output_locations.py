"""A student replaces another only when asked to, is never mixed with it, and a replacement that was killed goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.students import distillation
from relabel.manifests.errors import StaleRunError
from relabel.manifests.records import plain, readable_json
from tests.killing import Killed, killed_at

OLD = {"max_steps": 2}
NEW = {"max_steps": 4, "save_every": 2, "learning_rate": 1e-4}


@pytest.mark.parametrize("train", [NEW, OLD | {"save_every": 1}], ids=["another spec", "the same spec"])
@pytest.mark.parametrize(
    "place",
    [
        "after_training_step",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("after_checkpoint", "before_model")),
    ],
)
def test_a_restart_that_was_killed_goes_on(
    run: Callable[..., Any], tmp_path: Path, place: str, train: dict[str, Any]
) -> None:
    run(train=OLD if train == NEW else train)
    manifest = tmp_path / "out/manifest.json"
    with killed_at(place):
        run(start="restart", train=train)
    assert not manifest.exists(), "--restart deletes the student"
    said: list[str] = []
    report = run(start="resume", say=said.append, train=train)
    assert not report.was_done
    assert report.manifest.training.steps == train["max_steps"]
    assert any("resuming from" in line for line in said) == (place != "after_training_step")
    assert manifest.read_bytes() == readable_json(plain(report.manifest))
    assert not (tmp_path / "out/checkpoints").exists()
    assert run(start="resume", train=train).was_done


def test_a_restart_that_was_killed_while_it_deleted_checkpoints_resumes_from_none_of_them(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at("before_model"):
        run(train=OLD | {"save_every": 1})

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(Killed):
            run(start="restart", train=NEW)
    with pytest.raises(StaleRunError, match="of another spec, model or data"):
        run(start="resume", train=NEW)
    assert run(start="restart", train=NEW).manifest.training.steps == 4


def test_a_resumed_training_that_no_restart_began_replaces_no_student(run: Callable[..., Any], tmp_path: Path) -> None:
    with killed_at("before_model"):
        run(train=NEW)
    other = tmp_path / "out/manifest.json"
    other.write_text('{"kind": "student", "fingerprint": "other"}')
    with pytest.raises(StaleRunError, match="another spec, model or data"):
        run(start="resume", train=NEW)
    assert "other" in other.read_text()


@pytest.mark.parametrize(
    ("meanwhile", "message"), [(NEW, "finished this student meanwhile"), (OLD, "another spec, model or data")]
)
def test_a_student_finished_while_another_call_read_its_texts_stays_as_it_is(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: dict[str, Any], message: str
) -> None:
    texts_of = distillation.texts_of

    def read_slowly(*arguments: Any) -> Any:
        monkeypatch.setattr(distillation, "texts_of", texts_of)
        run(train=meanwhile)
        return texts_of(*arguments)

    monkeypatch.setattr(distillation, "texts_of", read_slowly)
    with pytest.raises(StaleRunError, match=message):
        run(train=NEW)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["training"]["steps"] == meanwhile["max_steps"]
