"""A job whose labels a slow chat server gives, to be killed and called again; for tests and benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .scripted_server import MODEL, Call, Json, ScriptedServer, chat

GOOD = "<think>so</think><score>1</score>"


def late_answer(call: Call, *, mean_s: float) -> Json:
    """A good answer after 0.7 to 1.3 times so many seconds, so that not all come at once."""
    reply = chat(GOOD)
    reply.after_s = mean_s * (0.7 + 0.6 * (call.number * 37 % 100) / 100)
    return reply


def write_chat_job(folder: Path, server: ScriptedServer, *, rows: int, concurrency: int) -> Path:
    """Umbrela over the server, into `folder/out`."""
    numbers = range(rows)
    table = {
        "query_id": [f"q{row // 8}" for row in numbers],
        "query": [f"shoe {row // 8}" for row in numbers],
        "doc_id": [f"d{row}" for row in numbers],
        "document": [f"a shoe of kind {row}" for row in numbers],
    }
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(table), folder / "pairs.parquet")
    args = {"served_model": MODEL, "base_url": server.url, "concurrency": concurrency, "mode": "chat"}
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
    """A call of the ordinary command."""
    words = [sys.executable, "-m", "relabel", "run", str(job), "--output", "json"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
