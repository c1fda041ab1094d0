"""What a page is built of: text, facts, tables, figures. All of it is data; the templates escape it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from markupsafe import Markup

from relabel.jobs.report.downloads import Download

SHADES = 8
"""Steps of a shaded cell."""
INDENTS = 8
"""Levels that are drawn apart."""


@dataclass(frozen=True)
class Shade:
    """A number in a cell whose ground gets darker with its share of the most, 0 to 1."""

    text: str
    share: float
    kind: ClassVar[str] = "shade"

    @property
    def step(self) -> int:
        """The shade's number, 0 to `SHADES`."""
        return min(SHADES, max(0, round(self.share * SHADES)))


@dataclass(frozen=True)
class Badge:
    """A word with a tone: `good`, `bad`, `warn` or `plain`."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "badge"


Cell: TypeAlias = str | int | float | Shade | Badge | None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. `tone` as a badge's; `plain` for text without one."""

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
    """Rows under a head; columns of numbers are set to the right.

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
class Drawing:
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
    """Text as it is in a file."""

    text: str
    label: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class OutlineLine:
    """A line of an outline.

    Args:
        level: how deep it stands, from 0.
        number: what it is called in the data.
        is_text: of the text, and no heading.
    """

    level: int
    number: str
    text: str
    badges: Sequence[Badge]
    is_text: bool = False

    @property
    def indent(self) -> int:
        """The level, as far as a narrow page has room."""
        return min(self.level, INDENTS)


@dataclass(frozen=True)
class Outline:
    """Lines, indented by their level."""

    title: str
    lines: Sequence[OutlineLine]
    kind: ClassVar[str] = "outline"


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


Block: TypeAlias = Paragraph | Facts | Table | Drawing | Code | Outline | Fold | Side


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: its anchor, `[a-z-]+`.
    """

    name: str
    title: str
    blocks: Sequence[Block]


def confusion_table(
    counts: Sequence[Sequence[int]], rows: str, columns: str, *, caption: str, download: Download | None = None
) -> Table:
    """A confusion matrix, each row shaded by its shares."""
    grades = range(len(counts))
    head = [f"{rows} \\ {columns}", *map(str, grades), "sum"]
    body: list[list[Cell]] = []
    for grade, row in zip(grades, counts, strict=True):
        total = sum(row)
        body.append([str(grade), *(Shade(f"{count:,}", count / total if total else 0.0) for count in row), total])
    return Table(head, body, caption, download)


def title_over(title: str, queries: Iterable[Collection[str]]) -> str:
    """A figure's title, with a word where its sets are over different queries: what sets them apart may be these.

    Args:
        queries: of each set, the ids.
    """
    return f"{title}, over different queries" if len(set(map(frozenset, queries))) > 1 else title
