"""Documents as cleaned text and blocks (headings, paragraphs, tables, lists), and the HTML reader that produces
them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


class Draft(NamedTuple):
    """A block before it has its place.

    Args:
        parts: a line of text for each row of a table or item of a list; of other blocks the text.
        level, title: of a heading.
    """

    kind: BlockKind
    parts: Sequence[str]
    level: int = 0
    title: str = ""


def lay_out(drafts: Iterable[Draft], json_ld: Sequence[str] = (), unreadable_json_ld: int = 0) -> CleanedPage:
    """The blocks one after the other."""
    texts: list[str] = []
    blocks: list[PageBlock] = []
    at = 0
    for draft in drafts:
        spans = []
        for part in draft.parts:
            spans.append(Extent(at, at + len(part)))
            at += len(part) + 1
        texts.append("\n".join(draft.parts))
        span = Extent(spans[0].start, spans[-1].end)
        blocks.append(PageBlock(draft.kind, span, tuple(spans), draft.level, draft.title))
        at = span.end + len(_BETWEEN)
    return CleanedPage(_BETWEEN.join(texts), tuple(blocks), tuple(json_ld), unreadable_json_ld)


def fit(text: str) -> str:
    """The text with U+FFFD for each NUL and lone surrogate, which neither UTF-8 nor a prompt can hold."""
    return _UNFIT.sub("\ufffd", text)


NodeKind = Literal["page", "heading", "list", "item", "table", "row", "cell"]
_MOST_INDENT = 8
"""Levels that nested lists are indented by; more would make the text of deep ones quadratic."""


@dataclass(slots=True)
class Node:
    """What a page is made of, with its texts and further nodes in order.

    Args:
        number: level of a heading; of an ordered list that of its first item, None without numbers.
        is_header: of a cell.
        is_layout: of a list or table: it only lays the page out.
    """

    kind: NodeKind
    children: list[str | Node] = field(default_factory=list)
    number: int | None = None
    is_header: bool = False
    is_layout: bool = False

    def texts(self) -> Iterator[str]:
        """All texts in it."""
        for child in self.children:
            yield from (child,) if isinstance(child, str) else child.texts()


def drafts_of(node: Node) -> Iterator[Draft]:
    """The blocks of a page: a list or table with all that it holds is one."""
    for child in node.children:
        if isinstance(child, str):
            yield Draft("text", [child])
        elif child.kind == "heading":
            level, (title,) = child.number or 1, child.texts()
            yield Draft("heading", [f"{'#' * level} {title}"], level, title)
        elif child.kind == "list" and not child.is_layout:
            yield from _list(child)
        elif child.kind == "table" and not child.is_layout and (table := _table(child)):
            yield table
        else:
            yield from drafts_of(child)


def _list(node: Node) -> Iterator[Draft]:
    items: list[list[str]] = []
    for is_item, lines in _entries(node, 0):
        if lines and (is_item or not items):
            items.append(lines)
        elif lines:
            items[-1] += lines
    parts = ["\n".join(lines) for lines in items]
    if parts:
        yield Draft("list", [parts[0].lstrip(), *parts[1:]])


def _entries(node: Node, depth: int) -> Iterator[tuple[bool, list[str]]]:
    """For each child of a list whether it is an item, and its lines, indented."""
    indent = "  " * min(depth, _MOST_INDENT)
    number = node.number
    for child in node.children:
        lines: list[str] = []
        marker = ""
        is_item = isinstance(child, Node) and child.kind == "item"
        if is_item:
            marker = "- " if number is None else f"{number}. "
            number = None if number is None else number + 1
        for part in child.children if isinstance(child, Node) and is_item else [child]:
            if isinstance(part, Node):
                lines += [line for _, inner in _entries(part, depth + 1) for line in inner]
                marker = ""
                continue
            for line in part.split("\n"):
                # parts of a block are separated by line ends, so a blank line of preformatted text goes
                if line.strip():
                    lines.append(indent + (marker or "  ") + line.strip())
                    marker = ""
        yield is_item, lines


def _table(node: Node) -> Draft | None:
    """A table, a line a row; None where its cells don't relate to each other: it has neither two rows with text, nor
    two cells with headers.
    """
    above: list[str] = []
    rows: list[list[Node]] = []
    is_loose = False
    """Whether the last row is of cells that have no row."""
    for child in node.children:
        if isinstance(child, str):
            above.append(child)
        elif child.kind == "row":
            above += [one for one in child.children if isinstance(one, str)]
            rows.append([one for one in child.children if isinstance(one, Node)])
            is_loose = False
        elif is_loose:
            rows[-1].append(child)
        else:
            rows.append([child])
            is_loose = True
    texts = [[" ".join(" ".join(cell.texts()).split()) for cell in row] for row in rows]
    kept = [(row, cells) for row, cells in zip(texts, rows, strict=True) if any(row)]
    filled = [cell for row, cells in kept for text, cell in zip(row, cells, strict=True) if text]
    if len(filled) < 2 or (len(kept) < 2 and not any(cell.is_header for cell in filled)):
        return None
    lines = [f"| {' | '.join(row)} |" for row, _ in kept]
    if len(lines) > 1 and all(cell.is_header for cell in kept[0][1]):
        lines[0] += "\n|" + " --- |" * len(kept[0][1])
    if above:
        lines[0] = f"{' '.join(' '.join(above).split())}\n{lines[0]}"
    return Draft("table", lines)


_TYPE = "application/ld+json"


class JsonLd:
    """What scripts of JSON-LD hold: their objects, those of an array at the outside one by one, as extruct has it. Line
    ends within texts are borne with; other faults make a script unreadable.
    """

    def __init__(self) -> None:
        self.items: list[str] = []
        self.unreadable = 0

    def add(self, script: str) -> None:
        """Take a script's text; one without anything in it is no fault."""
        if not script.strip():
            return
        try:
            value = json.loads(script, strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, 1,000 open brackets
            self.unreadable += 1
            return
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                self.items.append(fit(json.dumps(item, ensure_ascii=False)))


def _refuse(constant: str) -> NoReturn:
    """NaN and infinity are no JSON, whatever Python's reader thinks."""
    raise ValueError(constant)


# HTML as a document: what a reader of the page sees, in blocks, and its JSON-LD.
#
# lxml (libxml2) calls `_Reader` for each tag and text and builds no tree: a tree by the HTML standard takes quadratic
# time for some pages (a start tag with 100,000 attributes, 100,000 open `<div>`: 30 to 50 s in Lexbor), or loses what
# is nested deeply. Of that only what shows becomes a node, and lists and tables only to a depth.
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
_NODES: dict[str, NodeKind] = {
    **dict.fromkeys(("ul", "ol", "dl", "menu", "dir"), "list"),
    **dict.fromkeys(("li", "dt"), "item"),
    **dict.fromkeys(("td", "th"), "cell"),
    "table": "table",
    "tr": "row",
}
_PARENTS: dict[NodeKind, tuple[NodeKind, ...]] = {"item": ("list",), "row": ("table",), "cell": ("row", "table")}
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
MOST_NODES = 64
"""Open nodes within which a list or table is text as any other."""


def read_html(html: str, json_ld: JsonLd) -> Iterator[Draft]:
    """A page's blocks, once its JSON-LD is added. Time grows with the page's length alone, whatever it holds.

    Raises:
        MissingExtraError: lxml is not installed.
    """
    page = _Reader(json_ld)
    _parse(fit(html), page)
    return drafts_of(page.root)


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
    """What lxml calls: keeps what shows as nodes."""

    def __init__(self, json_ld: JsonLd) -> None:
        self.root = Node("page")
        self._json_ld = json_ld
        self._script: list[str] | None = None
        self._open: list[Node | None] = []
        """For each open element the node that it opened, if any."""
        self._nodes = [self.root]
        """Those that are open."""
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
        kind = _NODES.get(tag)
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
            self._open_node(kind, tag, attributes)

    def end(self, tag: str) -> None:
        depth, node = self.depth, self._open.pop()
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
        if node is not None:
            self._nodes.pop()

    def data(self, text: str) -> None:
        if self._script is not None:
            self._script.append(text)
        elif self._hidden_at is None:
            self._text.append(text)

    def close(self) -> None:
        """Called at the end of each parser; all elements were ended."""
        self._end_text()

    def _open_node(self, kind: NodeKind, tag: str, attributes: Mapping[str, str]) -> None:
        parents = _PARENTS.get(kind)
        # a `li` outside of a list is a block of text, as any
        if self._nodes[-1].kind not in parents if parents else len(self._nodes) > MOST_NODES:
            return
        node = Node(kind, is_header=tag == "th")
        if kind == "table":
            self._mark_layout()
            node.is_layout = attributes.get("role", "").strip().lower() in ("presentation", "none")
        if tag == "ol":
            given = attributes.get("start", "").strip()
            node.number = int(given) if _NUMBER.fullmatch(given) else 1
        self._nodes[-1].children.append(node)
        self._open[-1] = node
        self._nodes.append(node)

    def _mark_layout(self) -> None:
        """Lists and tables around a heading or table only lay it out."""
        for node in self._nodes:
            node.is_layout = True

    def _end_heading(self) -> None:
        if self._heading is not None:
            level = self._heading[1]
            self._heading = None
            if title := " ".join("".join(self._taken()).replace(_LINE_BREAK, " ").split()):
                self._nodes[-1].children.append(Node("heading", [title], level))

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
            self._nodes[-1].children.append(text)

    def _taken(self) -> list[str]:
        taken, self._text = self._text, []
        return taken


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    return (
        "hidden" in attributes
        or (tag == "dialog" and "open" not in attributes)
        or ("style" in attributes and _HIDING.search(attributes["style"]) is not None)
    )
