"""A run that is asked to end: what is still asked, what is committed, and when it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run.stop import DRAIN_S, END_S, Deadline, Stop, num_fitting, stopping
from relabel.manifests.asks import Answer, Request
from tests.jobs.test_loop import Scripted, chunks_of, good, loop_of


def after(seconds: float) -> Deadline:
    return Deadline("--for a while", steady_s=time.perf_counter() + seconds)


class Clocked(Scripted):
    """Answers `batch` requests a poll, and each poll takes a while."""

    def __init__(self, answer: Any, poll_s: float, **options: Any) -> None:
        super().__init__(answer, **options)
        self.poll_s = poll_s

    def poll(self) -> list[Answer]:
        time.sleep(self.poll_s)
        return super().poll()


def test_a_drain_keeps_the_chunks_that_fit_and_asks_nothing_more_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 answers a second at best and four seconds to drain: of the begun chunks only the first, with 60 pairs to go,
    can be finished.
    """
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 4.0)
    monkeypatch.setattr("relabel.jobs.run.loop.CHECK_EVERY_S", 0.05)
    stop, committed = Stop(), []
    asked_for: list[int] = []

    def answer(request: Request) -> Answer:
        if loop.progress.pairs > 90:
            stop.drain("test")
        return good(request)

    class Watching(Clocked):
        def submit(self, request: Request) -> None:
            if stop.reason is not None and request.ask.stage == "verdict":
                asked_for.append(int(request.ask.messages[-1].parts[1].removeprefix("doc ")))
            super().submit(request)

        def poll(self) -> list[Answer]:  # first come, first served
            self.waiting.reverse()
            found = super().poll()
            self.waiting.reverse()
            return found

    engine = Watching(answer, 0.01, capacity=40, batch=1)
    loop = loop_of(engine, committed, stop=stop)
    started = time.perf_counter()
    assert loop.run(iter(chunks_of(150, 600, 600, 600, queries=1))) is False
    assert [work.id.chunk for work in committed] == [0]
    assert asked_for, "the chunk that was nearly done was not finished"
    assert max(asked_for) < 150, "asked for a chunk that could not be finished"
    assert time.perf_counter() - started < 12


def test_a_shared_answer_is_still_asked_for_if_a_kept_chunk_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intent's first asker is dropped, another that waits for the same answer is kept."""
    stop, committed = Stop(), []

    def answer(request: Request) -> Answer:
        stop.drain("test")
        return good(request)

    # of 5, 2 and 5 left: the chunk of 2 alone
    monkeypatch.setattr("relabel.jobs.run.loop.num_fitting", lambda lefts, *_: 1)
    engine = Scripted(answer, capacity=4, batch=1)
    works = chunks_of(5, 2, 5, queries=1)
    loop_of(engine, committed, stop=stop).run(iter(works))
    assert [work.id.chunk for work in committed] == [1]
    assert [request.ask.stage for request in engine.seen].count("intent") == 1
    assert [request.ask.stage for request in engine.seen].count("verdict") == 2


def test_a_deadline_ends_the_run_before_it_with_what_was_begun_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 0.5)
    monkeypatch.setattr("relabel.jobs.run.stop.END_S", 0.2)
    monkeypatch.setattr("relabel.jobs.run.loop.MAX_OPEN_PAIRS", 40)
    stop, committed = Stop(after(3.0)), []
    engine = Clocked(good, 0.01, capacity=20, batch=2)
    assert loop_of(engine, committed, stop=stop).run(iter(chunks_of(*[10] * 100, queries=100))) is False
    assert stop.deadline is not None
    assert stop.deadline.left_s() > 0, "the deadline has passed"
    assert stop.deadline.left_s() < 2.5, "nothing like the time was used"
    assert committed
    begun = {request.ask.messages[0].parts[1] for request in engine.seen if request.ask.stage == "verdict"}
    assert len(begun) == len(committed), "a chunk was begun and not committed, though there was time to drain"


@pytest.mark.parametrize(
    ("lefts", "rate", "seconds", "count"),
    [
        ([], 1, 20, 0),
        ([5, 10, 10], 1, 20, 2),
        ([30], 1, 20, 0),
        ([30, 40], None, 20, 2),
        ([0, 0], 1, 0, 2),
        ([5], 1, -1, 0),
    ],
)
def test_as_many_chunks_fit_as_the_rate_allows(
    lefts: list[int], rate: float | None, seconds: float, count: int
) -> None:
    assert num_fitting(lefts, rate, seconds) == count


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


def test_sigterm_commits_what_was_begun_and_ends_with_20(slow_job: str) -> None:
    with process_of("run", slow_job, "--output", "json") as process:
        deadline = time.perf_counter() + 60
        while not any(Path("out/ecom/receipts").glob("*/*.json")) and time.perf_counter() < deadline:
            time.sleep(0.05)
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
        "import time\nfrom relabel.jobs.cli import main\nfrom relabel.jobs.run import execution\n"
        "execution.start_engine = lambda _: time.sleep(300)\nmain()"
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
        patch.setattr("relabel.jobs.run.execution.start_engine", lambda _: pytest.fail("an engine was started"))
        for option in (("--for", "10s"), ("--until", near)):
            done = relabel("run", path, *option, "--output", "json")
            assert (done.code, done.json["rows_open"], done.json["busy_shards"]) == (20, 24, [])
    assert relabel("run", path).code == 0
    assert relabel("run", path, "--for", "1s").code == 10, "nothing is left to do"


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
