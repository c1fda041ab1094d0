"""`--log-format json`: every line on stderr is one object, whatever wrote it."""

import contextlib
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest

from relabel.jobs import logs
from relabel.jobs.logs import json_lines, redacted_streams
from relabel.jobs.run.display import DRAW_EVERY_S, Display
from relabel.jobs.run.progress import Progress
from relabel.jobs.transfers import TransferDisplay
from relabel.labelers.prompts import TEMPLATES_READ


def lines_of(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert {"time", "level", "event", "message"} <= set(line)
        assert abs(datetime.fromisoformat(line["time"]).timestamp() - time.time()) < 600
    return found


@pytest.fixture
def call(folder: Path) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """A command in a process of its own: exit code, the objects on stderr, stdout."""

    def run(*arguments: str, **variables: str) -> tuple[int, list[dict[str, Any]], str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELABEL_")} | variables
        program = (
            "from relabel.jobs.run import display; display.LINE_EVERY_S = 0.0; "
            "from relabel.jobs.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, lines_of(done.stderr), done.stdout

    return run


def test_every_line_of_a_run_is_an_object_with_job_shard_and_counts(
    call: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    path = write_job(
        {
            "engine": {"args": {"batch": 2, "p_garbage": 0.3}},
            "labeler": {"attempts": 1},
            "run": {"max_failed_fraction": 1.0},
        }
    )
    code, lines, out = call(
        "run", path, "--shard", "0/1", "--log-format", "json", "--metrics", "absent/m.prom", "--for", "1h"
    )
    assert code == 0
    assert "labelled" in out
    events = [line["event"] for line in lines]
    assert {"note", "progress", "advice", "end", "relabel.jobs.run.progress"} <= set(events)
    assert all((line["job"], line["shard"]) == ("ecom", "0/1") for line in lines)
    counts = [line["pairs"] for line in lines if line["event"] == "progress"]
    assert counts == sorted(counts)
    (end,) = [line for line in lines if line["event"] == "end"]
    assert (end["rows"], end["labelled"] + end["quarantined"], end["exit_code"]) == (24, 24, 0)
    assert next(line["level"] for line in lines if line["event"] == "relabel.jobs.run.progress") == "warning"


def test_the_variable_does_as_the_flag_and_the_flag_wins(
    call: Callable[..., Any],
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_job({"input": {"path": "absent.parquet"}})
    code, lines, _ = call("run", path, RELABEL_LOG_FORMAT="json")
    assert code == 3
    assert [(line["level"], line["event"], line["error"], line["exit_code"]) for line in lines] == [
        ("error", "error", "InputError", 3)
    ]
    monkeypatch.setenv("RELABEL_LOG_FORMAT", "json")
    assert relabel("run", path, "--log-format", "text").err.startswith("relabel: ")
    monkeypatch.setenv("RELABEL_LOG_FORMAT", "xml")
    relabel("run", path).refused(2, "'xml' is not one of 'text', 'json'")


@pytest.mark.parametrize(
    ("arguments", "code", "event"),
    [
        (["run", "job.yaml", "--shrad", "1"], 2, "usage"),
        (["rnu"], 2, "usage"),
        (["run", "job.yaml", "--until", "25:00"], 2, "error"),
        (["run", "absent.yaml"], 3, "error"),
    ],
)
def test_what_goes_wrong_early_is_one_object_too(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    event: str,
) -> None:
    monkeypatch.setenv("RELABEL_LOG_FORMAT", "json")
    write_job()
    done = relabel(*arguments)
    (line,) = lines_of(done.err)
    assert (done.code, line["level"], line["event"]) == (code, "error", event)


def test_a_traceback_stays_within_one_line(
    relabel: Callable[..., Any], write_job: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("relabel.jobs.job.load_job", fails)
    done = relabel("run", write_job(), "--log-format=json")
    (line,) = lines_of(done.err)
    assert (done.code, line["level"], line["event"], line["error"]) == (1, "error", "crash", "ZeroDivisionError")
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("second line\n")


def test_what_others_print_becomes_objects_and_threads_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.json_lines():
        threads = [
            threading.Thread(target=lambda name=name: [print(f"{name} says {n}", file=sys.stderr) for n in range(200)])
            for name in "abc"
        ]
        for thread in threads:
            thread.start()
        click.echo("from click", err=True)
        for thread in threads:
            thread.join()
        print("no line end", end="", file=sys.stderr)
    lines = lines_of(capsys.readouterr().err)
    messages = [line["message"] for line in lines]
    for name in "abc":
        assert [text for text in messages if text.startswith(name)] == [f"{name} says {n}" for n in range(200)]
    assert {"from click", "no line end"} <= set(messages)
    assert not logs.is_json()


# Text that is cut before it gets to the door: by bars that wrap lines, by writes of a word at a time, by lines of
# JSON.


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
    display.write(line)


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


def test_a_terminal_of_80_columns_shows_how_many_pairs_are_done(terminal: Terminal) -> None:
    progress = Progress(rows_of_others=5)
    with contextlib.redirect_stderr(terminal), Display(progress, 1_200_500, before=700_000) as display:
        time.sleep(2 * DRAW_EVERY_S)
        display.update()
    assert "700005/1900500pairs·ETA" in terminal.shown()
    assert "5byotherworkers" in terminal.shown()


def test_what_moves_is_named_without_its_secret(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), redacted_streams(), TransferDisplay() as display:
        for before in range(40, 81, 2):
            display(f"{'x' * before}=https://user:{SECRET}@host/x", 10)
            display.write(f"{'x' * before}=https://user:{SECRET}@host/x")
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


# No id or text of the data begins a line of what a command says, and none commands a terminal.


MARK = "FORGED"
FORGED = f"q\n{MARK} all rows are done\r{MARK}\x1b[2J\u2028{MARK}"
CALLS: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor", "job.yaml"),
    "plan": ("plan", "job.yaml"),
    "run": ("run", "job.yaml"),
    "status": ("status", "job.yaml"),
    "inspect": ("inspect", "out/ecom"),
    "inspect a row": ("inspect", "out/ecom", "--row", "0"),
    "verify": ("verify", "out/ecom"),
    "ask": ("ask", "job.yaml", "--rows", "0"),
    "ask a query that is not there": ("ask", "job.yaml", "--query", FORGED + "x"),
    "evaluate": ("evaluate", "out/ecom", "--qrels", "pairs.parquet"),
    "evaluate with conflicts": ("evaluate", "out/ecom", "--qrels", "twice.parquet"),
    "evaluate by a column that is not there": ("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--grade", "query_id"),  # noqa: E501
    "compare": ("compare", "out/ecom", "out/other", "--qrels", "pairs.parquet"),
    "convert to qrels": ("convert", "out/ecom", "x.qrels"),
    "convert conflicts": ("convert", "twice.parquet", "x.jsonl"),
    "convert ids as grades": ("convert", "pairs.parquet", "x.jsonl", "--grade", "doc_id"),
    "report": ("report", "out/ecom"),
}  # fmt: skip


@pytest.fixture
def world(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str], pairs: list[Any]
) -> None:
    rows = [{**row, "query_id": FORGED, "doc_id": f"{FORGED}{number}"} for number, row in enumerate(pairs[:8])]
    write_pairs(rows)
    write_pairs([*rows, {**rows[0], "grade": 2}], "twice.parquet")
    for output, seed in (("out/ecom", 1), ("out/other", 2)):
        changes = {"input": {"columns": {"gold": "grade"}}, "output": output, "engine": {"seed": seed}}
        assert relabel("run", write_job(changes)).code == 0
    write_job({"input": {"columns": {"gold": "grade"}}, "engine": {"seed": 1}})


def test_no_text_of_the_data_begins_a_line(world: None, relabel: Callable[..., Any]) -> None:
    for call in CALLS.values():
        done = relabel(*call)
        assert done.code != 1, done
        for said in (done.out, done.err):
            assert not any(line.startswith(MARK) for line in said.splitlines()), said
            assert "\x1b[2J" not in said, said


def test_an_error_keeps_the_lines_of_its_list(relabel: Callable[..., Any], world: None) -> None:
    done = relabel("run", "job.yaml", "--set", "labeler.attempts=7", "--set", "engine.seed=9")
    assert done.err.count("\n  ") >= 2, done
    assert "\\n" not in done.err


# A command line that a message offers is one to be pasted: it means the job that was asked, and no other.


Call = Callable[..., Any]
FAILING = {
    "labeler": {"name": "direct", "attempts": 1},
    "engine": {"name": "fake", "seed": 7, "args": {"p_garbage": 0.3}},
    "run": {"chunk_rows": 4, "max_failed_fraction": 1.0},
}


def offered(text: str, command: str) -> list[str]:
    """The words of the one `relabel COMMAND …` that a text ends a line with."""
    (line,) = re.findall(rf"relabel ({command} .+)$", text, flags=re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("name", ["two words.yaml", "-dash.yaml"])
@pytest.mark.parametrize("changes", [[], ["--set", "output=out/other place"], ["--date", "2026-11-19"]])
def test_a_retry_that_is_offered_asks_the_output_that_the_run_left(
    relabel: Call, write_pairs: Call, write_job: Call, folder: Path, name: str, changes: list[str]
) -> None:
    write_pairs()
    write_job({**FAILING, "output": "out/ecom-${date}"}, path=name)
    ended = relabel("run", *changes, "--", name)
    assert ended.code == 0, ended
    (output,) = (path for path in (folder / "out").iterdir())
    command, *words = offered(ended.err, "retry")
    again = relabel(command, "--output", "json", *words)
    assert again.code in (0, 20), again
    assert Path(again.json["output"]).name == output.name
    assert again.json["this_run"]["requests"] > 0
    assert list((folder / "out").iterdir()) == [output]


def test_a_retry_that_can_do_no_more_names_the_command_that_can(
    relabel: Call, write_pairs: Call, write_job: Call
) -> None:
    write_pairs()
    job = write_job({"labeler": {"name": "direct"}})
    assert relabel("run", job, "--shard", "0/4").code == 0
    left = relabel("retry", job)
    assert left.code == 20
    assert "run the same command again" not in left.out
    assert relabel(*offered(left.err, "run")).code == 0


# What is reported where an output belongs to another job: the texts of prompts and the values that differ, no
# digests.


OLD, NEW = "Judge by the title.", "Judge by the body."


@pytest.fixture
def begun(relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str]) -> str:
    """A job with prompts of its own in `prompts`, of which the output has a plan."""
    write_pairs()
    job = write_job({"labeler": {"name": "direct", "templates": "prompts"}})
    assert relabel("templates", "export", "direct", "prompts").code == 0
    edit(lambda text: f"{text}\n{OLD}\nSame.\n")
    assert relabel("run", job).code == 0
    TEMPLATES_READ.clear()  # as a later process finds it
    return job


def edit(change: Callable[[str], str]) -> None:
    file = Path("prompts/system.j2")
    file.write_text(change(file.read_text()))


@pytest.mark.parametrize(
    ("new", "settings", "shown", "absent"),
    [
        (NEW, (), ["templates.system.j2: another text than the planned one, plan/template-"], ["stages"]),
        (NEW, ("engine.seed=8",), ["templates.system.j2: another", "engine.seed: was 7, is 8"], ["stages"]),
        (OLD, ("engine.seed=8",), ["engine.seed: was 7, is 8"], ["system.j2", "stages"]),
    ],
)
def test_templates_that_differ_are_named(
    begun: str,
    relabel: Callable[..., Any],
    new: str,
    settings: tuple[str, ...],
    shown: list[str],
    absent: list[str],
) -> None:
    edit(lambda text: text.replace(OLD, new))
    done = relabel("run", begun, *(part for one in settings for part in ("--set", one)))
    done.refused(3, "out/ecom: belongs to another job", *shown)
    assert not [word for word in absent if word in done.err], done


def test_prompts_of_another_labeler_are_not_set_against_each_other(begun: str, relabel: Callable[..., Any]) -> None:
    done = relabel("run", begun, "--set", "labeler.name=umbrela", "--set", "labeler.templates=null")
    done.refused(3, 'labeler.name: was "direct", is "umbrela"')
    assert "system.j2" not in done.err
    assert not re.search("[0-9a-f]{16}", done.err), done
