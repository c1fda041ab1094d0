"""Servers that go bad while a run is under way: it ends with its rows open, and goes on once they are mended."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from .scripted_server import MODEL, Call, Json, Reset, chat, error
from .test_run import committed, relabel

BEFORE = 40
ROWS = 300

BAD: dict[str, Callable[[], Any]] = {
    "empty": lambda: chat(""),
    "noise": lambda: chat("!!!!!!!!!!!!"),
    "endless": lambda: chat("<think>and so on and so on", finish="length"),
    "another form": lambda: Json({"detail": "Internal Server Error"}),
    "503": lambda: error(503, "upstream connect error"),
    "403": lambda: error(403, "Your key has been disabled"),
    "400": lambda: error(400, "no"),
    "404": lambda: error(404, "model unloaded"),
    "401": lambda: error(401, "expired"),
    "402": lambda: error(402, "pay"),
    "dropped": Reset,
}
CODES = {"404": 4}


def number_of(call: Call) -> int:
    found = re.findall(r"of kind (\d+)", call.body["messages"][-1]["content"])
    return int(found[-1]) if found else 0


def one_ask(call: Call) -> Json:
    return chat(f"<think>plain</think>\n<score>{number_of(call) % 3}</score>")


def two_asks(call: Call) -> Json:
    if len(call.body["messages"]) == 2:
        return chat("<think>plain</think>\n<intent>wants shoes</intent>")
    return chat(f"<think>plain</think>\n<extract>a red shoe</extract>\n<score>{number_of(call) % 3}</score>")


LABELERS = {"r1": one_ask, "r3a": two_asks}


@pytest.mark.parametrize("labeler", LABELERS)
@pytest.mark.parametrize("how", BAD)
def test_rows_stay_open_when_a_server_goes_bad_and_are_labelled_once_it_is_mended(
    how: str,
    labeler: str,
    serve: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-run-0123456789")
    rows = [
        {
            "query_id": f"q{number // 10}",
            "query": f"shoe {number // 10}",
            "doc_id": f"d{number}",
            "document": f"a red shoe of kind {number}",
        }
        for number in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    good = LABELERS[labeler]
    server = serve(lambda call: good(call) if call.number <= BEFORE else BAD[how]())
    job = {
        "name": "shoes",
        "input": {"path": "pairs.parquet"},
        "labeler": {"name": labeler},
        "engine": {
            "name": "openai",
            "args": {
                "base_url": server.url,
                "served_model": MODEL,
                "mode": "chat",
                "backoff_s": 0.001,
                "max_tries": 2,
                "concurrency": 8,
            },
        },
        "output": "out",
        "run": {"chunk_rows": 4},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))
    assert relabel("run", "job.yaml") == CODES.get(how, 20)
    assert len(server.calls) < BEFORE + 200
    assert list(Path("out").rglob("quarantine/**/*.parquet")) == []
    capsys.readouterr()
    assert relabel("status", "out", "--output", "json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["stopped"] is None) == (how in CODES)
    assert status["quarantined"] == 0

    server.script = good
    assert relabel("run", "job.yaml") == 0
    assert relabel("verify", "job.yaml") == 0
    assert {row_id: row["grade"] for row_id, row in committed("labels").items()} == {
        number: number % 3 for number in range(ROWS)
    }
