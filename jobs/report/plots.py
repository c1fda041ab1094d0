"""Plots: matplotlib draws them, and what it draws is made fit to be inside a page.

Colours are roles (ink, grid, series 1 to 6), which become CSS classes, so that one drawing reads in dark and in light.
Styles become attributes, since the page's content policy forbids inline styles; text stays text. The same numbers give
the same bytes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from relabel.jobs.report.plot_style import GRID, INK, SERIES, fitted
from relabel.jobs.report.plotted import Bars, Line, PlottedInterval
from relabel.manifests.extras import require
from relabel.manifests.secrets.redaction import shortened

_SIZE = (4.8, 2.9)
"""Inches: 346 points wide, which a phone shows as it is."""
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relabel",
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.formatter.useoffset": False,
}
_LABEL_CHARS = 24


def draw_bars(groups: Sequence[Bars], *, label: str, value: str) -> Markup:
    """Bars side by side, all groups with the same labels in the same order."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(groups)
        for number, group in enumerate(groups):
            places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(group.labels))]
            axes.bar(places, group.values, width * 0.94, color=_series(number), label=_short(group.name))
        axes.set_xticks(range(len(groups[0].labels)), [_short(text) for text in groups[0].labels])
        axes.grid(axis="y")
        _labels(axes, label, value, is_named=len(groups) > 1)

    return _drawn(draw)


def draw_histogram(groups: Sequence[Bars], edges: Sequence[float], *, label: str, value: str) -> Markup:
    """Counts between edges, one outline a group."""

    def draw(axes: Any) -> None:
        for number, group in enumerate(groups):
            is_alone = len(groups) == 1
            axes.stairs(
                group.values, edges, color=_series(number), fill=is_alone, label=_short(group.name), linewidth=1.6
            )
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        _labels(axes, label, value, is_named=len(groups) > 1)

    return _drawn(draw)


def draw_lines(
    lines: Sequence[Line],
    *,
    label: str,
    value: str,
    marks: Sequence[float] = (),
    is_log: bool = False,
    starts_at_0: bool = False,
    has_log_values: bool = False,
) -> Markup:
    """Curves over one axis.

    Args:
        marks: places to mark with a dotted upright line.
        is_log: the axis of places goes by powers of two.
        starts_at_0: the axis of values does.
        has_log_values: the axis of values goes by powers of ten.
    """

    def draw(axes: Any) -> None:
        for number, line in enumerate(lines):
            more: dict[str, Any] = {"drawstyle": "steps-post"} if line.is_stepped else {}
            more |= {"linestyle": "--"} if line.is_dashed else {}
            more |= {"marker": "o", "markersize": 4} if line.has_marks else {}
            axes.plot(line.places, line.values, color=_series(number), label=_short(line.name), linewidth=1.6, **more)
        for place in marks:
            axes.axvline(place, color=INK, linestyle=":", linewidth=1)
        if is_log:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({place for line in lines for place in line.places}))
            axes.xaxis.set_major_formatter(lambda place, _: f"{place:g}")
        if has_log_values:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
            axes.yaxis.set_minor_formatter(lambda *_: "")
        if starts_at_0:
            axes.set_ylim(bottom=0)
        axes.grid()
        _labels(axes, label, value, is_named=len(lines) > 1)

    return _drawn(draw)


def draw_reliability(groups: Sequence[Line]) -> Markup:
    """Accuracy over mean confidence, beside the diagonal of a judge that is as often right as it says."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
        for number, group in enumerate(groups):
            axes.plot(
                group.places,
                group.values,
                color=_series(number),
                marker="o",
                markersize=4,
                linewidth=1.4,
                label=_short(group.name),
            )
        axes.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))
        axes.grid()
        _labels(axes, "mean confidence", "share that is right", is_named=len(groups) > 1)

    return _drawn(draw)


def draw_intervals(groups: Sequence[tuple[str, Sequence[PlottedInterval]]], *, label: str) -> Markup:
    """Values on one axis, a line of points a name, a colour a group; whiskers where there is an interval."""
    names = list(dict.fromkeys(one.name for _, items in groups for one in items))

    def draw(axes: Any) -> None:
        for number, (group, items) in enumerate(groups):
            shift = (number - (len(groups) - 1) / 2) * 0.24
            for which, one in enumerate(items):
                place = names.index(one.name) + shift
                if one.low is not None and one.high is not None:
                    axes.plot([one.low, one.high], [place, place], color=_series(number), linewidth=1.6)
                axes.plot(
                    [one.value],
                    [place],
                    "o",
                    color=_series(number),
                    markersize=5,
                    label=_short(group) if not which else None,
                )
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        _labels(axes, label, "", is_named=len(groups) > 1)

    return _drawn(draw, height=max(_SIZE[1], 0.9 + 0.34 * len(names)))


def _series(number: int) -> str:
    return SERIES[number % len(SERIES)]


def _short(text: str) -> str:
    """Text that a drawing has room for, without what no XML may hold."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    return shortened(clean, _LABEL_CHARS)


def _labels(axes: Any, label: str, value: str, *, is_named: bool) -> None:
    axes.set(xlabel=label, ylabel=value)
    if is_named:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.4, columnspacing=1.2
        )


def _drawn(draw: Any, *, height: float = _SIZE[1]) -> Markup:
    matplotlib = require("matplotlib", extra="cpu", purpose="The plots of a report")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plots of a report").Figure
    sink = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_RC):
        warnings.simplefilter("ignore")  # of letters that its own font lacks: the page's font draws them
        figure = figure_class(figsize=(_SIZE[0], height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(
            sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return fitted(sink.getvalue())
