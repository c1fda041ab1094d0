"""Results as data: sections of text, facts, tables and plots, which the terminal and the HTML page both show.

Everything here is text or a number; `as_text` and the templates of `jobs/report` escape it for where it is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from relabel.jobs.output import grid
from relabel.manifests.secrets import one_line

SHADES = 8
"""Steps of a shaded cell."""


class _Kind:
    @property
    def kind(self) -> str:
        """By which the templates of the page know it."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Shade(_Kind):
    """A number in a cell whose background gets darker with its share, 0 to 1."""

    text: str
    share: float

    @property
    def step(self) -> int:
        return min(SHADES, max(0, round(self.share * SHADES)))


@dataclass(frozen=True)
class Badge(_Kind):
    """A word with a tone: `good`, `bad`, `warn` or `plain`."""

    text: str
    tone: str = "plain"


Cell: TypeAlias = str | int | float | Shade | Badge | None


@dataclass(frozen=True)
class Paragraph(_Kind):
    """A paragraph; `tone` as a badge's."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Facts(_Kind):
    """Names and values, a line each."""

    title: str
    rows: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Table(_Kind):
    """Rows under a head; columns of numbers are aligned to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_number(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float | Shade) for cell in cells)


class Series(NamedTuple):
    """One colour of a plot: values `y` at places `x`, with bounds for `intervals`."""

    name: str
    x: Sequence[str | float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Plot(_Kind):
    """A drawing; the terminal leaves it out.

    Args:
        form: `histogram` has one place more than values: the edges of its bins. `reliability` is lines with a diagonal.
        label, value: of the two axes.
    """

    title: str
    form: Literal["bars", "histogram", "lines", "reliability", "intervals"]
    series: Sequence[Series]
    label: str
    value: str = ""
    note: str = ""

    @property
    def alt(self) -> str:
        """What it shows, in words: all points of a few, else the first and the last."""
        return "; ".join(f"{one.name}: {_points(one)}" for one in self.series)


@dataclass(frozen=True)
class Code(_Kind):
    """Text as it is in a file."""

    label: str
    text: str


@dataclass(frozen=True)
class Remarks(_Kind):
    """Sentences that a reader should know, of lesser weight."""

    items: Sequence[str]


@dataclass(frozen=True)
class Fold(_Kind):
    """Blocks under a line that opens them; the terminal leaves them out."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = Paragraph | Facts | Table | Plot | Code | Remarks | Fold


@dataclass(frozen=True)
class Section:
    """A part of a page; one without blocks is left out.

    Args:
        name: its anchor, `[a-z-]+`.
    """

    name: str
    title: str
    blocks: Sequence[Block]


def confusion_table(counts: Sequence[Sequence[int]], rows: str, columns: str, *, caption: str = "") -> Table:
    """A confusion matrix with its sums, each row shaded by its shares."""
    body: list[list[Cell]] = [
        [str(grade), *(Shade(f"{count:,}", count / max(1, sum(row))) for count in row), sum(row)]
        for grade, row in enumerate(counts)
    ]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    head = [f"{rows} \\ {columns}", *map(str, range(len(counts))), "sum"]
    return Table(caption, head, [*body, ["sum", *sums, sum(sums)]])


def cell_text(value: Cell) -> str:
    """A cell as people read it: thousands apart, four digits after the point, tiny numbers as powers of ten."""
    if isinstance(value, Shade | Badge):
        return value.text
    if value is None or value != value:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 0.001 <= abs(value) < 1e6:
        return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:.2e}"


def as_text(blocks: Iterable[Block]) -> str:
    """Blocks for a terminal."""
    found: list[str] = []
    for is_paragraph, group in itertools.groupby(blocks, lambda block: isinstance(block, Paragraph)):
        texts = [text for block in group if (text := _block_text(block))]
        found += ["\n".join(texts)] if is_paragraph else texts
    return "\n\n".join(filter(None, found))


def _block_text(block: Block) -> str:
    match block:
        case Paragraph(text=text):
            return one_line(text)
        case Facts(title=title, rows=rows):
            lines = [grid([(name, cell_text(value)) for name, value in rows])]
        case Table(caption=title, head=head, rows=rows):
            right = [column for column in range(len(head)) if block.is_number(column)]
            lines = [grid([head, *([cell_text(cell) for cell in row] for row in rows)], right)]
        case Remarks(items=items):
            title, lines = "remarks" if items else "", [f"  - {one_line(item)}" for item in items]
        case _:
            return ""
    return "\n".join([*([one_line(title)] if title else []), *lines])


def _points(one: Series) -> str:
    points = [f"{_short(x)} {cell_text(y)}" for x, y in zip(one.x, one.y, strict=False)]
    return ", ".join(points) if len(points) <= 12 else f"from {points[0]} to {points[-1]}, {len(points):,} points"


def _short(place: str | float) -> str:
    return place if isinstance(place, str) else f"{place:g}"
