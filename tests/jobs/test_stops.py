"""A run that is asked to end: what is still asked, what is committed, and when it has ended."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.training.checkpoints import commit
from relabel.export.bundles import switch
from relabel.jobs.commands.options import sigterm_ends
from relabel.jobs.commands.train import advice_to_continue
from relabel.jobs.run import label
from relabel.jobs.run.report import locked_text
from relabel.jobs.run.stop import (
    DRAIN_S,
    END_S,
    Deadline,
    Stop,
    choose_deadline,
    span_s,
    stopping,
    until_s,
)
from relabel.jobs.tables import written
from relabel.manifests.asks import Answer
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.process import Terminated, check_interrupted, draining, is_stop_wished
from tests.jobs.test_loop import Scripted, chunks_of, good, label_chunks


def after(seconds: float) -> Deadline:
    return Deadline("--for a while", time.perf_counter() + seconds)


class Clocked(Scripted):
    """Answers `batch` requests a poll, and each poll takes a while."""

    def __init__(self, answer: Any, poll_s: float, **options: Any) -> None:
        super().__init__(answer, **options)
        self.poll_s = poll_s

    def poll(self) -> list[Answer]:
        time.sleep(self.poll_s)
        return super().poll()


def test_a_deadline_ends_the_run_before_it_with_what_was_begun_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 0.5)
    monkeypatch.setattr("relabel.jobs.run.loop.DRAIN_S", 0.5)
    monkeypatch.setattr("relabel.jobs.run.stop.END_S", 0.2)
    monkeypatch.setattr("relabel.jobs.run.loop.MAX_OPEN_PAIRS", 40)
    stop, committed = Stop(after(3.0)), []
    engine = Clocked(good, 0.01, capacity=20, batch=2)
    assert label_chunks(engine, chunks_of(*[10] * 100, queries=100), committed, stop=stop) is False
    assert stop.deadline.left_s() > 0, "the deadline has passed"
    assert stop.deadline.left_s() < 2.5, "nothing like the time was used"
    assert committed
    begun = {request.ask.messages[0].parts[1] for request in engine.seen if request.ask.stage == "verdict"}
    assert len(begun) == len(committed), "chunks were begun and not committed, though there was time to drain"


def test_a_deadline_shortens_a_drain_and_the_first_reason_stays() -> None:
    stop = Stop(after(END_S + 5))
    stop.drain("SIGTERM")
    assert stop.deadline_s - time.perf_counter() == pytest.approx(5, abs=0.5)
    late = Stop(after(1000))
    late.mind(2000)
    assert late.deadline_s - time.perf_counter() == pytest.approx(1000 - END_S, abs=1)
    late.drain("SIGTERM")
    assert late.deadline_s - time.perf_counter() == pytest.approx(DRAIN_S, abs=1)
    assert late.reason == "--for a while"


def test_a_ctrl_c_during_a_deadline_drain_is_the_first_one() -> None:
    stop = Stop(after(1))
    stop.mind(DRAIN_S)
    with stopping(stop, lambda _: None):
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.is_now
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_now


@pytest.fixture
def slow_job(write_job: Callable[..., str], write_pairs: Callable[..., Path]) -> str:
    """2,000 pairs at four a tenth of a second, in chunks of four."""
    write_pairs(
        [
            {
                "query_id": f"q{n // 4}",
                "query": f"red shoe {n // 4}",
                "doc_id": f"d{n}",
                "title": "shoe",
                "body": f"red {n}",
            }
            for n in range(2000)
        ]
    )
    return write_job(
        {
            "input": {"limit": None},
            "labeler": {"name": "direct"},
            "engine": {"args": {"latency_s": 0.1, "batch": 4, "capacity": 8}},
        }
    )


def process_of(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELABEL_")}
    # at most eight open pairs: as an engine that holds two chunks
    program = "from relabel.jobs.run import loop; loop.MAX_OPEN_PAIRS = 8\nfrom relabel.jobs.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_a_receipt() -> None:
    deadline = time.perf_counter() + 60
    while not any(Path("out/ecom/receipts").glob("*/*.json")) and time.perf_counter() < deadline:
        time.sleep(0.05)


def test_the_table_of_a_run_that_ended_early_says_what_stopped_it(slow_job: str) -> None:
    with process_of("run", slow_job) as process:
        wait_for_a_receipt()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 20, err
    assert re.search(r"^  stopped +SIGTERM$", out, re.MULTILINE), out


def test_sigterm_commits_what_was_begun_and_ends_with_20(slow_job: str) -> None:
    with process_of("run", slow_job, "--output", "json") as process:
        wait_for_a_receipt()
        process.send_signal(signal.SIGTERM)
        asked = time.perf_counter()
        out, err = process.communicate(timeout=60)
    result = json.loads(out)
    assert (process.returncode, result["stopped"]) == (20, "SIGTERM"), err
    assert time.perf_counter() - asked < DRAIN_S + 2
    assert result["this_run"]["pairs"] == result["labelled"] > 0
    assert "SIGTERM: no new chunks" in err


def test_a_run_whose_engine_is_still_starting_ends_in_20_and_has_asked_nothing(
    write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    path = write_job()
    program = (
        "import time\nfrom relabel.jobs.cli import main\nfrom relabel.jobs.run import label\n"
        "label.start_runner = lambda _: time.sleep(300)\nmain()"
    )
    call = [sys.executable, "-c", program, "run", path, "--output", "json"]
    started = time.perf_counter()
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not Path("out/ecom/leases").exists() and time.perf_counter() < started + 60:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    result = json.loads(out)
    assert (process.returncode, result["stopped"], result["rows_open"]) == (20, "SIGTERM", 24), err


def test_a_deadline_too_near_to_drain_starts_no_engine_and_leaves_no_lock(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_pairs()
    path = write_job()
    near = time.strftime("%H:%M:%SZ", time.gmtime(time.time() + 8))
    with monkeypatch.context() as patch:
        patch.setattr("relabel.jobs.run.label.start_runner", lambda _: pytest.fail("an engine was started"))
        for option in (("--for", "10s"), ("--until", near)):
            done = relabel("run", path, *option, "--output", "json")
            assert (done.code, done.json["rows_open"], done.json["busy_shards"]) == (20, 24, [])
            assert done.json["too_near"].startswith(f"{' '.join(option)} is too near, nothing was asked: its last 22 s")
            shown = relabel("run", path, *option).out
            assert "partial; its deadline was too near to ask anything\n" in shown
            assert re.search(r"stopped .* The least that works is \d+s from the start of the command, and what", shown)
    assert relabel("run", path).code == 0
    assert relabel("run", path, "--for", "1s").code == 10, "nothing is left to do"


def test_a_length_that_is_proposed_for_one_that_was_too_short_works(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    path = write_job()
    refused = relabel("run", path, "--for", "2s", "--output", "json").json["too_near"]
    length = refused.partition("The least that works is ")[2].partition(" ")[0]
    assert relabel("run", path, "--for", length).code == 0


def test_an_engine_whose_start_leaves_no_time_to_ask_is_said(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_runner = label.start_runner

    def start_late(job: Any) -> Any:
        runner = start_runner(job)
        monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 1e6)
        monkeypatch.setattr("relabel.jobs.run.loop.DRAIN_S", 1e6)
        return runner

    write_pairs()
    monkeypatch.setattr("relabel.jobs.run.label.start_runner", start_late)
    done = relabel("run", write_job(), "--for", "1h", "--output", "json")
    assert (done.code, done.json["this_run"]["requests"]) == (20, 0)
    assert "from the start of the command" in done.json["too_near"]
    assert "engine" not in done.json["too_near"]


def test_a_retry_that_was_cut_short_says_partial_and_one_that_ended_does_not(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    path = write_job(
        {"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}, "run": {"max_failed_fraction": 1.0}}
    )
    assert relabel("run", path).code == 0
    assert relabel("retry", path, "--for", "1s").code == 20
    assert relabel("retry", path, "--for", "1h").code == 0


def test_the_second_of_two_ticks_on_one_shard_ends_in_75_at_once(slow_job: str, relabel: Callable[..., Any]) -> None:
    with process_of("run", slow_job, "--shard", "0/4") as first:
        deadline = time.perf_counter() + 60
        while not any(Path("out/ecom/receipts").glob("*/*.json")) and time.perf_counter() < deadline:
            time.sleep(0.05)
        started = time.perf_counter()
        done = relabel("run", slow_job, "--shard", "0/4", "--output", "json")
        took = time.perf_counter() - started
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert (done.code, done.json["busy_shards"], done.json["this_run"]["requests"]) == (75, [0], 0)
    assert took < 5
    assert relabel("run", slow_job, "--shard", "0/4", "--for", "1s").code == 20, "the lock outlived its holder"


def test_a_list_of_locked_shards_that_is_cut_shows_it() -> None:
    assert locked_text(range(10)) == "locked by other workers: 10 shards: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert locked_text(range(12)) == "locked by other workers: 12 shards: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …"


# `--until` and `--for`: which moment they mean, and that a run has ended by then.


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's clock is in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("06:00", "2026-11-20T01:00", "2026-11-20T05:00"),
        ("6:00", "2026-11-20T04:59:59", "2026-11-20T05:00"),
        ("06:00", "2026-11-20T05:00", "2026-11-21T05:00"),
        ("06:00", "2026-11-20T22:00", "2026-11-21T05:00"),
        ("23:30:15", "2026-11-20T22:00", "2026-11-20T22:30:15"),
        ("00:00", "2026-11-20T22:59", "2026-11-20T23:00"),
        ("06:00", "2026-07-01T01:00", "2026-07-01T04:00"),
        ("06:00", "2026-03-28T23:00", "2026-03-29T04:00"),
        ("06:00", "2026-10-24T23:00", "2026-10-25T05:00"),
        # zones that are named
        ("06:00Z", "2026-11-20T01:00", "2026-11-20T06:00"),
        ("06:00+02:00", "2026-11-20T01:00", "2026-11-20T04:00"),
        ("06:00 -0530", "2026-11-20T01:00", "2026-11-20T11:30"),
        ("06:00 America/New_York", "2026-11-20T01:00", "2026-11-20T11:00"),
        ("06:00 UTC", "2026-11-20T01:00", "2026-11-20T06:00"),
        ("2026-11-21T06:00", "2026-11-20T01:00", "2026-11-21T05:00"),
        ("2026-11-21 06:00", "2026-11-20T01:00", "2026-11-21T05:00"),
        ("2026-11-21T06:00Z", "2026-11-20T01:00", "2026-11-21T06:00"),
        ("2026-11-21T06:00-05:00", "2026-11-20T01:00", "2026-11-21T11:00"),
    ],
)
def test_a_time_of_day_is_the_next_moment_at_which_the_clock_shows_it(
    berlin: None, text: str, now: str, expected: str
) -> None:
    assert datetime.fromtimestamp(until_s(text, utc(now)), UTC) == utc(expected)


@pytest.mark.parametrize("hour", range(24))
def test_a_time_of_day_lies_ahead_and_at_most_a_day_and_an_hour_away(berlin: None, hour: int) -> None:
    for day in ("2026-03-28", "2026-03-29", "2026-10-24", "2026-10-25", "2026-12-31"):
        for now_hour in range(24):
            now = utc(f"{day}T{now_hour:02d}:30")
            assert 0 < until_s(f"{hour}:30", now) - now.timestamp() <= 25 * 3600


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "want a time of day"),
        ("6", "want a time of day"),
        ("soon", "want a time of day"),
        ("24:00", "no clock shows that"),
        ("12:60", "no clock shows that"),
        ("06:00 Mars/Olympus", "knows no zone Mars/Olympus"),
        ("06:00+99:00", "no clock shows that"),
        ("2026-11-21", "names a day and no time; write 2026-11-21T06:00"),
        ("2026-11-19T06:00", "has passed; it is now 2026-11-20T"),
        ("2026-11-20T01:00Z", "has passed"),
    ],
)
def test_a_deadline_that_is_past_or_nonsense_is_refused(berlin: None, text: str, part: str) -> None:
    with pytest.raises(UsageError) as error:
        until_s(text, utc("2026-11-20T01:00"))
    assert f"--until {text}: " in str(error.value)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1h30m5s", 5405), ("0.5h", 1800), ("1d", 86400)],
)
def test_a_length_has_units(text: str, seconds: float) -> None:
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:30", "30m1h", "-5m", "0s", "0h0m", "9999999h", "5 min", "m"])
def test_a_length_that_is_none_says_so(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        span_s(text)


def test_of_two_deadlines_the_earlier_counts() -> None:
    now = datetime.now(UTC)
    clock = datetime.fromtimestamp(now.timestamp() + 7200, UTC).strftime("%H:%M:%SZ")
    assert choose_deadline(None, None) is None
    nearer = choose_deadline(clock, "90m")
    assert (nearer.text, round(nearer.left_s(), -1)) == ("--for 90m", 5400)
    nearer = choose_deadline(clock, "3h")
    assert (nearer.text, round(nearer.left_s(), -1)) == (f"--until {clock}", 7200)


def test_a_deadline_states_its_zone(berlin: None) -> None:
    assert (
        Deadline("--until 06:00", utc("2026-11-21T05:00").timestamp(), is_time_of_day=True).shown()
        == "--until 06:00 (2026-11-21 06:00:00 +0100 CET)"
    )


def test_a_clock_that_is_set_moves_a_time_of_day_and_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    by_clock, by_length = Deadline("u", time.time() + 100, True), Deadline("f", time.perf_counter() + 100)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)
    assert round(by_clock.left_s()) == 40
    assert round(by_length.left_s()) == 100


# SIGTERM and Ctrl-C end a command whatever a library makes of the KeyboardInterrupt, and nothing that went on after
# it takes a place.


def swallow(number: int) -> None:
    """A library that goes on as if nothing had come."""
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)


def make_it_another(number: int) -> None:
    """An import of a C extension."""
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt as exc:
        raise ImportError("initialization failed") from exc


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """The signal; Ctrl-C is heeded also where this suite was begun in the background."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield request.param
    signal.signal(signal.SIGINT, earlier)


def test_an_error_that_a_library_makes_of_it_is_an_interruption(number: int) -> None:
    with pytest.raises(KeyboardInterrupt) as end, sigterm_ends():
        make_it_another(number)
    assert isinstance(end.value, Terminated) == (number == signal.SIGTERM)


def to_a_file(place: Path) -> None:
    with written(str(place), Storage()) as file:
        file.write_text("odd")
        swallow(signal.SIGTERM)


def to_a_bundle(place: Path) -> None:
    part = place.with_name("part")
    part.mkdir()
    swallow(signal.SIGTERM)
    switch(part, place)


def to_a_checkpoint(place: Path) -> None:
    part = place.with_name(".part-1")
    part.mkdir()
    swallow(signal.SIGTERM)
    commit(part, place)


@pytest.mark.parametrize("make", [to_a_file, to_a_bundle, to_a_checkpoint])
def test_what_went_on_after_it_takes_no_place(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_ends():
        make(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_next_command_begins_again(tmp_path: Path, number: int) -> None:
    with sigterm_ends():
        swallow(number)
        with pytest.raises(KeyboardInterrupt):
            check_interrupted()
    check_interrupted()
    with written(str(tmp_path / "a"), Storage()) as file:
        file.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"


def drain(number: int, *, times: int, done: list[str]) -> None:
    with advice_to_continue("out"), draining():
        for _ in range(times):
            os.kill(os.getpid(), number)
        assert is_stop_wished()
        done.append("checkpoint")


def tidy(number: int, *, done: list[str]) -> None:
    with advice_to_continue("out"):
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            done.append("tidied")


def test_where_a_launcher_repeats_it_a_signal_is_no_impatience(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Systemd and Slurm signal torchrun and its processes, and torchrun passes on what it got: the second signal cut
    the drain short, and no checkpoint was left.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        drain(number, times=3, done=done)
    with pytest.raises(KeyboardInterrupt):
        tidy(number, done=done)
    assert done == ["checkpoint", "tidied"]


def test_without_a_launcher_the_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt) as end:
        drain(number, times=1, done=done)
    assert isinstance(end.value, Terminated) == (number == signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        drain(number, times=2, done=done)
    assert done == ["checkpoint"]
