"""The curve, sent while it grows to services that show it: TensorBoard, Trackio, MLflow, W&B, through accelerate's
trackers.

How much of the curve each one has, and which run it is there, is kept beside the checkpoints: a training that goes on
does so in the same run, and sends no point again. A service that fails is left alone and never ends a training.

    checkpoints/reports/state.json      the run's name, ids that services gave it, points sent
    .tensorboard/<run>/                 TensorBoard's events, beside the model; hidden, so no part of it
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from relabel.distill.training.curves import Curve, Point
from relabel.manifests.errors import ConfigError
from relabel.manifests.extras import require
from relabel.manifests.storage.filesystems import is_url

logger = logging.getLogger(__name__)

PROJECT = "relabel"
"""Project, or experiment, of all runs."""
REPORTS, STATE, EVENTS = "reports", "state.json", ".tensorboard"


def check_services(names: Sequence[str], *, output: str) -> None:
    """Look whether curves can be sent, before anything is trained.

    Args:
        output: of the spec.
    Raises:
        MissingExtraError: a service's package is not installed.
        ConfigError: TensorBoard's events would lie beside a model that is at a URL.
    """
    for name in names:
        require(name, extra=name, purpose=f"train.report_to: {name}")
    if "tensorboard" in names and is_url(output) and not output.lower().startswith(("file:", "local:")):
        raise ConfigError(
            f"train.report_to: tensorboard writes beside the model, and `output` is at a URL ({output}). Name a "
            "folder, or another service."
        )


@dataclass
class _Service:
    """One service.

    Args:
        tracker: accelerate's, once it has begun.
    """

    name: str
    tracker: Any = None
    has_failed: bool = False


@dataclass
class _Sent:
    """What is kept beside the checkpoints.

    Args:
        run: its name.
        ids: that services gave it.
        sent: points, by service.
    """

    run: str
    ids: dict[str, str] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


class CurveReporter:
    """Sends a curve as it grows.

    Args:
        names: of the services.
        checkpoints: folder of the training's checkpoints, in the model's.
        say: hears of services that fail.
    """

    def __init__(self, names: Sequence[str], checkpoints: Path, say: Callable[[str], None]) -> None:
        self._services = [_Service(name) for name in dict.fromkeys(names)]
        self._folder, self._say = checkpoints / REPORTS, say
        self._model = checkpoints.resolve().parent
        self._state: _Sent | None = None

    def send(self, curve: Curve) -> None:
        """Send what a service does not have yet."""
        for service in self._services:
            if not service.has_failed:
                self._attempt(service, lambda one: self._send(one, curve.points))

    def finish(self) -> None:
        """Close all runs."""
        for service in self._services:
            if service.tracker is not None and not service.has_failed:
                self._attempt(service, lambda one: one.tracker.finish())
            service.tracker = None

    def _attempt(self, service: _Service, act: Callable[[_Service], None]) -> None:
        try:
            act(service)
        except Exception as exc:
            service.has_failed = True
            logger.warning("report_to: %s", service.name, exc_info=exc)
            words = (str(exc).splitlines() or [""])[0][:150]
            self._say(
                f"report_to: {service.name} failed ({type(exc).__name__}: {words}): training goes on without it. "
                "--resume, or the next training, tries again."
            )

    def _send(self, service: _Service, points: Sequence[Point]) -> None:
        state = self._begun(service)
        start = state.sent.get(service.name, 0)
        for step, group in groupby(points[start:], key=lambda point: point[0]):
            held = list(group)
            service.tracker.log({f"{split}/{_plain(name)}": value for _, split, name, value in held}, step=step)
            state.sent[service.name] = state.sent.get(service.name, 0) + len(held)
            self._keep(state)

    def _begun(self, service: _Service) -> _Sent:
        """The state, with the service's run open."""
        if self._state is None:
            file = self._folder / STATE
            kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            self._state = _Sent(**(kept or {"run": f"{self._model.name}-{uuid.uuid4().hex[:8]}"}))
        if service.tracker is None:
            tracker = _tracker(service.name, self._state.run, self._state.ids, self._model / EVENTS)
            tracker.start()
            if service.name == "mlflow":
                self._state.ids |= {service.name: tracker.tracker.info.run_id}
            service.tracker = tracker
            self._keep(self._state)
        return self._state

    def _keep(self, state: _Sent) -> None:
        """Write the state, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{STATE}"
        part.write_text(json.dumps(asdict(state)), encoding="utf-8")
        part.replace(self._folder / STATE)


def _tracker(name: str, run: str, ids: dict[str, str], events: Path) -> Any:
    """accelerate's tracker for a run, new or begun before."""
    from accelerate import tracking

    if name == "tensorboard":
        return tracking.TensorBoardTracker(run, logging_dir=events)
    if name == "mlflow":
        return tracking.MLflowTracker(PROJECT, run_id=ids.get("mlflow"), run_name=run)
    if name == "wandb":
        return tracking.WandBTracker(PROJECT, name=run, id=run, resume="allow")
    return tracking.TrackioTracker(PROJECT, name=run, resume="allow", embed=False)


def _plain(name: str) -> str:
    """A figure's name in the letters that all services take."""
    return re.sub(r"[^\w./-]", ".", name)
