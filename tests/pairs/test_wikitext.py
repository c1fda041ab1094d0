"""Wikitext as a page: what a reader of the wiki sees is kept as far as no other page is needed for it, and no text
takes more than linear time.
"""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lxml")
pytest.importorskip("mwparserfromhell")

from relabel.jobs.pairs.page_columns import read_page
from relabel.jobs.pairs.pages import CleanedPage
from relabel.jobs.pairs.wikitext import MOST_DEPTH, well_nested
from tests.pairs.pages import assert_sound, repeated
from tests.strategies import texts


def read(text: str) -> CleanedPage:
    page = read_page([(text, "wikitext")])
    assert_sound(page)
    return page


def test_a_page_by_hand() -> None:
    page = read(
        "{{Infobox plant\n| name = Rose & ''co''\n| empty =\n| home = [[Asia|the east]]\n}}\n"
        "'''Rose''' is a [[flower]].<ref name=a>no {{cite|b=c}}</ref> It\ngrows<!-- never --> {{lang|fr|bien}}"
        " &amp; fast. [[File:a.jpg|thumb|no [[b]]]]\n\n__TOC__\n== History ==\n{{main|Other}}\n* one\n** within\n"
        "*: goes on\n* two\n: indented\n\n;Term: meaning\n# first\n# second\n\n"
        '{| class="wikitable"\n|+ Caption\n! a !! b\n|-\n| 1 || colspan=2 | 2\n|}\n=== Deep ===\n'
        "<blockquote>cited\ntext</blockquote> [http://x the site], <nowiki>''raw''</nowiki>\n[[Category:a]] [[fr:b]]"
    )
    found = [(block.kind, page.text[block.span.start : block.span.end]) for block in page.blocks]
    assert found == [
        ("table", "| name | Rose & co |\n| home | the east |"),
        ("text", "Rose is a flower. It grows bien & fast."),
        ("heading", "## History"),
        ("list", "- one\n  - within\n  goes on\n- two"),
        ("text", "indented"),
        ("text", "Term: meaning"),
        ("list", "1. first\n2. second"),
        ("table", "Caption\n| a | b |\n| --- | --- |\n| 1 | 2 |"),
        ("heading", "### Deep"),
        ("text", "cited text"),
        ("text", "the site, ''raw''"),
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ""),
        ("no heading", "no heading"),
        ("a\n\nb\nc", "a\n\nb c"),
        ("== ==\na", "a"),
        ("= a =\nb", "# a\n\nb"),
        ("== a <!-- b -->==\nc", "## a\n\nc"),
        ("======= a =======", "###### = a ="),
        ("[[a]]s [[b|c]] [[:Category:d]] [[e#f|]]", "as c Category:d e#f"),
        ("[http://a] http://b [http://c d]", "http://b d"),
        ("x {{unknown|a}} y {{convert|3|km|mi}}", "x y 3 km"),
        ("a {{{1|b}}} {{{2}}}", "a b"),
        ("<div>a", "a"),
        ("a</div>b", "ab"),
        ("a<br/>b<br>c", "a\nb\nc"),
        ("{| a\n|-\n| b", "{| a |- | b"),
        ("[[a\n{{b", "[[a {{b"),
        ("1 < 2 > 0 & x", "1 < 2 > 0 & x"),
        ("<script>a</script><style>b</style>c", "c"),
        ('<span style="display:none">a</span>b', "b"),
        ("''a'' '''b''' '''''c'''''", "a b c"),
        ("a\0b\r\nc", "a\ufffdb c"),
        ("<nowiki>[[a]] '''b'''</nowiki>", "[[a]] '''b'''"),
        ("\u0130\u0130<!--a--><NOWIKI>[[</nowiki>b", "\u0130\u0130[[b"),  # which lower() makes longer
        ("{|\n| a\n* b\n|-\n| c || d\n|}", "| a b | |\n| c | d |".replace(" | |", " |")),
    ],
)
def test_what_is_kept_and_what_goes(text: str, wanted: str) -> None:
    assert read(text).text == wanted


MARKS = "'' ''' [[ ]] [[a| {{ }} {{a| {{{ }}} {| |} |- || ! <ref> </ref> <div> </div> <!-- --> == * # : ; <br> <nowiki>"
marks = st.sampled_from([*MARKS.split(" "), "[http://a ", "</nowiki>", "\n", "\n\n", " "])


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(texts(), st.lists(st.one_of(marks, texts()), max_size=20).map("".join)))
def test_any_text_is_a_sound_page_and_the_same_one_again(text: str) -> None:
    assert read(text) == read(text)


@settings(max_examples=200, deadline=None)
@given(soup=st.lists(marks, max_size=40))
def test_marks_without_their_ends_take_no_word_along(soup: list[str]) -> None:
    """Before the first mark that has an end, and after the last."""
    opening = [mark for mark in soup if not re.search(r"\]|\}|/|-->|'|=", mark)]
    words = re.findall(r"w[0-9]+x", read("".join(f" {mark} w{number}x " for number, mark in enumerate(opening))).text)
    assert words == [f"w{number}x" for number in range(len(opening))]


def test_marks_are_well_nested_and_those_that_were_so_stay() -> None:
    fine = "{{a|[[b|[http://c d]]]<ref name=e>{{f}}</ref>}} {| g\n| h\n|} <br> <nowiki>[[ {{ <b></nowiki> i"
    assert well_nested(fine) == fine
    assert well_nested("<b>{|</b>|}") == "<b>&#123;|</b>|}"
    assert well_nested("<i><b>a</i>") == "<i>a</i>"
    assert well_nested("a<!-- [[ -->b]]<ref/>") == "ab]]<ref/>"
    deep = well_nested("<b>" * 1000 + "a" + "</b>" * 1000)
    assert deep == "<b>" * MOST_DEPTH + "a" + "</b>" * MOST_DEPTH


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<ul><li>a<li>b</ul>c", "<ul><li>a</li><li>b</li></ul>c"),
        ("<ul><li>a</li><li>b</ul>c</li>", "<ul><li>a</li><li>b</li></ul>c"),
        ("<table><tr><td>a<td>b<tr><td>c</table>", "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>"),
        ("<dl><dt><ul><li>a</dl>", "<dl><dt><li>a</li></dt></dl>"),
        ("<li>a\n== b ==\n<li>c\n", "<li>a\n== b ==\n<li>c\n"),
        ("{|\n| <li>a\n| <td>b\n|}", "{|\n| <li>a\n| <td>b\n|}"),
    ],
)
def test_ends_that_may_be_left_out_are_put_in(text: str, wanted: str) -> None:
    """Not where nothing holds the item, nor before marks of wikitext, which begin a line."""
    assert well_nested(text) == wanted
    assert well_nested(wanted) == wanted


HOSTILE = {
    "links": "[[",
    "links with text": "[[a|",
    "templates": "{{",
    "fields": "{{a|b=",
    "arguments": "{{{",
    "tables": "{|\n",
    "references": "<ref>",
    "tags without end": "<div ",
    "attributes": "<a b=\"'",
    "comments": "<!--",
    "raw": "<nowiki>",
    "addresses": "[http://a ",
    "quotes": "'''a''b",
    "headings": "== a\n",
    "lists": "* a\n",
    "marks of lists": "*",
    "rules": "----\n",
    "entities": "&amp",
    "items without ends": "<li>a\n",
}
NESTED = {"tags": ("<div>", "</div>"), "templates": ("{{a|", "}}"), "tables": ("{|\n|-\n|\n", "|}\n")}
NESTED["crossed"] = ("<b>{|\n", "</b>|}\n")
NESTED |= {"items": ("<li>", "</li>"), "lists": ("<ul><li>", "</li></ul>"), "cells": ("<tr><td>", "</td></tr>")}


@pytest.mark.parametrize("name", [*HOSTILE, *(f"nested {name}" for name in NESTED)])
def test_hostile_wikitext_takes_linear_time(name: str) -> None:
    """Alone, mwparserfromhell takes 15 s of 0.1 MB of `<ref>`, and 39 s of 0.2 MB of addresses."""
    if name in HOSTILE:
        text = repeated(HOSTILE[name], 0.05)
    else:
        start, end = NESTED[name.partition(" ")[2]]
        text = repeated(start, 0.025) + "deep" + repeated(end, 0.025)
    started = time.process_time()
    page = read_page([(text, "wikitext")])
    assert time.process_time() - started < 10  # 0.1 to 1.2 s
    assert_sound(page)
