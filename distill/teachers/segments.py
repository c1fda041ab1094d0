"""Which part of an answer each of its tokens belongs to.

A character belongs to the token that completes it, and a token to the part that most of its characters are in; of
equals to a section before what is between sections, and to the earlier section. A token that completes no character
belongs where the one that it is part of does. Tokens without text (the end of a turn) belong to no section.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

NO_PART = -1
"""The part of what is between sections: tags, white space, the end of a turn."""

Span = tuple[int, int]


def token_spans(pieces: Iterable[bytes]) -> list[Span]:
    """The characters [start, end) of the decoded answer that each token completes; none where start is end.

    Args:
        pieces: the bytes of each token, in order. Bytes that are not UTF-8 become replacement characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    spans = []
    at = 0
    for piece in pieces:
        end = at + len(decoder.decode(piece))
        spans.append((at, end))
        at = end
    return spans


def token_parts(pieces: Sequence[bytes], spans: Mapping[int, Sequence[Span]]) -> list[int]:
    """The part of each token.

    Args:
        pieces: the bytes of each token; none for one that is not text.
        spans: by part, the characters [start, end) of the answer's text that are its own; they do not overlap.
    """
    ends = token_spans(pieces)
    length = max(ends[-1][1] if ends else 0, *(end for held in spans.values() for _, end in held), 0) + 1
    part_of = [NO_PART] * length
    for part, held in spans.items():
        for start, end in held:
            part_of[start:end] = [part] * (end - start)
    return [
        _most(part_of[start : max(end, start + 1)]) if piece else NO_PART
        for piece, (start, end) in zip(pieces, ends, strict=True)
    ]


def _most(parts: Sequence[int]) -> int:
    counts = Counter(parts)
    most = max(counts.values())
    among = [part for part in counts if counts[part] == most]
    return next((part for part in among if part != NO_PART), NO_PART)
