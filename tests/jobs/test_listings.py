"""Whether a run has work left is asked with one listing, however many shards it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.commands.label import open_session
from jobs.pool.backends import WorkerPool, label_with
from manifests.storage.local_run_store import LocalRunStore


def test_a_run_of_many_shards_lists_a_few_times_and_not_once_a_shard(
    write_pairs: Callable[..., Any], write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs()
    session = open_session(str(write_job({"shards": 24})))
    listed: list[str] = []
    for verb in ("names", "etags"):
        true = getattr(LocalRunStore, verb)

        def counted(self: LocalRunStore, folder: str, true: Any = true) -> Any:
            if folder.startswith("receipts"):
                listed.append(folder)
            return true(self, folder)

        monkeypatch.setattr(LocalRunStore, verb, counted)
    assert len(session.left.open_shards()) > 5
    assert listed == ["receipts"]
    label_with(WorkerPool(), session, on_progress=lambda: None, say=lambda _: None, on_engine=lambda *_: None)
    assert session.left.open_shards() == []
    listed.clear()
    again = open_session(str(write_job({"shards": 24})))
    label_with(WorkerPool(workers=2), again, on_progress=lambda: None, say=lambda _: None, on_engine=lambda *_: None)
    assert len(listed) <= 6, listed
