"""What a `kill -9` costs over a server: the next call asks what was left, as many at a time as ever."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .chat_jobs import late_answer, start, write_chat_job
from .scripted_server import Script, ScriptedServer

ROWS = 64
CONCURRENCY = 32
LATENCY_S = 2.0
TRIALS = 1
"""Requests of a start, about a made-up pair."""


def committed(folder: Path) -> int:
    return sum(json.loads(path.read_bytes())["rows"] for path in (folder / "out/receipts").rglob("*.json"))


def test_the_calls_after_two_kills_ask_what_was_left_at_full_concurrency(
    serve: Callable[[Script], ScriptedServer], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-run-0123456789")
    server = serve(functools.partial(late_answer, mean_s=LATENCY_S))
    job = write_chat_job(tmp_path, server, rows=ROWS, concurrency=CONCURRENCY)
    for _ in range(2):
        process = start(job)
        seen = len(server.calls)
        while len(server.calls) < seen + CONCURRENCY + TRIALS + 8 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
        while server.in_flight:
            time.sleep(0.01)
    left = ROWS - committed(tmp_path)
    seen = len(server.calls)
    server.most_in_flight = 0
    assert start(job).wait() == 0
    assert len(server.calls) - seen <= left + TRIALS
    assert server.most_in_flight >= 0.75 * min(left, CONCURRENCY), "rows were asked apart"
    assert committed(tmp_path) == ROWS
