"""No id or text of the data begins a line of what a command says, and none commands a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
