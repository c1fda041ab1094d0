"""HTML, Markdown and text as pages: what shows is kept, what does not goes, and no page takes more than linear time."""

import os
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lxml")
pytest.importorskip("markdown_it")


from relabel.jobs.pairs.chunks import chunk_page, count_pieces
from relabel.jobs.pairs.pages import MOST_DEPTH, PIECE_CHARS, CleanedPage, Form, read_page
from tests.pairs.pages import assert_sound, hostile_markdown, hostile_pages
from tests.strategies import texts

IS_FULL = bool(os.environ.get("RELABEL_FAULTS"))


def read(text: str, form: Form = "html") -> CleanedPage:
    page = read_page([(text, form)])
    assert_sound(page)
    return page


def blocks(page: CleanedPage) -> list[tuple[str, str]]:
    return [(block.kind, page.text[block.span.start : block.span.end]) for block in page.blocks]


def test_a_page_by_hand() -> None:
    page = read(
        "<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body><nav>Home</nav>"
        "<h1>Roses &amp; <i>pruning</i></h1><p>Cut   them<br>in\n winter.<script>'<p>no</p>'</script> Then wait.</p>"
        "<div>One <b>line</b>,<div>another&nbsp;line</div>and a third</div>"
        "<h3>Tools</h3><ol start=3><li>Shears<ul><li>sharp</li><li>clean</li></ul></li><li><p>Gloves</p></li></ol>"
        "<table><caption>Months</caption><tr><th>rose</th><th>month</th></tr>"
        "<tr><td>climbing</td><td>January<br>or <b>March</b></td></tr></table>"
        "<pre>a\n  b\n\nc</pre><dl><dt>hip</dt><dd>the fruit</dd><dt>cane</dt><dd>the stem</dd></dl></body></html>"
    )
    assert blocks(page) == [
        ("heading", "# Roses & pruning"),
        ("text", "Cut them\nin winter. Then wait."),
        ("text", "One line,"),
        ("text", "another line"),
        ("text", "and a third"),
        ("heading", "### Tools"),
        ("list", "3. Shears\n  - sharp\n  - clean\n4. Gloves"),
        ("table", "Months\n| rose | month |\n| --- | --- |\n| climbing | January or March |"),
        ("text", "a\n  b\n\nc"),
        ("list", "- hip\n  the fruit\n- cane\n  the stem"),
    ]
    assert [(block.level, block.title) for block in page.blocks if block.kind == "heading"] == [
        (1, "Roses & pruning"),
        (3, "Tools"),
    ]
    parts = [[page.text[part.start : part.end] for part in block.parts] for block in page.blocks]
    assert parts[6] == ["3. Shears\n  - sharp\n  - clean", "4. Gloves"]
    assert parts[7] == ["Months\n| rose | month |\n| --- | --- |", "| climbing | January or March |"]


@pytest.mark.parametrize(
    ("html", "wanted"),
    [
        ("<p>a<p hidden>b<p style='x: y; DISPLAY : none'>c<p style='visibility:hidden'>d<p>e", ["a", "e"]),
        ("a<div hidden><div>b</div><ul><li>c</ul></div>d", ["a", "d"]),
        ("<dialog>a</dialog><dialog open>b</dialog><template>c</template><noscript>d</noscript>", ["b"]),
        ("<select><option>a</select><button>b</button><textarea>c</textarea><svg><text>d</text></svg>e", ["e"]),
        ("&lt;p&gt; &#233; &#xD800; &#0; &#150; &unknown; &copy", ["<p> é \ufffd \ufffd – &unknown; ©"]),
        ("a\0b\ud800c", ["a\ufffdb\ufffdc"]),
        ("<p>a</p", ["a"]),
        ("<p>a<b>b<p>c</b>d", ["ab", "cd"]),
        ("<h1>a<h2>b</h1>c", ["# a", "## b", "c"]),
        ("<h2>a<p>b", ["## a", "b"]),
        ("<h2>a<ul><li>b</ul>", ["## a", "- b"]),
        ("<h2><div>a</div><div>b</div></h2>", ["## a b"]),
        ("<h2> </h2>a", ["a"]),
        ("<li>a<li>b<td>c", ["a", "b", "c"]),
        ("a<!-- b --!>c<![CDATA[d]]>", ["ac"]),
        ("<table><tr><td>layout <p>of a page</table>", ["layout", "of a page"]),
        ("<table><tr><td>a<td>b</table>", ["a", "b"]),
        ("<table><tr><td>a<td>b<tr><td>c</table>", ["| a | b |\n| c |"]),
        ("<table role=presentation><tr><td>a<td>b<tr><td>c</table>", ["a", "b", "c"]),
        ("<table><td>a<td>b<tr><td>c", ["| a | b |\n| c |"]),
        ("<table><tr><td>a<td><h2>b</h2><tr><td>c</table>", ["a", "## b", "c"]),
        ("<table><tr><td><table><tr><td>a<tr><td>b</table><td>c</table>", ["| a |\n| b |", "c"]),
        ("<ul><li>a<li><table><tr><td>b<tr><td>c</table></ul>", ["a", "| b |\n| c |"]),
        ("<ul><li><h3>a</h3>b<li>c</ul>", ["### a", "b", "c"]),
        ("<ul>a<li>b<ol><li>c<li>d</ol>e</ul>f", ["a\n- b\n  1. c\n  2. d\n  e", "f"]),
        ("<ul><li><ul><li>a</ul></ul>", ["- a"]),
        ("<table><tr><td><ul><li>a<li>b</ul><td>c<tr><td><p>d<p>e</table>", ["| a b | c |\n| d e |"]),
        ("", []),
        (" \n", []),
        ("<script>1</script>", []),
    ],
)
def test_what_shows_is_kept_and_what_does_not_goes(html: str, wanted: list[str]) -> None:
    assert [text for _, text in blocks(read(html))] == wanted


def test_markdown_is_read_as_the_html_that_it_represents() -> None:
    page = read(
        "# Roses\n\nSee [the *guide*](http://x.y/z) or ![a picture](p.png).\nNext line.\n\nSetext\n---\n\n"
        "| a | b |\n|---|---|\n| 1 | ~~2~~ |\n\n- one\n  - two\n\n```py\nx = '# no heading'\n```\n\n"
        "<div hidden>no</div>\n&amp; <b>bold</b>\n",
        "markdown",
    )
    assert blocks(page) == [
        ("heading", "# Roses"),
        ("text", "See the guide or . Next line."),
        ("heading", "## Setext"),
        ("table", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        ("list", "- one\n  - two"),
        ("text", "x = '# no heading'"),
        ("text", "& bold"),
    ]


def test_text_stays_as_it_is_but_for_line_ends_and_what_no_prompt_can_hold() -> None:
    page = read("# no heading\r\n  <b>\rx\n \t\n\n  second\0\ud83d \n\nthird\n", "text")
    assert blocks(page) == [("text", "# no heading\n  <b>\nx"), ("text", "second\ufffd\ufffd"), ("text", "third")]


def test_several_texts_are_one_page() -> None:
    page = read_page([("A <title>", "text"), ("<p>b</p>", "html")])
    assert page.text == "A <title>\n\nb"
    assert_sound(page)


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ('{"a": "<p>&amp;"}', ['{"a": "<p>&amp;"}']),
        ('[{"a": 1}, 2, {"b": "é"}]', ['{"a": 1}', '{"b": "é"}']),
        ('{"a": "//b", /* c */ "d": [1,],}', None),
        ('{"a": "b\nc\ud800\\ud800"}', ['{"a": "b\\nc\ufffd\ufffd"}']),
        ("null", []),
        (" ", []),
        ('{"a": NaN}', None),
        ('{"a": }', None),
        ("[" * 100_000, None),
        ('{"a": ' + "1" * 5000 + "}", None),
    ],
)
def test_json_ld_is_kept_apart(script: str, wanted: list[str] | None) -> None:
    page = read(f'a<script type="Application/LD+JSON; charset=utf-8">{script}</script><script>{{}}</script>')
    assert page.text == "a"
    assert (list(page.json_ld), page.unreadable_json_ld) == ((wanted, 0) if wanted is not None else ([], 1))


def test_json_ld_of_a_hidden_part_is_kept() -> None:
    assert read('<div hidden><script type="application/ld+json">{}</script></div>').json_ld == ("{}",)


tags = st.sampled_from(
    ["p", "div", "span", "b", "ul", "li", "ol", "dl", "dt", "dd", "table", "tr", "td", "th", "h1", "h2", "h4", "pre"]
)
pieces = st.one_of(
    tags.map("<{}>".format),
    tags.map("</{}>".format),
    st.sampled_from(["<br>", "&nbsp;", "&#10;", "<caption>", "</caption>", "<!-- a -->", "<hr/>", " ", "\n"]),
)


@settings(max_examples=100, deadline=None)
@given(soup=st.lists(pieces, max_size=60))
def test_no_word_of_tag_soup_is_lost_or_doubled(soup: list[str]) -> None:
    html = "".join(f" {piece} w{number}x " for number, piece in enumerate(soup))
    words = re.findall(r"w[0-9]+x", read(html).text)
    assert sorted(words) == sorted(f"w{number}x" for number in range(len(soup)))


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(
        st.text(st.sampled_from("#>-+*1.)`~_=:!]()& \tab\n\\"), max_size=20),
        max_size=15,
    )
)
def test_no_word_of_markdown_soup_is_lost_or_doubled(lines: list[str]) -> None:
    """But for what Markdown makes invisible: links, references, tags, cells without a column, names of languages."""
    text = "\n".join(f"{line} w{number}x" for number, line in enumerate(lines))
    words = re.findall(r"w[0-9]+x", read(text, "markdown").text)
    # what is after a fence's marks on its line is the name of a language
    named = set(re.findall(r"(?:```|~~~)[^\n]*?(w[0-9]+x)", text))
    assert sorted({*words} | named) == sorted({f"w{number}x" for number in range(len(lines))} | named)
    assert len(words) == len({*words})


@settings(max_examples=100, deadline=None)
@given(
    text=st.one_of(texts(), st.lists(st.one_of(pieces, texts()), max_size=20).map("".join)),
    form=st.sampled_from(["html", "markdown", "text"]),
)
def test_any_text_is_a_sound_page_and_the_same_one_again(text: str, form: Form) -> None:
    assert read(text, form) == read(text, form)


def test_what_lies_within_100_000_tags_is_read() -> None:
    for start, end in (("<div>", "</div>"), ("<ul><li>", "</li></ul>"), ("<table><tr><td>", "</td></tr></table>")):
        depth = 100_000 // start.count("<")
        html = start * depth + "deep" + end * depth
        assert read(html).text.lstrip("- ") == "deep"
    assert read("- " * 100_000 + "deep", "markdown").text.endswith("deep")
    assert read("> " * 100_000 + "deep", "markdown").text.endswith("deep")
    assert read("\n".join(" " * 2 * depth + "- w" for depth in range(300)), "markdown").text.count("w") == 300


def test_where_a_new_parser_takes_over_no_text_is_lost_and_no_script_shows() -> None:
    deep = "<div>" * (MOST_DEPTH + 10)
    script = "<script>" + "var a = '<p>no</p>';" * (PIECE_CHARS // 10) + "</script>"
    html = deep + script + "<p>first" + "<p>x" * PIECE_CHARS + "<p>last"
    words = read(html).text.split("\n\n")
    assert words == ["first", *["x"] * PIECE_CHARS, "last"]


@pytest.mark.parametrize("name", hostile_pages(0))
def test_a_hostile_page_takes_linear_time(name: str) -> None:
    # a parser without a bound to its depth takes 30 s of 2 MB with strange ends
    megabytes = 10.0 if IS_FULL else 2.0 if "strange ends" in name else 0.1
    html = hostile_pages(megabytes)[name]
    started = time.process_time()
    page = read_page([(html, "html")])
    chunks, _ = chunk_page(page, 256, count_pieces)
    assert time.process_time() - started < 10 + 6 * megabytes  # most take 0.1 to 2 s a megabyte
    assert all(page.text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert sum(len(heading) for chunk in chunks for heading in chunk.heading_path) < 100 * len(html) + 1000


@pytest.mark.parametrize("name", hostile_markdown(0))
def test_hostile_markdown_takes_linear_time(name: str) -> None:
    megabytes = 2.0 if IS_FULL else 0.01
    started = time.process_time()
    page = read_page([(hostile_markdown(megabytes)[name], "markdown")])
    assert time.process_time() - started < 30 + 60 * megabytes  # 2 to 20 s a megabyte, with a full heap more
    assert_sound(page)
