"""Reads documents (HTML, Markdown, wikitext or text) as cleaned text and blocks: headings, paragraphs, tables, lists.

`read_page` is the door. All forms but text become HTML, which one reader takes apart.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from relabel.manifests.process import require

# A document as its cleaned text and the blocks that it is made of: headings, text, tables and lists, each with its
# place in that text.
#
# The cleaned text looks like Markdown (`## heading`, `- item`, `| cell | cell |`), but nothing in it is escaped: it is
# for models and people, and what is a heading or a table is known from the blocks, never read back from the marks.
# Blocks are parted by one blank line. Places are offsets in code points, as Python's `str` counts them.

BlockKind = Literal["heading", "text", "table", "list"]
_BETWEEN = "\n\n"


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


Draft: TypeAlias = tuple[BlockKind, Sequence[str], int, str]
"""A block before it has its place: its kind; a line of text for each row of a table or item of a list, of other blocks
the text; level and title of a heading.
"""


Form = Literal["html", "markdown", "wikitext", "text"]


def read_page(texts: Iterable[tuple[str, Form]]) -> CleanedPage:
    """Read texts, one after the other, as one document.

    Markdown is CommonMark with tables and struck-out text; HTML in it is read as HTML, and so are its links: their text
    stays, their targets go; of wikitext likewise. Of text, paragraphs are parted by blank lines and their lines stay as
    they are.

    Raises:
        MissingExtraError: what reads the form is not installed.
    """
    drafts: list[Draft] = []
    scripts: list[str] = []
    for text, form in texts:
        if form == "text":
            drafts += [
                ("text", [one.strip()], 0, "") for one in re.split(r"\n(?:[^\S\n]*\n)+", _lines(text)) if one.strip()
            ]
        else:
            page = read_html(_AS_HTML[form](text))
            drafts += drafts_of(page.root)
            scripts += page.scripts
    blocks: list[PageBlock] = []
    at = 0
    for kind, parts, level, title in drafts:
        starts = itertools.accumulate((len(part) + 1 for part in parts), initial=at)
        spans = tuple(Extent(start, start + len(part)) for start, part in zip(starts, parts, strict=False))
        blocks.append(
            PageBlock(
                kind,
                Extent(at, spans[-1].end),
                spans,
                level,
                title,
            )
        )
        at = spans[-1].end + len(_BETWEEN)
    return CleanedPage(_BETWEEN.join("\n".join(parts) for _, parts, *_ in drafts), tuple(blocks), *json_ld_of(scripts))


def _lines(text: str) -> str:
    return fit(text).replace("\r\n", "\n").replace("\r", "\n")


def fit(text: str) -> str:
    """The text with U+FFFD for each NUL and lone surrogate, which neither UTF-8 nor a prompt can hold."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


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
            yield "text", [child], 0, ""
        elif child.kind == "heading":
            level = child.number or 1
            (title,) = child.texts()
            yield "heading", [f"{'#' * level} {title}"], level, title
        elif child.kind == "list" and not child.is_layout:
            parts = ["\n".join(lines) for lines in _items(child, 0)]
            if parts:
                yield "list", [parts[0].lstrip(), *parts[1:]], 0, ""
        elif child.kind == "table" and not child.is_layout and (table := _table(child)):
            yield table
        else:
            yield from drafts_of(child)


def _items(node: Node, depth: int) -> list[list[str]]:
    """The lines of each item of a list, indented; what is in none belongs to the one before."""
    indent = "  " * min(depth, _MOST_INDENT)
    number = node.number
    items = list[list[str]]()
    for child in node.children:
        lines: list[str] = []
        marker = ""
        is_item = isinstance(child, Node) and child.kind == "item"
        if is_item:
            marker = "- " if number is None else f"{number}. "
            number = None if number is None else number + 1
        for part in child.children if isinstance(child, Node) and is_item else [child]:
            if isinstance(part, Node):
                lines += itertools.chain.from_iterable(_items(part, depth + 1))
                marker = ""
                continue
            # parts of a block are separated by line ends, so a blank line of preformatted text goes
            for line in filter(None, map(str.strip, part.split("\n"))):
                lines.append(indent + (marker or "  ") + line)
                marker = ""
        if lines and (is_item or not items):
            items.append(lines)
        elif lines:
            items[-1] += lines
    return items


def _table(node: Node) -> Draft | None:
    """A table, a line a row; None where its cells don't relate to each other: it has neither two rows with text, nor
    two cells with headers.
    """
    above: list[str] = []
    for child in node.children:
        if isinstance(child, str):
            above.append(child)
        elif child.kind == "row":
            above += [inner for inner in child.children if isinstance(inner, str)]
    rows: list[list[Node]] = []
    nodes = [child for child in node.children if isinstance(child, Node)]
    for is_row, group in itertools.groupby(nodes, lambda child: child.kind == "row"):
        if not is_row:
            rows.append(list(group))  # cells that have no row are one
            continue
        for row in group:
            rows.append([cell for cell in row.children if isinstance(cell, Node)])
    filled_rows: list[tuple[list[str], list[Node]]] = []
    filled: list[Node] = []
    for cells in rows:
        texts = [" ".join(" ".join(cell.texts()).split()) for cell in cells]
        if any(texts):
            filled_rows.append((texts, cells))
            filled += [cell for text, cell in zip(texts, cells, strict=True) if text]
    if len(filled) < 2 or (len(filled_rows) < 2 and not any(cell.is_header for cell in filled)):
        return None
    lines = [f"| {' | '.join(texts)} |" for texts, _ in filled_rows]
    _, first = filled_rows[0]
    if len(lines) > 1 and all(cell.is_header for cell in first):
        lines[0] += "\n|" + " --- |" * len(first)
    if above:
        lines[0] = f"{' '.join(' '.join(above).split())}\n{lines[0]}"
    return "table", lines, 0, ""


def json_ld_of(scripts: Iterable[str]) -> tuple[tuple[str, ...], int]:
    """What scripts of JSON-LD hold, and how many are no JSON: their objects, those of an array at the outside one by
    one, as extruct has it. Line ends within texts are borne with.
    """
    items = list[str]()
    unreadable = 0
    for script in filter(str.strip, scripts):
        try:
            value = json.loads(script, strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, 1,000 open brackets
            unreadable += 1
            continue
        values = value if isinstance(value, list) else [value]
        items += [fit(json.dumps(item, ensure_ascii=False)) for item in values if isinstance(item, dict)]
    return tuple(items), unreadable


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
_HIDING = re.compile(r"display\s{0,9}:\s{0,9}none|visibility\s{0,9}:\s{0,9}hidden", re.IGNORECASE)
_LINE_BREAK = "\0"
"""In place of `<br>` in text that is collected; no text that was read holds it."""
MOST_DEPTH = 1000
"""Open elements at which a new parser takes over between two pieces: libxml2 searches all of them for each end
tag that matches none. Browsers stop at 512.
"""
PIECE_CHARS = 1 << 16
_PIECE = re.compile(f".{{1,{PIECE_CHARS}}}(?:(?=<)|\\Z)|.{{1,{PIECE_CHARS}}}", re.DOTALL)
"""Pieces end before a `<` where they can."""
MOST_NODES = 64
"""Open nodes within which a list or table is text as any other."""


def read_html(text: str) -> _Reader:
    """A page's nodes, and its scripts of JSON-LD. Time grows with the page's length alone, whatever it holds.

    Raises:
        MissingExtraError: lxml is not installed.
    """
    etree = require("lxml.etree", extra="pairs", purpose="relabel pairs chunk")
    page, is_borne = _Reader(), contextlib.suppress(etree.XMLSyntaxError)  # it found nothing, which is no fault
    parser = etree.HTMLParser(target=page, huge_tree=True)
    for piece in _PIECE.finditer(fit(text)):
        parser.feed(piece[0])
        if len(page.open) > MOST_DEPTH and not page.is_raw:
            with is_borne:
                parser.close()
            parser = etree.HTMLParser(target=page, huge_tree=True)
    with is_borne:
        parser.close()
    return page


class _Reader:
    """What lxml calls: keeps what shows as nodes."""

    def __init__(self) -> None:
        self.root = Node("page")
        self.scripts: list[str] = []
        self._script: list[str] | None = None
        self.open: list[Node | None] = []
        """For each open element the node that it opened, if any."""
        self.is_raw = False
        """Whether a `<` is text where the parser is."""
        self._nodes = [self.root]
        """Those that are open."""
        self._hidden_at: int | None = None
        """Depth of the element that hides what is in it."""
        self._pre_at: int | None = None
        self._heading: tuple[int, int] | None = None
        """Depth and level of the heading that is open."""
        self._text: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.open.append(None)
        self.is_raw = _RAW.fullmatch(tag) is not None
        depth = len(self.open)
        if tag == "script" and attributes.get("type", "").partition(";")[0].strip().lower() == "application/ld+json":
            self._script = []
        if self._hidden_at is not None:
            return
        is_block = _BLOCK.fullmatch(tag) is not None
        is_heading = re.fullmatch("h[1-6]", tag) is not None
        kind = _NODES.get(tag)
        if is_heading or (kind in ("list", "table") and self._heading):
            self._end_heading()
        if is_block:
            self._end_text()
        is_shut = "hidden" in attributes or (tag == "dialog" and "open" not in attributes)
        if _LEFT_OUT.fullmatch(tag) or is_shut or _HIDING.search(attributes.get("style", "")):
            self._hidden_at = depth
        elif tag == "br":
            self._text.append(_LINE_BREAK)
        elif tag == "pre" and self._pre_at is None:
            self._pre_at = depth
        elif is_heading:
            self._mark_layout()
            self._heading = depth, int(tag[1])
        elif kind is not None:
            self._open_node(kind, tag, attributes)

    def end(self, tag: str) -> None:
        depth = len(self.open)
        node = self.open.pop()
        self.is_raw = False
        if tag == "script" and self._script is not None:
            self.scripts.append("".join(self._script))
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
            node.number = int(given) if re.fullmatch("-?[0-9]{1,9}", given) else 1
        self._nodes[-1].children.append(node)
        self.open[-1] = node
        self._nodes.append(node)

    def _mark_layout(self) -> None:
        """Lists and tables around a heading or table only lay it out."""
        for node in self._nodes:
            node.is_layout = True

    def _end_heading(self) -> None:
        if self._heading is not None:
            level = self._heading[1]
            self._heading = None
            title = " ".join("".join(self._taken()).replace(_LINE_BREAK, " ").split())
            if title:
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
        taken = self._text
        self._text = []
        return taken


# ------------------------------------------------------------------------------
# Markdown as HTML.

_PREFIX = re.compile(r"^(?:[ \t>]|[-+*](?=[ \t])|\d{1,9}[.)](?=[ \t]))*", re.MULTILINE)
_MOST_PREFIX = 40
"""Columns of `> - 1.` and blanks that a line begins with at most: markdown-it leaves out what is nested more deeply."""


def _markdown_html(markdown: str) -> str:
    library: Any = require("markdown_it", extra="pairs", purpose="documents in Markdown")
    reader = library.MarkdownIt("commonmark", {"maxNesting": 100}).enable(["table", "strikethrough"])

    def shallow(prefix: re.Match[str]) -> str:
        return prefix[0] if len(prefix[0]) <= _MOST_PREFIX // 4 else prefix[0].expandtabs(4)[:_MOST_PREFIX]

    return str(reader.render(_PREFIX.sub(shallow, _lines(markdown))))


# ------------------------------------------------------------------------------
# Wikitext as HTML, for the reader of HTML: mwparserfromhell parses, and what a reader of the page sees is written.
#
# A template can't be expanded without its wiki: an infobox becomes a table of its fields, a template that only marks
# words (`{{lang|fr|…}}`) leaves them, any other leaves nothing. Left out too: references, files, categories, comments,
# magic words, and the targets of links.

_NOT_SHOWN = {"ref", "references", "gallery", "imagemap", "timeline", "score", "templatestyles", "graph", "mapframe"}
_AS_TEXT = {"nowiki", "math", "chem", "code", "tt", "source", "syntaxhighlight", "pre", "poem"}
_NO_TEXT_LINK = re.compile(
    r"\s*(?:(?:file|image|media|category|datei|bild|kategorie|fichier|catégorie)\s*:|[a-z]{2,3}(?:-[a-z]+)?:)",
    re.IGNORECASE,
)
_STRAY_TAG = re.compile(r"</?[a-z][a-z0-9]*(?:[\s/][^<>]*)?>", re.IGNORECASE)
"""A tag without its other end, which the parser leaves in the text."""
_SHOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("nowrap", "nobr", "small", "big", "angbr", "smallcaps", "abbr", "circa"), ("1",)),
    **dict.fromkeys(("lang", "transl", "tooltip"), ("2",)),
    **dict.fromkeys(("convert", "cvt", "sortkeyname", "sortname"), ("1", "2")),
    **dict.fromkeys(("birth date", "birth date and age", "death date", "death date and age"), ("1", "2", "3")),
    **dict.fromkeys(("start date", "start date and age", "end date", "dts"), ("1", "2", "3")),
    **dict.fromkeys(("ubl", "ublist", "unbulleted list", "hlist", "flatlist", "plainlist"), tuple("123456789")),
    "quote": ("1",),
}
"""Templates that leave words, and which of their fields these are."""


def wikitext_html(wikitext: str) -> str:
    """HTML with the text, headings, lists and tables of a page.

    Raises:
        MissingExtraError: mwparserfromhell is not installed.
    """
    parser: Any = require("mwparserfromhell", extra="pairs", purpose="documents in wikitext")
    return _html_of(
        parser.parse(re.sub(r"(?m)^([*#:;]{10})[*#:;]+", r"\1", re.sub("__[A-Z]+__", "", _lines(wikitext))))
    )


def _html_of(code: Any) -> str:
    page = _Wiki()
    _write(code, page)
    page.block("")
    return "".join(page.pieces)


class _Wiki:
    """HTML from text whose line ends mean something: lists are lines with a mark, a blank line ends a paragraph."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._lists = ""
        """Marks of the lists that are open, the outermost first."""
        self._mark = ""
        self._is_line_empty = True

    def mark(self, mark: str) -> None:
        """A mark of a list; within a line it is text."""
        if self._is_line_empty:
            self._mark += mark
        else:
            self.inline(f"{mark} ")

    def text(self, text: str) -> None:
        for number, line in enumerate(text.split("\n")):
            if number:
                if self._is_line_empty and not self._mark:
                    self._nest("")
                    self.pieces.append("<p>")
                self.pieces.append("\n")
                self._mark = ""
                self._is_line_empty = True
            if line.strip() or (line and not self._is_line_empty):
                self.inline(html.escape(line, quote=False))

    def inline(self, written: str) -> None:
        """HTML within a line."""
        if self._is_line_empty:
            self._begin()
        self.pieces.append(written)

    def block(self, written: str) -> None:
        """HTML that is a block, which ends all lists."""
        self._mark = ""
        self._is_line_empty = True
        self._nest("")
        self.pieces.append(written)

    def _begin(self) -> None:
        """What a line begins with, once there is something on it."""
        self._is_line_empty = False
        items = "".join(mark for mark in self._mark if mark in "*#")
        goes_on = self._mark.endswith(":") and self._lists.startswith(items)
        if self._mark or self._lists:
            self._nest(items)
            if not items:
                self.pieces.append("<p>")
            else:
                self.pieces.append("<br>" if goes_on else "<li>")

    def _nest(self, wanted: str) -> None:
        """Close and open lists until those of `wanted` are open."""
        pairs = zip(self._lists, wanted, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.pieces += ["</ul>" if mark == "*" else "</ol>" for mark in reversed(self._lists[same:])]
        self.pieces += ["<ul>" if mark == "*" else "<ol>" for mark in wanted[same:]]
        self._lists = wanted


def _write(code: Any, page: _Wiki) -> None:
    for node in () if code is None else code.nodes:
        match type(node).__name__:
            case "Text":
                page.text(_STRAY_TAG.sub("", str(node)))
            case "HTMLEntity":
                page.inline(str(node))
            case "Heading":
                level = min(max(node.level, 1), 6)
                page.block(f"<h{level}>{_html_of(node.title)}</h{level}>")
            case "Wikilink" if not _NO_TEXT_LINK.match(str(node.title)):
                if node.text is not None and str(node.text).strip():
                    _write(node.text, page)
                else:
                    page.text(" ".join(str(node.title).lstrip(" :").split()))
            case "ExternalLink":
                _write(node.title, page)
                if node.title is None and not node.brackets:
                    page.text(str(node.url))
            case "Template":
                _write_template(node, page)
            case "Tag":
                _write_tag(node, page)
            case "Argument":
                _write(node.default, page)


def _write_template(node: Any, page: _Wiki) -> None:
    name = " ".join(str(node.name).replace("_", " ").split()).lower()
    if name.startswith("infobox"):
        fields = [(html.escape(str(one.name).strip()), _html_of(one.value)) for one in node.params if one.showkey]
        shown = (
            f"<tr><th>{key}</th><td>{value}</td></tr>" for key, value in fields if re.sub("<[^>]*>", "", value).strip()
        )
        page.block(f"<table>{''.join(shown)}</table>")
    for place, key in enumerate(_SHOWN.get(name, ())):
        if node.has(key):
            page.text(" " * (place > 0))
            _write(node.get(key).value, page)


def _write_tag(node: Any, page: _Wiki) -> None:
    name = str(node.tag).strip().lower()
    mark = node.wiki_markup
    if name in _NOT_SHOWN:
        return
    if mark in ("*", "#", ":", ";"):
        page.mark(mark)
    elif name == "table":
        page.block(f"<table>{_rows_of(node.contents)}</table>")
    elif name == "br":
        page.inline("<br>")
    elif name == "hr":
        page.block("<hr>")
    elif node.contents is None or name in ("b", "i") or not name.isalnum():
        _write(node.contents, page)
    elif name in _AS_TEXT:
        for number, line in enumerate(str(node.contents).split("\n")):
            page.inline(("<br>" if number else "") + html.escape(line, quote=False))
    else:
        style = node.get("style").value if node.has("style") else ""
        page.inline(f'<{name} style="{html.escape(str(style))}">')
        _write(node.contents, page)
        page.inline(f"</{name}>")


def _rows_of(code: Any) -> str:
    """The rows of a table; the first may have no mark of its own, after a caption."""
    rows = []
    cells = []
    caption = ""
    for node in code.nodes:
        name = str(node.tag) if type(node).__name__ == "Tag" else ""
        if name == "tr":
            rows.append(_cells_of(() if node.contents is None else node.contents.nodes))
        elif name in ("td", "th") and str(node.contents).startswith("+"):
            caption = f"<caption>{_html_of(node.contents).replace('+', '', 1)}</caption>"
        elif name in ("td", "th"):
            cells.append(node)
    return caption + "".join(f"<tr>{row}</tr>" for row in (_cells_of(cells), *rows) if row)


def _cells_of(nodes: Any) -> str:
    found = ((str(one.tag), one.contents) for one in nodes if type(one).__name__ == "Tag")
    return "".join(f"<{name}>{_html_of(contents)}</{name}>" for name, contents in found if name in ("td", "th"))


_AS_HTML: dict[Form, Callable[[str], str]] = {"html": str, "markdown": _markdown_html, "wikitext": wikitext_html}
