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


def test_of_commits_that_end_together_those_next_to_a_failed_one_are_counted() -> None:
    progress, ended = Progress(), threading.Semaphore(0)

    def commit(work: ChunkWork) -> bool:
        ended.release()
        if work.id.chunk == 1:
            raise OSError("disk")
        return work.id.chunk != 3

    commits = CommitThreads(commit, progress, threads=4)

    def settle() -> None:
        with commits:
            for number in range(5):
                commits.add(chunk(number))
            for _ in range(5):
                assert ended.acquire(timeout=20)
            commits.settle(wait_for_all=True)

    with pytest.raises(OSError, match="disk"):
        settle()
    assert (progress.chunks_committed, progress.chunks_lost, len(commits)) == (3, 1, 0)


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
