"""What is true of a page and its chunks, whatever they were made of; and pages that a hostile author writes."""

from collections.abc import Callable
from itertools import pairwise

from relabel.jobs.pairs.chunks import PageChunk
from relabel.jobs.pairs.pages import CleanedPage

MEGABYTE = 1_000_000


def assert_sound(page: CleanedPage) -> None:
    """Blocks are in order, parts tile their block, and all that is no white space lies in a block."""
    text = page.text
    text.encode()  # no lone surrogate
    assert "\0" not in text
    at = 0
    for block in page.blocks:
        assert text[at : block.span.start].strip() == ""
        assert text[block.span.start : block.span.end].strip() != ""
        assert (block.parts[0].start, block.parts[-1].end) == block.span
        assert all(text[one.end : other.start] == "\n" for one, other in pairwise(block.parts))
        assert all(text[part.start : part.end].strip() for part in block.parts)
        at = block.span.end
    assert text[at:] == ""


def assert_chunked(
    page: CleanedPage, chunks: list[PageChunk], num_duplicates: int, max_tokens: int, count: Callable[[str], int]
) -> None:
    """Every guarantee of `chunk_page`."""
    assert [chunk.n for chunk in chunks] == list(range(1, len(chunks) + 1))
    for chunk in chunks:
        assert page.text[chunk.start : chunk.end] == chunk.text
        assert chunk.text.strip()
        assert chunk.token_len == count(chunk.text)
        assert chunk.token_len <= max_tokens or len(chunk.text) == 1
    assert all(one.end <= other.start for one, other in pairwise(chunks))
    open_places = set(range(len(page.text)))
    for start, end in [(chunk.start, chunk.end) for chunk in chunks]:
        open_places -= set(range(start, end))
    headings = [block for block in page.blocks if block.kind == "heading"]
    under = {heading for chunk in chunks for heading in chunk.heading_path}
    for heading in headings:
        shown = {place for place in range(*heading.span) if not page.text[place].isspace()}
        outside = shown <= open_places
        assert outside or num_duplicates or not shown & open_places, "a heading is in chunks as a whole or not at all"
        assert not outside or num_duplicates or heading.title[:160] in under
        open_places -= set(range(*heading.span))
    lost = "".join(page.text[place] for place in sorted(open_places) if not page.text[place].isspace())
    assert bool(lost) <= bool(num_duplicates)
    assert is_made_of(squeezed(lost), {squeezed(chunk.text) for chunk in chunks})


def squeezed(text: str) -> str:
    return "".join(text.casefold().split())


def is_made_of(text: str, parts: set[str]) -> bool:
    """Whether the text is some of the parts put together."""
    reached = [True] + [False] * len(text)
    for place, is_reached in enumerate(reached):
        if is_reached:
            for part in parts:
                if text.startswith(part, place):
                    reached[place + len(part)] = True
    return reached[-1]


def repeated(unit: str, megabytes: float) -> str:
    return unit * int(megabytes * MEGABYTE / len(unit))


def hostile_pages(megabytes: float) -> dict[str, str]:
    """HTML of about that size, each made to take a reader's time, memory or stack."""

    def fill(unit: str, share: float = 1.0) -> str:
        return repeated(unit, megabytes * share)

    return {
        "open divs": fill("<div>"),
        "open divs, strange ends": fill("<div>", 0.5) + fill("</span>", 0.5),
        "open, strange, open": fill("<div></span>"),
        "open lists": fill("<ul><li>x"),
        "lists with headings": fill("<ul><li>x<h2>a</h2>"),
        "open tables": fill("<table><tr><td>x<td>y"),
        "cells": "<table><tr>" + fill("<td>x"),
        "formatting that is opened again": fill("<p><b id=1>x"),
        "attributes": "<p " + " ".join(f"a{number}" for number in range(int(megabytes * 100_000))) + ">x",
        "an attribute without end": '<a b="' + fill("x<"),
        "a comment without end": "<!--" + fill("<!-- -"),
        "less-than": fill("<"),
        "entities": fill("&amp"),
        "a number without end": "&#" + fill("1"),
        "breaks": fill("a<br>"),
        "a script without end": "<script>" + fill("</scrip>"),
        "a heading without end": "<h1>" + fill("word "),
        "chunks under a long heading": "<h1>"
        + "w " * 900
        + "</h1>"
        + "".join(f"<ul><li>{number}</ul>" for number in range(int(megabytes * 60_000))),
        "a word": fill("a"),
        "stops": fill("."),
        "stops and blanks": "<pre>" + fill(".  "),
        "quotes": "." + fill('"'),
        "brackets of JSON-LD": '<script type="application/ld+json">' + fill("["),
        "texts of JSON-LD": '<script type="application/ld+json">x' + fill('\\"'),
        "comments of JSON-LD": '<script type="application/ld+json">x' + fill("<!--"),
        "commas of JSON-LD": '<script type="application/ld+json">x' + fill(", "),
        "a style": '<p style="' + fill("display:          ") + '">x',
        "styles": fill('<p style="display:   nonx">x'),
        "hidden": fill("<div hidden>x"),
    }


def hostile_markdown(megabytes: float) -> dict[str, str]:
    """Markdown of about that size."""
    units = {
        "quotes": "> ",
        "lists": "- a\n",
        "brackets": "[",
        "links": "[a](",
        "references": "[a][",
        "stars": "*a **b",
        "ticks": "`a``",
        "rows": "a|b\n-|-\n",
        "tags": "<a ",
        "tildes": "~~a",
    }
    return {name: repeated(unit, megabytes) for name, unit in units.items()}
