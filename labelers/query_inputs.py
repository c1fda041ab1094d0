"""Inputs that belong to a query: its documents and how many fit a prompt, their chunks, and earlier search rounds."""

from __future__ import annotations

import bisect
import heapq
import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field

from relabel.manifests.formats import JsonIndices
from relabel.manifests.labels import InputColumn, Pair
from relabel.manifests.specs import LabelerOptions, TextOptions

# ------------------------------------------------------------------------------
# A search that goes on for several rounds: what `variants` and `review` are shown of the rounds before.
#
# Source: R2RAG, section 3.3 (papers); the columns' names are ours. `relabel rounds` is such a search: jobs/rounds.


ASPECT = InputColumn("aspect", "string", "The side of the question that this round searches.")
PREVIOUS_QUERIES = InputColumn("previous_queries", "list<string>", "Queries of the rounds before.")
PREVIOUS_SUMMARIES = InputColumn("previous_summaries", "list<string>", "Summaries of what was found in them.")
PREVIOUS_DOCS = InputColumn("previous_docs", "list<string>", "Ids of the documents that were kept in them.")


class OnceAQueryOptions(LabelerOptions):
    """Options of a labeler whose one answer is about a whole query: rows can't vote on their parts of it."""

    samples: Literal[1] = 1
    """One: all rows of a query take their label from the same answer."""


class SearchOptions(OnceAQueryOptions, TextOptions):
    """Options of `variants` and `review`."""

    temperature: float = Field(0.6, ge=0.0, le=5.0)
    """As in the paper; 0 is greedy."""
    top_p: float = Field(0.95, gt=0.0, le=1.0)
    """As in the paper; 1.0 is off."""


def folded(query: str) -> str:
    """A query in which case, white space and punctuation do not count (but `#` does, as in C#, and the like)."""
    kept = (
        " " if unicodedata.category(char)[0] == "P" and char not in "#%&*@" else char
        for char in unicodedata.normalize("NFKC", query).casefold()
    )
    return " ".join("".join(kept).split())


# ------------------------------------------------------------------------------
# Chunks of a query's documents: which are shown, and whether they are the document's own.


CHUNKS = InputColumn("chunks", "list<chunk>", "The document's chunks, as `relabel pairs chunk` writes them.", True)


class Chunk(NamedTuple):
    """A chunk of a document, as the column holds it."""

    n: int
    heading_path: Sequence[str]
    text: str
    token_len: int
    start: int
    end: int


class ShownChunks(NamedTuple):
    """How many chunks of each document are shown, and the room that they take, in tokens."""

    counts: tuple[int, ...]
    num_tokens: int


def chunks_within(sizes: Sequence[Sequence[int]], room: int) -> ShownChunks:
    """What fits into so many tokens: chunks go from the end of the document that is longest just then, of equals the
    last one.

    Args:
        sizes: tokens of each chunk, by document.
    """
    counts, totals = [len(one) for one in sizes], [sum(one) for one in sizes]
    longest = [(-total, -place) for place, total in enumerate(totals) if counts[place]]
    heapq.heapify(longest)
    num_tokens = sum(totals)
    while num_tokens > room and longest:
        place = -heapq.heappop(longest)[1]
        counts[place] -= 1
        size = sizes[place][counts[place]]
        totals[place] -= size
        num_tokens -= size
        if counts[place]:
            heapq.heappush(longest, (-totals[place], -place))
    return ShownChunks(tuple(counts), num_tokens)


def rendered_sets(section: JsonIndices, wanted: Sequence[Sequence[int]]) -> str:
    """The answer that chooses these chunks, as far as they are shown, each once.

    Args:
        wanted: chunk numbers by document, most important first; of documents that are not shown, too.
    """
    held = zip(section.keys, section.mosts, wanted, strict=False)
    return json.dumps({key: list(dict.fromkeys(n for n in one if 1 <= n <= most)) for key, most, one in held})


def chunk_texts(pair: Pair, selected: Sequence[int]) -> list[str]:
    """Texts of these chunks of a document, each once and under its headings, as the prompt shows them."""
    chunks = chunks_of(pair)
    return [text_of(chunks[number - 1]) for number in dict.fromkeys(selected)]


def chunks_of(pair: Pair) -> tuple[Chunk, ...]:
    held: Sequence[dict[str, Any]] = pair.columns.get(CHUNKS.name, ())
    return tuple(Chunk(**one) for one in held)


def text_of(chunk: Chunk) -> str:
    return "\n".join(filter(None, (" > ".join(chunk.heading_path), chunk.text)))


def first_fault(pairs: Sequence[Pair]) -> str | None:
    """What is wrong with the first chunk that is not of its document; None where all are."""
    for pair in pairs:
        for number, one in enumerate(chunks_of(pair), start=1):
            if why := _fault(one, number, pair.document):
                return f"document {pair.doc_id}: chunk {number} {why}"
    return None


def _fault(chunk: Chunk, number: int, document: str) -> str | None:
    """Chunks are numbered from 1, each is a piece of the document, and none is of less than no tokens. An input may
    hold null anywhere.
    """
    start, end, size = chunk.start, chunk.end, chunk.token_len
    if None in (chunk.n, start, end, size, *chunk.heading_path):
        return "is null, or has a null in it"
    if chunk.n != number or not 0 <= start <= end <= len(document) or document[start:end] != chunk.text:
        return (
            f"is not the document's characters {start} to {end}: both must come from one `relabel pairs chunk`, and "
            "`n` counts from 1"
        )
    return f"has a `token_len` of {size}, expected 0 or more" if size < 0 else None


# ------------------------------------------------------------------------------
# Which documents of a query one prompt shows: as many as fit, in row order, the last of them perhaps in part.
#
# A labeler knows no tokenizer, so room is counted in characters first; where the engine answers that the prompt does
# not fit, less is shown and it is asked again, which costs the engine the counting and nothing more.


T = TypeVar("T")

CHARS_PER_TOKEN = 4
"""Characters that a token of room is taken for at first: English has 4 to 5. Fewer only mean that it is asked again."""
CHARS_PER_DOCUMENT = 16
"""Room that a document takes in addition to its text: its number and line breaks."""
LEAST_CHARS = 200
"""A document is cut to no less: what fits of the next one is left out where it is shorter."""
SHRINK = 0.8
"""Of what was shown, what is shown after the engine said that it does not fit."""


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
            self._last = last = key, make()
        return last[1]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, tuple) and bool(one == other))


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

    @property
    def flags(self) -> list[str]:
        """What a label says of documents that were cut or left out."""
        return ["document_truncated"] * self.is_cut + ["documents_left_out"] * (self.num_left_out > 0)


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
