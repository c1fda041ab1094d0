"""Plots as SVG images, drawn with matplotlib. The same numbers give the same bytes."""

from __future__ import annotations

import base64
import io
import math
import warnings
from typing import Any

from relabel.jobs.sections import Plot
from relabel.manifests.process import require
from relabel.manifests.secrets import redacted, shortened

_WIDTH, _HEIGHT = 4.8, 2.9
"""Inches: 346 points wide, which a phone shows as it is."""
_COLOURS = ("#0f6f80", "#bf5415", "#5b4bb0", "#3f7d20", "#a3336f", "#6b6f76")
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relabel",
    "text.parse_math": False,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": "#dddbd5",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.formatter.useoffset": False,
}
_LABEL_CHARS = 24


def draw(plot: Plot) -> str:
    """A `data:` URI of the image."""
    matplotlib = require("matplotlib", extra="cpu", purpose="The plots of a report")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plots of a report").Figure
    cycle = matplotlib.cycler(linestyle=("-", "--", ":")) * matplotlib.cycler(color=_COLOURS)
    num_names = len({name for one in plot.series for name in one.x}) if plot.form == "intervals" else 0
    sink = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({**_RC, "axes.prop_cycle": cycle}):
        warnings.simplefilter("ignore")  # of letters that its own font lacks: the reader's font draws them
        figure = figure_class(figsize=(_WIDTH, max(_HEIGHT, 0.9 + 0.34 * num_names)), layout="constrained")
        axes = figure.subplots()
        {"bars": _bars, "histogram": _histogram, "intervals": _intervals}.get(plot.form, _lines)(axes, plot)
        axes.set(xlabel=_short(plot.label, 60), ylabel=_short(plot.value, 60))
        if len(plot.series) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.4)
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(sink, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(sink.getvalue()).decode()}"


def _bars(axes: Any, plot: Plot) -> None:
    width = 0.8 / len(plot.series)
    for number, one in enumerate(plot.series):
        shift = (number - (len(plot.series) - 1) / 2) * width
        places = [place + shift for place in range(len(one.x))]
        axes.bar(places, one.y, width * 0.94, color=_COLOURS[number % len(_COLOURS)], label=_short(one.name))
    names = max((one.x for one in plot.series), key=len)
    axes.set_xticks(range(len(names)), [_short(str(name)) for name in names])


def _histogram(axes: Any, plot: Plot) -> None:
    for number, one in enumerate(plot.series):
        colour = _COLOURS[number % len(_COLOURS)]
        axes.stairs(one.y, one.x, color=colour, fill=len(plot.series) == 1, label=_short(one.name), linewidth=1.6)
    axes.set_ylim(bottom=0)


def _lines(axes: Any, plot: Plot) -> None:
    for one in plot.series:
        marker = "o" if len(one.x) < 30 else None
        axes.plot(one.x, one.y, marker=marker, markersize=4, linewidth=1.5, label=_short(one.name))
    if plot.form == "reliability":
        axes.plot([0, 1], [0, 1], color="#535b65", linestyle=":", linewidth=1)
        axes.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))


def _intervals(axes: Any, plot: Plot) -> None:
    """A line a name; whiskers where there is an interval."""
    names = list(dict.fromkeys(name for one in plot.series for name in one.x))
    for number, one in enumerate(plot.series):
        shift = (number - (len(plot.series) - 1) / 2) * 0.24
        places = [names.index(name) + shift for name in one.x]
        reach = [
            [
                math.nan if end is None else max(0.0, side * (end - value))
                for end, value in zip(ends, one.y, strict=True)
            ]
            for side, ends in ((-1, one.low), (1, one.high))
        ]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(one.y, places, xerr=reach, fmt="o", color=colour, markersize=5, label=_short(one.name))
    axes.set_yticks(range(len(names)), [_short(str(name)) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _short(text: str, most: int = _LABEL_CHARS) -> str:
    """Text that a plot has room for, without what XML can't hold."""
    return shortened("".join(one if one.isprintable() else " " for one in redacted(text)), most)
