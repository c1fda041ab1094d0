"""What a run says of itself between two commits: what is in flight, what was refused and why, and that nothing was
accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run import progress as progress_module
from relabel.jobs.run.chunks import FIRST_ANSWERS, SHOWN_CHARS, Live, RefusedAnswer
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.progress import Display


def refused(number: int, text: str = "No idea.", status: str = "format") -> RefusedAnswer:
    return RefusedAnswer(number, "verdict", 1, status, "stop", "there is no <score>", text)


def test_refused_answers_are_counted_by_reason_and_the_last_one_is_kept() -> None:
    live = Live(in_flight=3, accepted=2)
    live.count([refused(4)])
    live.count([refused(5, status="truncated")])
    assert live.answers_text() == "4 answered: 2 accepted, 2 refused (1 format, 1 truncated)"
    assert live.last_refused == refused(5, status="truncated")


def test_an_answer_that_rows_share_counts_once_and_is_accepted_if_one_could_read_it() -> None:
    live = Live()
    live.count([refused(number) for number in range(FIRST_ANSWERS)])
    assert live.answers_text() == "1 answered: 0 accepted, 1 refused (1 format)"
    assert live.warning() is None
    live.count([None, refused(5)])
    assert live.answers_text() == "2 answered: 1 accepted, 1 refused (1 format)"
    assert live.last_refused == refused(5)


def test_the_answers_of_a_run_are_those_of_its_asks(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    job = write_job({"engine": {"args": {"p_garbage": 0.3, "batch": 4}}, "labeler": {"name": "r3a"}})
    found = relabel("run", job, "--output", "json").json
    answers = found["answers"]
    assert sum(answers["refused"].values()) > 0
    assert answers["accepted"] + sum(answers["refused"].values()) == found["this_run"]["requests"]
    assert found["this_run"]["in_vain"]["requests"] == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n  \n\tI can't say.\nMore.", "I can't say."),
        ("", "(no text)"),
        ("\x1b[2J\x1b]0;title\x07gone\u202e", "\\x1b[2J\\x1b]0;title\\x07gone\\u202e"),
        ("x" * 5000, "x" * SHOWN_CHARS + "…"),
    ],
)
def test_an_answer_is_shown_by_a_line_that_no_terminal_obeys(text: str, line: str) -> None:
    assert refused(7, text).line() == f"row 7, verdict, format: there is no <score>: {line}"


def test_only_where_nothing_was_accepted_of_the_first_answers_a_run_says_so() -> None:
    live = Live()
    for number in range(FIRST_ANSWERS - 1):
        live.count([refused(number)])
        assert live.warning() is None
    live.count([refused(99, "I am a small model.")])
    assert (warning := live.warning()) is not None
    assert "none of the first 16 answers was accepted (format)" in warning
    assert warning.endswith("row 99, verdict, format: there is no <score>: I am a small model.")
    live.accepted = 1
    assert live.warning() is None


def test_a_run_whose_every_answer_is_refused_says_so_once_and_shows_one(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    done = relabel("run", write_job({"engine": {"args": {"p_garbage": 1.0, "batch": 4}}, "labeler": {"name": "r3a"}}))
    assert done.code == 30
    assert done.err.count("warning: none of the first 16 answers was accepted (") == 1
    assert "The last one: row " in done.err


@pytest.mark.parametrize("verbose", [False, True])
def test_a_line_of_progress_says_slow_from_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    progress = Progress()
    progress.live = Live(12, 1, Counter(format=3), refused(3))
    with Display(progress, 24, shows_refused=verbose) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("0 of 24 pairs · 0.000 pairs/s · 0 quarantined · 12 in flight, 4 answered: 1 accepted, ")
    assert "3 refused (3 format) · " in err
    assert " prompt + " in err
    assert ("last refused: row 3, verdict, format: there is no <score>: No idea." in err) is verbose
    assert err.endswith("ETA unknown\n")


def test_a_run_that_asks_nothing_shows_no_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a student's does, which scores."""
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    progress = Progress(pairs=4)
    with Display(progress, 24) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("4 of 24 pairs · ")
    assert "answered" not in err


def test_lines_come_soon_until_one_could_tell_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that takes 14 s to start had a first line of zeros, and the next one a minute later."""
    now, progress, lines_at = [100.0], Progress(), list[float]()
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    progress.started_s = now[0]
    with Display(progress, 24) as display:
        for second in range(200):
            now[0] = 100.0 + second
            if second == 40:
                progress.pairs = 2
            display.update()
            if "pairs/s" in capsys.readouterr().err:
                lines_at.append(second)
    assert lines_at == [15, 30, 45, 105, 165]
