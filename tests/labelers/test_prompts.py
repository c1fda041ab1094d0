"""Templates: data never passes through Jinja, a template that is off is named with its line, and the built-in prompts
are golden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from relabel.labelers.prompts import Prompts, Turn
from relabel.manifests.errors import ConfigError
from tests.labelers.driving import ROSES, answer_of, fake, labeler
from tests.strategies import texts


def turn(folder: Path, source: str, **more: Any) -> Turn:
    (folder / "user.j2").write_text(source, encoding="utf-8")
    return Prompts(folder).turn("user", "user.j2", **{"data": ("query", "document"), "settings": {"grades": 3}, **more})


@given(query=texts(), document=texts())
def test_data_is_inserted_verbatim(tmp_path_factory, query: str, document: str) -> None:
    folder = tmp_path_factory.mktemp("templates", numbered=True)
    message = turn(folder, "Q: {{ query }}{{ document }}\nagain {{ query }} of {{ grades }}").message(query, document)
    assert message.parts == ("Q: ", query, "", document, "\nagain ", query, " of 3")
    assert message.fields == ("query", "document", "query")


def test_context_documents_are_listed_and_counted(tmp_path: Path) -> None:
    source = (
        "{{ query }}{% if context %} {{ context | length }}:{% for c in context %} {{ loop.index }} {{ c }}{% endfor "
        "%}{% endif %}"
    )
    two = turn(tmp_path, source, data=("query", "context"), num_context=2).message("q", "a", "b")
    assert two.text == "q 2: 1 a 2 b"
    assert two.fields == ("query", "context", "context")
    assert turn(tmp_path, source, data=("query", "context")).message("q").text == "q"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ query }}\n{{ document }}\n{{ doc }}",
            r"user.j2:3: 'doc' is undefined. A template may read: document, grades, query",
        ),
        ("{{ query }}\n{% if %}\n{{ document }}", r"user.j2:2: "),
        ("{{ query }}\n\n{{ document | upper }}", r"user.j2:3: `document` can be printed and nothing else"),
        ("{{ query }}\n{{ document | trim }}", r"user.j2:2: `document` can be printed"),
        ("{{ query }}\n{{ document | e }}", r"user.j2:2: `document` can be printed"),
        ("{{ query }}\n{{ document | length }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{% if query == 'x' %}{% endif %}", r"user.j2:2: `query` can be printed"),
        ("{{ query }}{{ document }}\n{% if query %}{% endif %}", r"user.j2:2: `query` can be printed"),
        ("{{ query ~ document }}", r"user.j2:1: "),
        ("{{ '%s' % query }}{{ document }}", r"user.j2:1: `query` can be printed"),
        ("{{ query }}{{ document._sentinel }}", r"user.j2:1: "),
        (
            "{{ query }}\n{% filter upper %}{{ document }}{% endfilter %}",
            r"user.j2:2: a filter changed the place of a data field",
        ),
        (
            "{{ query }}{% set d %}{{ document }}{% endset %}\n{{ d | truncate(4, true, '') }}",
            r"user.j2:1: a filter changed",
        ),
        ("{{ query }}", r"user.j2: never prints `document` \(expected {{ document }}"),
        ("{{ query }}{{ document }}{{ '\\x00' }}", r"user.j2:1: a filter changed"),
        ("{{ query }}{{ document }}\n\0", r"user.j2:2: holds a NUL"),
        ("{{ query }}{{ document }}\n{% include 'scal.j2' %}", r"user.j2:2: no template 'scal.j2': known are user.j2"),
        ("{{ query }}{{ document }}\n{% include query %}", r"user.j2:2: include a file by its literal name"),
        ("{{ query }}{{ document }}\n{{ 1 // 0 }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{% include 'user.j2' %}", r"user.j2:\d: maximum recursion depth exceeded"),
        ("{{ query }}{{ document }}\n{{ 'x' * 10**18 }}", r"user.j2:2: "),
        ("{{ query }}{{ document }}\n{{ ''.__class__.__mro__ }}", r"user.j2:2: "),
    ],
)
def test_a_template_that_is_off_is_named_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        turn(tmp_path, source)


def test_context_that_is_never_shown_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"never prints `context` \(expected {% for text in context %}"):
        turn(tmp_path, "{{ query }}", data=("query", "context"), num_context=1)


def test_a_file_may_be_utf8_with_crlf_and_nothing_else(tmp_path: Path) -> None:
    assert turn(tmp_path, "é\r\n{{ query }}{{ document }}").message("q", "d").parts[0] == "é\n"
    (tmp_path / "user.j2").write_bytes(b"\xff{{ query }}")
    with pytest.raises(ConfigError, match="UTF-8 text; byte 0"):
        Prompts(tmp_path).turn("user", "user.j2", data=("query",), settings={})


@pytest.mark.parametrize("name", ["direct", "graph-grpo"])
def test_an_override_takes_one_file_and_leaves_the_others(name: str, tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / "user.j2").write_text("Mine: {{ query }} / {{ document }}")
    ask = next(labeler(name, templates=str(tmp_path)).label(ROSES))
    assert ask.messages[1].text == f"Mine: {ROSES.query} / {ROSES.document}"
    assert ask.messages[0] == next(labeler(name).label(ROSES)).messages[0]


def test_an_override_of_an_included_file_changes_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "scale.j2").write_text("Only {{ grades }} grades.")
    assert "Only 4 grades." in next(labeler("direct", templates=str(tmp_path)).label(ROSES)).messages[0].text


def test_an_include_counts_for_the_digests_whether_or_not_this_shape_takes_its_branch(tmp_path: Path) -> None:
    (tmp_path / "hint.j2").write_text("Hint.")
    (tmp_path / "user.j2").write_text("{{ query }}{% if context %}{% include 'hint.j2' %}{{ context[0] }}{% endif %}")
    prompts = Prompts(tmp_path)
    assert prompts.turn("user", "user.j2", data=("query", "context"), settings={}).message("q").text == "q"
    assert list(prompts.digests) == ["hint.j2", "user.j2"]


def test_a_folder_with_a_file_that_no_stage_uses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "verdct.j2").write_text("x")
    with pytest.raises(ConfigError, match=r"no stage uses .*verdct.j2'.*Did you mean verdict.j2\?"):
        labeler("r3a", templates=str(tmp_path))
    with pytest.raises(ConfigError, match="is not a folder; make one"):
        labeler("r3a", templates=str(tmp_path / "absent"))


@settings(deadline=None)
@given(text=texts())
def test_the_models_own_first_answer_goes_back_whole_with_all_but_its_tags_as_data(text: str) -> None:
    generator = labeler("r3a").label(ROSES)
    first = next(generator)
    answer = answer_of(fake(), first)
    answer.text = f"<think>{text.replace('<', '(')}</think><intent>x</intent>"
    turn = generator.send(answer).messages[2]
    assert turn.text == answer.text
    assert turn.parts == ("<think>", text.replace("<", "("), "</think><intent>", "x", "</intent>")
