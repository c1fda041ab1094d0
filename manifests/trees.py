"""The structure tree of a document: its headings and what is under them, each with its place in the text. Source: RDR2
(papers, section 3.2). A *structure* node is a heading, a *content* node a passage, a table or a list. One tree is a
list of nodes, as dicts in a column of the input or in JSON; `COLUMN` is what the column is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from relabel.manifests.errors import InputError

COLUMN = "tree"
STRUCTURE: Final = "structure"
CONTENT: Final = "content"
ROOT = 0
"""Id of the root: the document itself, its text the title."""
NO_PARENT = -1

NODE = pa.struct(
    [
        ("id", pa.int32()),
        ("type", pa.large_string()),
        ("level", pa.int32()),
        ("text", pa.large_string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("parent", pa.int32()),
    ]
)
"""What a node holds at least; see `Node`."""
NODES = pa.large_list(NODE)


class Node(NamedTuple):
    """A node of a tree.

    Args:
        id: its place among the nodes, in document order; 0 is the root.
        type: `structure` or `content`.
        level: how many nodes lie above it; a heading of level 4 right below one of level 2 is one deeper, not two.
        text: `document[start:end]`; the root's may be a title that is nowhere in the document.
        start, end: its place, in code points; the root's may be empty.
        parent: id of the node that it is under, -1 for the root. A heading is under headings alone.
    """

    id: int
    type: str
    level: int
    text: str
    start: int
    end: int
    parent: int

    @property
    def is_content(self) -> bool:
        return self.type == CONTENT


class Tree(NamedTuple):
    """A document's nodes, checked, and the ids of each one's children in order."""

    nodes: tuple[Node, ...]
    children: tuple[tuple[int, ...], ...]

    def ancestors(self, id: int) -> Iterable[Node]:
        """The nodes above one, the nearest first."""
        while (id := self.nodes[id].parent) != NO_PARENT:
            yield self.nodes[id]

    def values(self) -> list[dict[str, Any]]:
        """The nodes as dicts: one value of a column of type `NODES`, and plain JSON."""
        return [node._asdict() for node in self.nodes]


def read_tree(values: Sequence[Mapping[str, Any]], document: str) -> Tree:
    """The tree that a column or JSON holds, checked with the document.

    Raises:
        InputError: it is no tree of this document; names the node, and why.
    """
    nodes = [_read_node(number, value) for number, value in enumerate(values)]
    if not nodes:
        raise InputError("the tree has no node; it wants a root at least.")
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        if not _is_sound(number, nodes, document):
            raise InputError(
                f"node {number} of the tree is not one of this document: {node!r:.200}. Ids count from 0 in document "
                "order, a node is one level below its parent, a heading is under headings alone, and the text is the "
                "document's from `start` to `end`. Tree and document must come from one `relabel pairs tree`."
            )
        if node.id != ROOT:
            children[node.parent].append(node.id)
    return Tree(tuple(nodes), tuple(map(tuple, children)))


_KINDS: dict[str, type] = {name: str if name in ("type", "text") else int for name in Node._fields}


def _read_node(number: int, value: Mapping[str, Any]) -> Node:
    for name, kind in _KINDS.items():
        if type(value.get(name)) is not kind:
            got = f"{value[name]!r:.40}" if name in value else "missing"
            raise InputError(f"node {number} of the tree: `{name}` is {got}, expected {kind.__name__}.")
    return Node(**{name: value[name] for name in _KINDS})


def _is_sound(number: int, nodes: Sequence[Node], document: str) -> bool:
    """Whether a node is as it should be, where those before it are."""
    node = nodes[number]
    if not 0 <= node.start <= node.end <= len(document):
        return False
    if number == ROOT:
        return (node.id, node.type, node.level, node.parent) == (ROOT, STRUCTURE, 0, NO_PARENT)
    if node.id != number or not ROOT <= node.parent < number:
        return False
    if document[node.start : node.end] != node.text:
        return False
    parent = nodes[node.parent]
    if node.level != parent.level + 1:
        return False
    kinds = (CONTENT,) if parent.is_content else (STRUCTURE, CONTENT)
    if node.type not in kinds:
        return False
    before = nodes[number - 1]
    return before.id == ROOT or node.start >= before.start
