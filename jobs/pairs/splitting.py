"""A stretch of text in pieces of at most so many tokens, cut where it hurts least: between its parts (paragraphs, rows,
items), lines, sentences, words, and within a word where it must.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from relabel.jobs.pairs.pages import Extent
from relabel.jobs.pairs.token_counts import CountTokens

_LINE = re.compile(r"[^\n]+")
_CLOSING = "[\"')\\]\u2019\u201d\u00bb\u300d\u300f\u3011\uff09]*+"
_SENTENCE_END = re.compile(
    # A small letter goes on ("approx. five"). The rest is for time that grows with the text alone.
    rf"(?<![.!?…])[.!?…]++{_CLOSING}(?=\s++[^\sa-z])|(?<![。！？｡])[。！？｡]++{_CLOSING}"
)
_WORD = re.compile(r"\S+")


class Piece(NamedTuple):
    """A stretch of text and its tokens."""

    span: Extent
    num_tokens: int


def split(text: str, parts: Sequence[Extent], max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Pieces that hold as much as fits, in order; what lies between two is white space.

    Args:
        parts: in order, parted by white space alone; at least one.
        max_tokens: at least 1; only a single character that has more tokens by itself is a piece with more.
    """
    whole = Extent(parts[0].start, parts[-1].end)
    num_tokens = count(text[whole.start : whole.end])
    if num_tokens <= max_tokens:
        yield Piece(whole, num_tokens)
        return
    yield from _packed(text, [*_fitting(text, parts, max_tokens, count)], max_tokens, count)


def _packed(text: str, units: Sequence[Piece], max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Neighbours put together. Tokens of two texts needn't add up to those of both, so what is put together is
    counted again.
    """
    first = 0
    while first < len(units):
        last, total = first, units[first].num_tokens
        while last + 1 < len(units) and total + units[last + 1].num_tokens <= max_tokens:
            last += 1
            total += units[last].num_tokens
        while True:
            span = Extent(units[first].span.start, units[last].span.end)
            total = count(text[span.start : span.end]) if last > first else units[first].num_tokens
            if total <= max_tokens or last == first:
                break
            last -= 1
        yield Piece(span, total)
        first = last + 1


def _fitting(
    text: str, spans: Sequence[Extent], max_tokens: int, count: CountTokens, level: int = 0
) -> Iterator[Piece]:
    """The spans, those that are too long cut up by the levels below."""
    for span in spans:
        num_tokens = count(text[span.start : span.end])
        if num_tokens <= max_tokens or span.end - span.start == 1:
            yield Piece(span, num_tokens)
        else:
            finer = [*_LEVELS[level](text, span)] if level < len(_LEVELS) else [*_cuts(span, max_tokens)]
            yield from _fitting(text, finer, max_tokens, count, level + 1)


def _lines(text: str, span: Extent) -> Iterator[Extent]:
    for match in _LINE.finditer(text, span.start, span.end):
        if stripped := _stripped(text, Extent(*match.span())):
            yield stripped


def _sentences(text: str, span: Extent) -> Iterator[Extent]:
    start = span.start
    for match in _SENTENCE_END.finditer(text, span.start, span.end):
        if stripped := _stripped(text, Extent(start, match.end())):
            yield stripped
        start = match.end()
    if stripped := _stripped(text, Extent(start, span.end)):
        yield stripped


def _words(text: str, span: Extent) -> Iterator[Extent]:
    for match in _WORD.finditer(text, span.start, span.end):
        yield Extent(*match.span())


def _cuts(span: Extent, max_tokens: int) -> Iterator[Extent]:
    """Stretches of as many characters as tokens are allowed, and of half as many where those are too long."""
    length = span.end - span.start
    step = max_tokens if length > max_tokens else -(-length // 2)
    for start in range(span.start, span.end, step):
        yield Extent(start, min(start + step, span.end))


def _stripped(text: str, span: Extent) -> Extent | None:
    """Without white space at its ends; None where nothing else is in it."""
    stretch = text[span.start : span.end]
    lead = len(stretch) - len(stretch.lstrip())
    if lead == len(stretch):
        return None
    return Extent(span.start + lead, span.start + len(stretch.rstrip()))


_LEVELS: tuple[Callable[[str, Extent], Iterator[Extent]], ...] = (_lines, _sentences, _words)
