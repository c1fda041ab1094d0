"""Chunks of a query's documents: which are shown, and whether they are the document's own."""

import heapq
from collections.abc import Sequence
from typing import Any, cast

from relabel.manifests.labels import InputColumn, Pair

CHUNKS = InputColumn("chunks", "list<chunk>", "The document's chunks, as `relabel pairs chunk` writes them.", True)


Chunk = dict[str, Any]
"""A chunk of a document, as the column holds it: `n`, `heading_path`, `text`, `token_len`, `start` and `end`."""


def chunks_within(sizes: Sequence[Sequence[int]], room: int) -> tuple[tuple[int, ...], int]:
    """How many chunks of each document fit into so many tokens, and the tokens that they take: chunks go from the end
    of the document that is longest just then, of equals the last one.

    Args:
        sizes: tokens of each chunk, by document.
    """
    counts = [len(chunk_sizes) for chunk_sizes in sizes]
    totals = [sum(chunk_sizes) for chunk_sizes in sizes]
    longest = [(-total, -document) for document, total in enumerate(totals) if counts[document]]
    heapq.heapify(longest)
    num_tokens = sum(totals)
    while num_tokens > room and longest:
        document = -heapq.heappop(longest)[1]
        counts[document] -= 1
        size = sizes[document][counts[document]]
        totals[document] -= size
        num_tokens -= size
        if counts[document]:
            heapq.heappush(longest, (-totals[document], -document))
    return tuple(counts), num_tokens


def chunk_texts(pair: Pair, selected: Sequence[int]) -> list[str]:
    """Texts of these chunks of a document, each once and under its headings, as the prompt shows them."""
    chunks = chunks_of(pair)
    return [text_of(chunks[number - 1]) for number in dict.fromkeys(selected)]


def chunks_of(pair: Pair) -> Sequence[Chunk]:
    """The document's chunks."""
    return cast("Sequence[Chunk]", pair.columns.get(CHUNKS.name, ()))


def text_of(chunk: Chunk) -> str:
    return "\n".join(filter(None, (" > ".join(chunk["heading_path"]), chunk["text"])))


def first_fault(pairs: Sequence[Pair]) -> str | None:
    """What is wrong with the first chunk that is not of its document; None where all are."""
    for pair in pairs:
        for number, chunk in enumerate(chunks_of(pair), start=1):
            why = _fault(chunk, number, pair.document)
            if why:
                return f"document {pair.doc_id}: chunk {number} {why}"
    return None


def _fault(chunk: Chunk, number: int, document: str) -> str | None:
    """Chunks are numbered from 1, each is a piece of the document, and none is of less than no tokens. An input may
    hold null anywhere.
    """
    start = chunk["start"]
    end = chunk["end"]
    size = chunk["token_len"]
    if None in (chunk["n"], start, end, size, *chunk["heading_path"]):
        return "is null, or has a null in it"
    if chunk["n"] != number or not 0 <= start <= end <= len(document) or document[start:end] != chunk["text"]:
        return (
            f"is not the document's characters {start} to {end}: both must come from one `relabel pairs chunk`, and "
            "`n` counts from 1"
        )
    if size < 0:
        return f"has a `token_len` of {size}, expected 0 or more"
    return None
