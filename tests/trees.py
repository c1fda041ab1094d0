"""Trees made up for tests, with the document that they are of."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from hypothesis import strategies as st

from relabel.manifests.trees import COLUMN, CONTENT, NO_PARENT, NODES, STRUCTURE, Node, Tree, read_tree


class Sketch(NamedTuple):
    """A node's text and what is under it; one with a text that ends in `.` is content."""

    text: str
    below: list[Sketch]


def tree_of(root: Sketch) -> tuple[str, Tree]:
    """The document, a node a line without the root's title, and its tree."""
    lines: list[str] = []
    nodes: list[Node] = []

    def add(sketch: Sketch, parent: int, level: int) -> None:
        start = sum(len(line) + 1 for line in lines)
        kind = CONTENT if sketch.text.endswith(".") and parent != NO_PARENT else STRUCTURE
        end = start + len(sketch.text) if nodes else start
        place = len(nodes)
        nodes.append(Node(place, kind, level, sketch.text, start, end, parent))
        if place:
            lines.append(sketch.text)
        for below in sketch.below:
            add(below, place, level + 1)

    add(root, NO_PARENT, 0)
    document = "\n".join(lines)
    return document, read_tree([node._asdict() for node in nodes], document)


def with_trees(table: pa.Table) -> pa.Table:
    """The pairs, with each document as content under two headings, and half of it as a passage."""
    documents, trees, passages = [], [], []
    for text in table["document"].to_pylist():
        halves = [text[: len(text) // 2] + ".", text[len(text) // 2 :] + "."]
        document, tree = tree_of(Sketch("Page", [Sketch(f"Part {half[:9]}!", [Sketch(half, [])]) for half in halves]))
        documents.append(document)
        trees.append(tree.values())
        passages.append(halves[:1])
    table = table.set_column(table.schema.get_field_index("document"), "document", pa.array(documents))
    return table.append_column(COLUMN, pa.array(trees, NODES)).append_column("passages", pa.array(passages))


_WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)
_CONTENT: st.SearchStrategy[Sketch] = st.recursive(
    st.builds(lambda text: Sketch(f"{text}.", []), _WORDS),
    lambda below: st.builds(lambda text, held: Sketch(f"{text}.", held), _WORDS, st.lists(below, max_size=3)),
    max_leaves=4,
)
_HEADING: st.SearchStrategy[Sketch] = st.recursive(
    st.builds(lambda text, held: Sketch(text.rstrip(".") + "!", held), _WORDS, st.lists(_CONTENT, max_size=3)),
    lambda below: st.builds(
        lambda text, held, more: Sketch(text.rstrip(".") + "!", [*held, *more]),
        _WORDS,
        st.lists(_CONTENT, max_size=3),
        st.lists(below, max_size=3),
    ),
    max_leaves=6,
)


def sketches() -> st.SearchStrategy[Sketch]:
    """Pages of any shape: headings in headings, content in content, either without anything below it."""
    return _HEADING
