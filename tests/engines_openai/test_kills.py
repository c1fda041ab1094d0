"""What a `kill -9` costs over a server: the next call asks what was left, as many at a time as ever."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .conftest import GOOD
from .scripted_server import MODEL, Call, Json, Script, ScriptedServer, chat

ROWS = 64
CONCURRENCY = 32
LATENCY_S = 2.0
TRIALS = 1
"""Requests of a start, about a made-up pair."""


def write_job(folder: Path, server: ScriptedServer) -> Path:
    numbers = range(ROWS)
    table = {
        "query_id": [f"q{row // 8}" for row in numbers],
        "query": [f"shoe {row // 8}" for row in numbers],
        "doc_id": [f"d{row}" for row in numbers],
        "document": [f"a shoe of kind {row}" for row in numbers],
    }
    pq.write_table(pa.table(table), folder / "pairs.parquet")
    args = {"served_model": MODEL, "base_url": server.url, "concurrency": CONCURRENCY, "mode": "chat"}
    job = {
        "name": "killed",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": {"name": "umbrela"},
        "engine": {"name": "openai", "args": args},
        "output": str(folder / "out"),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def start(job: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "relabel", "run", str(job), "--output", "json"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def committed(folder: Path) -> int:
    return sum(json.loads(path.read_bytes())["rows"] for path in (folder / "out/receipts").rglob("*.json"))


def slowly(call: Call) -> Json:
    """Answers seconds later, not all at once."""
    reply = chat(GOOD)
    reply.after_s = LATENCY_S * (0.7 + 0.6 * (call.number * 37 % 100) / 100)
    return reply


def test_the_calls_after_two_kills_ask_what_was_left_at_full_concurrency(
    serve: Callable[[Script], ScriptedServer], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-run-0123456789")
    server = serve(slowly)
    job = write_job(tmp_path, server)
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
