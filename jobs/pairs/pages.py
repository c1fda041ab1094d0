"""A document as its cleaned text and the blocks that it is made of: headings, text, tables and lists, each with its
place in that text.

The cleaned text looks like Markdown (`## heading`, `- item`, `| cell | cell |`), but nothing in it is escaped: it is
for models and people, and what is a heading or a table is known from the blocks, never read back from the marks. Blocks
are parted by one blank line. Places are offsets in code points, as Python's `str` counts them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

BlockKind = Literal["heading", "text", "table", "list"]
_BETWEEN = "\n\n"
_UNFIT = re.compile("[\0\ud800-\udfff]")


class Extent(NamedTuple):
    """Code points `start` up to, not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PageBlock:
    """One block.

    Args:
        parts: spans of a table's rows (the first with what is above it) or of a list's outermost items; of other
            blocks the block itself. Between two parts is one line end.
        level: of a heading, 1 to 6; else 0.
        title: of a heading, its text without the marks.
    """

    kind: BlockKind
    span: Extent
    parts: tuple[Extent, ...]
    level: int = 0
    title: str = ""


class CleanedPage(NamedTuple):
    """A document that was read.

    Args:
        text: the cleaned text; holds no NUL and no lone surrogate.
        blocks: in order; what lies outside of them is white space.
        json_ld: each item of the page's JSON-LD as JSON, in order.
        unreadable_json_ld: scripts that are declared as JSON-LD and are no JSON.
    """

    text: str
    blocks: tuple[PageBlock, ...]
    json_ld: tuple[str, ...] = ()
    unreadable_json_ld: int = 0


class PageWriter:
    """Puts blocks one after the other."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._blocks: list[PageBlock] = []
        self._length = 0

    def heading(self, level: int, title: str) -> None:
        """Add a heading of level 1 to 6."""
        self._add("heading", [f"{'#' * level} {title}"], level, title)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add("text", [text])

    def table(self, rows: Sequence[str]) -> None:
        """Add a table, a line of text each row."""
        self._add("table", rows)

    def list(self, items: Sequence[str]) -> None:
        """Add a list, a line of text each item."""
        self._add("list", items)

    def finish(self, json_ld: Sequence[str] = (), unreadable_json_ld: int = 0) -> CleanedPage:
        """The page as written so far."""
        return CleanedPage(_BETWEEN.join(self._texts), tuple(self._blocks), tuple(json_ld), unreadable_json_ld)

    def _add(self, kind: BlockKind, parts: Sequence[str], level: int = 0, title: str = "") -> None:
        at = start = self._length + len(_BETWEEN) * bool(self._texts)
        spans = []
        for part in parts:
            spans.append(Extent(at, at + len(part)))
            at += len(part) + 1
        self._texts.append("\n".join(parts))
        self._length = spans[-1].end
        self._blocks.append(PageBlock(kind, Extent(start, self._length), tuple(spans), level, title))


def fit(text: str) -> str:
    """The text with U+FFFD for each NUL and lone surrogate, which neither UTF-8 nor a prompt can hold."""
    return _UNFIT.sub("\ufffd", text)
