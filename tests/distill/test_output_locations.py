"""A student replaces another only when asked to, is never mixed with it, and a replacement that was killed goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.students import distillation
from relabel.distill.training import locations as output_locations
from relabel.distill.training.locations import OutputLocation
from relabel.manifests.bundle_store import LocalBundleStore
from relabel.manifests.errors import StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.records import plain, readable_json

URL = "s3://bucket/students/ecom"


class Killed(BaseException):
    """Stands for the signal."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind `URL`."""
    monkeypatch.setattr(
        output_locations,
        "open_bundle_store",
        lambda url, storage: LocalBundleStore(tmp_path / url.removeprefix("s3://")),
    )
    return tmp_path / "bucket/students/ecom"


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., OutputLocation]:
    """`trained("one", "its_own.txt")`: an output location whose student is finished here, each file of it naming it."""

    def make(name: str, *more: str) -> OutputLocation:
        folder = tmp_path / name
        folder.mkdir()
        for file in ("model.safetensors", "student.json", *more):
            (folder / file).write_text(name)
        (folder / "manifest.json").write_text(json.dumps({"kind": "student", "fingerprint": name}))
        return OutputLocation(distillation.STUDENT, URL, folder, Storage(), URL)

    return make


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def die_at(monkeypatch: pytest.MonkeyPatch, place: str, count: int = 1) -> None:
    """Be killed at the failpoint's hit of that number, in this process."""
    left = [count]

    def hit(name: str) -> None:
        left[0] -= name == place
        if name == place and not left[0]:
            raise Killed

    monkeypatch.setattr("relabel.manifests.failpoints.hit", hit)


def test_a_student_that_comes_too_late_leaves_every_byte_of_another_as_it_is(
    there: Path, trained: Callable[..., OutputLocation]
) -> None:
    trained("first").deliver(is_replacing=False)
    before = contents(there)
    late = trained("late", "of_the_late_one.txt")
    with pytest.raises(StaleRunError, match=r"manifest\.json: another student was put there.*--restart"):
        late.deliver(is_replacing=False)
    assert contents(there) == before
    assert (late.folder / "model.safetensors").read_text() == "late"


@pytest.mark.parametrize("count", [1, 2])
def test_a_replacement_killed_between_files_leaves_no_manifest_over_them_and_is_delivered_wholly_later(
    there: Path, trained: Callable[..., OutputLocation], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    trained("old", "of_the_old_one.txt").deliver(is_replacing=False)
    new = trained("new")
    with monkeypatch.context() as patch:
        die_at(patch, "before_model_upload", count)
        with pytest.raises(Killed):
            new.deliver(is_replacing=True)
    assert "manifest.json" not in contents(there)
    assert new.manifest() is None
    expected = contents(new.folder)
    new.deliver(is_replacing=True)
    assert contents(there) == expected
    assert not new.folder.exists()


def test_a_student_that_was_delivered_already_is_not_sent_again(
    there: Path, trained: Callable[..., OutputLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    student = trained("one")
    with monkeypatch.context() as patch:
        die_at(patch, "after_model_manifest")
        with pytest.raises(Killed):
            student.deliver(is_replacing=True)
    die_at(monkeypatch, "before_model_upload")
    before = contents(there)
    student.deliver(is_replacing=True)
    assert contents(there) == before
    assert not student.folder.exists()


def test_a_student_put_there_while_another_was_copied_is_not_replaced(
    there: Path, trained: Callable[..., OutputLocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hit(name: str) -> None:
        if name == "before_model_manifest":
            (there / "manifest.json").write_text('{"kind": "student", "fingerprint": "other"}')

    trained("old").deliver(is_replacing=False)
    monkeypatch.setattr("relabel.manifests.failpoints.hit", hit)
    with pytest.raises(StaleRunError, match="another student was put there"):
        trained("new").deliver(is_replacing=True)
    assert json.loads((there / "manifest.json").read_text())["fingerprint"] == "other"


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
def test_a_restart_that_was_killed_goes_on_beside_the_student_that_it_replaces(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, train: dict[str, Any]
) -> None:
    run(train=OLD if train == NEW else train)
    manifest = tmp_path / "out/manifest.json"
    old = manifest.read_bytes()
    with monkeypatch.context() as patch:
        die_at(patch, place)
        with pytest.raises(Killed):
            run(start="restart", train=train)
    assert manifest.read_bytes() == old
    if train == NEW:
        with pytest.raises(StaleRunError, match=r"another spec, model or data .*--restart"):
            run(train=train)
        with pytest.raises(StaleRunError, match="another spec"):
            run(start="resume", train=NEW | {"learning_rate": 1e-3})
    said: list[str] = []
    report = run(start="resume", say=said.append, train=train)
    assert not report.was_done
    assert report.manifest.training.steps == train["max_steps"]
    assert any("resuming from" in line for line in said) == (place != "after_training_step")
    assert manifest.read_bytes() == readable_json(plain(report.manifest))
    assert manifest.read_bytes() != old
    assert not (tmp_path / "out/checkpoints").exists()
    assert run(start="resume", train=train).was_done


def test_a_resumed_training_that_no_restart_began_replaces_no_student(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, "before_model")
        with pytest.raises(Killed):
            run(train=NEW)
    other = tmp_path / "out/manifest.json"
    other.write_text('{"kind": "student", "fingerprint": "other"}')
    with pytest.raises(StaleRunError, match="another spec, model or data"):
        run(start="resume", train=NEW)
    assert "other" in other.read_text()


def test_a_restart_killed_as_its_manifest_was_written_is_finished(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    run(train=OLD)
    with monkeypatch.context() as patch:
        patch.setattr(OutputLocation, "deliver", die)
        with pytest.raises(Killed):
            run(start="restart", train=NEW)
    before = (tmp_path / "out/manifest.json").read_bytes()
    assert run(start="resume", train=NEW).was_done
    assert (tmp_path / "out/manifest.json").read_bytes() == before


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


def test_no_manifest_stands_over_files_that_are_being_replaced(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise Killed

    run(train=OLD)
    with monkeypatch.context() as patch:
        patch.setattr("relabel.distill.students.distillation.write_student", die)
        with pytest.raises(Killed):
            run(start="restart", train=NEW)
    assert not (tmp_path / "out/manifest.json").exists()
    assert not run(start="resume", train=NEW).was_done
