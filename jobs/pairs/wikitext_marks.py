"""Marks of wikitext that come in pairs, made well-nested before a parser sees them.

A mark that opens and is never closed costs mwparserfromhell a look at all that follows: 100 kB of `<ref>` took 15 s,
and of `[http://a` 39 s. One pass with a stack tells such marks, which mean nothing to MediaWiki either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MOST_DEPTH = 20
"""Marks open at a time; those within more are plain text. mwparserfromhell gives up at 40."""
_MARK = re.compile(
    r"<!--|<(?P<end>/?)(?P<tag>[a-z][a-z0-9]*)(?:[\s/][^<>]*)?>|<|\{\{|\}\}|\{\||\|\}(?!\})|\[\[|\]\]|\[(?=\w+:|//)|\]",
    re.IGNORECASE,
)
_CLOSES = {"}}": "{{", "|}": "{|", "]]": "[[", "]": "["}
_RAW = {"nowiki", "math", "pre", "source", "syntaxhighlight", "score", "timeline"}
"""What stands in these is no wikitext."""
_SINGLE = {"br", "hr", "wbr"}
_ENDED_BY = {
    "li": ("li",),
    **dict.fromkeys(("dt", "dd"), ("dt", "dd")),
    **dict.fromkeys(("td", "th"), ("td", "th")),
    "tr": ("td", "th", "tr"),
}
"""Tags whose end may be left out: what each of them ends. The end of what holds them ends them too."""
_ENTITIES = {"<": "&lt;", "{": "&#123;", "[": "&#91;"}


class _Open(NamedTuple):
    """A mark that waits for its end."""

    name: str
    start: int
    end: int


def well_nested(text: str) -> str:
    """The text without its comments, with the ends that items of lists and tables may leave out, with other tags that
    have no other end taken out, and with other such marks as entities. Time grows with its length alone.
    """
    pieces: list[str] = []
    at = 0
    for start, end, instead in sorted(_changes(text), key=lambda change: change[:2]):
        pieces += (text[at:start], instead)
        at = end
    return "".join((*pieces, text[at:]))


def _changes(text: str) -> Iterator[tuple[int, int, str]]:
    """Stretches of the text and what takes their places."""
    waiting: list[_Open] = []
    endless: set[str] = set()
    """What has no end behind the last place where one was looked for."""
    at = 0
    while (mark := _MARK.search(text, at)) is not None:
        start, at = mark.span()
        name = (mark["tag"] or mark[0]).lower()
        if name == "<!--" or (name in _RAW and not mark["end"] and not mark[0].endswith("/>")):
            closing = "-->" if name == "<!--" else f"</{name}"
            found = None if name in endless else re.compile(closing, re.IGNORECASE | re.ASCII).search(text, at)
            if found is None:
                endless.add(name)
                yield _plain(mark.start(), mark.end(), text)
            elif name == "<!--":
                at = found.end()
                yield start, at, ""
            else:
                at = found.end()
        elif name in _SINGLE or (mark["tag"] and mark[0].endswith("/>")):
            continue
        elif name == "]]" and waiting and waiting[-1].name == "[":
            waiting.pop()  # `[[a|[http://b c]]]`
            at = start + 1
        elif mark["end"] or name in _CLOSES:
            opener = _CLOSES.get(name, name)
            while any(one.name == opener for one in waiting):
                if (last := waiting.pop()).name == opener:
                    break
                if last.name not in _ENDED_BY:
                    yield _plain(last.start, last.end, text)
                elif mark["end"]:
                    yield start, start, f"</{last.name}>"
            else:
                if mark["end"]:
                    yield start, at, ""
        else:
            yield from _ends(waiting, name, start)
            if name == "<" or len(waiting) >= MOST_DEPTH:
                yield _plain(start, at, text)
            else:
                waiting.append(_Open(name, start, at))
    for one in waiting:
        if one.name not in _ENDED_BY:
            yield _plain(one.start, one.end, text)


def _ends(waiting: list[_Open], name: str, at: int) -> Iterator[tuple[int, int, str]]:
    """The ends that a tag of this name implies: a list of 8,000 items without them took mwparserfromhell 3 s. An item
    that no tag holds goes on without one.
    """
    while waiting and waiting[-1].name in _ENDED_BY.get(name, ()):
        last = waiting.pop()
        if waiting and waiting[-1].name.isalnum():
            yield at, at, f"</{last.name}>"


def _plain(start: int, end: int, text: str) -> tuple[int, int, str]:
    """A tag goes, any other mark becomes text."""
    if end - start > 1 and text[start] == "<" and text[start + 1] != "!":
        return start, end, ""
    return start, start + 1, _ENTITIES[text[start]]
