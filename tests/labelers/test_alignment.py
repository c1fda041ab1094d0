"""A passage is found where it occurs verbatim, else where the document is most similar to it; the nodes found do not
change with a character more or less.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relabel.labelers.route import PassagePlace, align, content_at
from relabel.manifests.errors import MissingExtraError
from tests.trees import Sketch, sketches, tree_of

LETTERS = st.text("ab ", min_size=1, max_size=24)


def distance(first: str, second: str) -> int:
    """Levenshtein's, by the table that defines it."""
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, start=1):
        before, row = row, [place]
        for other, (kept, added) in enumerate(itertools.pairwise(before)):
            row.append(min(kept + (letter != second[other]), added + 1, row[-1] + 1))
    return row[-1]


@given(passage=LETTERS, document=st.text("ab ", max_size=60))
def test_the_place_is_the_first_window_at_the_least_distance(passage: str, document: str) -> None:
    pytest.importorskip("rapidfuzz")
    assume(len(passage) < len(document))
    starts = range(len(document) - len(passage) + 1)
    found = [distance(passage, document[at : at + len(passage)]) for at in starts]
    least = min(found)
    wanted = PassagePlace(found.index(least), found.index(least) + len(passage), least)
    assert align(passage, document) == (wanted if least <= len(passage) // 2 else None)


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(count))


def test_a_passage_that_was_cleaned_otherwise_is_found_in_a_long_document_in_time() -> None:
    """The limit is ten times what it takes."""
    pytest.importorskip("rapidfuzz")
    document = words(70_000, 1)[:450_000]
    passage = document[300_000:300_600].replace("e", "", 9).replace("sh", "s h")
    started = time.process_time()
    found = align(passage, document)
    assert found is not None
    assert abs(found.start - 300_000) <= found.distance < 60
    assert align(words(100, 2), document) is None
    assert align("a" * 500 + "b" * 500, "a" * 450_000) == PassagePlace(0, 1000, 500)
    assert time.process_time() - started < 10.0


def test_verbatim_text_needs_no_package_and_other_text_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert align("b a", "a b a b a b") == PassagePlace(2, 5, 0)
    assert align("longer than it", "a document") == PassagePlace(0, 10, 0)
    with pytest.raises(MissingExtraError, match=r"pip install 'relabel-ir\[pairs\]'"):
        align("a c a b", "a b a b a b")


@given(sketch=sketches(), data=st.data())
def test_a_node_is_found_by_its_text_and_a_character_to_either_side(sketch: Sketch, data: st.DataObject) -> None:
    document, tree = tree_of(sketch)
    long = [node for node in tree.nodes if node.is_content and len(node.text) > 3]
    assume(long)
    node = data.draw(st.sampled_from(long))
    shift = data.draw(st.sampled_from([-1, 0, 1]))
    start, end = max(0, node.start + shift), min(len(document), node.end + shift)
    assert content_at(tree, PassagePlace(start, end, 0)) == [node.id]


def test_all_content_is_found_by_the_whole_document_and_none_by_a_heading() -> None:
    document, tree = tree_of(Sketch("T", [Sketch("History", [Sketch("One.", []), Sketch("Two.", [])])]))
    place = align(document, document)
    assert place is not None
    assert content_at(tree, place) == [2, 3]
    assert content_at(tree, PassagePlace(0, 7, 0)) == []
    assert content_at(tree, PassagePlace(8, 12, 9)) == [2], "the one of which most lies there"
