"""The training curve as Parquet and as a plot, step timings, the outcome of a training, and reporting to TensorBoard,
Trackio, MLflow and W&B."""

from __future__ import annotations

import io
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import ConfigError
from relabel.manifests.files import is_url
from relabel.manifests.process import require
from relabel.manifests.store import LocalRunStore

# ------------------------------------------------------------------------------
# The training curve: losses by step and figures on dev, as Parquet and as a plot.
#
# Long form, a row a value, so that a figure that is looked at every hundredth step costs no nulls: step, split
# (`train`, `dev`), name, value.


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

    def names(self, split: str) -> list[str]:
        """Names of a split's curves, in the order of their first points."""
        return list(dict.fromkeys(name for _, of, name, _ in self.points if of == split))


def write_curves(folder: Path, curve: Curve, *, title: str) -> None:
    """Write `CURVES_NAME` and `PLOT_NAME`, each whole or not at all."""
    arrays = [pa.array([point[place] for point in curve.points], kind.type) for place, kind in enumerate(CURVE_SCHEMA)]
    table = pa.Table.from_arrays(arrays, schema=CURVE_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    files = LocalRunStore(folder)
    files.put(CURVES_NAME, sink.getvalue())
    files.put(PLOT_NAME, _plotted(curve, title))


def _plotted(curve: Curve, title: str) -> bytes:
    """Figures of training above, on axes by what they are; on dev below. The same curve gives the same bytes."""
    matplotlib = require("matplotlib", extra="cpu", purpose="The plot of a training")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a training").Figure
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        shown = {LOSS_PANEL: [], **panels_of(curve.names("train"))}
        figure = figure_class(figsize=(8, 3 * (len(shown) + 1)), layout="constrained")
        *above, below = figure.subplots(len(shown) + 1, 1, sharex=True)
        for axes, (panel, names) in zip(above, shown.items(), strict=True):
            axes.set(ylabel=panel)
            for name in names:
                axes.plot(*zip(*curve.series("train", name), strict=True), label=name, linewidth=1)
        for name in curve.names("dev"):
            if panel_of(name) != "tokens":
                points = zip(*curve.series("dev", name), strict=True)
                below.plot(*points, label=name, marker="o", markersize=3, linewidth=1)
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


# ------------------------------------------------------------------------------
# What the seconds of a training's steps were spent on. No two trainings have the same, so they stay out of checkpoints
# and of the curve: a training that was resumed tells of its last call's steps alone.


SECONDS_NAME = "seconds.parquet"
SECONDS_SCHEMA = pa.schema([("step", pa.int64()), ("part", pa.string()), ("seconds", pa.float64())])


class StepClock:
    """Seconds by part; of parts within parts, the inner one's count.

    Args:
        parts: names, in their order.
        rest: the part that takes what no other has.
    """

    def __init__(self, parts: tuple[str, ...], *, rest: str) -> None:
        self._names, self._rest = (*parts, rest), rest
        self._inside: list[str] = []
        self._since = self._began = 0.0
        self._held: dict[str, float] = {}
        self._is_open = False
        self.steps: list[tuple[int, dict[str, float]]] = []

    def begin_step(self) -> None:
        """Forget what was done between two steps."""
        self._began, self._is_open = time.perf_counter(), True
        self._held = dict.fromkeys(self._names, 0.0)

    def end_step(self, step: int) -> None:
        """Keep a step that was begun; else nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._held[self._rest] += time.perf_counter() - self._began - sum(self._held.values())
        self.steps.append((step, self._held))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What the block takes is that part's."""
        self._charge()
        self._inside.append(name)
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._inside and self._is_open:
            self._held[self._inside[-1]] += now - self._since
        self._since = now

    def mean(self) -> dict[str, float]:
        """Seconds of a step by part; nothing where there was no step."""
        return {
            name: round(sum(held[name] for _, held in self.steps) / len(self.steps), 6)
            for name in self._names
            if self.steps
        }

    def write(self, folder: Path) -> None:
        """Write `SECONDS_NAME`, a row a step and part."""
        rows = [(step, name, value) for step, held in self.steps for name, value in held.items()]
        arrays = [pa.array([row[place] for row in rows], kind.type) for place, kind in enumerate(SECONDS_SCHEMA)]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_arrays(arrays, schema=SECONDS_SCHEMA), sink, compression="zstd")
        (folder / SECONDS_NAME).write_bytes(sink.getvalue())


# ------------------------------------------------------------------------------
# How a training ended, whoever ran it.


@dataclass
class Outcome:
    """How a training ended.

    Args:
        best_step: the step that was kept, where looks at dev chose one.
        stopped_by: what ended it before its last step, `early_stopping` or `watch`.
        rows_per_s: rows trained in a second of this process's own steps, looks at dev and checkpoints left out.
        clock: what the seconds of those steps were spent on, where the trainer tells.
    """

    steps: int
    epochs: float
    best_step: int | None
    rows_per_s: float | None
    curve: Curve
    device: str
    notes: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    clock: StepClock | None = None


# ------------------------------------------------------------------------------
# The curve, sent while it grows to services that show it: TensorBoard, Trackio, MLflow, W&B, through accelerate's
# trackers.
#
# How much of the curve each one has, and which run it is there, is kept beside the checkpoints: a training that goes on
# does so in the same run, and sends no point again. A service that fails is left alone and never ends a training.
#
#     checkpoints/reports/state.json      the run's name, ids that services gave it, points sent
#     .tensorboard/<run>/                 TensorBoard's events, beside the model; hidden, so no part of it


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
