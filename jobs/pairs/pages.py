"""Documents as cleaned text and blocks (headings, paragraphs, tables, lists), and the HTML reader that produces
them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from relabel.manifests.process import require

# A document as its cleaned text and the blocks that it is made of: headings, text, tables and lists, each with its
# place in that text.
#
# The cleaned text looks like Markdown (`## heading`, `- item`, `| cell | cell |`), but nothing in it is escaped: it is
# for models and people, and what is a heading or a table is known from the blocks, never read back from the marks.
# Blocks are parted by one blank line. Places are offsets in code points, as Python's `str` counts them.

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

    def finish(self, json_ld: Sequence[str] = (), unreadable_json_ld: int = 0) -> CleanedPage:
        """The page as written so far."""
        return CleanedPage(_BETWEEN.join(self._texts), tuple(self._blocks), tuple(json_ld), unreadable_json_ld)

    def add(self, kind: BlockKind, parts: Sequence[str], level: int = 0, title: str = "") -> None:
        """Add a block.

        Args:
            parts: a line of text for each row of a table or item of a list; of other blocks the text.
            level, title: of a heading.
        """
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
            to.add("heading", [f"{'#' * event.level} {event.text}"], event.level, event.text)
        elif event.kind == "text":
            to.add("text", [event.text])


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
            to.add("list", items)


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
                to.add("text", [above])
            return
        if self._headers[kept[0]] and len(lines) > 1:
            lines[0] += "\n|" + " --- |" * len(self._rows[kept[0]])
        if above:
            lines[0] = f"{above}\n{lines[0]}"
        to.add("table", lines)


_TYPE = "application/ld+json"
_ASIDE = re.compile(
    r"""
    ("(?:[^"\\]|\\.)*(?:"|\Z))              # a text, which stays
    | //[^\n]* | /\*.*?(?:\*/|\Z)            # comments of JavaScript
    | <!--(?:[^{\["<]*-->)? | -->             # comments of HTML, and the marks of one around it all
    | <!\[CDATA\[ | \]\]>
    """,
    re.DOTALL | re.VERBOSE,
)
_LAST_COMMA = re.compile(r"""("(?:[^"\\]|\\.)*(?:"|\Z))|,(?=\s*[}\]])""", re.DOTALL)


class JsonLd:
    """What scripts of JSON-LD hold: their objects, those of an array at the outside one by one, as extruct has it.

    Line ends within texts, comments, CDATA marks and commas before a closing bracket are borne with; other faults make
    a script unreadable.
    """

    def __init__(self) -> None:
        self.items: list[str] = []
        self.unreadable = 0

    def add(self, script: str) -> None:
        """Take a script's text; one without anything in it is no fault."""
        if not script.strip():
            return
        try:
            value = _read(script)
        except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, 1,000 open brackets
            self.unreadable += 1
            return
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                self.items.append(fit(json.dumps(item, ensure_ascii=False)))


def _read(script: str) -> Any:
    try:
        return json.loads(script, strict=False, parse_constant=_refuse)
    except ValueError:
        bare = _LAST_COMMA.sub(_kept, _ASIDE.sub(_kept, script))
        return json.loads(bare, strict=False, parse_constant=_refuse)


def _kept(match: re.Match[str]) -> str:
    return match[1] or ""


def _refuse(constant: str) -> NoReturn:
    """NaN and infinity are no JSON, whatever Python's reader thinks."""
    raise ValueError(constant)


# HTML as a document: what a reader of the page sees, in blocks, and its JSON-LD.
#
# lxml (libxml2) calls `_Reader` for each tag and text and builds no tree: a tree by the HTML standard takes quadratic
# time for some pages (a start tag with 100,000 attributes, 100,000 open `<div>`: 30 to 50 s in Lexbor), or loses what
# is nested deeply. What a table or a list is is known only at its end, so a page is first a flat list of events.
#
# Left out: scripts, styles, templates, forms' controls, navigation, embedded media, and what the page hides (`hidden`,
# `display: none`, `visibility: hidden`, a closed dialog). A table within which a table or heading lies, or that has one
# cell, lays a page out; so does a list within which one lies: their content is read as if they were not there.

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
"""In place of `<br>` in text that is collected; no text that was read holds it."""
MOST_DEPTH = 1000
"""Open elements at which a new parser takes over between two pieces: libxml2 searches all of them for each end
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
        """Whether a `<` is text where the parser is, as far as is known."""
        return self._script is not None or (self._is_raw and self._hidden_at == self.depth)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._open.append(None)
        if tag == "script" and attributes.get("type", "").partition(";")[0].strip().lower() == _TYPE:
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
