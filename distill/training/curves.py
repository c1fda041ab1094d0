"""The training curve: losses by step and figures on dev, as Parquet and as a plot.

Long form, a row a value, so that a figure that is looked at every hundredth step costs no nulls: step, split (`train`,
`dev`), name, value.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.extras import require
from relabel.manifests.storage.local_run_store import LocalRunStore

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
