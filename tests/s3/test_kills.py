"""What `kill -9` costs a run on S3 is counted by the model's server: a second's answers and what was in flight."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from relabel.manifests.store import ObjectStore
from tests.engines_openai.counting_server import FEW_ASKS, Counting
from tests.engines_openai.scripted_server import MODEL, ScriptedServer
from tests.s3.conftest import ROWS, Outcome, command, labels, put_parquet

CONCURRENCY = 8
BUSY = 75
SLOW_S = 0.4
PUT_S = 0.5
"""What a busy machine needs to write an object."""


@pytest.fixture
def counting() -> Counting:
    return Counting(latency_s=SLOW_S)


@pytest.fixture
def server(counting: Counting) -> Iterator[ScriptedServer]:
    server = ScriptedServer(counting)
    yield server
    server.close()


def test_a_kill_costs_a_second_of_answers_and_what_was_in_flight(
    counting: Counting,
    server: ScriptedServer,
    s3: str,
    write_job: Callable[..., Path],
    relabel: Callable[..., Outcome],
    open_fresh: Callable[..., ObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-run-0123456789")
    rows = [
        {
            "query_id": f"q{row // 6}",
            "query": f"shoe {row // 6}",
            "doc_id": f"d{row}",
            "document": f"a red shoe of kind {row}",
        }
        for row in range(ROWS)
    ]
    put_parquet(f"{s3}/shoes.parquet", pa.Table.from_pylist(rows))
    args = {"served_model": MODEL, "mode": "chat", "base_url": server.url, "concurrency": CONCURRENCY}
    changes = {
        "input": {"path": f"{s3}/shoes.parquet"},
        "labeler": {"name": "r3a", "attempts": 2, "context": "none"},
        "engine": {"name": "openai", "args": args, "seed": 7},
        "shards": 1,
        "run": {"chunk_rows": 30, "lease_s": 3},
    }
    job = write_job(changes)
    process = subprocess.Popen(command("run", job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(counting.answered) < 45 or not open_fresh().names("journal"):
        assert process.poll() is None
        time.sleep(0.01)
    killed_s = time.monotonic()
    process.kill()
    process.wait()
    time.sleep(2 * SLOW_S)  # what was in flight is answered to nobody
    num_first = len(counting.answered)
    num_late = counting.num_late(killed_s - PUT_S)
    counting.latency_s = 0.0
    done = relabel("run", job)
    while done.returncode == BUSY:  # until the lease of the one that was killed is over
        time.sleep(0.5)
        done = relabel("run", job)
    assert done.returncode == 0, done.stderr
    assert counting.num_twice <= max(num_late, FEW_ASKS), f"of {num_first} answered before"
    assert num_first - counting.num_twice > 10, "nothing was kept"
    undisturbed = write_job({**changes, "output": f"{s3}/undisturbed"})
    assert relabel("run", undisturbed).returncode == 0
    assert labels(f"{s3}/out") == labels(f"{s3}/undisturbed")
