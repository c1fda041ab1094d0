"""The training curve: losses by step and figures on dev, as Parquet and as a plot.

Long form, a row a value, so that a figure that is looked at every hundredth step costs no nulls: step, split (`train`,
`dev`), name, value.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.extras import require

CURVES_NAME = "curves.parquet"
PLOT_NAME = "curves.svg"
CURVE_SCHEMA = pa.schema([("step", pa.int64()), ("split", pa.string()), ("name", pa.string()), ("value", pa.float64())])
NOT_PLOTTED = ("learning_rate", "grad_norm")

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
    """Write `CURVES_NAME` and `PLOT_NAME`."""
    arrays = [pa.array([point[place] for point in curve.points], kind.type) for place, kind in enumerate(CURVE_SCHEMA)]
    table = pa.Table.from_arrays(arrays, schema=CURVE_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    (folder / CURVES_NAME).write_bytes(sink.getvalue())
    _plot(folder / PLOT_NAME, curve, title)


def _plot(path: Path, curve: Curve, title: str) -> None:
    """Losses of training above, figures on dev below. The same curve gives the same bytes."""
    matplotlib = require("matplotlib", extra="cpu", purpose="The plot of a training")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a training").Figure
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        figure = figure_class(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for name in curve.names("train"):
            if name not in NOT_PLOTTED:
                above.plot(*zip(*curve.series("train", name), strict=True), label=name, linewidth=1)
        for name in curve.names("dev"):
            below.plot(*zip(*curve.series("dev", name), strict=True), label=name, marker="o", markersize=3, linewidth=1)
        above.set(title=title, ylabel="training loss, nats")
        below.set(xlabel="optimizer step", ylabel="dev")
        for axes in (above, below):
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize="small")
        figure.savefig(path, format="svg", metadata={"Date": None})
