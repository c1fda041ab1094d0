"""A document from what a user has: HTML, Markdown, wikitext or text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from relabel.jobs.pairs.html_reading import read_html
from relabel.jobs.pairs.json_ld import JsonLd
from relabel.jobs.pairs.pages import CleanedPage, PageWriter, fit
from relabel.jobs.pairs.wikitext import wikitext_html
from relabel.manifests.extras import require

Form = Literal["html", "markdown", "wikitext", "text"]
_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")
_PREFIX = re.compile(r"^(?:[ \t>]|[-+*](?=[ \t])|\d{1,9}[.)](?=[ \t]))*", re.MULTILINE)
_MOST_PREFIX = 40
"""Columns of `> - 1.` and blanks that a line begins with at most: markdown-it leaves out what is nested more deeply."""
_MOST_NESTING = 100


def read_page(texts: Iterable[tuple[str, Form]]) -> CleanedPage:
    """Read texts, one after the other, as one document.

    Markdown is CommonMark with tables and struck-out text; HTML in it is read as HTML, and so are its links: their text
    stays, their targets go; of wikitext likewise (`wikitext.py`). Of text, paragraphs are parted by blank lines and
    their lines stay as they are.

    Raises:
        MissingExtraError: what reads the form is not installed.
    """
    writer, json_ld = PageWriter(), JsonLd()
    for text, form in texts:
        if form == "text":
            _read_text(text, writer)
        else:
            read_html(_AS_HTML[form](text), writer, json_ld)
    return writer.finish(json_ld.items, json_ld.unreadable)


def _read_text(text: str, to: PageWriter) -> None:
    lines = fit(text).replace("\r\n", "\n").replace("\r", "\n")
    for paragraph in _BLANK.split(lines):
        if stripped := paragraph.strip():
            to.text(stripped)


def _html_of(markdown: str) -> str:
    library: Any = require("markdown_it", extra="pairs", purpose="documents in Markdown")
    reader = library.MarkdownIt("commonmark", {"maxNesting": _MOST_NESTING}).enable(["table", "strikethrough"])
    lines = fit(markdown).replace("\r\n", "\n").replace("\r", "\n")
    rendered: str = reader.render(_PREFIX.sub(lambda match: _shallow(match[0]), lines))
    return rendered


def _shallow(prefix: str) -> str:
    return prefix if len(prefix) <= _MOST_PREFIX // 4 else prefix.expandtabs(4)[:_MOST_PREFIX]


_AS_HTML: dict[Form, Callable[[str], str]] = {"html": str, "markdown": _html_of, "wikitext": wikitext_html}
