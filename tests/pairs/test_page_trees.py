"""`relabel pairs tree`: every word of a document is in one node, at its place, under its headings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("polars")
pytest.importorskip("lxml")
pytest.importorskip("markdown_it")

from relabel.jobs.pairs.chunks import tree_of
from relabel.jobs.pairs.pages import CleanedPage, Form, read_page
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec
from relabel.manifests.trees import CONTENT, NODES, STRUCTURE, Node, read_tree
from tests.strategies import texts

PAGE = "# Roses\n\nA flower.\n\n### Care\n\n- prune\n  - in winter\n- water\n\n## Care\n\n| a | b |\n|-|-|\n| 1 | 2 |\n"
TREE = [
    (0, STRUCTURE, 0, "Plants", -1),
    (1, STRUCTURE, 1, "Roses", 0),
    (2, CONTENT, 2, "A flower.", 1),
    (3, STRUCTURE, 2, "Care", 1),
    (4, CONTENT, 3, "- prune\n  - in winter", 3),
    (5, CONTENT, 3, "- water", 3),
    (6, STRUCTURE, 2, "Care", 1),
    (7, CONTENT, 3, "| a | b |\n| --- | --- |\n| 1 | 2 |", 6),
]


def shape(nodes: list[Node]) -> list[tuple[int, str, int, str, int]]:
    return [(node.id, node.type, node.level, node.text, node.parent) for node in nodes]


def assert_reversible(page: CleanedPage, nodes: list[Node]) -> None:
    """It is a tree of the page, and what lies in no node is white space and the marks of headings."""
    tree = read_tree([node._asdict() for node in nodes], page.text)
    assert list(tree.nodes) == nodes
    at = nodes[0].end
    for node in nodes[1:]:
        assert page.text[at : node.start].strip("# \n") == ""
        at = node.end
    assert page.text[at:].strip() == ""
    # a heading is below the nearest one before it of a lower level
    wanted: list[tuple[int, int]] = [(0, 0)]
    levels = iter(block.level for block in page.blocks if block.kind == "heading")
    for node in nodes[1:]:
        if not node.is_content:
            level = next(levels)
            wanted = [one for one in wanted if one[0] < level]
            assert node.parent == wanted[-1][1]
            wanted.append((level, node.id))
        assert node.parent == wanted[-1 - (not node.is_content)][1]


def test_a_tree_by_hand() -> None:
    page = read_page([(PAGE, "markdown")])
    nodes = tree_of(page, "Plants")
    assert shape(nodes) == TREE
    assert_reversible(page, nodes)


@pytest.mark.parametrize(
    ("markdown", "wanted"),
    [
        ("", []),
        ("a\n\nb", [(CONTENT, 1, 0), (CONTENT, 1, 0)]),
        ("###### a\n\nb", [(STRUCTURE, 1, 0), (CONTENT, 2, 1)]),
        ("### a\n\n# b\n\n## c", [(STRUCTURE, 1, 0), (STRUCTURE, 1, 0), (STRUCTURE, 2, 2)]),
        ("# a\n\n# a\n\n# a", [(STRUCTURE, 1, 0)] * 3),
        ("a\n\n# b", [(CONTENT, 1, 0), (STRUCTURE, 1, 0)]),
    ],
)
def test_pages_without_headings_and_headings_that_skip_or_repeat(
    markdown: str, wanted: list[tuple[str, int, int]]
) -> None:
    page = read_page([(markdown, "markdown")])
    nodes = tree_of(page)
    assert [(node.type, node.level, node.parent) for node in nodes[1:]] == wanted
    assert nodes[0] == Node(0, STRUCTURE, 0, "", 0, 0, -1)
    assert_reversible(page, nodes)


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(st.one_of(st.sampled_from(["# a", "## b", "#### c", "- d", "", "|a|\n|-|", "e"]), texts())),
    form=st.sampled_from(["html", "markdown", "text"]),
    title=texts(),
)
def test_any_text_gives_a_tree_that_reads_back(lines: list[str], form: Form, title: str) -> None:
    page = read_page([("\n".join(lines), form)])
    assert_reversible(page, tree_of(page, title))


def test_from_end_to_end(relabel: Callable[..., Any], write: Callable[..., str], folder: Path) -> None:
    pair = {"query_id": "q", "query": "x", "doc_id": "a", "grade": 1}
    write("p.parquet", [{**pair, "title": "Plants", "document": PAGE}, {**pair, "title": None, "document": None}])
    done = relabel("pairs", "tree", "p.parquet", "--to", "out.parquet", "--format", "markdown", "--output", "json")
    assert done.code == 0, done
    held = pq.read_table("out.parquet")
    assert held.schema.field("tree").type == NODES
    rows = held.to_pylist()
    assert shape([Node(**node) for node in rows[0]["tree"]]) == TREE
    read_tree(rows[0]["tree"], rows[0]["document"])
    assert (rows[1]["document"], len(rows[1]["tree"]), rows[1]["title"]) == ("", 1, None)
    assert {key: value for key, value in done.json.items() if key != "seconds"} == {
        "output": "out.parquet",
        "pairs": 2,
        "format": "markdown",
        "structure_nodes": 3,
        "content_nodes": 4,
        "documents_without_content": 1,
    }
    assert open_dataset(InputSpec(path=("out.parquet",)), Storage()).columns.document == ("document",)
