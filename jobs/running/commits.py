"""Commits under way: finished chunks made durable by a few threads, so that the loop that fills the engine never waits
for a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Self

from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.counts import Progress
from relabel.jobs.running.watch import Watch

COMMITS_IN_FLIGHT = 8


class CommitThreads:
    """Commits of one execution, a context manager: leaving waits for those under way.

    Args:
        commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
        progress: where finished commits are counted.
        watch: called for each commit, in the thread that made it.
        threads: how many commit at a time.
    """

    def __init__(
        self, commit: Callable[[ChunkWork], bool], progress: Progress, *, watch: Watch | None = None, threads: int = 2
    ) -> None:
        self._commit = commit
        self._progress = progress
        self._watch = watch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="commit")
        self._under_way: set[Future[tuple[ChunkWork, bool]]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        ended, self._under_way = self._under_way, set()
        error = self._count(ended)
        if error is not None and kind is None:  # else another is on its way
            raise error

    def __len__(self) -> int:
        return len(self._under_way)

    def add(self, work: ChunkWork) -> None:
        """Have a finished chunk committed."""
        self._under_way.add(self._pool.submit(self._make_durable, work))

    def settle(self, *, wait_for_all: bool) -> bool:
        """Take note of finished commits; a failed one raises here. Waits while too many are under way, or for all of
        them.

        Returns:
            Whether any had finished.
        """
        has_news = False
        while self._under_way:
            must_wait = wait_for_all or len(self._under_way) >= COMMITS_IN_FLIGHT
            done, self._under_way = wait(self._under_way, timeout=None if must_wait else 0, return_when=FIRST_COMPLETED)
            has_news = has_news or bool(done)
            error = self._count(done)
            if error is not None:
                raise error
            if not wait_for_all:
                break
        return has_news

    def _count(self, done: set[Future[tuple[ChunkWork, bool]]]) -> BaseException | None:
        """Take note of all of these, which have ended; the error of one that failed, if any did."""
        failed = None
        for future in done:
            error = future.exception()
            if error is not None:
                failed = failed or error
                continue
            work, was_first = future.result()
            if was_first:
                self._progress.chunks_committed += 1
            else:
                self._progress.lose(work)
        return failed

    def _make_durable(self, work: ChunkWork) -> tuple[ChunkWork, bool]:
        was_first = self._commit(work)
        if self._watch is not None:
            self._watch.commits(work, was_first=was_first)
        return work, was_first
