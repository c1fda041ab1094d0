"""Which documents of a query one prompt shows: as many as fit, in row order, the last of them perhaps in part.

A labeler knows no tokenizer, so room is counted in characters first; where the engine answers that the prompt does not
fit, less is shown and it is asked again, which costs the engine the counting and nothing more.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from relabel.manifests.labels import Pair

T = TypeVar("T")

CHARS_PER_TOKEN = 4
"""Characters that a token of room is taken for at first: English has 4 to 5. Fewer only mean that it is asked again."""
CHARS_PER_DOCUMENT = 16
"""Room that a document takes in addition to its text: its number and line breaks."""
LEAST_CHARS = 200
"""A document is cut to no less: what fits of the next one is left out where it is shorter."""
SHRINK = 0.8
"""Of what was shown, what is shown after the engine reported that it does not fit."""


def with_siblings(pair: Pair) -> Pair:
    """The pair; one that came alone, without its query's other rows, is its own only sibling."""
    return pair if pair.siblings else pair._replace(siblings=(pair,))


def place_among_siblings(pair: Pair) -> int:
    """From 0. Siblings are in row order, and a query may have thousands, each of which needs its place."""
    return bisect.bisect_left(pair.siblings, pair.row_id, key=lambda sibling: sibling.row_id)


class OfOneQuery(Generic[T]):
    """What was made for the last query: its rows follow each other, and what they share is put together once."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], T] | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The same as last time, if the key is the same; tuples are the same only as one object, since comparing all
        documents of a query for each of its rows would be quadratic.
        """
        last = self._last
        if last is None or not all(map(_is_same, key, last[0])):
            last = (key, make())
            self._last = last
        return last[1]


def _is_same(part: Any, other: Any) -> bool:
    if isinstance(part, tuple):
        return part is other
    return part is other or bool(part == other)


class Shown(NamedTuple):
    """The first documents of a query, as far as one prompt shows them.

    Args:
        texts: of the documents shown, in row order.
        num_chars: room that they take.
        is_cut: the last of them is not whole.
        num_left_out: documents after them.
    """

    texts: tuple[str, ...]
    num_chars: int
    is_cut: bool
    num_left_out: int


def documents_within(documents: Sequence[str], num_chars: int) -> Shown:
    """The first documents that fit into so many characters. The one at which the room ends is cut if `LEAST_CHARS` of
    it or more fit, and left out with all after it if not.
    """
    texts: list[str] = []
    left = num_chars
    for document in documents:
        room = left - CHARS_PER_DOCUMENT
        if len(document) > room:
            if room >= LEAST_CHARS:
                texts.append(document[:room])
                return Shown(tuple(texts), num_chars, True, len(documents) - len(texts))
            break
        texts.append(document)
        left = room - len(document)
    return Shown(tuple(texts), num_chars - left, False, len(documents) - len(texts))
