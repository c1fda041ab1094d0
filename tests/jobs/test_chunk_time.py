"""Whether a chunk is small enough for a kill to cost half a minute at most, by what earlier work measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run.estimate import pairs_per_s
from relabel.manifests.receipts import Receipt, ReusedRows
from relabel.manifests.records import unsealed


def receipt(worker: str, started: int, committed: int, rows: int, reused: int = 0) -> Receipt:
    stamps = [f"2026-11-20T06:00:{second:02d}.000+00:00" for second in (started, committed)]
    sources = [ReusedRows("out/a", "f", None, "r", reused)] if reused else []
    return Receipt("f", 0, 0, 1, rows, None, None, {}, {}, 1.0, {}, worker, 0, stamps[0], stamps[1], None, sources)


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([], None),
        ([receipt("a", 0, 10, 50)], 5.0),
        ([receipt("a", 0, 10, 50), receipt("a", 2, 20, 50)], 5.0),  # they overlap
        ([receipt("a", 0, 10, 50), receipt("b", 30, 40, 150)], 10.0),  # two workers, ten seconds each
        ([receipt("a", 0, 10, 50, reused=40)], 1.0),  # what was reused cost nothing
        ([receipt("a", 0, 10, 50, reused=50)], None),
        ([receipt("a", 0, 0, 50)], None),
    ],
)
def test_the_rate_is_that_of_one_worker_over_its_own_time(receipts: list[Receipt], expected: float | None) -> None:
    assert pairs_per_s(receipts) == expected


@pytest.fixture
def slow_run(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path], folder: Path
) -> str:
    """A run whose receipts say that 24 pairs took twelve seconds."""
    write_pairs()
    path = write_job()
    assert relabel("run", path).code == 0
    for file in folder.glob("out/ecom/receipts/*/*.json"):
        held = unsealed(file.read_bytes())
        held["started"], held["committed"] = "2026-11-20T06:00:00.000+00:00", "2026-11-20T06:00:12.000+00:00"
        file.write_text(json.dumps(held))
    return path


def test_plan_warns_of_chunks_that_a_kill_would_make_dear_and_says_what_would_fit(
    relabel: Callable[..., Any], slow_run: str, folder: Path
) -> None:
    done = relabel(
        "plan",
        slow_run,
        "--set",
        "output=out/next",
        "--set",
        "reuse=out/ecom",
        "--set",
        "run.chunk_rows=256",
        "--output",
        "json",
    )
    assert (done.code, done.json["chunk_seconds"]) == (0, 128.0)
    assert "warning: a chunk takes about 128 s of engine time" in done.err
    assert "run.chunk_rows: 60 would keep it under 30 s" in done.err
    fits = ("--set", "output=out/other", "--set", "reuse=out/ecom", "--set", "run.chunk_rows=60", "--output", "json")
    done = relabel("plan", slow_run, *fits)
    assert (done.code, done.err, done.json["chunk_seconds"]) == (0, "", 30.0)


def test_an_output_tells_by_its_own_receipts_and_a_first_plan_tells_nothing(
    relabel: Callable[..., Any], slow_run: str
) -> None:
    assert relabel("plan", slow_run, "--output", "json").json["chunk_seconds"] == 2.0
    first = relabel("plan", slow_run, "--set", "output=out/first", "--output", "json")
    assert (first.json["chunk_seconds"], first.err) == (None, "")
