"""A structure tree comes back from Arrow and JSON as it went in, and one that is not of its document is refused with
the node and the reason.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from relabel.manifests.errors import InputError
from relabel.manifests.trees import NODES, Tree, read_tree
from tests.trees import Sketch, sketches, tree_of

ROUGH = Sketch("1990s", [Sketch("Rough.", [])])
PARK = Sketch("Six Flags", [Sketch("History", [Sketch("Opened in 1961.", []), ROUGH])])


def park() -> tuple[str, list[dict[str, Any]]]:
    document, tree = tree_of(PARK)
    return document, tree.values()


@given(sketch=sketches())
def test_a_tree_comes_back_from_arrow_and_from_json(sketch: Sketch) -> None:
    document, tree = tree_of(sketch)
    column = pa.array([tree.values(), None], NODES)
    assert read_tree(column[0].as_py(), document) == tree
    assert read_tree(json.loads(json.dumps(tree.values())), document) == tree
    for node in tree.nodes:
        assert all(tree.nodes[child].parent == node.id for child in tree.children[node.id])
        assert len(list(tree.ancestors(node.id))) == node.level
    assert sum(map(len, tree.children)) == len(tree.nodes) - 1


@pytest.mark.parametrize(
    ("place", "change", "why"),
    [
        (2, {"id": 3}, "node 2 of the tree has id 3: ids count from 0"),
        (0, {"parent": 0}, "node 0 of the tree is the root"),
        (1, {"type": "heading"}, "node 1 of the tree is of type 'heading', expected structure or content"),
        (1, {"parent": 1}, "node 1 of the tree has parent 1, expected a node before it"),
        (1, {"parent": -1}, "node 1 of the tree has parent -1"),
        (2, {"parent": 4}, "node 2 of the tree has parent 4"),
        (2, {"level": 3}, "node 2 of the tree is of level 3 below one of level 1, expected 2"),
        (3, {"parent": 2, "level": 3}, "node 3 of the tree is a heading below the content node 2"),
        (2, {"end": 10_000}, "of a document of"),
        (2, {"start": -1}, "node 2 of the tree lies at -1 to"),
        (2, {"text": "Opened in 1962."}, "node 2 of the tree is not the document's characters"),
        (2, {"text": None}, "node 2 of the tree: `text` is None, expected str"),
        (2, {"start": True}, "node 2 of the tree: `start` is True, expected int"),
        (4, {"start": 0, "end": 7, "text": "History"}, "node 4 of the tree begins before node 3"),
    ],
)
def test_a_tree_that_is_not_of_its_document_is_refused(place: int, change: dict[str, Any], why: str) -> None:
    document, values = park()
    assert document.startswith("History")
    assert read_tree(values, document)
    values[place] |= change
    with pytest.raises(InputError) as refused:
        read_tree(values, document)
    assert why in str(refused.value)


def test_a_page_without_text_is_its_root() -> None:
    document, tree = tree_of(Sketch("Empty page", []))
    assert (document, tree.children) == ("", ((),))
    assert isinstance(read_tree(tree.values(), ""), Tree)
