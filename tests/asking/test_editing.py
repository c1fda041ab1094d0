"""`relabel ask --edit-prompt`: prompts are edited under an engine that stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.ask import AskedRows, Exchange
from relabel.jobs.commands.ask import again_on_change, asked_text
from relabel.manifests.asks import Answer, Ask, Message
from relabel.manifests.secrets import keep_secret, redacted

SECRET = "Zq7hunter2Xv9"
ROWS = [
    {"query_id": f"q{n}", "query": f"how to prune roses {n}", "doc_id": f"d{n}", "document": "Cut in winter."}
    for n in range(3)
]


@pytest.fixture
def prompts(folder: Path, relabel: Callable[..., Any]) -> None:
    """A job file, and the prompts of its labeler in `prompts`."""
    pq.write_table(pa.Table.from_pylist(ROWS), "pairs.parquet")
    spec = {
        "name": "asked",
        "input": {"path": "pairs.parquet"},
        "labeler": {"name": "direct"},
        "engine": {"name": "fake", "seed": 5},
        "output": "out/run",
    }
    Path("job.yaml").write_text(json.dumps(spec))
    assert relabel("templates", "export", "direct", "prompts").code == 0


ASK = Ask("think", (Message("user", ("hello",)),), None, 9)


def test_nothing_that_is_written_is_a_command_to_the_terminal_or_a_secret(no_secrets_kept: None) -> None:
    keep_secret(SECRET, "the variable KEY")
    text = f"a\x1b[31m\x07 {SECRET} and api_key={SECRET}, done"
    out = redacted(click.unstyle(asked_text(AskedRows([], [Exchange(ASK, Answer(0, text, "stop"), 1.0)]), None)))
    assert "hunter" not in out
    assert "\x1b" not in out
    assert "a\\x1b[31m\\x07 " in out


class Editor:
    """A person at an editor: at each pause the next step is taken, and then Ctrl-C."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def __call__(self, _: float) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def wait() -> None:
    """Nothing is changed: what was changed before counts now."""


def replaces(file: str, old: str, new: str) -> Callable[[], object]:
    def step() -> None:
        path = Path(file)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return step


def test_a_changed_template_is_asked_with_the_same_engine_and_a_broken_one_is_said(
    prompts: None, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = Editor(
        wait,
        replaces("prompts/user.j2", "{{ query }}", "{{ quary }}"),
        wait,
        replaces("prompts/user.j2", "{{ quary }}", "{% if %}"),
        wait,
        replaces("prompts/user.j2", "{% if %}", "Be brief. {{ query }}"),
        wait,
    )
    monkeypatch.setattr(again_on_change, "__kwdefaults__", {"pause": editor})
    started: list[object] = []
    from relabel.jobs.ask import start_engine

    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda job: (started.append(job), start_engine(job))[1])
    done = relabel("ask", "job.yaml", "--row", "2", "--edit-prompt", "prompts")
    assert done.code == 130
    assert len(started) == 1
    assert done.out.count("row 2: label") == 2
    assert len(re.findall(r"1 row, 1 ask in \d+\.\d s; nothing was written\.", done.out)) == 2
    first, second = done.out.split("nothing was written.")[:2]
    assert "Be brief. ⟦how to prune roses 2⟧" not in first
    assert "Be brief. ⟦how to prune roses 2⟧" in second
    assert re.search(r"prompts/user\.j2:\d+: .*quary", done.err)
    assert re.search(r"prompts/user\.j2:\d+: Expected an expression", done.err)
    assert done.err.count("changed: user.j2") == 3
    assert done.err.count("is watched") == 4
    assert "Stopped by hand" in done.err
    assert "Traceback" not in done.err


def test_a_dry_run_renders_again_and_loads_no_model(
    prompts: None, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    relabel("ask", "job.yaml", "--edit-prompt", "absent").refused(2, "relabel templates export direct absent")
    relabel("ask", "job.yaml", "--row", "9", "--edit-prompt", "prompts").refused(3, "row 9: the input has 3 rows")
    Path("prompts/user.j2~").write_text("{{ broken, as an editor leaves it")
    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
    editor = Editor(replaces("prompts/user.j2", "{{ query }}", "Mine: {{ query }}"), wait)
    monkeypatch.setattr(again_on_change, "__kwdefaults__", {"pause": editor})
    done = relabel("ask", "job.yaml", "--dry-run", "--edit-prompt", "prompts")
    assert done.code == 130
    assert len(re.findall(r"\d+ rows?, \d+ asks? would be asked first; nothing was written\.", done.out)) == 2
    assert done.out.count("Mine: ⟦") == 1
    assert not Path("out").exists()


def test_a_file_that_is_written_in_steps_is_one_change_and_what_editors_leave_is_none(folder: Path) -> None:
    Path("p").mkdir()
    Path("p/a.j2").write_text("one")
    seen: list[str] = []

    def read() -> None:
        seen.append("".join(sorted(path.read_text() for path in Path("p").glob("*.j2"))))

    editor = Editor(
        wait,
        lambda: Path("p/a.j2").write_text(""),
        lambda: Path("p/a.j2").write_text("tw"),
        lambda: Path("p/a.j2").write_text("two"),
        wait,
        lambda: Path("p/.a.j2.swp").write_text("x"),
        lambda: Path("p/a.j2~").write_text("two"),
        lambda: os.utime("p/a.j2", (1, 1)),
        lambda: Path("p/b.j2").write_text("more"),
        wait,
        lambda: Path("p/a.j2").unlink(),
        wait,
    )
    with pytest.raises(KeyboardInterrupt):
        again_on_change(Path("p"), read, pause=editor)
    assert seen == ["one", "two", "moretwo", "more"]
