"""The page: sections of blocks, put into one HTML file that asks nobody for anything.

Whatever a block holds is text, escaped by the templates. A content policy admits the page's own script and style, by their digests, and
nothing else: no address, no frame, no inline handler, no string that becomes markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from markupsafe import Markup

from jobs.report.downloads import Download
from manifests.redaction import redacted

if TYPE_CHECKING:
    from jinja2 import Environment

    from jobs.report.browser import BrowserData

SHADES = 8
"""Steps of a shaded cell."""


@dataclass(frozen=True)
class Shade:
    """A number in a cell whose ground gets darker with its share of the most, 0 to 1."""

    text: str
    share: float
    kind: ClassVar[str] = "shade"

    @property
    def step(self) -> int:
        return min(SHADES, max(0, round(self.share * SHADES)))


@dataclass(frozen=True)
class Badge:
    """A word with a tone: `good`, `bad`, `warn` or `plain`."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "badge"


Cell: TypeAlias = str | int | float | Shade | Badge | None


@dataclass(frozen=True)
class Text:
    """A paragraph. `tone` as a badge's; `plain` for text that just stands there."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each."""

    rows: Sequence[tuple[str, Cell]]
    title: str = ""
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns of numbers stand to the right.

    Args:
        caption: what it shows, also what a screen reader calls it.
        has_row_heads: the first column names the row.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str
    download: Download | None = None
    has_row_heads: bool = True
    kind: ClassVar[str] = "table"

    def is_number(self, column: int) -> bool:
        """Whether a column's cells are numbers."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float | Shade) for cell in cells)


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Args:
        svg: of `plots.py` or `lineage.py`.
        alt: in words, what a reader is to see in it.
        download: its data.
    """

    title: str
    svg: Markup
    alt: str
    download: Download | None = None
    note: str = ""
    is_wide: bool = False
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Code:
    """Text as it stands in a file."""

    text: str
    label: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: Sequence[Block]
    kind: ClassVar[str] = "fold"


@dataclass(frozen=True)
class Side:
    """Blocks side by side where there is room."""

    blocks: Sequence[Block]
    kind: ClassVar[str] = "side"


Block: TypeAlias = Text | Facts | Table | Figure | Code | Fold | Side


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: its anchor, `[a-z-]+`.
    """

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """All of it.

    Args:
        made_by: the command, which the file's first bytes name.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    browser: BrowserData | None = None
    notes: Sequence[str] = field(default=())
    made_by: str = "report"


def confusion_table(counts: Sequence[Sequence[int]], rows: str, columns: str, *, caption: str, download: Download | None = None) -> Table:
    """A confusion matrix, each row shaded by its shares."""
    grades = range(len(counts))
    head = [f"{rows} \\ {columns}", *map(str, grades), "sum"]
    body: list[list[Cell]] = []
    for grade, row in zip(grades, counts, strict=True):
        total = sum(row)
        body.append([str(grade), *(Shade(f"{count:,}", count / total if total else 0.0) for count in row), total])
    return Table(head, body, caption, download)


def render_page(page: Page) -> str:
    """The HTML file."""
    style, script = _asset("report.css"), _asset("report.js")
    sections = [section for section in page.sections if section.blocks]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            opening=Markup(opening(page.made_by)),
            sections=sections,
            style=Markup(style),
            script=Markup(script),
            policy=(
                f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'; "
                "require-trusted-types-for 'script'; trusted-types 'none'"
            ),
            rows=Markup(page.browser.as_json()) if page.browser is not None else None,
        )
    )


def opening(command: str) -> str:
    """What a page of a command begins with, by which the command knows its own again."""
    return f"<!DOCTYPE html>\n<!-- relabel {command} -->"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return resources.files("jobs.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: redacted(value) if type(value) is str else value,  # records of others may hold a secret; Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["figure"] = show_number
    return found


def show_number(value: Any) -> str:
    """A number as people read it: thousands apart, four digits after the point, tiny ones as powers."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value != value:
        return "–"
    if value == 0 or 0.001 <= abs(value) < 1e6:
        return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:.2e}"
