"""Bar charts, histograms, line plots and interval plots as inline SVG, drawn with matplotlib and styled by CSS
classes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from relabel.manifests.process import require
from relabel.manifests.records import sha256_bytes
from relabel.manifests.secrets import shortened

# ------------------------------------------------------------------------------
# What is drawn: bars, lines, intervals.


@dataclass(frozen=True)
class Bars:
    """One colour's bars: a label and a height each."""

    name: str
    labels: Sequence[str]
    values: Sequence[float]


@dataclass(frozen=True)
class Line:
    """One curve. `is_stepped`: a value holds from its place to the next."""

    name: str
    places: Sequence[float]
    values: Sequence[float]
    is_stepped: bool = False
    is_dashed: bool = False
    has_marks: bool = False


@dataclass(frozen=True)
class PlottedInterval:
    """A named value with the ends of its interval, where it has one."""

    name: str
    value: float
    low: float | None
    high: float | None


# ------------------------------------------------------------------------------
# The SVG that matplotlib draws, without sizes and colours of its own: the page's style sheet says them.


INK, GRID = "#010101", "#020202"
SERIES = ("#110000", "#110011", "#110022", "#110033", "#110044", "#110055")
_CLASSES = {INK: "ink", GRID: "grid", **{colour: f"s{number}" for number, colour in enumerate(SERIES, start=1)}}
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"


def fitted(data: bytes) -> Markup:
    """An SVG file's drawing as it may be inside a page: no styles, no metadata, no ids but those it refers to,
    colours as classes.
    """
    ElementTree.register_namespace("", _SVG)
    own = f"{sha256_bytes(data)[:8]}-"
    data = re.sub(rb'((?:url\(|href=")#|\bid=")', lambda match: match[0] + own.encode(), data)
    root = ElementTree.fromstring(data)
    names = {name.decode() for pair in re.findall(rb'url\(#([^)]+)\)|href="#([^"]+)"', data) for name in pair}
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                element.remove(child)
        _restyle(element)
        if element.attrib.get("id") not in names:
            element.attrib.pop("id", None)
        if _LINK in element.attrib:
            element.set("href", element.attrib.pop(_LINK))
    box = root.attrib["viewBox"]
    for name in list(root.attrib):
        del root.attrib[name]
    root.attrib.update({"viewBox": box, "class": "plot", "aria-hidden": "true", "focusable": "false"})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _restyle(element: ElementTree.Element) -> None:
    classes = []
    for name, value in _properties(element):
        role = _CLASSES.get(value)
        if role is not None and name in ("fill", "stroke"):
            classes.append(f"{name[0]}-{role}")
        elif name == "font-size":
            element.set(name, value.removesuffix("px"))
        elif not name.startswith("font"):
            element.set(name, value)
    if classes:
        element.set("class", " ".join(classes))


def _properties(element: ElementTree.Element) -> list[tuple[str, str]]:
    held: list[tuple[str, str]] = [
        (name, element.attrib[name]) for name in ("fill", "stroke") if name in element.attrib
    ]
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        if value:
            held.append((name.strip(), value.strip()))
    return held


# ------------------------------------------------------------------------------
# Plots: matplotlib draws them, and what it draws is made fit to be inside a page.
#
# Colours are roles (ink, grid, series 1 to 6), which become CSS classes, so that one drawing reads in dark and in
# light. Styles become attributes, since the page's content policy forbids inline styles; text stays text. The same
# numbers give the same bytes.


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
