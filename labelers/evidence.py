"""Verbatim evidence: where in the document a quoted fragment is, or that it is not there.

The one normalisation: Unicode NFC, every run of white space folded to one space, none at either end. A fragment is
found if its normal form is a substring of the document's normal form that begins and ends between characters, an accent
never parted from its letter. The span is in code points of the original document. A fragment that is a substring as it
is there is found as it is, accents or not.

Several fragments: one a line. A text of several lines that is found whole is one fragment; otherwise every line that is
not blank has to be found by itself. `none`, in any case, is no evidence, even where the document holds that word.

Source: R3A, section 2 (the extract must be in the document); the normalisation is ours.
"""

from __future__ import annotations

import functools
import re
import unicodedata

from relabel.labelers.verdicts import is_none, lines_of
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Span

_PIECES = re.compile(r"\s+|\S+")
_FIRST_NAME = 0xF0000  # planes 15 and 16 are for private use: 131,071 names for clusters of several code points
# a document's clusters beyond those; no fragment ever holds it, so they are found only as they are
_NAMELESS = chr(0x10FFFF)


def read_evidence(content: str, document: str) -> tuple[Span, ...]:
    """The spans that an extract quotes, in the order quoted; empty for `none`.

    Args:
        content: what the model wrote between the tags.
        document: what it was to quote.
    Raises:
        VerdictError: `format`: a fragment is not in the document, or there is neither a fragment nor `none`.
    """
    content = content.strip()
    if is_none(content):
        return ()
    if not content:
        raise VerdictError("format", "the extract is empty; expected none or a fragment of the document")
    at = document.find(content)
    if at >= 0:
        return (Span(at, at + len(content), content),)
    index = _Index(document)
    whole = index.find(content)
    if whole is not None:
        return (whole,)
    spans = []
    for line in lines_of(content):
        span = index.find(line)
        if span is None:
            raise VerdictError("format", f"the extract is not in the document: {line[:60]!r}")
        spans.append(span)
    return tuple(spans)


class _Index:
    """A document as a string of symbols, one a cluster, so that one linear `str.find` respects the clusters' edges.

    A cluster is what normalisation can't change across its edges: a character with all that composes with it or is
    reordered around it (combining marks, Hangul vowels and finals). A cluster whose normal form is one code point is
    that code point; a longer one gets a private symbol; a run of white space is one space.
    """

    def __init__(self, document: str) -> None:
        self._document = document
        self._names = dict[str, str]()
        self._symbols, self._starts, self._ends = self._symbolise(document, is_document=True)

    def find(self, fragment: str) -> Span | None:
        """Where the fragment first occurs, as it is or after normalisation; None if it does not."""
        at = self._document.find(fragment)
        if at >= 0:
            return Span(at, at + len(fragment), fragment)
        wanted = self._symbolise(fragment, is_document=False)[0].strip(" ")
        if not wanted or _NAMELESS in wanted:
            return None
        at = self._symbols.find(wanted)
        if at < 0:
            return None
        start = self._starts[at]
        end = self._ends[at + len(wanted) - 1]
        return Span(start, end, self._document[start:end])

    def _symbolise(self, text: str, *, is_document: bool) -> tuple[str, list[int], list[int]]:
        symbols: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece in _PIECES.finditer(text):
            start, end = piece.span()
            word = piece.group()
            if word.isspace():
                symbols.append(" ")
                starts.append(start)
                ends.append(end)
            elif word.isascii():
                symbols.append(word)
                starts.extend(range(start, end))
                ends.extend(range(start + 1, end + 1))
            else:
                edges = [i for i, char in enumerate(word) if i == 0 or not _continues(char)]
                for left, right in zip(edges, [*edges[1:], len(word)], strict=True):
                    symbols.append(self._symbol(word[left:right], is_document))
                    starts.append(start + left)
                    ends.append(start + right)
        return "".join(symbols), starts, ends

    def _symbol(self, cluster: str, is_document: bool) -> str:
        if len(cluster) == 1 and cluster < "\x80":
            return cluster
        normal = unicodedata.normalize("NFC", cluster)
        if len(normal) == 1 and ord(normal) < _FIRST_NAME:
            return normal
        name = self._names.get(normal, _NAMELESS)
        if name == _NAMELESS and is_document and _FIRST_NAME + len(self._names) < ord(_NAMELESS):
            name = chr(_FIRST_NAME + len(self._names))
            self._names[normal] = name
        return name


@functools.lru_cache(maxsize=4096)
def _continues(char: str) -> bool:
    """Whether normalisation may merge this character with, or move it before, the one in front of it."""
    first = unicodedata.normalize("NFD", char)[0]
    # nothing below the combining block continues
    return char >= "\u0300" and (unicodedata.combining(first) != 0 or first in _composing_seconds())


@functools.cache
def _composing_seconds() -> frozenset[str]:
    """Characters of combining class 0 that compose with one before them: Hangul vowels and finals, and a few Indic
    vowel signs.

    Read off the interpreter's own Unicode tables (about 15 ms, once), since they change with its version. Planes 0 and
    1: the others hold no composition of two characters.
    """
    # Hangul composes by rule, not by table
    hangul = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    parts = (unicodedata.decomposition(chr(code)).split() for code in range(0x20000))
    seconds = {chr(int(pair[1], 16)) for pair in parts if len(pair) == 2 and not pair[0].startswith("<")}
    return frozenset(hangul | {second for second in seconds if unicodedata.combining(second) == 0})
