"""Reads the document of each pair (HTML, Markdown, wikitext or text) and adds columns to the pairs, such as the heading
tree. Memory does not grow with the file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from relabel.jobs.pairs.pages import CleanedPage, Draft, Extent, JsonLd, PageBlock, fit, lay_out, read_html
from relabel.jobs.pairs.wikitext import wikitext_html
from relabel.jobs.tables import PairsFile, add_columns, check_columns, open_pairs, refuse_taken
from relabel.manifests.columns import values_of
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.process import require
from relabel.manifests.trees import COLUMN, CONTENT, NO_PARENT, NODES, ROOT, STRUCTURE, Node

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
    drafts, json_ld = list[Draft](), JsonLd()
    for text, form in texts:
        if form == "text":
            lines = fit(text).replace("\r\n", "\n").replace("\r", "\n")
            drafts += [Draft("text", [one.strip()]) for one in _BLANK.split(lines) if one.strip()]
        else:
            drafts += read_html(_AS_HTML[form](text), json_ld)
    return lay_out(drafts, json_ld.items, json_ld.unreadable)


def _html_of(markdown: str) -> str:
    library: Any = require("markdown_it", extra="pairs", purpose="documents in Markdown")
    reader = library.MarkdownIt("commonmark", {"maxNesting": _MOST_NESTING}).enable(["table", "strikethrough"])
    lines = fit(markdown).replace("\r\n", "\n").replace("\r", "\n")
    rendered: str = reader.render(_PREFIX.sub(lambda match: _shallow(match[0]), lines))
    return rendered


def _shallow(prefix: str) -> str:
    return prefix if len(prefix) <= _MOST_PREFIX // 4 else prefix.expandtabs(4)[:_MOST_PREFIX]


_AS_HTML: dict[Form, Callable[[str], str]] = {"html": str, "markdown": _html_of, "wikitext": wikitext_html}


DOCUMENT, TITLE = "document", "title"
TEXT = pa.large_string()
_BATCH_ROWS = 32
"""Rows read at a time; a page may have megabytes."""


class PageRow(NamedTuple):
    """A pair's document.

    Args:
        title: of the column `title`; empty where there is none.
        has_title: whether the page begins with it.
    """

    page: CleanedPage
    title: str
    has_title: bool


def add_page_columns(
    pairs_path: str,
    to: str,
    form: Form,
    column: str | None,
    added: Mapping[str, pa.DataType],
    values: Callable[[PageRow], Sequence[Any]],
    storage: Storage,
) -> None:
    """Write the pairs with further columns, rows in the order of the input.

    Args:
        form: of the documents; a title is text in any case.
        column: that holds the documents; None for `html`, else the columns that a job would read.
        added: name and type of each; `document` may take the place of the one that was read.
        values: of a pair, one for each added column.
    Raises:
        InputError: a file or column is off, or a column that is written is there already.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        MissingExtraError: what reads the documents is not installed.
    """
    pairs = open_pairs(pairs_path, {}, storage)
    columns = _document_columns(column, pairs)
    refuse_taken(pairs, [name for name in added if name != DOCUMENT or DOCUMENT not in columns])
    read = {*columns, *([TITLE] if str(pairs.types.get(TITLE)) == "String" else [])}

    def values_of_rows(table: pa.Table) -> dict[str, Sequence[Any]]:
        texts = {name: values_of(table[name], pairs_path) for name in sorted(read)}
        rows = [
            values(_read(dict(zip(texts, row, strict=True)), columns, form, column))
            for row in zip(*texts.values(), strict=True)
        ]
        return dict(zip(added, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(added, ())

    add_columns(pairs, to, added, values_of_rows, storage, batch_rows=_BATCH_ROWS)


def _document_columns(column: str | None, pairs: PairsFile) -> tuple[str, ...]:
    """The columns that hold the documents.

    Raises:
        InputError: there are none, or they hold no text.
    """
    names = pairs.types
    given = (column,) if column else ("html",) if "html" in names else (DOCUMENT,) if DOCUMENT in names else ()
    columns = given or tuple(name for name in (TITLE, "body") if name in names)
    if not columns:
        raise InputError(
            f"{pairs.named} (PAIRS): no column for the document: neither `html`, `document`, `title` nor `body`. It "
            f"has {', '.join(names)}. Name it with --column."
        )
    check_columns(names, dict.fromkeys(columns, "text"), file=pairs.named, role="PAIRS")
    return columns


def _read(row: Mapping[str, str | None], columns: Sequence[str], form: Form, column: str | None) -> PageRow:
    has_title = TITLE in columns and column is None
    texts = [(text, name) for name in columns if (text := row[name])]
    page = read_page((text, "text" if name == TITLE and has_title else form) for text, name in texts)
    title = " ".join((row.get(TITLE) or "").split()) if column != TITLE else ""
    return PageRow(page, title, has_title and bool(title))


# The structure tree of a page: its headings, and what is under each.
#
# Source: RDR2 (papers, section 3.2). A paragraph is a node, a table is one, and so is each outermost item of a list, as
# in the paper's own example. A heading is under the last one of a lower level, whatever levels are skipped.

_ADDED: dict[str, pa.DataType] = {DOCUMENT: TEXT, COLUMN: NODES}


def tree_pairs(pairs_path: str, to: str, form: Form, column: str | None, storage: Storage) -> Counter[str]:
    """Write the pairs with the columns `document` and `tree`, rows in the order of the input; pairs and nodes (without
    the roots) by type, and documents without content.

    Raises:
        InputError, DiskFullError, StoreError, MissingExtraError: see `add_page_columns`.
    """
    counts = Counter[str]()

    def values(row: PageRow) -> Sequence[Any]:
        nodes = tree_of(row.page, row.title, has_title=row.has_title)
        counts["pairs"] += 1
        counts["documents_without_content"] += not any(node.is_content for node in nodes)
        counts["content_nodes"] += sum(node.is_content for node in nodes[1:])
        counts["structure_nodes"] += sum(not node.is_content for node in nodes[1:])
        return row.page.text, [node._asdict() for node in nodes]

    add_page_columns(pairs_path, to, form, column, _ADDED, values, storage)
    return counts


def tree_of(page: CleanedPage, title: str = "", *, has_title: bool = False) -> list[Node]:
    """The nodes of a page, the root first.

    Args:
        title: the root's text.
        has_title: the page begins with it, so that the root is there, and is not also content.
    """
    blocks = list(page.blocks)
    span = blocks.pop(0).span if has_title else Extent(0, 0)
    text = page.text[span.start : span.end] if has_title else fit(title)
    nodes = [Node(ROOT, STRUCTURE, 0, text, *span, NO_PARENT)]
    above = [(0, nodes[0])]
    """The headings that the next block is under, each with its level on the page."""
    for block in blocks:
        if block.kind == "heading":
            while above[-1][0] >= block.level:
                above.pop()
        parent = above[-1][1]
        for start, end in _extents(block):
            kind = STRUCTURE if block.kind == "heading" else CONTENT
            nodes.append(Node(len(nodes), kind, parent.level + 1, page.text[start:end], start, end, parent.id))
        if block.kind == "heading":
            above.append((block.level, nodes[-1]))
    return nodes


def _extents(block: PageBlock) -> Iterator[Extent]:
    """Where a block's nodes are: a heading's without its marks, a list's items each."""
    if block.kind == "heading":
        yield Extent(block.span.end - len(block.title), block.span.end)
    elif block.kind == "list":
        yield from block.parts
    else:
        yield block.span
