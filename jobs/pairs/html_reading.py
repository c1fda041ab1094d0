"""HTML as a document: what a reader of the page sees, in blocks, and its JSON-LD.

lxml (libxml2) calls `_Reader` for each tag and text and builds no tree: a tree by the HTML standard takes quadratic
time for some pages (a start tag with 100,000 attributes, 100,000 open `<div>`: 30 to 50 s in Lexbor), or loses what is
nested deeply. What a table or a list is is known only at its end, so a page is first a flat list of events.

Left out: scripts, styles, templates, forms' controls, navigation, embedded media, and what the page hides (`hidden`,
`display: none`, `visibility: hidden`, a closed dialog). A table within which a table or heading lies, or that has one
cell, lays a page out; so does a list within which one lies: their content is read as if they were not there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from relabel.jobs.pairs.json_ld import JsonLd, is_json_ld
from relabel.jobs.pairs.pages import PageWriter, fit
from relabel.jobs.pairs.structures import Event, Frame, FrameKind, write_events
from relabel.manifests.extras import require

_LEFT_OUT = re.compile(
    "applet|audio|button|canvas|datalist|embed|iframe|input|meter|nav|noembed|noframes|noscript|object|progress|script|"
    "select|style|svg|template|textarea|title|video"
)
_RAW = re.compile("script|style|textarea|title")
_BLOCK = re.compile(
    "address|article|aside|blockquote|body|caption|center|dd|details|dialog|dir|div|dl|dt|fieldset|figcaption|figure|"
    "footer|form|frameset|header|h[1-6]|hgroup|hr|html|legend|li|main|menu|ol|option|p|pre|search|section|summary|table|"
    "tbody|td|tfoot|th|thead|tr|ul"
)
_FRAMES: dict[str, FrameKind] = {
    **dict.fromkeys(("ul", "ol", "dl", "menu", "dir"), "list"),
    **dict.fromkeys(("li", "dt"), "item"),
    **dict.fromkeys(("td", "th"), "cell"),
    "table": "table",
    "tr": "row",
}
_PARENTS: dict[FrameKind, tuple[FrameKind, ...]] = {"item": ("list",), "row": ("table",), "cell": ("row", "table")}
_HEADING = re.compile("h[1-6]")
_HIDING = re.compile(r"display\s{0,9}:\s{0,9}none|visibility\s{0,9}:\s{0,9}hidden", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
_LINE_BREAK = "\0"
"""Stands for `<br>` in text that is collected; no text that was read holds it."""
MOST_DEPTH = 1000
"""Open elements at which a new parser takes over between two pieces: libxml2 looks through all of them for each end
tag that matches none. Browsers stop at 512.
"""
PIECE_CHARS = 1 << 16


def read_html(html: str, to: PageWriter, json_ld: JsonLd) -> None:
    """Add a page's blocks and its JSON-LD. Time grows with the page's length alone, whatever it holds.

    Raises:
        MissingExtraError: lxml is not installed.
    """
    page = _Reader(json_ld)
    _parse(fit(html), page)
    write_events(page.events, to)


def _parse(html: str, page: _Reader) -> None:
    etree = require("lxml.etree", extra="pairs", purpose="relabel pairs chunk")
    parser = None
    for piece in _pieces(html):
        parser = parser or etree.HTMLParser(target=page, huge_tree=True)
        parser.feed(piece)
        if page.depth > MOST_DEPTH and not page.is_in_script:
            _close(parser, etree)
            parser = None
    if parser is not None:
        _close(parser, etree)


def _close(parser: Any, etree: Any) -> None:
    """End all elements that are open. libxml2 complains where it found nothing, which is no fault."""
    with contextlib.suppress(etree.XMLSyntaxError):
        parser.close()


def _pieces(html: str) -> Iterator[str]:
    """The page in pieces that end before a `<` where they can."""
    start = 0
    while start < len(html):
        end = start + PIECE_CHARS
        mark = html.rfind("<", start + 1, end) if end < len(html) else -1
        end = mark if mark > 0 else end
        yield html[start:end]
        start = end


class _Reader:
    """What lxml calls: keeps what shows as events."""

    def __init__(self, json_ld: JsonLd) -> None:
        self.events: list[Event] = []
        self._json_ld = json_ld
        self._script: list[str] | None = None
        self._open: list[Frame | None] = []
        """For each open element the frame that it opened, if any."""
        self._frames: list[Frame] = []
        self._hidden_at: int | None = None
        """Depth of the element that hides what is in it."""
        self._is_raw = False
        self._pre_at: int | None = None
        self._heading: tuple[int, int] | None = None
        """Depth and level of the heading that is open."""
        self._text: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def is_in_script(self) -> bool:
        """Whether a `<` is text where the parser is, as far as one can tell."""
        return self._script is not None or (self._is_raw and self._hidden_at == self.depth)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._open.append(None)
        if is_json_ld(tag, attributes):
            self._script = []
        if self._hidden_at is not None:
            return
        is_block = _BLOCK.fullmatch(tag) is not None
        is_heading = is_block and _HEADING.fullmatch(tag) is not None
        kind = _FRAMES.get(tag)
        if is_heading or (kind in ("list", "table") and self._heading):
            self._end_heading()
        if is_block:
            self._end_text()
        if _LEFT_OUT.fullmatch(tag) or _is_hidden(tag, attributes):
            self._hidden_at, self._is_raw = self.depth, _RAW.fullmatch(tag) is not None
        elif tag == "br":
            self._text.append(_LINE_BREAK)
        elif tag == "pre" and self._pre_at is None:
            self._pre_at = self.depth
        elif is_heading:
            self._mark_layout()
            self._heading = self.depth, int(tag[1])
        elif kind is not None:
            self._open_frame(kind, tag, attributes)

    def end(self, tag: str) -> None:
        depth, frame = self.depth, self._open.pop()
        if tag == "script" and self._script is not None:
            self._json_ld.add("".join(self._script))
            self._script = None
        if self._hidden_at is not None:
            if self._hidden_at == depth:
                self._hidden_at = None
            return
        if self._heading is not None and self._heading[0] == depth:
            self._end_heading()
        elif _BLOCK.fullmatch(tag):
            self._end_text()
        if self._pre_at == depth:
            self._pre_at = None
        if frame is not None:
            self._close_frame(frame)

    def data(self, text: str) -> None:
        if self._script is not None:
            self._script.append(text)
        elif self._hidden_at is None:
            self._text.append(text)

    def close(self) -> None:
        """Called at the end of each parser; all elements were ended."""
        self._end_text()

    def _open_frame(self, kind: FrameKind, tag: str, attributes: Mapping[str, str]) -> None:
        nearest = self._frames[-1].kind if self._frames else None
        if kind in _PARENTS and nearest not in _PARENTS[kind]:
            return  # a `li` outside of a list is a block of text, as any
        frame = Frame(kind, is_header=tag == "th")
        if kind == "table":
            self._mark_layout()
            frame.is_layout = attributes.get("role", "").strip().lower() in ("presentation", "none")
        if tag == "ol":
            given = attributes.get("start", "").strip()
            frame.first_number = int(given) if _NUMBER.fullmatch(given) else 1
        self._open[-1] = frame
        self._frames.append(frame)
        self.events.append(Event("open", frame=frame))

    def _close_frame(self, frame: Frame) -> None:
        self._frames.pop()
        self.events.append(Event("close", frame=frame))
        around = self._frames[-1] if self._frames else None
        if frame.kind == "table":
            frame.is_layout |= not frame.holds_data()
        elif frame.has_text and around is not None:
            around.has_text = True
            if frame.kind not in ("row", "cell"):
                return
            # a row's cells reach the table with the row; one without a row is a row
            around.is_header |= frame.is_header
            around.num_cells += frame.num_cells if frame.kind == "row" else 1
            around.num_rows += around.kind == "table"

    def _mark_layout(self) -> None:
        """Lists and tables around a heading or table only lay it out. All around one that is marked already are."""
        for frame in reversed(self._frames):
            if frame.is_layout:
                return
            frame.is_layout = frame.kind in ("list", "table")

    def _end_heading(self) -> None:
        if self._heading is not None:
            level = self._heading[1]
            self._heading = None
            if title := " ".join("".join(self._taken()).replace(_LINE_BREAK, " ").split()):
                self.events.append(Event("text", title, level))

    def _end_text(self) -> None:
        if self._heading is not None:
            self._text.append(" ")  # a heading is one line, whatever blocks it is made of
            return
        raw = "".join(self._taken())
        if self._pre_at is not None:
            text = "\n".join(line.rstrip() for line in raw.replace(_LINE_BREAK, "\n").split("\n")).strip("\n")
        else:
            text = "\n".join(filter(None, (" ".join(line.split()) for line in raw.split(_LINE_BREAK))))
        if text:
            self.events.append(Event("text", text))
            if self._frames:
                self._frames[-1].has_text = True

    def _taken(self) -> list[str]:
        taken, self._text = self._text, []
        return taken


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    return (
        "hidden" in attributes
        or (tag == "dialog" and "open" not in attributes)
        or ("style" in attributes and _HIDING.search(attributes["style"]) is not None)
    )
