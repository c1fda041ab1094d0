"""Text that is cut before it gets to the door: by bars that wrap lines, by writes of a word at a time, by lines of
JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable

import pytest

from relabel.jobs.delivery import TransferDisplay
from relabel.jobs.logs import json_lines, redacted_streams
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.progress import Display

SECRET = "Zq7hunter2Xv9"


class Terminal(io.StringIO):
    """A terminal of 80 columns that keeps what it is sent."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """Its letters, line after line, as an eye would put them together."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s", "", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def _say(display: Display, line: str) -> None:
    display.say(line)


def _log(_: Display, line: str) -> None:
    logging.getLogger("relabel.x").warning("%s", line)


def _print(_: Display, line: str) -> None:
    print(line, file=sys.stderr)


def _print_in_parts(_: Display, line: str) -> None:
    for part in re.split(r"(?<=[ :=/])", line):
        sys.stderr.write(part)
    sys.stderr.write("\n")


@pytest.mark.parametrize("way", [_say, _log, _print, _print_in_parts])
@pytest.mark.parametrize("form", ["https://user:{}@host/x", "password={}", "Authorization: Bearer {}", "key hf_{0}{0}"])
def test_a_secret_that_the_bars_would_wrap_is_masked(
    terminal: Terminal, way: Callable[[Display, str], None], form: str
) -> None:
    with contextlib.redirect_stderr(terminal), redacted_streams(), Display(Progress(), 10) as display:
        for before in range(40, 81, 2):
            way(display, f"{'x' * before}={form.format(SECRET)}")
    assert terminal.shown().count("***") >= 21
    assert "hunter2" not in terminal.shown()


def test_what_moves_is_named_without_its_secret(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), redacted_streams(), TransferDisplay() as display:
        for before in range(40, 81, 2):
            display(f"{'x' * before}=https://user:{SECRET}@host/x", 10)
            display.say(f"{'x' * before}=https://user:{SECRET}@host/x")
            print("password =", SECRET, file=sys.stderr)
    assert terminal.shown().count("***") >= 42
    assert "hunter2" not in terminal.shown()


def test_a_line_that_is_written_in_parts_is_redacted_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    with redacted_streams():
        print("Authorization:", "Bearer", SECRET, "and", 3)
        print("password =", SECRET, end="")
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert out.endswith("password = ***")


def test_what_is_asked_on_an_unfinished_line_is_seen_before_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with redacted_streams():
        sys.stdout.write("Go on? ")
        sys.stdout.flush()
        assert capsys.readouterr().out == "Go on? "


def test_a_key_of_many_lines_is_masked_before_it_becomes_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    key = f"-----BEGIN PRIVATE KEY-----\nMII\n{SECRET}\n-----END PRIVATE KEY-----"
    with redacted_streams(), json_lines():
        print(f"about\n{key}\nand more", file=sys.stderr)
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages == ["about", "***", "and more"]
