"""Wikitext as a page: what a reader of the wiki sees is kept as far as no other page is needed for it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lxml")
pytest.importorskip("mwparserfromhell")

from relabel.jobs.pairs.pages import CleanedPage, read_page
from tests.pairs.pages import assert_sound
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


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(texts(), st.lists(st.one_of(marks, texts()), max_size=20).map("".join)))
def test_any_text_is_a_sound_page_and_the_same_one_again(text: str) -> None:
    assert read(text) == read(text)


@settings(max_examples=100, deadline=None)
@given(soup=st.lists(marks, max_size=40))
def test_marks_without_their_ends_take_no_word_along(soup: list[str]) -> None:
    """Before the first mark that has an end, and after the last."""
    opening = [mark for mark in soup if not re.search(r"\]|\}|/|-->|'|=", mark)]
    words = re.findall(r"w[0-9]+x", read("".join(f" {mark} w{number}x " for number, mark in enumerate(opening))).text)
    assert words == [f"w{number}x" for number in range(len(opening))]
