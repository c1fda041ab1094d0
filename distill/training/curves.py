"""The training curve as Parquet and as a plot, the outcome of a training, and reporting to TensorBoard, Trackio, MLflow
and W&B."""

from __future__ import annotations

import functools
import io
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from relabel.manifests.process import require
from relabel.manifests.schemas import table_bytes
from relabel.manifests.store import LocalRunStore

CURVES_NAME = "curves.parquet"
PLOT_NAME = "curves.svg"
CURVE_SCHEMA = pa.schema([("step", pa.int64()), ("split", pa.string()), ("name", pa.string()), ("value", pa.float64())])
NOT_PLOTTED = ("learning_rate", "grad_norm")
LOSS_PANEL = "training loss, nats"
PANELS = {
    LOSS_PANEL: r"",
    "reward": r"(node_)?reward|usefulness$|f1_(ans|ret)$|penalty$",
    "share of answers": r".*_(rate|share)$|accuracy$",
    "tokens": r".*_tokens$",
    "chunks": r"chunks$",
    "coefficients": r"(alpha|ratio)_",
}
"""Axes of a training's figures, by what is on them, and the names that belong there; the first takes the others."""

Point = tuple[int, str, str, float]
"""Step, split, name, value."""


@dataclass
class Curve:
    """Points in the order in which they were measured."""

    points: list[Point] = field(default_factory=list)

    def add(self, step: int, split: str, values: dict[str, float]) -> None:
        """Add one step's values."""
        self.points += [(step, split, name, float(value)) for name, value in values.items()]

    def series(self, split: str, name: str) -> list[tuple[int, float]]:
        """One curve."""
        return [(step, value) for step, of, called, value in self.points if (of, called) == (split, name)]

    def until(self, step: int) -> Curve:
        """The curve as it was after a step."""
        return Curve([point for point in self.points if point[0] <= step])

    def names(self, split: str) -> list[str]:
        """Names of a split's curves, in the order of their first points."""
        return list(dict.fromkeys(name for _, of, name, _ in self.points if of == split))


def write_curves(folder: Path, curve: Curve, *, title: str) -> None:
    """Write `CURVES_NAME` and `PLOT_NAME`, each whole or not at all."""
    arrays = [pa.array([point[place] for point in curve.points], kind.type) for place, kind in enumerate(CURVE_SCHEMA)]
    table = pa.Table.from_arrays(arrays, schema=CURVE_SCHEMA)
    files = LocalRunStore(folder)
    files.put(CURVES_NAME, table_bytes(table))
    files.put(PLOT_NAME, _plotted(tuple(curve.points), title))


@functools.lru_cache(maxsize=1)  # a finished folder has the plot of its last checkpoint
def _plotted(points: tuple[Point, ...], title: str) -> bytes:
    """Figures of training above, on axes by what they are; on dev below. The same curve gives the same bytes."""
    curve = Curve(list(points))
    matplotlib = require("matplotlib", extra="cpu", purpose="The plot of a training")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a training").Figure
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        shown = {LOSS_PANEL: [], **panels_of(curve.names("train"))}
        height = 3 * (len(shown) + 1)  # margins are fixed: a layout that measures its texts draws everything twice
        figure = figure_class(figsize=(8, height))
        figure.subplots_adjust(left=0.11, right=0.98, bottom=0.5 / height, top=1 - 0.3 / height, hspace=0.08)
        *above, below = figure.subplots(len(shown) + 1, 1, sharex=True)
        for axes, (panel, names) in zip(above, shown.items(), strict=True):
            axes.set(ylabel=panel)
            for name in names:
                axes.plot(*zip(*curve.series("train", name), strict=True), label=name, linewidth=1)
        for name in curve.names("dev"):
            if panel_of(name) != "tokens":
                below.plot(
                    *zip(*curve.series("dev", name), strict=True), label=name, marker="o", markersize=3, linewidth=1
                )
        above[0].set(title=title)
        below.set(xlabel="optimizer step", ylabel="dev")
        for axes in (*above, below):
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize="small", ncols=1 + len(axes.lines) // 8)
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", metadata={"Date": None})
    return sink.getvalue()


def panels_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by panel, for those panels that have any, in the order of `PANELS`."""
    shown = [name for name in names if name not in NOT_PLOTTED]
    found = {panel: [name for name in shown if panel_of(name) == panel] for panel in PANELS}
    return {panel: held for panel, held in found.items() if held}


def panel_of(name: str) -> str:
    return next((panel for panel, pattern in PANELS.items() if pattern and re.match(pattern, name)), LOSS_PANEL)


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How a training went, as a manifest says it.

    Args:
        best_step: the step that was kept, where evaluations on dev chose one.
        stopped_by: what ended it before its last step, `early_stopping` or `watch`.
        rows_per_s: rows trained in a second of this process's own steps, evaluations and checkpoints left out.
        batch_size, accumulation: in the end: one is halved and the other doubled where memory ran out.
    """

    steps: int
    epochs: int | float
    best_step: int | None = None
    stopped_by: str | None = None
    device: str
    rows_per_s: int | float | None
    batch_size: int | None = None
    tokens_per_batch: int | None = None
    accumulation: int = 1
    was_batch_halved: bool = False


@dataclass
class Outcome:
    """How a training ended, and remarks for the user."""

    facts: TrainingFacts
    curve: Curve
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------
# Reporting to services, through accelerate's trackers.
#
#     checkpoints/reports/state.json      the run's name, ids that services gave it, points sent
#     .tensorboard/<run>/                 TensorBoard's events; hidden, so they are no part of the model


logger = logging.getLogger(__name__)

PROJECT = "relabel"
"""Project, or experiment, of all runs."""
REPORTS, STATE, EVENTS = "reports", "state.json", ".tensorboard"
NOT_IN_NAMES = r"[^\w./-]"
"""Characters that some service takes in no figure's name."""


def check_services(names: Sequence[str]) -> None:
    """
    Raises:
        MissingExtraError: a service's package is not installed.
    """
    for name in names:
        require(name, extra=name, purpose=f"train.report_to: {name}")


class CurveReporter:
    """Sends a curve as it grows. Names of services, and how much each one has, are kept in a file, so that a resumed
    training continues the same run; a service that fails is left out and never ends a training.

    Args:
        names: of the services.
        checkpoints: folder of the training's checkpoints, in the model's.
        say: called with each service that fails.
    """

    def __init__(self, names: Sequence[str], checkpoints: Path, say: Callable[[str], None]) -> None:
        self._trackers: dict[str, Any] = dict.fromkeys(names)
        self._file = checkpoints / REPORTS / STATE
        self._model = checkpoints.resolve().parent
        self._say = say

    @functools.cached_property
    def _state(self) -> dict[str, Any]:
        if self._file.is_file():
            return dict(json.loads(self._file.read_text(encoding="utf-8")))
        return {"run": f"{self._model.name}-{uuid.uuid4().hex[:8]}", "ids": {}, "sent": {}}

    def send(self, curve: Curve) -> None:
        """Send what a service does not have yet."""
        for name in list(self._trackers):
            with self._dropped_if_it_fails(name):
                self._send(name, curve.points)

    def finish(self) -> None:
        """Close all runs."""
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                if tracker is not None:
                    tracker.finish()
        self._trackers = {}

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            del self._trackers[name]
            logger.warning("report_to: %s", name, exc_info=exc)
            words = (str(exc).splitlines() or [""])[0][:150]
            self._say(
                f"report_to: {name} failed ({type(exc).__name__}: {words}): training continues without it. --resume, "
                "or the next training, tries again."
            )

    def _send(self, name: str, points: Sequence[Point]) -> None:
        sent = self._state["sent"]
        if self._trackers[name] is None:
            self._trackers[name] = self._started(name)
        for step, group in groupby(points[sent.get(name, 0) :], key=lambda point: point[0]):
            held = list(group)
            values = {f"{split}/{re.sub(NOT_IN_NAMES, '.', figure)}": value for _, split, figure, value in held}
            self._trackers[name].log(values, step=step)
            sent[name] = sent.get(name, 0) + len(held)
            self._keep()

    def _started(self, name: str) -> Any:
        """accelerate's tracker for the run, new or begun before."""
        from accelerate import tracking

        run, ids = self._state["run"], self._state["ids"]
        if name == "tensorboard":
            tracker = tracking.TensorBoardTracker(run, logging_dir=self._model / EVENTS)
        elif name == "mlflow":
            tracker = tracking.MLflowTracker(PROJECT, run_id=ids.get("mlflow"), run_name=run)
        elif name == "wandb":
            tracker = tracking.WandBTracker(PROJECT, name=run, id=run, resume="allow")
        else:
            tracker = tracking.TrackioTracker(PROJECT, name=run, resume="allow", embed=False)
        tracker.start()
        if name == "mlflow":
            ids["mlflow"] = tracker.tracker.info.run_id
        self._keep()
        return tracker

    def _keep(self) -> None:
        LocalRunStore(self._file.parent).jot(STATE, json.dumps(self._state).encode())
