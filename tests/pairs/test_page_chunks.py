"""Chunks of a page: RES-RAG's Algorithm 1 by hand, and what is true of the chunks of any page."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lxml")
pytest.importorskip("markdown_it")

from relabel.jobs.pairs.chunks import MOST_HEADING_CHARS, chunk_page, count_pieces
from relabel.jobs.pairs.pages import Form, read_page
from tests.pairs.pages import assert_chunked, assert_sound
from tests.strategies import texts

any_text = texts()


def chunked(text: str, form: Form = "markdown", max_tokens: int = 256) -> tuple[list[Any], int]:
    """Type, headings and text of each chunk; and the number of duplicates."""
    page = read_page([(text, form)])
    chunks, num_duplicates = chunk_page(page, max_tokens, count_pieces)
    assert_chunked(page, chunks, num_duplicates, max_tokens, count_pieces)
    return [(chunk.type, list(chunk.heading_path), chunk.text) for chunk in chunks], num_duplicates


def test_algorithm_1_by_hand() -> None:
    text = (
        "before\n\n# A\n\none\n\ntwo\n\n## B\n\nthree\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\nfour\n\n- i\n- j\n\n"
        "### C\n\n## D\n\nfive\n\n# E\n\nsix\n\n## F\n"
    )
    assert chunked(text) == (
        [
            ("text", [], "before"),
            ("text", ["A"], "one\n\ntwo"),
            ("text", ["A", "B"], "three"),
            ("table", ["A", "B"], "| x | y |\n| --- | --- |\n| 1 | 2 |"),
            ("text", ["A", "B"], "four"),
            ("list", ["A", "B"], "- i\n- j"),
            ("text", ["A", "B"], "### C"),
            ("text", ["A", "D"], "five"),
            ("text", ["E"], "six"),
            ("text", ["E"], "## F"),
        ],
        0,
    )


def test_duplicates_under_the_same_headings_go() -> None:
    text = "# A\n\nsame\n\n- x\n\nSame\n\n# B\n\nsame\n\n# A\n\n-  x\n"
    assert chunked(text) == (
        [("text", ["A"], "same"), ("list", ["A"], "- x"), ("text", ["B"], "same")],
        2,
    )


def test_what_is_too_long_is_cut_at_rows_items_paragraphs_and_sentences() -> None:
    table = "| a | b |\n|---|---|\n" + "".join(f"| r{row} | s{row} |\n" for row in range(6))
    found, _ = chunked(table, max_tokens=16)
    assert [text for _, _, text in found] == [
        "| a | b |\n| --- | --- |",
        "| r0 | s0 |\n| r1 | s1 |",
        "| r2 | s2 |\n| r3 | s3 |",
        "| r4 | s4 |\n| r5 | s5 |",
    ]
    found, _ = chunked("- one two\n  - deep\n- three four five six\n- seven\n- eight", max_tokens=6)
    assert [text for _, _, text in found] == ["- one two\n  - deep", "- three four five six", "- seven\n- eight"]
    found, _ = chunked("One two. Three four? “Five six.” Seven e.g. eight nine.\n\nTen.\n\nEnd", max_tokens=8)
    assert [text for _, _, text in found] == [
        "One two. Three four?",
        "“Five six.”",
        "Seven e.g. eight nine.",
        "Ten.\n\nEnd",
    ]
    found, _ = chunked("今日は晴れ。明日は雨。", max_tokens=7)
    assert [text for _, _, text in found] == ["今日は晴れ。", "明日は雨。"]


def test_a_word_that_is_too_long_is_cut_within() -> None:
    word = "".join(chr(ord("a") + number * number % 26) for number in range(100))
    found, _ = chunked(f"before {word} after", "text", 4)
    assert "".join(text for _, _, text in found).replace(" ", "") == f"before{word}after"
    assert all(count_pieces(text) >= 2 for _, _, text in found[:-1])


def test_a_character_with_many_tokens_is_a_chunk_and_its_count_is_reported() -> None:
    page = read_page([("a𝔘b c", "text")])
    chunks, _ = chunk_page(page, 2, lambda text: sum(len(one.encode()) for one in text if one != " "))
    assert [(chunk.text, chunk.token_len) for chunk in chunks] == [("a", 1), ("𝔘", 4), ("b c", 2)]


def test_a_heading_of_any_length_does_not_make_the_output_explode() -> None:
    found, _ = chunked("<h1>" + "long " * 10_000 + "</h1>a<ul><li>b</ul>", "html")
    assert [len(path[0]) for _, path, _ in found] == [MOST_HEADING_CHARS] * 2


def even(text: str) -> int:
    """A tokenizer whose tokens don't add up: two texts together may have more, and fewer, than each alone."""
    return (len(text.split()) * 3 + len(text) % 5 + 1) // 2


blocks_of_markdown = st.sampled_from(
    [
        "# A",
        "## B",
        "#### C",
        "para one. Two three. Four",
        "para",
        "- i\n- j\n  - k",
        "1. x\n2. y",
        "| a | b |\n|---|---|\n| c | d |",
        "word" * 9,
    ]
)
blocks_of_html = st.sampled_from(
    [
        "<h1>A</h1>",
        "<h2>B",
        "<h4>C</h4>",
        "<p>para one. Two three. Four",
        "<p>para",
        "<ul><li>i<li>j<ul><li>k</ul></ul>",
        "<ol><li>x<p>y</ol>",
        "<table><tr><td>a<td>b<tr><td>c<td>d</table>",
        "<table><tr><td>",
        "</table>",
        "<ul><li>",
        "</ul>",
        "<pre>a  b\n\n c.  D</pre>",
        "<div hidden>",
        "</div>",
        "<script type='application/ld+json'>{}</script>",
    ]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data(), form=st.sampled_from(["html", "markdown", "text"]), max_tokens=st.integers(1, 12))
def test_chunks_of_any_page_keep_every_guarantee(data: st.DataObject, form: Form, max_tokens: int) -> None:
    known = blocks_of_html if form == "html" else blocks_of_markdown
    text = "\n\n".join(data.draw(st.lists(st.one_of(known, any_text), max_size=12)))
    page = read_page([(text, form)])
    assert_sound(page)
    for count in (count_pieces, even):
        chunks, num_duplicates = chunk_page(page, max_tokens, count)
        assert_chunked(page, chunks, num_duplicates, max_tokens, count)
        assert (chunks, num_duplicates) == chunk_page(page, max_tokens, count)


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_text_has_a_token_for_each_character_that_is_no_letter_and_one_for_six_that_are(text: str) -> None:
    assert count_pieces(text) <= len(text)
    assert count_pieces(text) >= sum(not (one.isascii() and one.isalpha()) and not one.isspace() for one in text)
    assert count_pieces("Pruning roses, 2024") == 2 + 1 + 1 + 4
