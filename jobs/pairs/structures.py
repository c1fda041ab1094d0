"""Tables and lists of a page: a flat list of events in, blocks out. At its end it is known of each whether it holds
data or lays the page out; one that lays out is read as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from relabel.jobs.pairs.pages import PageWriter

FrameKind = Literal["list", "item", "table", "row", "cell"]
_MOST_INDENT = 8
"""Levels that nested lists are indented by; more would make the text of deep ones quadratic."""


@dataclass(slots=True)
class Frame:
    """A list, an item, a table, a row or a cell.

    Args:
        first_number: of an ordered list's first item; None for a list without numbers.
        is_header: of a cell, and of a table in which one with text is.
        is_layout: of a list or table: it only lays the page out.
        has_text: of a cell or row.
        num_rows, num_cells: of a table, those with text.
    """

    kind: FrameKind
    first_number: int | None = None
    is_header: bool = False
    is_layout: bool = False
    has_text: bool = False
    num_rows: int = 0
    num_cells: int = 0

    def holds_data(self) -> bool:
        """Of a table at its end, whether its cells relate to each other: two rows, or two cells with headers."""
        return self.num_cells > 1 and (self.num_rows > 1 or self.is_header)


class Event(NamedTuple):
    """A heading (level above 0) or text (level 0), or a frame that opens or closes."""

    kind: Literal["text", "open", "close"]
    text: str = ""
    level: int = 0
    frame: Frame | None = None


def write_events(events: Iterable[Event], to: PageWriter) -> None:
    """Put events into blocks: a list or table with all that it holds is one."""
    outermost: Frame | None = None
    built: _ListText | _TableText | None = None
    for event in events:
        frame = event.frame
        if built is not None:
            if event.kind == "close" and frame is outermost:
                built.write(to)
                outermost = built = None
            else:
                built.take(event)
        elif event.kind == "open" and frame is not None and frame.kind in ("list", "table") and not frame.is_layout:
            outermost = frame
            built = _ListText(frame) if frame.kind == "list" else _TableText()
        elif event.kind == "text" and event.level:
            to.heading(event.level, event.text)
        elif event.kind == "text":
            to.text(event.text)


class _ListText:
    """The text of a list and of those within it: a line an item, indented."""

    def __init__(self, frame: Frame) -> None:
        self._items: list[list[str]] = []
        self._numbers = [frame.first_number]
        self._marker = ""
        self._starts_item = True

    def take(self, event: Event) -> None:
        frame = event.frame
        if frame is None:
            self._add(event.text)
        elif frame.kind == "list":
            self._marker = ""
            if event.kind == "open":
                self._numbers.append(frame.first_number)
            else:
                self._numbers.pop()
        elif frame.kind == "item":
            self._marker = self._next_marker() if event.kind == "open" else ""
            self._starts_item |= len(self._numbers) == 1 and event.kind == "open"

    def _next_marker(self) -> str:
        number = self._numbers[-1]
        if number is None:
            return "- "
        self._numbers[-1] = number + 1
        return f"{number}. "

    def _add(self, text: str) -> None:
        if self._starts_item:
            self._items.append([])
            self._starts_item = False
        indent = "  " * min(len(self._numbers) - 1, _MOST_INDENT)
        for line in text.split("\n"):
            # parts of a block are separated by line ends, so a blank line of preformatted text goes
            if line.strip():
                self._items[-1].append(indent + (self._marker or "  ") + line.strip())
                self._marker = ""

    def write(self, to: PageWriter) -> None:
        items = ["\n".join(item) for item in self._items]
        if items:
            items[0] = items[0].lstrip()
            to.list(items)


class _TableText:
    """The text of a table: a line a row."""

    def __init__(self) -> None:
        self._above: list[str] = []
        self._rows: list[list[str]] = []
        self._headers: list[bool] = []
        self._cell: list[str] | None = None
        self._is_row_open = False

    def take(self, event: Event) -> None:
        frame = event.frame
        if frame is None:
            (self._above if self._cell is None else self._cell).append(" ".join(event.text.split()))
        elif frame.kind == "row":
            self._is_row_open = False
        elif frame.kind == "cell" and event.kind == "open":
            if not self._is_row_open:
                self._is_row_open = True
                self._rows.append([])
                self._headers.append(True)
            self._headers[-1] &= frame.is_header
            self._cell = []
        elif frame.kind == "cell":
            self._rows[-1].append(" ".join(self._cell or ()))
            self._cell = None

    def write(self, to: PageWriter) -> None:
        kept = [number for number, row in enumerate(self._rows) if any(row)]
        lines = [f"| {' | '.join(self._rows[number])} |" for number in kept]
        above = " ".join(self._above)
        if not lines:
            if above:
                to.text(above)
            return
        if self._headers[kept[0]] and len(lines) > 1:
            lines[0] += "\n|" + " --- |" * len(self._rows[kept[0]])
        if above:
            lines[0] = f"{above}\n{lines[0]}"
        to.table(lines)
