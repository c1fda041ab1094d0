"""`--log-format json`: every line on stderr is one object, whatever wrote it."""

from __future__ import annotations

import json
import os
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
            "from relabel.jobs.run import progress; progress.LINE_EVERY_S = 0.0; "
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

    monkeypatch.setattr("relabel.jobs.commands.labeling.load_job", fails)
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
