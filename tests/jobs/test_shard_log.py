"""A shard's log: for people, one line for each thing that happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from relabel.jobs.run.shards import ShardLogs
from relabel.manifests.store import LocalRunStore


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028"])
def test_a_reason_that_a_server_or_document_wrote_can_not_forge_a_line(tmp_path: Path, end: str) -> None:
    ShardLogs(LocalRunStore(tmp_path)).write(
        3, f"row 7 quarantined as refused: no{end}2026-11-20T00:00:00Z chunk 9 attempt 1: 10 ok", "done"
    )
    lines = (tmp_path / "logs" / "shard-00003.log").read_text(encoding="utf-8").splitlines()
    assert [line.partition("Z ")[2] for line in lines] == [
        "row 7 quarantined as refused: no 2026-11-20T00:00:00Z chunk 9 attempt 1: 10 ok",
        "done",
    ]
