"""Converts wikitext to HTML for the HTML reader."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

from relabel.jobs.pairs.pages import fit
from relabel.manifests.process import require

# Wikitext as HTML, for the reader of HTML: mwparserfromhell parses, and what a reader of the page sees is written.
#
# A template can't be expanded without its wiki: an infobox becomes a table of its fields, a template that only marks
# words (`{{lang|fr|…}}`) leaves them, any other leaves nothing. Left out too: references, files, categories, comments,
# magic words, and the targets of links.

_LEFT_OUT = {"ref", "references", "gallery", "imagemap", "timeline", "score", "templatestyles", "graph", "mapframe"}
_AS_TEXT = {"nowiki", "math", "chem", "code", "tt", "source", "syntaxhighlight", "pre", "poem"}
_NO_TEXT_LINK = re.compile(
    r"\s*(?:(?:file|image|media|category|datei|bild|kategorie|fichier|catégorie)\s*:|[a-z]{2,3}(?:-[a-z]+)?:)",
    re.IGNORECASE,
)
_DEEP_MARKS = re.compile(r"^([*#:;]{10})[*#:;]+", re.MULTILINE)
_HTML_TAG = re.compile("<[^>]*>")
_STRAY_TAG = re.compile(r"</?[a-z][a-z0-9]*(?:[\s/][^<>]*)?>", re.IGNORECASE)
"""A tag without its other end, which the parser leaves in the text."""
_MAGIC = re.compile(r"__[A-Z]+__")
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
    text = fit(wikitext).replace("\r\n", "\n").replace("\r", "\n")
    return _html_of(parser.parse(_DEEP_MARKS.sub(r"\1", _MAGIC.sub("", text))))


def _html_of(code: Any) -> str:
    page = _Lines()
    _write(code, page)
    page.end_lists()
    return "".join(page.pieces)


class _Lines:
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
        first, *others = text.split("\n")
        if first:
            self._take(html.escape(first, quote=False))
        for line in others:
            if self._is_line_empty and not self._mark:
                self._nest("")
                self.pieces.append("<p>")
            self.pieces.append("\n")
            self._mark, self._is_line_empty = "", True
            if line:
                self._take(html.escape(line, quote=False))

    def inline(self, written: str) -> None:
        """HTML within a line."""
        self._begin()
        self.pieces.append(written)

    def block(self, written: str) -> None:
        """HTML that is a block, which ends all lists."""
        self.end_lists()
        self.pieces.append(written)
        self._is_line_empty = True

    def end_lists(self) -> None:
        self._mark = ""
        self._nest("")

    def _take(self, written: str) -> None:
        if not self._is_line_empty or written.strip():
            self.inline(written)

    def _begin(self) -> None:
        """What a line begins with, once there is something on it."""
        if not self._is_line_empty:
            return
        self._is_line_empty = False
        items = "".join(one for one in self._mark if one in "*#")
        goes_on = self._mark.endswith(":") and self._lists.startswith(items)
        if self._mark or self._lists:
            self._nest(items)
            self.pieces.append("<br>" if items and goes_on else "<li>" if items else "<p>")

    def _nest(self, wanted: str) -> None:
        """Close and open lists until those of `wanted` are open."""
        pairs = zip(self._lists, wanted, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for mark in reversed(self._lists[same:]):
            self.pieces.append("</ul>" if mark == "*" else "</ol>")
        for mark in wanted[same:]:
            self.pieces.append("<ul>" if mark == "*" else "<ol>")
        self._lists = wanted


def _write(code: Any, page: _Lines) -> None:
    for node in code.nodes:
        match type(node).__name__:
            case "Text":
                page.text(_STRAY_TAG.sub("", str(node)))
            case "HTMLEntity":
                page.inline(str(node))
            case "Heading":
                level = min(max(node.level, 1), 6)
                page.block(f"<h{level}>{_html_of(node.title)}</h{level}>")
            case "Wikilink":
                _write_link(node, page)
            case "ExternalLink":
                if node.title is not None:
                    _write(node.title, page)
                elif not node.brackets:
                    page.text(str(node.url))
            case "Template":
                _write_template(node, page)
            case "Tag":
                _write_tag(node, page)
            case "Argument" if node.default is not None:
                _write(node.default, page)


def _write_link(node: Any, page: _Lines) -> None:
    target = str(node.title)
    if _NO_TEXT_LINK.match(target):
        return
    if node.text is not None and str(node.text).strip():
        _write(node.text, page)
    else:
        page.text(" ".join(target.lstrip(" :").split()))


def _write_template(node: Any, page: _Lines) -> None:
    name = " ".join(str(node.name).replace("_", " ").split()).lower()
    if name.startswith("infobox"):
        fields = [(str(one.name).strip(), _html_of(one.value)) for one in node.params if one.showkey]
        rows = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{value}</td></tr>"
            for key, value in fields
            if _HTML_TAG.sub("", value).strip()
        )
        page.block(f"<table>{rows}</table>")
    for place, field in enumerate(_SHOWN.get(name, ())):
        if node.has(field):
            page.text(" " * (place > 0))
            _write(node.get(field).value, page)


def _write_tag(node: Any, page: _Lines) -> None:
    name, mark = str(node.tag).strip().lower(), node.wiki_markup
    if name in _LEFT_OUT:
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
        _write_contents(node, page)
    elif name in _AS_TEXT:
        for number, line in enumerate(str(node.contents).split("\n")):
            page.inline(("<br>" if number else "") + html.escape(line, quote=False))
    else:
        style = node.get("style").value if node.has("style") else ""
        page.inline(f'<{name} style="{html.escape(str(style))}">')
        _write_contents(node, page)
        page.inline(f"</{name}>")


def _write_contents(node: Any, page: _Lines) -> None:
    if node.contents is not None:
        _write(node.contents, page)


def _rows_of(code: Any) -> str:
    """The rows of a table; the first may have no mark of its own, after a caption."""
    rows, cells, caption = [], [], ""
    for node in code.nodes:
        name = str(node.tag) if type(node).__name__ == "Tag" else ""
        if name == "tr":
            rows.append(_cells_of(node.contents.nodes if node.contents is not None else ()))
        elif name in ("td", "th") and str(node.contents).startswith("+"):
            caption = f"<caption>{_html_of(node.contents).replace('+', '', 1)}</caption>"
        elif name in ("td", "th"):
            cells.append(node)
    return caption + "".join(f"<tr>{row}</tr>" for row in (_cells_of(cells), *rows) if row)


def _cells_of(nodes: Any) -> str:
    found = ((str(one.tag), one.contents) for one in nodes if type(one).__name__ == "Tag")
    return "".join(
        f"<{name}>{'' if contents is None else _html_of(contents)}</{name}>"
        for name, contents in found
        if name in ("td", "th")
    )
