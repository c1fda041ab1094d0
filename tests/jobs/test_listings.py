"""Whether a run has work left is asked with one listing, however many shards it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.commands.labeling import open_session
from relabel.jobs.pool.backends import WorkerPool, label_with
from relabel.manifests.errors import StoreUnreachableError
from relabel.manifests.store import LocalRunStore


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders of receipts that were listed."""
    found: list[str] = []
    for verb in ("names", "etags"):
        true = getattr(LocalRunStore, verb)

        def counted(self: LocalRunStore, folder: str, true: Any = true) -> Any:
            if folder.startswith("receipts"):
                found.append(folder)
            return true(self, folder)

        monkeypatch.setattr(LocalRunStore, verb, counted)
    return found


def test_a_run_of_many_shards_lists_a_few_times_and_not_once_a_shard(
    write_pairs: Callable[..., Any], write_job: Callable[..., Path], listed: list[str]
) -> None:
    write_pairs()
    session = open_session(str(write_job({"shards": 24})))
    listed.clear()
    assert len(session.left.open_shards()) > 5
    assert listed == ["receipts"]
    label_with(WorkerPool(), session, on_progress=lambda: None, say=lambda _: None, on_engine=lambda *_: None)
    assert session.left.open_shards() == []
    listed.clear()
    again = open_session(str(write_job({"shards": 24})))
    label_with(WorkerPool(workers=2), again, on_progress=lambda: None, say=lambda _: None, on_engine=lambda *_: None)
    assert len(listed) <= 6, listed


def test_a_run_that_lists_once_still_sees_a_receipt_that_went_and_one_that_came(
    write_pairs: Callable[..., Any], write_job: Callable[..., Path], relabel: Callable[..., Any], folder: Path
) -> None:
    write_pairs()
    job = write_job({"run": {"max_failed_fraction": 1.0}, "engine": {"args": {"p_garbage": 0.3}}})
    assert relabel("run", job).code == 0
    manifest = folder / "out/ecom/manifest.json"
    before = manifest.read_bytes()
    assert relabel("retry", job).code == 0
    after = manifest.read_bytes()
    assert after != before
    manifest.write_bytes(before)  # as of a retry that was killed before its manifest: receipts came
    assert relabel("run", job).code == 0
    assert manifest.read_bytes() == after
    next((folder / "out/ecom/receipts").rglob("chunk-000001.json")).rename(folder / "away")
    assert relabel("run", job).code != 10


def test_receipts_that_a_listing_lacks_at_a_retry_end_it_as_work_to_run_again(
    write_pairs: Callable[..., Any], write_job: Callable[..., Path], relabel: Callable[..., Any]
) -> None:
    """It was called a fault of relabel."""
    write_pairs()
    job = write_job(
        {"labeler": {"attempts": 1}, "run": {"max_failed_fraction": 1.0}, "engine": {"args": {"p_garbage": 0.5}}}
    )
    assert relabel("run", job).code == 0
    left = open_session(str(job), is_retry=True).left
    shard = next(iter(left.retries))
    with pytest.raises(StoreUnreachableError, match="lacks what was there a moment ago"):
        left.todo(shard, {})
