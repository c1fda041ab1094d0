"""What other workers have committed of the work that one worker found open, as far as the listings show that it makes
anyway; and their pace of late.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping

from relabel.manifests.runs.receipts import ChunkId

KEPT_S = 300.0
"""How far back their pace looks: over several commits, and soon past those of one of them that was killed."""
LEAST_NEWS = 4
"""So many looks that brought news tell the pace, however long ago they were."""
GONE_AFTER = 2.0
"""They are gone once nothing came for so many times as long as ever lay between two commits of late."""


class Others:
    """Counts for one worker, from any thread. A chunk that this worker has begun is its own until it is known to be
    lost, so that a row never counts twice.

    Attributes:
        rows: that others have committed since this worker's first look.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._begun: set[ChunkId] = set()
        self._by_shard: dict[int, int] = {}
        self._guard = threading.Lock()
        self._looked_s = time.perf_counter()
        self._news = deque([(self._looked_s, 0)])

    def begins(self, chunk: ChunkId) -> None:
        """This worker asks a chunk."""
        with self._guard:
            self._begun.add(chunk)

    def committed_first(self, chunk: ChunkId, rows: int) -> None:
        """Another worker had committed a chunk that this one asked."""
        with self._guard:
            if chunk in self._begun:
                self._begun.discard(chunk)
                self._set(chunk.shard, self._by_shard.get(chunk.shard, 0) + rows)

    def saw(self, shard: int, done: Mapping[ChunkId, int]) -> None:
        """A look at a shard.

        Args:
            done: rows of each chunk that is committed by now and was not at the first look.
        """
        with self._guard:
            self._set(shard, sum(rows for chunk, rows in done.items() if chunk not in self._begun))

    def saw_in_all(self, least: int, most: int) -> None:
        """A look at all shards, instead of those at each: how many rows it can have been."""
        with self._guard:
            self._set(0, max(0, min(max(self.rows, least), most)))

    def _set(self, shard: int, rows: int) -> None:
        self._looked_s = time.perf_counter()
        self.rows += rows - self._by_shard.get(shard, 0)
        self._by_shard[shard] = rows
        if self.rows > self._news[-1][1]:
            self._news.append((self._looked_s, self.rows))
        while len(self._news) > LEAST_NEWS and self._news[1][0] < self._looked_s - KEPT_S:
            self._news.popleft()

    def pairs_per_s(self) -> float | None:
        """What all of them together commit a second of late, or None while nothing tells: they have not begun, or are
        silent for so long that they are gone.
        """
        with self._guard:
            (since_s, before), times_s = self._news[0], [when_s for when_s, _ in self._news]
            rows, seconds = self.rows - before, self._looked_s - since_s
            silent_s = self._looked_s - times_s[-1]
        longest_s = max((later - sooner for sooner, later in itertools.pairwise(times_s)), default=0.0)
        return rows / seconds if rows > 0 and seconds > 0 and silent_s <= GONE_AFTER * longest_s else None
