"""The structure tree of a page: its headings, and what stands under each.

Source: RDR2 (papers, section 3.2). A paragraph is a node, a table is one, and so is each outermost item of a list, as
in the paper's own example. A heading stands under the last one of a lower level, whatever levels lie between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from relabel.jobs.pairs.page_columns import DOCUMENT, TEXT, PageRow, add_page_columns
from relabel.jobs.pairs.pages import CleanedPage, Extent, PageBlock, fit
from relabel.jobs.pairs.reading import Form
from relabel.manifests.storage.context import Storage
from relabel.manifests.trees import COLUMN, CONTENT, NO_PARENT, NODES, ROOT, STRUCTURE, Node

_ADDED: dict[str, pa.DataType] = {DOCUMENT: TEXT, COLUMN: NODES}


@dataclass(slots=True)
class TreeCounts:
    """What came of it: pairs, pairs whose document has no content, and nodes by type without the roots."""

    pairs: int = 0
    without_content: int = 0
    structure_nodes: int = 0
    content_nodes: int = 0


def tree_pairs(pairs_path: str, to: str, form: Form, column: str | None, storage: Storage) -> TreeCounts:
    """Write the pairs with the columns `document` and `tree`, rows in the order of the input.

    Raises:
        InputError, DiskFullError, StoreError, MissingExtraError: see `add_page_columns`.
    """
    counts = TreeCounts()

    def values(row: PageRow) -> Sequence[Any]:
        nodes = tree_of(row.page, row.title, has_title=row.has_title)
        counts.pairs += 1
        counts.without_content += not any(node.is_content for node in nodes)
        for node in nodes[1:]:
            counts.content_nodes += node.is_content
            counts.structure_nodes += not node.is_content
        return row.page.text, [node._asdict() for node in nodes]

    add_page_columns(pairs_path, to, form, column, _ADDED, values, storage)
    return counts


def tree_of(page: CleanedPage, title: str = "", *, has_title: bool = False) -> list[Node]:
    """The nodes of a page, the root first.

    Args:
        title: the root's text.
        has_title: the page begins with it, so that the root stands there, and is no content beside.
    """
    blocks = list(page.blocks)
    span = blocks.pop(0).span if has_title else Extent(0, 0)
    text = page.text[span.start : span.end] if has_title else fit(title)
    nodes = [Node(ROOT, STRUCTURE, 0, text, *span, NO_PARENT)]
    above = [(0, nodes[0])]
    """The headings that the next block stands under, each with its level on the page."""
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
    """Where a block's nodes stand: a heading's without its marks, a list's items each."""
    if block.kind == "heading":
        yield Extent(block.span.end - len(block.title), block.span.end)
    elif block.kind == "list":
        yield from block.parts
    else:
        yield block.span
