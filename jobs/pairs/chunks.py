"""Chunks of a document: what a labeler chooses evidence from.

Source: RES-RAG, Algorithm 1: a heading ends the chunk before it and becomes the path of those after it; tables and
lists are chunks of their own; what is too long is cut at sentences, rows or items; duplicates go; by offset, numbered
from 1.
Ours differs in three ways. A table or list ends the text before it too, else the text around it would be no stretch of
the document. Duplicates have the same headings above them, as the paper's chunks begin with these. And a heading with
nothing under it is a chunk, which would otherwise get lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from relabel.jobs.pairs.pages import BlockKind, CleanedPage, Extent, PageBlock
from relabel.jobs.pairs.splitting import split
from relabel.jobs.pairs.token_counts import CountTokens

MOST_HEADING_CHARS = 160
"""Of a heading as part of a path, which is in each chunk below it: a page with a heading of a megabyte would become
gigabytes.
"""


class PageChunk(NamedTuple):
    """A chunk, as it is written.

    Args:
        n: its number, from 1.
        heading_path: the headings that it is under, the outermost first, each cut to `MOST_HEADING_CHARS`.
        text: the document's code points `start` up to `end`.
        token_len: tokens of the text, without its headings.
    """

    n: int
    type: BlockKind
    heading_path: tuple[str, ...]
    text: str
    token_len: int
    start: int
    end: int


class _Section(NamedTuple):
    """What will be one chunk, or several where it is too long."""

    type: BlockKind
    heading_path: tuple[str, ...]
    parts: list[Extent]


def chunk_page(page: CleanedPage, max_tokens: int, count: CountTokens) -> tuple[list[PageChunk], int]:
    """The chunks, and how many duplicates were dropped.

    Chunks are in order and don't overlap. Every character that is no white space lies in one, in a heading, or in a
    duplicate. None has more than `max_tokens`, unless it is a single character.
    """
    chunks: list[PageChunk] = []
    seen: set[bytes] = set()
    num_duplicates = 0
    for section in _sections(page):
        for span, num_tokens in split(page.text, section.parts, max_tokens, count):
            text = page.text[span.start : span.end]
            key = _key(section.heading_path, text)
            if key in seen:
                num_duplicates += 1
                continue
            seen.add(key)
            chunks.append(PageChunk(len(chunks) + 1, section.type, section.heading_path, text, num_tokens, *span))
    return chunks, num_duplicates


def _sections(page: CleanedPage) -> Iterator[_Section]:
    above: list[PageBlock] = []
    """The headings that the next block is under."""
    buffer: list[Extent] = []
    is_bare = False
    """Whether nothing is under the last heading yet."""
    for block in page.blocks:
        if block.kind == "text":
            buffer.append(block.span)
            is_bare = False
            continue
        path = tuple(heading.title[:MOST_HEADING_CHARS] for heading in above)
        if buffer:
            yield _Section("text", path, buffer)
            buffer = []
        if block.kind == "heading":
            if is_bare and block.level <= above[-1].level:
                yield _Section("text", path[:-1], [above[-1].span])
            while above and above[-1].level >= block.level:
                above.pop()
            above.append(block)
        else:
            yield _Section(block.kind, path, list(block.parts))
        is_bare = block.kind == "heading"
    path = tuple(heading.title[:MOST_HEADING_CHARS] for heading in above)
    if buffer:
        yield _Section("text", path, buffer)
    elif is_bare:
        yield _Section("text", path[:-1], [above[-1].span])


def _key(heading_path: tuple[str, ...], text: str) -> bytes:
    """Equal for texts that differ in white space and case alone, under the same headings."""
    normal = "\n".join(" ".join(one.casefold().split()) for one in (*heading_path, text))
    return hashlib.blake2b(normal.encode(), digest_size=16).digest()
