"""Which open chunks of a shard that another worker holds are worth asking here.

A chunk is taken only where waiting for it is longer than asking it. Waiting is estimated by the rate at which the
shard's receipts have come since this worker began to look, with the gap that is under way counted as one more (of two
chunks, the last one was asked in vain just before its commit); the chunk at place k of those open is k + 1 commits
away. Asking is estimated by this worker's own chunks. Before there is a rate, the front is the holder's: as many rows
as an engine of this job takes at once. Where its lock is free, the holder is gone, and everything open may be asked;
where it hangs, waiting grows until it is longer than asking.

Helpers choose from the end, and say so first (`claims/`, created if absent), so that neither two of them nor the holder
ask one chunk. A claim is no lock: its worker is taken for dead where its process is gone, or once the claim has been
seen for longer than asking takes. Clocks are this process's own.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from relabel.jobs.planning.open_runs import OpenRun
from relabel.manifests.storage.run_stores import shard_lock_name
from relabel.manifests.storage.temp_files import HERE

CHUNKS_AT_ONCE = 8
"""Most chunks that a helper takes on at a time: a row group that is read for one can as well serve its neighbours."""
STALL_S = 60.0
"""How long nothing may come of a chunk before it is asked here, where neither rate is known, seconds."""
LEAST_S = 1.0
"""Shorter spans tell nothing of a worker's life, seconds."""


class _Seen(NamedTuple):
    """A shard at this worker's first look, and when a commit was last seen there."""

    since_s: float
    open: int
    last_s: float
    last_open: int


class Helping:
    """Chooses for one worker. Used by the thread that reads chunks alone.

    Attributes:
        rows_in_hand: rows that an engine of this job takes at once; 0 until one has started.
    """

    def __init__(self, opened: OpenRun, worker: str) -> None:
        self.rows_in_hand = 0
        self._store = opened.store
        self._plan = opened.plan
        self._worker = worker
        self._seen: dict[int, _Seen] = {}
        self._claims: dict[str, float] = {}
        self._workers: dict[str, str] = {}
        self._mine: set[tuple[int, int]] = set()
        self._spans: list[float] = []

    def asked(self, seconds: float) -> None:
        """Note how long a chunk took here from its first row to its commit."""
        self._spans = [*self._spans[-7:], seconds]

    def begins(self, shard: int, chunk: int) -> None:
        """Note a chunk that this worker asks, as a helper or as the holder that it may cease to be."""
        self._mine.add((shard, chunk))

    def ignore(self, shard: int) -> None:
        """Claims that are there when a shard's lock is taken are of workers that went with its last holder."""
        self._claims.update(dict.fromkeys(self._store.names(_folder(shard)), float("-inf")))

    def claimed(self, shard: int) -> set[int]:
        """Chunks of a shard that other helpers are at."""
        now_s, limit_s = time.monotonic(), max(LEAST_S, 3 * self._ask_s(shard)) if self._spans else STALL_S
        found = set()
        for name in self._store.names(_folder(shard)):
            chunk = int(name.rpartition("chunk-")[2].partition(".")[0])
            is_fresh = now_s - self._claims.setdefault(name, now_s) < limit_s
            if is_fresh and (shard, chunk) not in self._mine and not self._is_dead(name):
                found.add(chunk)
        return found

    def _is_dead(self, claim: str) -> bool:
        """Whether the worker of a claim was a process in this process's PID namespace and is gone; of others only time
        tells.
        """
        if claim not in self._workers:
            self._workers[claim] = self._store.read(claim).decode(errors="replace")
        process = self._workers[claim].removeprefix(f"{HERE}-").partition("-")[0]
        if not process.isdecimal() or not self._workers[claim].startswith(f"{HERE}-"):
            return False
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def choose(self, shard: int, still_open: list[int]) -> list[int]:
        """Chunks to ask now, ascending, claimed; empty where waiting is better."""
        now_s = time.monotonic()
        seen = self._seen.setdefault(shard, _Seen(now_s, len(still_open), now_s, len(still_open)))
        if len(still_open) < seen.last_open:
            seen = self._seen[shard] = seen._replace(last_s=now_s, last_open=len(still_open))
        claimed = self.claimed(shard)
        free = [chunk for chunk in still_open if chunk not in claimed and (shard, chunk) not in self._mine]
        if self._store.is_locked(shard_lock_name(shard)):
            free = [chunk for place, chunk in enumerate(free) if self._pays(shard, seen, place, now_s)]
        taken: list[int] = []
        count = max(1, min(CHUNKS_AT_ONCE, len(free) // 4)) if self._spans else 1
        for chunk in reversed(free):
            if len(taken) == count:
                break
            if self._claim(shard, chunk):
                taken.append(chunk)
        return sorted(taken)

    def _pays(self, shard: int, seen: _Seen, place: int, now_s: float) -> bool:
        """Whether waiting for the chunk at a place among those open is longer than asking it."""
        commits, looked_s, silent_s = seen.open - seen.last_open, now_s - seen.since_s, now_s - seen.last_s
        ask_s = self._ask_s(shard)
        if commits and (place >= self._in_hand(shard) or (self._spans and looked_s > LEAST_S)):
            is_slower = (place + 1) * looked_s / (commits + 1) > ask_s  # the gap under way is one more
        else:
            is_slower = not commits and place >= self._in_hand(shard)
        return is_slower or silent_s > (max(LEAST_S, 2 * ask_s) if self._spans else STALL_S)

    def _in_hand(self, shard: int) -> int:
        """Chunks that a holder has begun at most: their rows are as many as an engine takes, and one is cut by that."""
        return 1 + -(-self.rows_in_hand // max(self._plan.shards[shard].chunks, default=1))

    def _ask_s(self, shard: int) -> float:
        """How long a chunk takes here; by others' rate until one was asked."""
        if self._spans:
            return sum(self._spans) / len(self._spans)
        seen = self._seen.get(shard)
        commits = seen.open - seen.last_open if seen is not None else 0
        return 2 * (time.monotonic() - seen.since_s) / commits if seen is not None and commits else STALL_S

    def _claim(self, shard: int, chunk: int) -> bool:
        stem = f"{_folder(shard)}/chunk-{chunk:06d}."
        number = sum(name.startswith(stem) for name in self._claims)
        if not self._store.create(f"{stem}{number}", self._worker.encode()):
            return False
        self._mine.add((shard, chunk))
        return True


def _folder(shard: int) -> str:
    return f"claims/shard-{shard:05d}"
