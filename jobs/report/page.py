"""Renders sections as one self-contained HTML file, with the label browser.

Everything in a section is text: the templates escape it, and mask secrets. A content policy admits the page's own
style and script, by their digests, and images from inside the file; nothing is loaded from anywhere. The same sections
give the same bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from relabel.jobs.sections import Paragraph, Plot, Section, cell_text
from relabel.manifests.labels import Pair, Span
from relabel.manifests.process import require
from relabel.manifests.schemas import LabelRow, QuarantineRow, Try
from relabel.manifests.secrets import redacted, shortened

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Browser:
    """What the page's script shows.

    Args:
        runs: name of each run.
        rows: see `shown_row`.
        notes: what a reader should know first, such as that this is a sample.
    """

    runs: Sequence[str]
    rows: Sequence[dict[str, Any]]
    notes: Sequence[Paragraph]


def render_page(title: str, subtitle: str, sections: Sequence[Section], *, browser: Browser | None = None) -> str:
    """The HTML file."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = _environment().get_template("page.html.j2")
    return page.render(
        title=title,
        subtitle=subtitle,
        sections=[section for section in sections if section.blocks],
        browser=browser,
        rows=browser and Markup(browser_json(browser)),
        style=Markup(style),
        script=Markup(script),
        policy=policy,
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return resources.files("relabel.jobs.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: redacted(value) if type(value) is str else value,  # Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(cell=cell_text, draw=draw)
    return found


# ------------------------------------------------------------------------------
# Rows of the label browser, as plain values.

DOCUMENT_CHARS = 8_000
"""Most characters of a document that a page carries; a page of 5,000 rows must open on a phone."""
LONG_CHARS = 4_000
"""Of an answer, a reasoning or an intent."""
QUERY_CHARS = 2_000
SHORT_CHARS = 500
"""Of an id, a reason, a flag, a piece of evidence, and of a text in the labeler's own columns."""
MOST_ITEMS = 64
"""Most pieces of evidence of a row, and most items of a list."""
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What could end the script element, or JavaScript's lines; JSON reads both spellings alike."""


def browser_json(browser: Browser) -> str:
    """JSON that can't leave its script element."""
    held = {"runs": [{"name": name} for name in browser.runs], "rows": list(browser.rows)}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def shown_row(run: int, row: LabelRow | QuarantineRow, pair: Pair | None, gold: int | None) -> dict[str, Any]:
    """A label or a quarantined row as the browser takes it; what is not there is left out.

    Args:
        run: its number among the page's runs.
        pair: its texts; None where they can't be read any more.
        gold: a trusted grade.
    """
    found: dict[str, Any] = {
        "run": run,
        "row": row.row_id,
        "query_id": _cut(row.query_id, SHORT_CHARS),
        "doc_id": _cut(row.doc_id, SHORT_CHARS),
        "status": row.status,
        "gold": gold,
        "tokens": (row.prompt_tokens, row.output_tokens),
    }
    if pair is not None:
        is_cut = len(pair.document) > DOCUMENT_CHARS
        found |= {"query": _cut(pair.query, QUERY_CHARS), "document": pair.document[:DOCUMENT_CHARS]}
        found |= {"length": len(pair.document)} if is_cut else {}
    if isinstance(row, QuarantineRow):
        tries = [Try(**held) for held in row.tries or ()]
        found["reason"] = _cut(row.reason, SHORT_CHARS)
        found["tries"] = [{**one._asdict(), "text": _cut(one.text, LONG_CHARS)} for one in tries] or None
    else:
        spans = [Span(**span) for span in row.evidence or ()]
        found |= {
            "grade": row.grade,
            "probs": _plain(row.probs),
            "outside": _plain(row.outside_mass),
            "entropy": entropy(row.probs),
            "evidence": [[span.start, span.end, _cut(span.text, SHORT_CHARS)] for span in spans[:MOST_ITEMS]] or None,
            "evidence_more": max(0, len(spans) - MOST_ITEMS) or None,
            "intent": _cut(row.intent, LONG_CHARS),
            "reasoning": _cut(row.reasoning, LONG_CHARS),
            "flags": _plain(list(row.flags or ())) or None,
            "own": {name: value for name, held in row.columns.items() if (value := _plain(held)) is not None} or None,
            "samples": [{"status": one["status"], "grade": one["grade"]} for one in row.samples or ()] or None,
            "reused": row.reused or None,
        }
    return {name: value for name, value in found.items() if value is not None}


def entropy(probs: Sequence[float] | None) -> float | None:
    """Of a distribution, nats."""
    return None if probs is None else round(max(0.0, -math.fsum(p * math.log(p) for p in probs if p > 0)), 4)


def _plain(value: Any) -> Any:
    """A value as JSON holds it: texts and lists cut, numbers rounded, None for what is no number."""
    if isinstance(value, list):
        return [_plain(one) for one in value[:MOST_ITEMS]]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    return _cut(value, SHORT_CHARS) if isinstance(value, str) else value


def _cut(text: str | None, most: int) -> str | None:
    return text if text is None or len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"


# ------------------------------------------------------------------------------
# Plots as SVG images, drawn with matplotlib. The same numbers give the same bytes.

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
