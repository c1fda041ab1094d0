"""What is durable is counted, whatever becomes of its neighbours."""

from __future__ import annotations

import threading

import pytest

from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.session import CommitThreads
from relabel.manifests.receipts import ChunkId


def chunk(number: int) -> ChunkWork:
    return ChunkWork(ChunkId(0, number), [])


def test_commits_that_end_after_a_failed_one_are_counted_too() -> None:
    progress, has_failed = Progress(), threading.Event()

    def commit(work: ChunkWork) -> bool:
        if work.id.chunk == 0:
            raise OSError("disk")
        assert has_failed.wait(20)
        return True

    def settle() -> None:
        with CommitThreads(commit, progress, threads=2) as commits:
            commits.add(chunk(0))
            commits.add(chunk(1))
            try:
                commits.settle(wait_for_all=True)
            finally:
                has_failed.set()

    with pytest.raises(OSError, match="disk"):
        settle()
    assert progress.chunks_committed == 1
