"""A training that is under way or was stopped, on the page: as far as its last whole checkpoint goes, said to be
unfinished, and left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.training import output
from relabel.distill.training.output import (
    CHECKPOINTS,
    DIGESTS,
    RECORD_NAME,
    STATE,
    BaseModelUsed,
    TrainingPlace,
    TrainingRecord,
)
from relabel.jobs.report.build import build_report
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import FileLock, Storage
from relabel.manifests.records import plain, readable_json
from tests.report.conftest import BAITS, assert_baits_are_text, plots_of
from tests.report.test_teachers import forge_teacher

torch = pytest.importorskip("torch")
WRITTEN = 1_790_000_000  # 2026-09-21 14:13:20 UTC
FINGERPRINT = "f" * 64


def forge_training(
    folder: Path,
    *,
    steps: Iterable[int] = (2, 4),
    name: str = "tuned",
    figures: tuple[str, ...] = ("loss", "reward"),
) -> Path:
    """An output whose training wrote checkpoints after these steps, by the code that writes them, and goes on."""
    from relabel.distill.training.checkpoints import StepState, write_checkpoint

    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    spec = {"name": name, "method": "grpo", "labeler": {"name": "r1"}, "train": {"max_steps": 9}}
    base = BaseModelUsed("hf:org/base", "e" * 64, "qwen2")
    record = TrainingRecord(
        version=1, kind="teacher", relabel="0.1.0", fingerprint=FINGERPRINT, model=base, data="d" * 64, spec=spec
    )
    (checkpoints / RECORD_NAME).write_bytes(readable_json(plain(record)))
    curve: list[Any] = []
    place = TrainingPlace(checkpoints, 2, lambda _: None, [])
    done = 0
    for step in steps:
        for one in range(done + 1, step + 1):
            curve += [(one, "train", figure, one / 10) for figure in figures]
        done = step
        curve.append((step, "dev", "reward", step / 10))
        optimizer = {"state": {0: {"exp_avg": torch.zeros(2)}}}
        state = StepState(optimizer=optimizer, curve=list(curve), own={"logits": torch.ones(2)})
        write_checkpoint(place, step, torch.nn.Linear(2, 2), state, is_writer=True)
        os.utime(checkpoints / f"checkpoint-{step:06d}" / STATE, (WRITTEN + step, WRITTEN + step))
    half = checkpoints / f".part-checkpoint-{done + 2:06d}"
    half.mkdir()
    (half / STATE).write_text("{")
    return folder


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file, with its bytes and the time of its last change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_a_training_under_way_is_shown_as_far_as_its_last_whole_checkpoint(
    folder: Path, relabel: Callable[..., Any]
) -> None:
    out = forge_training(folder / "out")
    lock = FileLock(out / CHECKPOINTS / "train.lock", "the teacher")
    lock.acquire()
    try:
        before = tree(out)
        done = relabel("report", "out", "--to", "page.html", "--output", "json")
        assert tree(out) == before
        said = relabel("report", "out", "--to", "page.html")
    finally:
        lock.release()
    assert done.code == said.code == 0
    assert done.json["sections"] == ["ran", "training"]
    assert done.json["unfinished"] == [{"path": "out", "step": 4, "written": "2026-09-21T14:13:24+00:00"}]
    assert "out: shown as of step 4, written 2026-09-21 14:13:24 UTC" in said.out
    html = (folder / "page.html").read_text()
    for words in (
        "This training is not finished",
        "step 4",
        "2026-09-21 14:13:24 UTC",
        "hf:org/base",
        "1 unfinished training",
        "max_steps: 9",
    ):
        assert words in html, words
    plots = plots_of(html)
    assert plots["Training loss, tuned (not finished)"] == "loss: 1 0.1000, 2 0.2000, 3 0.3000, 4 0.4000"
    assert plots["On dev, tuned (not finished)"] == "reward: 2 0.2000, 4 0.4000"
    assert html == build_report(["out"], Storage()).html


def test_without_a_checkpoint_there_is_nothing_to_show_yet(folder: Path, relabel: Callable[..., Any]) -> None:
    forge_training(folder / "out", steps=())
    refused = relabel("report", "out", "--to", "page.html")
    assert refused.code == 20
    for words in ("out: a training that has written no checkpoint yet", "train.save_every", "--resume"):
        assert words in refused.err
    assert not (folder / "page.html").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"dict": [["curve", {"value": 3}]]}'])
def test_a_checkpoint_that_is_not_what_was_written_is_refused_by_name(folder: Path, data: bytes) -> None:
    out = forge_training(folder / "out")
    last = out / CHECKPOINTS / "checkpoint-000004"
    (last / STATE).write_bytes(data)
    with pytest.raises(ManifestError, match=r"checkpoint-000004: a damaged checkpoint .*Remove it"):
        build_report([str(out)], Storage())
    (last / DIGESTS).unlink()  # as relabel 0.1 left it
    with pytest.raises(ManifestError, match=r"checkpoint-000004: a damaged checkpoint"):
        build_report([str(out)], Storage())
    (last / STATE).unlink()
    with pytest.raises(ManifestError, match=r"checkpoint-000004: a damaged checkpoint"):
        build_report([str(out)], Storage())


def test_half_a_copy_of_a_checkpoint_is_not_shown_as_a_whole_one(folder: Path) -> None:
    out = forge_training(folder / "out")
    (out / CHECKPOINTS / "checkpoint-000004" / "weights.safetensors").unlink()
    with pytest.raises(
        ManifestError, match=r"checkpoint-000004: a damaged checkpoint \(weights\.safetensors is missing"
    ):
        build_report([str(out)], Storage())


def test_a_checkpoint_that_goes_while_it_is_read_leaves_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training writes on: an old checkpoint is removed once there are newer ones."""
    out = forge_training(folder / "out")
    whole, lists = output.list_checkpoints, []

    def listed(place: Path) -> list[Path]:
        lists.append(place)
        return [place / "checkpoint-000001"] if len(lists) == 1 else whole(place)

    monkeypatch.setattr(output, "list_checkpoints", listed)
    assert "step 4" in build_report([str(out)], Storage()).html
    assert len(lists) == 2


def test_a_model_that_is_being_written_is_no_finished_one(folder: Path) -> None:
    """Killed, or just now, between the last step and the manifest."""
    out = forge_training(folder / "out")
    (out / "student.json").write_text("{")
    (out / "curves.parquet").write_bytes(b"PAR1")
    assert "This training is not finished" in build_report([str(out)], Storage()).html


def test_of_a_finished_model_whose_checkpoints_are_left_the_model_is_shown(folder: Path) -> None:
    teacher = forge_teacher(folder / "teacher")
    forge_training(folder / "begun").joinpath(CHECKPOINTS).rename(teacher / CHECKPOINTS)
    assert not build_report([str(teacher)], Storage()).unfinished, "killed while it removed the checkpoints"


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"fingerprint": "of another"}'])
def test_what_is_trained_is_left_out_where_its_record_is_damaged(folder: Path, data: bytes) -> None:
    out = forge_training(folder / "out")
    (out / CHECKPOINTS / RECORD_NAME).write_bytes(data)
    html = build_report([str(out)], Storage()).html
    assert "out (not finished)" in html
    assert "hf:org/base" not in html


def test_hostile_names_of_a_training_under_way_run_nowhere(folder: Path, open_page: Callable[..., Any]) -> None:
    out = forge_training(
        folder / "out", steps=(9, 21), name="".join(BAITS[:2]), figures=("reward", *(f"z{bait}" for bait in BAITS))
    )
    path = folder / "report.html"
    path.write_text(build_report([str(out)], Storage()).html, encoding="utf-8", errors="replace")
    assert all(bait not in path.read_text() for bait in BAITS[:3])
    assert_baits_are_text(path, open_page)
