"""A curve that is sent to a service arrives there whole and once, over kills too; one that fails ends no training."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from relabel.distill.training.output import EVENTS, REPORTS, STATE, Curve, CurveReporter, check_services
from relabel.manifests.errors import MissingExtraError

VALUES = {"loss": 0.5, "alpha_r>s": 1.25}


@pytest.fixture(autouse=True)
def _state() -> None:
    """What a Trainer's arguments set up."""
    from accelerate import PartialState

    PartialState()


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    return tmp_path / "out" / "checkpoints"


def grown(curve: Curve, steps: range) -> Curve:
    for step in steps:
        curve.add(step, "train", VALUES | {"loss": 1 / step})
        if step % 2 == 0:
            curve.add(step, "dev", {"reward": step / 10})
    return curve


def send_over_a_kill(name: str, checkpoints: Path, said: list[str]) -> Curve:
    """Five steps are sent step by step; what comes after the third is lost, trained again and goes on to the sixth."""
    first, curve = CurveReporter([name], checkpoints, said.append), Curve()
    for step in range(1, 6):
        first.send(grown(curve, range(step, step + 1)))
    first.finish()
    second, curve = CurveReporter([name], checkpoints, said.append), grown(Curve(), range(1, 4))
    for step in range(4, 7):
        second.send(grown(curve, range(step, step + 1)))
    second.finish()
    return curve


def expected(curve: Curve) -> dict[tuple[str, int], float]:
    return {(f"{split}/{name}".replace(">", "."), step): value for step, split, name, value in curve.points}


def events_of(model: Path) -> dict[tuple[str, int], float]:
    """Scalars of the one run below a model, by TensorBoard's own reader; each step once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (model / EVENTS).iterdir()
    reader = EventAccumulator(str(run))
    reader.Reload()
    points = [(tag, event.step, event.value) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)]
    assert max(Counter((tag, step) for tag, step, _ in points).values()) == 1
    return {(tag, step): value for tag, step, value in points}


def test_tensorboard_has_every_point_once_over_a_kill(checkpoints: Path) -> None:
    pytest.importorskip("tensorboard")
    said: list[str] = []
    curve = send_over_a_kill("tensorboard", checkpoints, said)
    assert events_of(checkpoints.parent) == pytest.approx(expected(curve))
    assert said == []


@pytest.mark.filterwarnings("ignore")  # the clients' own
def test_mlflow_has_every_point_once_over_a_kill(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    said: list[str] = []
    curve = send_over_a_kill("mlflow", checkpoints, said)
    assert said == []
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'relabel'")
    (run,) = client.search_runs([experiment.experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    found = [(name, point.step, point.value) for name, points in history.items() for point in points]
    assert len(found) == len(curve.points)
    assert {(name, step): value for name, step, value in found} == pytest.approx(expected(curve))


@pytest.mark.filterwarnings("ignore")
def test_trackio_has_every_point_once_over_a_kill(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    said: list[str] = []
    curve = send_over_a_kill("trackio", checkpoints, said)
    assert said == []
    run = json.loads((checkpoints / REPORTS / STATE).read_text())["run"]
    rows = SQLiteStorage.get_logs("relabel", run)
    found = [(name, row["step"], row[name]) for row in rows for name in row if "/" in name]
    assert len(found) == len(curve.points)
    assert {(name, step): value for name, step, value in found} == pytest.approx(expected(curve))


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_has_every_point_once_over_a_kill(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    curve = send_over_a_kill("wandb", checkpoints, said)
    assert said == []
    state = json.loads((checkpoints / REPORTS / STATE).read_text())
    assert state["sent"]["wandb"] == len(curve.points)
    wandb.teardown()  # as when the process ends: its service writes the files
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Broken:
    """A tracker whose service is not there."""

    calls = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def log(self, *_: Any, **__: Any) -> None:
        Broken.calls += 1
        raise ConnectionError("no route to host")


def test_a_service_that_fails_is_reported_once_left_alone_and_caught_up_with(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Broken)
        reporter, curve = CurveReporter(["tensorboard"], checkpoints, said.append), Curve()
        for step in range(1, 4):
            reporter.send(grown(curve, range(step, step + 1)))
        reporter.finish()
    assert (len(said), Broken.calls) == (1, 1)
    assert "tensorboard failed (ConnectionError: no route to host)" in said[0]
    again = CurveReporter(["tensorboard"], checkpoints, said.append)
    again.send(curve)
    again.finish()
    assert events_of(checkpoints.parent) == pytest.approx(expected(curve))


def test_a_package_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"train.report_to: wandb needs the package wandb.*relabel-ir\[wandb\]"):
        check_services(["wandb"])
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", json)
    check_services(["tensorboard"])
