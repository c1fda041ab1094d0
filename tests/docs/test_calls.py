"""Every call of relabel in docs/, the deploy files and the README is one that the command line takes."""

import re
from pathlib import Path

import click
import pytest

from relabel.jobs.cli import COMMANDS, relabel
from relabel.jobs.commands.demo import demo, steps_of
from tests.docs.pages import CALL, DOCS, PAGES, blocks, calls

DEPLOY_FILES = [path for path in sorted((DOCS / "deploy").rglob("*")) if path.is_file() and path.suffix != ".yaml"]
OTHER_PROGRAMS = {
    "cron": "called by cron, at its times",
    "output": "called by `relabel demo`; below",
}
"""Languages of blocks whose calls are another program's: they parse, and are not run here."""
CALLS = [call for path in [*PAGES, *DEPLOY_FILES] for call in calls(path)]


def test_the_search_for_calls_finds_them() -> None:
    words = [call for _, call in CALLS]
    assert len(words) > 60
    assert {call[0] for call in words} == set(COMMANDS), "a command that no page calls, or the search is broken"
    assert any("--backend" in call for call in words)
    assert any("--until" in call for call in words)


@pytest.mark.parametrize(("where", "words"), CALLS, ids=[where for where, _ in CALLS])
def test_every_call_of_relabel_in_the_docs_parses(where: str, words: list[str]) -> None:
    # a command keeps the help option that its first context gave it
    above = click.Context(relabel, **relabel.context_settings)
    command, arguments = relabel.get_command(above, words[0]), list(words[1:])
    assert command is not None
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        above = command.make_context(words[0], list(arguments), parent=above)
        command = command.get_command(above, arguments.pop(0))
        assert command is not None, where
    if arguments and arguments != ["--help"]:  # a sentence may name a command alone
        command.make_context(command.name, list(arguments), parent=above)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_a_call_in_a_block_is_run_or_is_a_form_with_places_to_fill_or_belongs_to_another_program(page: Path) -> None:
    for block in blocks(page):
        lines = [line for line in block.lines if CALL.search(line)]
        if block.language == "text":
            finished = [line for line in lines if not re.search(r"\b[A-Z]{3,}\b|\[|…", line)]
            assert finished == [], "nothing to fill in: make it `bash`, to be run"
        elif block.language not in {"bash", "console", *OTHER_PROGRAMS}:
            assert lines == [], f"{page.name}:{block.line}: `{block.language}` is neither run nor a form"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_block_says_its_language_and_none_is_indented(page: Path) -> None:
    assert [block.line for block in blocks(page) if not block.language] == []
    inside = {number for block in blocks(page) for number in range(block.line, block.line + len(block.lines))}
    lines = page.read_text(encoding="utf-8").splitlines()
    indented = [
        number
        for number, line in enumerate(lines, 1)
        if number not in inside
        and line.startswith("    ")
        and not lines[number - 2].strip()
        and not line.lstrip().startswith("```")
    ]
    assert indented == [], "an indented block: fence it, so that it says what it is"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language == "output" for block in blocks(page))],
    ids=lambda page: page.name,
)
def test_what_a_page_shows_of_the_demo_are_the_demos_steps(page: Path) -> None:
    """`tests/jobs/test_demo.py` runs them all."""
    default = next(option.default for option in demo.params if option.name == "bench_seconds")
    steps = steps_of("out/demo", seconds=default)
    for block in blocks(page):
        if block.language == "output":
            shown = [line for line in block.lines if re.match(r"\d+/\d+ |\$ ", line)]
            known = [
                line
                for number, (title, command) in enumerate(steps, 1)
                for line in (f"{number}/{len(steps)} {title}", f"$ {command}")
            ]
            assert [line for line in shown if line not in known] == []
            assert len(shown) > 5
