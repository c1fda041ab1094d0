"""Where in a document a retrieved passage comes from: exactly where its text is, else where the document reads most
like it.

Source: RDR2 (papers, section 3.3): a window of the passage's length slides over the document, and the one at the least
edit distance is taken. A retriever cuts and cleans pages in its own way, so passages are seldom verbatim in them.
"""

from __future__ import annotations

from typing import NamedTuple

from relabel.manifests.process import require
from relabel.manifests.trees import Tree

MOST_CHARS = 1000
"""A longer passage is searched by its beginning: time grows with the product of both lengths."""
_MOST_WINDOWS = 40
"""Windows that are compared to each passage's length of document. Prose takes a tenth of it; in a text that repeats
itself without end, all windows are near, and the search stops at the nearest so far.
"""


class PassagePlace(NamedTuple):
    """A piece of the document, `document[start:end]`, and its edit distance to the passage, or to its first
    `MOST_CHARS` characters; 0 where it is all of the document.
    """

    start: int
    end: int
    distance: int


def align(passage: str, document: str) -> PassagePlace | None:
    """The window of the passage's length that is nearest to it; the first of equals. All of the document for a passage
    that is as long or longer; None where more than half of the passage would have to be changed: two texts of one
    language that have nothing to do with each other are at about three quarters.

    Raises:
        MissingExtraError: the passage is not in the document verbatim, and rapidfuzz is not installed.
    """
    size = len(passage)
    start = document.find(passage)
    if size >= len(document):
        return PassagePlace(0, len(document), 0)
    if start >= 0:
        return PassagePlace(start, start + size, 0)
    rapidfuzz = require("rapidfuzz", extra="pairs", purpose="Finding a passage that is not there verbatim")
    distance = rapidfuzz.distance.Levenshtein.distance
    head = passage[:MOST_CHARS]
    least = len(head) // 2 + 1
    at = 0
    for _ in range(_MOST_WINDOWS * len(document) // len(head)):
        if at > len(document) - size:
            break
        edits = distance(head, document[at : at + len(head)])
        if edits < least:
            start = at
            least = edits
        # A window moved by one character loses one and gains one, so its distance changes by two at most: from a window
        # that is far off, those that can't be better are stepped over.
        at += (edits - least) // 2 + 1
    return PassagePlace(start, start + size, least) if start >= 0 else None


def content_at(tree: Tree, place: PassagePlace) -> list[int]:
    """Ids of the content nodes that a place lies in, in order: of which more lies there than the edits explain; where
    there is none, the one of which most does.

    So a passage that was cut a character early or late, or is a few characters off at its ends, has no more nodes than
    the passage itself.
    """
    overlaps = {
        node.id: min(node.end, place.end) - max(node.start, place.start) for node in tree.nodes if node.is_content
    }
    beyond_edits = [id for id, overlap in overlaps.items() if overlap > place.distance + 1]
    if beyond_edits:
        return beyond_edits
    most = max(overlaps, key=overlaps.__getitem__, default=None)
    if most is None or overlaps[most] <= 0:
        return []
    return [most]
